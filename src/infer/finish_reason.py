"""The reasons why a sequence or an answer ends; on the wire they are these words."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why nothing follows; equal to its word."""

    STOP = "stop"  # an end of text, a stop string or token, or the end of a constraint
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # its client or the server ended it
    ERROR = "error"
    TOOL_CALLS = "tool_calls"  # an answer that ends with calls of tools
    DROPPED = "dropped"  # a beam that others took the place of; no client sees it

    __repr__ = str.__repr__
