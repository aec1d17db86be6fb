r"""Logprobs in the two formats of OpenAI's API, and logprobs of prompts in vLLM's format.

    completions   {"tokens": [..], "token_logprobs": [..], "top_logprobs": [{token: logprob}, ..],
                   "text_offset": [..]}                         parallel lists
                  a token that is part of a character is spelled `bytes:\xe2\x82`, as OpenAI does
    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [..]}, ..]}
    prompts       [null, {token id: {"logprob", "rank", "decoded_token"}, ..}, ..]

A logprob is the float that the engine computed, never rounded: evaluation programs check if a token was the
likeliest by comparing its logprob with the largest alternative for equality. Minus infinity, which JSON
cannot represent, becomes -9999. The offset of a token is the index of the character that its first byte
belongs to: the three tokens of a euro sign have the same offset. Bytes that turn out not to be a character
become U+FFFD as soon as a token follows that cannot continue them, and that token's offset is after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.sampling.params import RowLogprobs
from infer.tokenizer.detokenizer import Detokenizer
from infer.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0


def to_json_number(logprob: float) -> float:
    """Return the logprob, but at least -9999."""
    return max(logprob, LOWEST)


class CompletionLogprobs:
    """Turns the tokens of one choice into parallel lists, piece by piece, and tracks the text offset."""

    def __init__(self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = ()) -> None:
        """`prompt_ids` are the tokens that the text continues; omit them if the text includes the prompt."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)
        self._offset = 0

    def take(self, ids: Sequence[int], rows: Sequence[RowLogprobs | None]) -> dict[str, Any]:
        """Return the lists for more tokens; a token without a row (the first of a prompt) has nulls."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id in ids:
            tokens.append(_name(self._tokenizer, token_id))
            offsets.append(self._offset + self._detokenizer.breaks_off(token_id))
            self._offset += len(self._detokenizer.push((token_id,)))
        return {
            "tokens": tokens,
            "token_logprobs": [None if row is None else to_json_number(row.logprob) for row in rows],
            "top_logprobs": [None if row is None else self._top(row) for row in rows],
            "text_offset": offsets,
        }

    def _top(self, row: RowLogprobs) -> dict[str, float]:
        """Return alternatives by name, and the token itself; of equal names the likelier one."""
        top: dict[str, float] = {}
        for token_id, logprob in (*row.top, (row.token_id, row.logprob)):
            top.setdefault(_name(self._tokenizer, token_id), to_json_number(logprob))
        return top


def join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate the lists of two pieces."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs]) -> dict[str, Any]:
    """Return the tokens of an output, each with its alternatives."""
    content = [
        {
            **_entry(tokenizer, row.token_id, row.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in row.top],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def spell(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; "" for ids of the model that its tokenizer does not have."""
    return tokenizer.token_text(token_id) if token_id < tokenizer.vocab_size else ""


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, or its bytes if they are not text, since U+FFFD is ambiguous."""
    text = spell(tokenizer, token_id)
    if "\ufffd" not in text or tokenizer.token_bytes(token_id) == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": to_json_number(logprob),
        "bytes": list(data),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[RowLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt in vLLM's format: for each token but the first, its own and the top."""
    pairs = zip(ids, rows, strict=True)
    return [None if row is None else _ranked(tokenizer, token_id, row) for token_id, row in pairs]


def _ranked(tokenizer: Tokenizer, token_id: int, row: RowLogprobs) -> dict[str, Any]:
    tokens = {other: (logprob, rank) for rank, (other, logprob) in enumerate(row.top, 1)}
    tokens[token_id] = (row.logprob, row.rank)
    return {
        str(each): {"logprob": to_json_number(logprob), "rank": rank, "decoded_token": spell(tokenizer, each)}
        for each, (logprob, rank) in tokens.items()
    }
