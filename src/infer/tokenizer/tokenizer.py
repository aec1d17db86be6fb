"""Text to token ids and back.

The `tokenizers` library does the *encoding*, configured to treat spellings of special tokens as text. If a
caller wants special tokens (`parse_special`), we find them ourselves and put an *anchor* in their place, so
that the library still sees the whole text at once and splits it as usual:

    <|im_start|>user⏎Hi     ──►   ⚓user⏎Hi   ──►   [⚓, 4093, 198, 23066]   ──►   [1, 4093, 198, 23066]

The anchor's spelling has a random number made at start-up, so that no text can contain it. A second anchor,
the *cut*, encodes to nothing and keeps merges from making a special token out of text.

*Decoding* is our own: each id stands for some bytes, and text is the UTF-8 of all bytes in a row, with U+FFFD
for invalid bytes. This rule makes streaming exact (detokenizer.py).

    byte-level vocabularies    "Ġworld" -> b" world"      a printable alphabet for the 256 bytes
    sentencepiece ones         "▁world" -> b" world", "<0xE2>" -> b"\\xe2", and the first space of a text
                               is dropped if encoding puts one there

Nothing changes after construction, so any number of threads may share a `Tokenizer`. The library holds the
GIL while it encodes a single text, but releases it for a batch. So long texts are encoded as batches of one,
and a thread that encodes megabytes does not block the others. Vocabularies with unknown patterns always use
batches, because a pattern may be slow.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from infer.errors import CheckpointError, ContextOverflow, InferError, RequestError
from infer.tokenizer.directory_vocab import read_directory_vocabulary
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.growth import check_normalized, flat_steps, growth_of
from infer.tokenizer.special_text import SpecialText
from infer.tokenizer.vocabulary import SPLIT_RULES, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

RULE, SLICE = 256, 4096  # characters of a piece on the ruler, and of a text that is measured at a time
LONG_TEXT = 2048  # normalized characters of a long text, which takes a millisecond or two to encode
_KEEPERS = (None, "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")  # lose no text
_KNOWN_PATTERNS = {pattern for rule in SPLIT_RULES.values() for pattern in rule.patterns}


class Tokenizer:
    """Text to token ids and back, for one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        core = self._core = vocabulary.core
        core.no_truncation()
        core.no_padding()
        added = core.get_added_tokens_decoder()
        vocab = core.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self._most_chars = _most_chars(core, vocab)
        self._ruler = None if _keeps_lengths(core) else _ruler(core)
        self._growth = growth_of(_state(core.normalizer))
        self._long_text = LONG_TEXT // self._growth if _has_known_patterns(core) else 0
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.published_chat_template = vocabulary.chat_template
        self.special_text = SpecialText(token for token in added.values() if token.special)
        self._special_id = {token.content: i for i, token in added.items() if token.special}

        self._prefix, self._suffix = self._find_wrapping(vocabulary)
        core.encode_special_tokens = True  # True: encode their spellings as text
        self._anchor, self._cut = (f"\ufdd0{secrets.token_hex(16)}\ufdd1" for _ in range(2))
        core.add_tokens([AddedToken(text, normalized=False) for text in (self._anchor, self._cut)])
        self._anchor_id, self._cut_id = core.token_to_id(self._anchor), core.token_to_id(self._cut)

        self._is_byte_level, self.num_stripped = _read_decoder(core.decoder)
        self._bytes: dict[int, bytes] = {}  # cache by id; two threads may write the same value
        self._added = frozenset(added)
        unknown_text = getattr(core.model, "unk_token", None)  # not every kind of model has one
        unknown = core.token_to_id(unknown_text) if unknown_text else None
        self._never_from_text = self.special_ids - {unknown}
        self.gap_after_special = self._find_gap()

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read a model directory, or a tokenizer.json."""
        with library_errors(CheckpointError):
            return cls(read_directory_vocabulary(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Read the `tokenizer.*` keys of a GGUF header."""
        with library_errors(CheckpointError):
            return cls(read_gguf_vocabulary(metadata))

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        guard: str = "",
        context_len: int | None = None,
    ) -> list[int]:
        """Turn text into ids.

        `add_special` adds the tokens that the checkpoint puts around every prompt, usually BOS, unless the
        text already begins with it. `parse_special` turns spellings of special tokens into these tokens,
        except those with a `guard` character inside; guards are removed. A text that cannot fit into
        `context_len` tokens, even if all were the longest in the vocabulary, is refused without encoding it.
        """
        if context_len is not None and self._most_chars is not None:
            bare = text.replace(guard, "") if guard else text
            if (least := self._least_tokens(bare, context_len)) > context_len:
                raise ContextOverflow(least, 1, context_len, is_least=True)
        check_normalized(len(text), self._growth)
        ids = self._encode_markup(text, guard) if parse_special else self._encode_parts([text], [])
        return self.begin(ids) + self._suffix if add_special else ids

    def begin(self, ids: list[int]) -> list[int]:
        """Prepend the ids that begin every prompt of this checkpoint (BOS, or nothing), never twice."""
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(map(self.visible_bytes if skip_special else self.token_bytes, ids))
        num_spaces = len(data) - len(data.lstrip(b" "))
        return data[min(num_spaces, self.num_stripped) :].decode("utf-8", errors="replace")

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: none if it is special."""
        data = self.token_bytes(token_id)
        return b"" if token_id in self.special_ids else data

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; for a special token, the bytes of its spelling."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Return a token as text, for people: an incomplete character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this spelling in the vocabulary, if there is one."""
        token_id = self._core.token_to_id(text)
        return None if token_id is None or token_id >= self.vocab_size else int(token_id)

    def _least_tokens(self, text: str, context_len: int) -> int:
        """Return the fewest tokens that a text can have, or a number above `context_len` that it has."""
        assert self._most_chars is not None
        if self._ruler is None:
            return len(text) // self._most_chars
        if len(text) * self._growth // self._most_chars <= context_len:
            return 0
        num_chars = 0
        for start in range(0, len(text), SLICE):
            piece = text[start : start + SLICE]
            num_chars += RULE * (len(self._encode_with(self._ruler, piece, is_long=True)) - 1)
            if num_chars // self._most_chars > context_len:
                break
        return num_chars // self._most_chars

    def _encode_markup(self, text: str, guard: str) -> list[int]:
        parts: list[str] = []
        specials: list[int] = []
        end = 0
        for found in self.special_text.find(text, guard):
            parts.append(text[end : found.start])
            specials.append(self._special_id[found.content])
            end = found.stop
        parts.append(text[end:])
        if guard:
            parts = [part.replace(guard, "") for part in parts]
        return self._encode_parts(parts, specials)

    def _encode_parts(self, parts: list[str], specials: list[int]) -> list[int]:
        """Encode text parts with a special token between neighbours; the parts themselves yield none."""
        ids = self._encode_raw(self._anchor.join(parts))
        if not self._never_from_text.isdisjoint(ids):
            # the vocabulary's merges can make a special token: cut its spelling into characters
            cut_up = [self.special_text.guard(part, self._cut) for part in parts]
            ids = self._encode_raw(self._anchor.join(cut_up))
        remaining = iter(specials)
        return [next(remaining) if i == self._anchor_id else i for i in ids if i != self._cut_id]

    def _encode_raw(self, text: str) -> list[int]:
        return self._encode_with(self._core, text, is_long=len(text) >= self._long_text)

    def _encode_with(self, core: Any, text: str, *, is_long: bool) -> list[int]:
        try:
            with library_errors(RequestError):
                if is_long:
                    ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
                else:
                    ids = core.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "the prompt must be text without lone surrogates (U+D800 to U+DFFF); "
                "Python reads bytes that are not UTF-8 as these"
            ) from None
        return ids

    def _find_wrapping(self, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
        """Return the ids around every prompt: the library's post-processor, unless the checkpoint differs."""
        bare = self._core.encode("a", add_special_tokens=False).ids
        wrapped = self._core.encode("a").ids
        start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(bare)] == bare), 0)
        prefix, suffix = wrapped[:start], wrapped[start + len(bare) :]
        if vocabulary.add_bos is not None:
            prefix = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
        if vocabulary.add_eos is not None:
            suffix = list(vocabulary.eos_ids[:1]) if vocabulary.add_eos else []
        return prefix, suffix

    def _find_gap(self) -> str:
        """Return the text to insert after a special token so that the next word gets its usual leading space.

        Sentencepiece words are spelled "▁word". Some vocabularies add the mark before every stretch of text,
        others only at the beginning of the prompt, so that a space must be inserted elsewhere.
        """
        puts_marks = not self._is_byte_level and self.num_stripped > 0
        after_special = self._encode_raw(self._anchor + "a")[1:]
        return " " if puts_marks and after_special != self._encode_raw("a") else ""

    def _spell(self, token_id: int) -> bytes:
        if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id!r} is not in the vocabulary; ids are 0 to {self.vocab_size - 1}"
            )
        token = self._core.id_to_token(token_id)
        if token is None:  # an unused id
            return b""
        if token_id in self.special_ids:
            return str(token).encode()
        if self._is_byte_level:
            is_text = token_id in self._added or any(char not in BYTE_OF_CHAR for char in token)
            return str(token).encode() if is_text else bytes(BYTE_OF_CHAR[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else str(token).replace("▁", " ").encode()


@contextmanager
def library_errors(kind: type[InferError]) -> Iterator[None]:
    """Turn errors of the `tokenizers` library, a bare Exception or a panic, into an `InferError`."""
    try:
        yield
    except BaseException as error:  # a panic is not an Exception, and its class cannot be imported
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise kind(f"the tokenizers library cannot work with this vocabulary: {error}") from None


def _printable_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, others are characters from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _printable_bytes()


def _most_chars(core: Any, vocab: Iterable[str]) -> int | None:
    """Return the most characters of normalized text that one token can represent; None: without limit.

    It is the length of the longest spelling, in which a byte takes a character or more, or of the longest
    normalized text of an added token. Twice that allows for composed characters (up to three become two
    bytes), and for a normalizer that sees slices of a text, or text in place of an added token.
    """
    steps = list(flat_steps(_state(core.pre_tokenizer)))
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if any(step["type"] not in _KEEPERS or step.get("behavior") == "Removed" for step in steps):
        return None
    added = core.get_added_tokens_decoder().values()
    takes_spaces = any((token.lstrip or token.rstrip) and not token.special for token in added)
    if takes_spaces or not (is_byte_level or getattr(core.model, "byte_fallback", False)):
        return None
    texts = [token.content for token in added]
    if core.normalizer is not None:
        texts += [core.normalizer.normalize_str(text) for text in texts]
    return 2 * max(map(len, [*vocab, *texts]), default=1)


def _keeps_lengths(core: Any) -> bool:
    """Return True if normalization shortens no text, except by composing characters that take more bytes."""
    is_byte_level = core.pre_tokenizer is not None and b"ByteLevel" in core.pre_tokenizer.__getstate__()
    return all(
        step["type"] in (None, "Prepend")
        or (step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁")
        or (step["type"] == "NFC" and is_byte_level)
        for step in flat_steps(_state(core.normalizer))
    )


def _ruler(core: Any) -> Any:
    """Return a tokenizer that normalizes as `core` does, and makes a token of each RULE characters."""
    ruler = RawTokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    ruler.normalizer = core.normalizer
    ruler.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?m).{{1,{RULE}}}"), "isolated")
    return ruler


def _state(part: Any) -> dict[str, Any]:
    """Return a part of the library's tokenizer as JSON."""
    return {"type": None} if part is None else dict(json.loads(part.__getstate__()))


def _has_known_patterns(core: Any) -> bool:
    """Return True if only patterns of `SPLIT_RULES`, which are fast, split and normalize text."""
    found = list(_regexes([_state(core.normalizer), _state(core.pre_tokenizer)]))
    return _KNOWN_PATTERNS.issuperset(found)


def _regexes(state: Any) -> Iterator[str]:
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == "Regex" and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _regexes(value)


def _read_decoder(decoder: Any) -> tuple[bool, int]:
    """Return True if tokens are byte-level, and the number of leading spaces that encoding adds to a text."""
    if decoder is None:
        raise CheckpointError("the tokenizer has no decoder, so its tokens cannot be turned into text")
    spec = _state(decoder)
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return True, 0
    known = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if kinds.isdisjoint({"Replace", "Metaspace"}) or not kinds <= known:
        raise CheckpointError(
            f"the tokenizer's decoder is {' + '.join(sorted(kinds))}; this engine reads ByteLevel decoders "
            f"and sentencepiece ones ({', '.join(sorted(known))})"
        )
    stripped = sum(step["start"] for step in steps if step["type"] == "Strip" and step["content"] == " ")
    drops_mark = any(step.get("prepend_scheme", "never") != "never" for step in steps)  # Metaspace's own
    return False, stripped + drops_mark
