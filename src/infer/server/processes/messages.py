"""The messages between process 0 of a server and its other API processes, as msgpack.

A `Question[T]` is answered with a T or with an error; other messages get no answer. As in client/messages.py,
nothing is pickled: bytes that match no type are an error.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from infer.config.server import ModelShares, ServerConfig
from infer.config.settings import EngineConfig
from infer.server.explain.served import ServedRequest

T_co = TypeVar("T_co", covariant=True)


class ProcessMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message that gets no answer."""


class Question(ProcessMessage, Generic[T_co], frozen=True):
    """A message that is answered with a T."""

    @classmethod
    def answer_type(cls) -> type[T_co]:
        """Return the type that the class names as its T."""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        answer: type[T_co] = base.__args__[0]
        return answer


# -- from process 0 -------------------------------------------------------------------------------


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an API process: the first line of its standard input, as JSON."""

    number: int
    num_processes: int
    server: ServerConfig
    models: list[EngineConfig]  # the first models
    listener: int  # file descriptors
    channel: int
    board: int
    log_level: str


class ModelUse(NamedTuple):
    """The use of a model, in one API process or in all."""

    num_held: int
    used_at: float  # monotonic seconds, which all processes of a machine share
    keep_s: float | None
    kept_at: float  # when a client set `keep_s`; 0: never

    def plus(self, other: ModelUse) -> ModelUse:
        """Return the combined use in two processes; the latest `keep_s` wins."""
        used_at = max(self.used_at, other.used_at)
        keep_s, kept_at = max(self[2:], other[2:], key=lambda said: said[1])
        return ModelUse(self.num_held + other.num_held, used_at, keep_s, kept_at)


class Spawned(ProcessMessage, frozen=True):
    """An engine was started and will connect to this endpoint."""

    engine: int
    endpoint: str


class Down(ProcessMessage, frozen=True):
    """An engine has ended; it may be restarted."""

    engine: int
    reason: str


class Gone(ProcessMessage, frozen=True):
    """These engines have ended for good."""

    engines: list[int]


class Serve(Question[None], frozen=True):
    """Serve a model with these engines, replacing one of the same name; answered when it is served."""

    name: str
    config: EngineConfig
    engines: list[int]
    labels: list[str]  # labels of the engines in the metrics
    created: int


class Unserve(Question[int], frozen=True):
    """Stop serving the model of these engines; answer with the number of requests that were cut off."""

    engines: list[int]
    timeout_s: float  # time that running requests have to finish


class SetNames(Question[None], frozen=True):
    """Set the names of models and adapters."""

    aliases: dict[str, ModelShares]
    adapters: dict[str, str]
    default: str | None
    loadable: list[str]  # models that are loaded on demand


class ForgetPrefixes(ProcessMessage, frozen=True):
    """The prefix caches of a model were emptied."""

    model: str


class GetUses(Question[dict[str, ModelUse]], frozen=True):
    """Answer with the use of each model in this process."""


class CheckAlive(Question[None], frozen=True):
    """Answer at once: the process does not hang."""


class Scrape(Question[dict[str, Any]], frozen=True):
    """Answer with the metrics of this process."""


class FindServed(Question[list[ServedRequest]], frozen=True):
    """Answer with an owner's requests that have this id and were served here."""

    request_id: str
    owner: str | None


class CountAlike(Question[list[int]], frozen=True):
    """Answer, for each prefix, how many prompts of an owner begin with it and have another salt."""

    owner: str
    prefixes: list[int]
    salt: bytes


class End(ProcessMessage, frozen=True):
    """End the process."""


# -- to process 0 ---------------------------------------------------------------------------------


class ForwardedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The response to a forwarded request."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    route: str


class ForwardRequest(Question[ForwardedAnswer | None], frozen=True):
    """Handle an HTTP request that only process 0 can answer; None if the client left before a response."""

    name: str  # name of the request, by which `ClientLeft` refers to it
    method: str
    path: str
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ClientLeft(Question[None], frozen=True):
    """The client of a forwarded request has left."""

    name: str


class StoredResponse(NamedTuple):
    """A response as JSON, in parts that can be read separately."""

    response: bytes  # the response as it was sent, without its output
    output: bytes  # the list of its output items
    items: bytes  # its input items, including the items of all earlier responses


class LoadOnDemand(Question[None], frozen=True):
    """Load a model unless it is served; answered when it is."""

    name: str


class PutResponse(Question[None], frozen=True):
    """Store a response."""

    owner: str
    response_id: str
    stored: StoredResponse


class GetResponse(Question[StoredResponse | None], frozen=True):
    """Answer with a response; None if this owner has none with this id."""

    owner: str
    response_id: str


class DeleteResponse(Question[bool], frozen=True):
    """Delete a response; answer True if it existed."""

    owner: str
    response_id: str


FromFirst: TypeAlias = (
    Spawned | Down | Gone | Serve | Unserve | SetNames | ForgetPrefixes | GetUses | CheckAlive | Scrape
    | FindServed | CountAlike | End
)  # fmt: skip
ToFirst: TypeAlias = ForwardRequest | ClientLeft | LoadOnDemand | PutResponse | GetResponse | DeleteResponse
