"""What is known about one HTTP request while it is served, for whoever works for it.

The record is found through a context variable. Its id is the one the client sees (`x-request-id`), and every
log line about the request carries it: those of the engine too, because the ids that requests have there
begin with it.

    x-request-id: req-7f      ──►   req-7f/cmpl-03ab-0,  req-7f/cmpl-03ab-1      one per prompt of the body
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.server.protocol.errors import ApiError


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known about one HTTP request while it is served."""

    request_id: str
    arrived_at: float  # perf_counter seconds
    status: int = 0  # 0: no answer was begun
    model: str | None = None  # the one that serves it, by its own name; None: not known yet
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_complete: bool = False  # the whole answer was handed to the connection
    is_gone: bool = False  # the client left before that
    error: ApiError | None = None  # what it was told in place of an answer, or at the end of half of one


RECORD: ContextVar[RequestRecord | None] = ContextVar("infer_request_record", default=None)


def current_record() -> RequestRecord | None:
    """The record of the HTTP request this code works for, if it works for one."""
    return RECORD.get()


def current_id() -> str:
    """The id of that request, for a log line."""
    record = RECORD.get()
    return record.request_id if record is not None else "unknown"


def engine_id(own_id: str) -> str:
    """An id for the engine that can be found by the one the client sees."""
    record = RECORD.get()
    return own_id if record is None else f"{record.request_id}/{own_id}"
