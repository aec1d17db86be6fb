"""The bytes of a model's tokens, for grammars; the engine itself never looks at them.

    files ──► tokenizer, as the text side reads it ──► JSON ──► LLTokenizer
    tokenizer.json that needs no change ─────────────┘

Building the tables takes about a second of one core, and other threads wait for much of it. So a server
builds them in a thread (`start`): with a GPU, while weights are copied to it; otherwise in the first idle
second, so that no request shares the core. A constrained request that comes earlier waits. A program that
never constrains an output never builds them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.constraints.numbers import Digits
from infer.errors import InferError, RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

PROBES = b"xz"  # letters that are both allowed in strings and hardly anywhere else


class TokenBytes:
    """The tokens of one model as bytes, built when first asked for. Safe to share between threads."""

    def __init__(
        self, read: Callable[[], str] | None, *, vocab_size: int, eos_ids: tuple[int, ...] = ()
    ) -> None:
        self.vocab_size = vocab_size  # the number of logits, which may exceed the number of tokens
        self._read = read  # the tokenizer as JSON; None: the model has none
        self._eos_ids = eos_ids
        self._is_started = False
        self._built: LLTokenizer | None = None
        self.probes: tuple[int, ...] = ()  # ids of `PROBES`, if each letter is a token
        self.digits: Digits | None = None  # digits of the tokens
        self._reason = "this model has no tokenizer, which a constraint on text needs"
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start to build the tables in a thread, unless that was started before."""
        if self._read is not None and not self._is_started:
            self._is_started = True
            threading.Thread(target=self.prepare, name="infer-vocabulary", daemon=True).start()

    def prepare(self) -> None:
        """Build the tables, or wait until they are built; `tokenizer` reports errors."""
        with self._lock:
            read, self._read = self._read, None
            if read is None:
                return
            try:
                self._built = self._build(read())
                self.probes = _probes_of(self._built)
                self.digits = Digits(self._built, self.probes)
            except Exception as error:  # any error of the library: the model can still be served
                is_known = isinstance(error, InferError | ValueError)
                said = f": {error}" if is_known else ""
                self._reason = f"this model's tokenizer cannot be used for constraints{said}"
                logger.warning("no constraints reason=%r", str(error), exc_info=not is_known)

    def tokenizer(self) -> LLTokenizer:
        """Return the matcher's tokenizer; raise `RequestError` if there is none."""
        self.prepare()
        if self._built is None:
            raise RequestError(self._reason)
        return self._built

    def _build(self, text: str) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_ids:
            raise ValueError("the model has no end-of-text token, so no output could end")
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(self._eos_ids))


def _probes_of(tokenizer: LLTokenizer) -> tuple[int, ...]:
    found = [(bytes([byte]), tokenizer.tokenize_bytes(bytes([byte]))) for byte in PROBES]
    are_tokens = all(len(ids) == 1 and tokenizer.decode_bytes(ids) == byte for byte, ids in found)
    return tuple(ids[0] for _, ids in found) if are_tokens else ()


def tokenizer_json(path: Path, gguf_metadata: Mapping[str, Any] | None) -> str:
    """Return the tokenizer of a model directory or a GGUF header as JSON of the tokenizers library."""
    from infer.tokenizer.directory_vocab import read_directory_vocabulary, read_plain_json
    from infer.tokenizer.gguf_vocab import read_gguf_vocabulary

    if gguf_metadata is None and (stored := read_plain_json(path)) is not None:
        return stored
    vocabulary = (
        read_directory_vocabulary(path) if gguf_metadata is None else read_gguf_vocabulary(gguf_metadata)
    )
    core = vocabulary.core
    core.no_padding()
    core.no_truncation()
    text: str = core.to_str()
    return text
