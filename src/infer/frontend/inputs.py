"""The forms in which a caller may give prompts and conversations, converted to the encoder's form.

A prompt is text or token ids; a conversation is a list of messages, or the text of a single message. Several
prompts or conversations are a list of these, so a list of integers is one prompt, and a list of messages is
one conversation.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from infer.errors import RequestError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int]
Conversation: TypeAlias = str | Sequence[Message]  # a string is one message of a user


def is_token_id(value: object) -> bool:
    """Return True if a value is a Python or numpy integer."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def read_prompt(prompt: object) -> str | list[int]:
    """The prompt as text, or as a list of integers from a sequence or a one-dimensional array."""
    if isinstance(prompt, str):
        return prompt
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise RequestError(f"a prompt must be text or token ids, got {type(prompt).__name__}", param="prompt")
    for token_id in given:
        if not is_token_id(token_id):
            raise RequestError(
                f"a prompt of token ids must hold integers, got {reprlib.repr(token_id)} "
                f"({type(token_id).__name__})",
                param="prompt",
            )
    return [int(token_id) for token_id in given]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a string, a list of integers or a one-dimensional array is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray):
        raise RequestError("a prompt must be text or token ids, got bytes; decode it first", param="prompt")
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(given, Sequence):
        raise RequestError(
            f"prompts must be text, token ids or a list of either, got {type(prompts).__name__}",
            param="prompt",
        )
    if given and is_token_id(given[0]):
        return [cast("Sequence[int]", given)]
    return list(cast("Sequence[Prompt]", given))


def check_single(given: object) -> None:
    """Refuse a list of prompts or conversations; a list of token ids or of messages is a single one."""
    items = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(items, list | tuple) and items and isinstance(items[0], str | list | tuple):
        raise RequestError(
            f"AsyncLLM takes one prompt per call, got a list of {len(items)}; use asyncio.gather",
            param="prompt",
        )


def as_conversations(messages: Conversation | Sequence[Sequence[Message]]) -> list[Conversation]:
    """The conversations as a list; a string or a list of messages is one conversation."""
    message = '{"role": "user", "content": "..."}'
    allowed = (
        f"chat takes a text, one conversation, which is a list of messages such as {message}, "
        "or several conversations as a list of such lists"
    )
    if isinstance(messages, str):
        return [messages]
    if not isinstance(messages, Sequence) or isinstance(messages, bytes | bytearray):
        raise RequestError(f"{allowed}, got {type(messages).__name__}", param="messages")
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    for i, each in enumerate(messages):
        if not isinstance(each, Sequence) or isinstance(each, str | bytes | bytearray):
            given = f"conversation {i} of {len(messages)} is {type(each).__name__}"
            if isinstance(each, str):  # turns of one conversation, or one text for each of several?
                given += f"; to ask each text separately, give [[{message}], [{message}], ...]"
            raise RequestError(f"{allowed}; {given}", param="messages")
    return list(cast("Sequence[Sequence[Message]]", messages))
