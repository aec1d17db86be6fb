"""The last responses of `/v1/responses`, kept in memory so that a request can continue one.

    (owner, id) ──► StoredResponse      above max_responses or MAX_BYTES, the least recently used is dropped

The owner is the API key of the request: no other key finds the response. A response contains the whole
conversation before it, so it can be continued even after earlier ones were deleted or dropped.

Process 0 of a server has the store, and the other API processes ask it (`RemoteStore`): a response that one
process has stored is found by the next request, whichever process handles it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from infer.server.processes.channel import Channel
from infer.server.processes.messages import DeleteResponse, GetResponse, PutResponse, StoredResponse

MAX_BYTES = 256 << 20  # limit of all responses together
ENTRY_BYTES = 1024  # overhead of an entry


def num_bytes_of(stored: StoredResponse) -> int:
    """Return the bytes that a response takes in the store."""
    return ENTRY_BYTES + sum(map(len, stored))


class ResponseStore:
    """The store itself; `max_responses=0` keeps nothing."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, evicting the least recently used; a response larger than the store is dropped."""
        await self.delete(owner, response_id)
        if num_bytes_of(stored) > self._max_bytes:
            return
        self._kept[owner, response_id] = stored
        self.num_bytes += num_bytes_of(stored)
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= num_bytes_of(oldest)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response with an id and mark it as used; None if this owner has none."""
        found = self._kept.get((owner, response_id))
        if found is not None:
            self._kept.move_to_end((owner, response_id))
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""
        found = self._kept.pop((owner, response_id), None)
        if found is not None:
            self.num_bytes -= num_bytes_of(found)
        return found is not None


class RemoteStore:
    """The store of process 0, as seen by another API process."""

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response; returns when every process can find it."""
        await self._channel.call(PutResponse(owner, response_id, stored))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response with an id; None if this owner has none."""
        return await self._channel.call(GetResponse(owner, response_id))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""
        return await self._channel.call(DeleteResponse(owner, response_id))
