"""The reasons why a sequence or an answer ends, as the words that APIs send."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why an answer ended; equal to its word."""

    STOP = "stop"  # an end of text, a stop string or token, or the end of a constraint
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # ended by the client or the server
    ERROR = "error"
    TOOL_CALLS = "tool_calls"  # the answer ends with tool calls
    DROPPED = "dropped"  # a beam replaced by better ones; no client sees it

    __repr__ = str.__repr__
