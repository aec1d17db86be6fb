"""A small byte-level vocabulary with the pieces that JSON is made of, for grammars."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from infer.constraints.compiler import Compiler, Grammar
from infer.constraints.description import Structured
from infer.constraints.token_bytes import TokenBytes
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.tokenizer import BYTE_OF_CHAR, Tokenizer

SPECIALS = ("<eos>", "<end>", "</think>", "<tool>")
EOS_IDS = (0, 1)
THINK_END, TOOL = 2, 3
PIECES = (
    '{"', '"}', '":', '": "', '", "', '":"', "[]", "{}", "true", "false", "null", "name", "age", "items",
    "12", "ab", "abc", "yes", "no", "<t", "<tc>", "<tc>\n", "ool>", "</tc>", " {", "\n\n", "  ",
)  # fmt: skip
_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def _metadata() -> dict[str, object]:
    """Every piece is merged from the left, byte by byte."""
    tokens = [*SPECIALS, *sorted(BYTE_OF_CHAR)]
    merges: dict[str, None] = {}
    for piece in PIECES:
        spelled = "".join(_CHAR_OF_BYTE[byte] for byte in piece.encode())
        for end in range(1, len(spelled)):
            merges.setdefault(f"{spelled[:end]} {spelled[end]}")
    tokens += dict.fromkeys(merge.replace(" ", "") for merge in merges)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
    }


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(read_gguf_vocabulary(_metadata()))


VOCAB_SIZE = tokenizer().vocab_size + 6  # logits beyond the tokens, and no multiple of 32
assert VOCAB_SIZE % 32


@functools.cache
def token_bytes() -> TokenBytes:
    text = read_gguf_vocabulary(_metadata()).core.to_str()
    return TokenBytes(lambda: text, vocab_size=VOCAB_SIZE, eos_ids=EOS_IDS)


@functools.cache
def compiler() -> Compiler:
    return Compiler(token_bytes())


def compiled(structured: Structured) -> Grammar:
    return compiler().compile(structured)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False, parse_special=True)


def token_of(text: str) -> int:
    """The one token that is spelled so, if the tokenizer would write it otherwise as well."""
    return next(i for i in range(tokenizer().vocab_size) if tokenizer().token_bytes(i) == text.encode())


def text_of(ids: Sequence[int]) -> str:
    return b"".join(tokenizer().visible_bytes(token_id) for token_id in ids).decode("utf-8", errors="replace")
