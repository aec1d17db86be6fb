"""A normalizer that multiplies is refused when it is read, and a text that it could make too long as well."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.constraints.token_bytes import tokenizer_json
from infer.errors import CheckpointError, ContextOverflow, RequestError
from infer.tokenizer import growth
from infer.tokenizer.growth import MAX_GROWTH, growth_of
from infer.tokenizer.tokenizer import RULE, Tokenizer
from scripts.make_checkpoint import Sizes, make_checkpoint


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


LONG = replace({"String": "a"}, "a" * 100)
TABLE = (4).to_bytes(4, "little") + bytes(4) + b"x\0" + b"a" * 900 + b"\0"
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(TABLE).decode()}
MARKS = replace({"String": " "}, "▁")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint("llama", tmp_path / "m", sizes=Sizes(vocab_size=300), seed=1)
    return tmp_path / "m"


def rewrite(model: Path, **parts: Any) -> Path:
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return model


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(LONG, LONG, LONG, LONG),
        sequence(sequence(LONG), sequence(sequence(LONG))),
        sequence(replace({"Regex": "x*"}, "b" * 100), LONG),
        sequence({"type": "Prepend", "prepend": "a" * 100}, LONG),
        replace({"String": "a"}, "\ufdfa" * 100),
        {"type": "Prepend", "prepend": "a" * 1000},
        replace({"Regex": ""}, "b" * 1000),
        PRECOMPILED,
    ],
)
def test_a_normalizer_that_multiplies_is_refused_before_the_library_reads_it(
    model: Path, normalizer: dict[str, Any]
) -> None:
    rewrite(model, normalizer=normalizer)
    for read in (Tokenizer.from_directory, lambda path: tokenizer_json(path, None)):
        with pytest.raises(CheckpointError, match=f"can turn one character into .* at most {MAX_GROWTH} are"):
            read(model)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (None, 1),
        ({"type": "NFC"}, 18),
        (sequence({"type": "Prepend", "prepend": "▁"}, MARKS), 2),
        (sequence(replace({"String": "``"}, '"'), {"type": "NFKD"}, replace({"Regex": " {2,}"}, " ")), 54),
        (sequence(), 1),
    ],
)
def test_published_normalizers_are_allowed(model: Path, normalizer: Any, expected: int) -> None:
    assert growth_of(normalizer) == expected <= MAX_GROWTH
    assert Tokenizer.from_directory(rewrite(model, normalizer=normalizer)).encode("The engine counted.")


def test_a_text_that_could_become_too_long_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_NORMALIZED", 1800)
    tokenizer = Tokenizer.from_directory(rewrite(model, normalizer={"type": "NFC"}))
    assert tokenizer.encode("a" * 100)
    with pytest.raises(RequestError, match="101 characters, and this model's tokenizer accepts at most 100"):
        tokenizer.encode("a" * 101)


STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
GROWING = sequence(replace({"String": "e"}, "eeee eeee eeee e"), replace({"String": "e"}, "b" * 16))


@pytest.mark.parametrize(
    ("normalizer", "char", "factor"),
    [({"type": "NFKC"}, "\ufdfa", 18), ({"type": "NFKD"}, "a", 1), (GROWING, "e", 211), (LONG, "a", 100)],
)
def test_a_text_that_grows_beyond_the_context_is_refused_before_it_is_encoded(
    model: Path, normalizer: dict[str, Any], char: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_directory(rewrite(model, normalizer=normalizer))
    assert tokenizer._most_chars is not None
    num_chars = 120 * tokenizer._most_chars // factor + 2 * RULE
    num_tokens = len(tokenizer.encode(char * num_chars))
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "_encode_raw", lambda text: pytest.fail("it was encoded"))
        for text in (char * num_chars, char * 50 * num_chars):
            with pytest.raises(ContextOverflow, match="prompt has at least") as caught:
                tokenizer.encode(text, context_len=100)
            assert len(text) > num_chars or 100 < caught.value.lengths[0] <= num_tokens
    short = "b" * 300  # it does not grow
    assert tokenizer.encode(short, context_len=100) == tokenizer.encode(short)
    with pytest.raises(RequestError, match="without lone surrogates"):
        tokenizer.encode("\ud800" * num_chars, context_len=100)


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "NFKC"}, GROWING, sequence({"type": "Lowercase"}, {"type": "NFKD"}), STRIP],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(text=st.text(st.sampled_from("aeB \n\ufdfa①ế\u0308日<|>"), max_size=300))
def test_no_text_that_fits_is_refused_whatever_the_normalizer(
    model: Path, normalizer: dict[str, Any], text: str
) -> None:
    tokenizer = Tokenizer.from_directory(rewrite(model, normalizer=normalizer))
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.encode(text, add_special=False, context_len=len(ids)) == ids


def test_a_pre_tokenizer_that_drops_text_leaves_no_limit_of_characters(model: Path) -> None:
    drop = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    nested = {"type": "Sequence", "pretokenizers": [drop]}
    parts = {"type": "Sequence", "pretokenizers": [nested, to_bytes]}
    tokenizer = Tokenizer.from_directory(rewrite(model, pre_tokenizer=parts))
    assert len(tokenizer.encode("a" * 100_000 + "b", context_len=10)) < 4


def test_others_run_while_a_slow_pattern_matches(model: Path) -> None:
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {"type": "Sequence", "pretokenizers": [slow, to_bytes]}
    tokenizer = Tokenizer.from_directory(rewrite(model, pre_tokenizer=parts))
    longest, last, done = 0.0, time.perf_counter(), threading.Event()

    def encode() -> None:
        with pytest.raises(RequestError, match="retry-limit"):
            tokenizer.encode("a" * 40 + "b")
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    thread.join()
    assert longest < 0.08  # the match takes 0.15 s and more
