from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from infer.errors import CheckpointError, ContextOverflow, InferError, RequestError
from infer.tokenizer.directory_vocab import read_plain_json
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.tokenizer import LONG_TEXT, Tokenizer, library_errors
from infer.tokenizer.vocabulary import SPLIT_RULES, SplitRule, Vocabulary
from tests.unit.tokenizer.vocabularies import (
    gpt2_metadata,
    gpt2_tokenizer,
    id_of,
    spm_metadata,
    spm_tokenizer,
)

TOKENIZERS = {"byte-level": gpt2_tokenizer(), "sentencepiece": spm_tokenizer()}
TEXTS = ["", " ", "the inner", "  the\n\n  a", "한글 👩‍👩‍👧 日本語 ½€", "1984 it's", "\x00\t\r\n", "▁"]


def library_twin(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same vocabulary as the library alone sees it."""
    return tokenizers.Tokenizer.from_str(read_gguf_vocabulary(metadata).core.to_str())


TWINS = {"byte-level": library_twin(gpt2_metadata()), "sentencepiece": library_twin(spm_metadata())}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_what_is_encoded_decodes_to_itself(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_a_byte_level_vocabulary(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@given(data=st.data())
def test_decoding_equals_the_library_wherever_bytes_are_characters(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    ours, twin = TOKENIZERS[name], TWINS[name]
    if name == "byte-level":  # any ids at all: both replace what is not UTF-8
        ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    else:  # the library gives up on a whole run of byte tokens at once, so whole characters only
        texts = data.draw(st.lists(st.sampled_from(TEXTS), max_size=4))
        ids = [i for text in texts for i in ours.encode(text)]
    for skip_special in (True, False):
        assert ours.decode(ids, skip_special=skip_special) == twin.decode(
            ids, skip_special_tokens=skip_special
        )


def test_invalid_bytes_become_replacement_characters_one_by_one() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0xFF, 0xE2)]
    assert tokenizer.decode(ids) == "€\ufffd\ufffd"


def test_special_text_stays_text_unless_parsing_is_asked_for() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = "the<|im_end|> inner"
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, parse_special=True)
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "the inner"
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_parsing_equals_the_librarys_own(name: str) -> None:
    texts = {
        "byte-level": [
            "<|im_start|>user\nthe<|im_end|>\n",
            "<|im_end|><|im_end|>",
            " <|im_start|> a",
            "x<|im_|>",
        ],
        "sentencepiece": ["<s>the a</s> in", "the </s><s>", "a<s>  b", "</s"],
    }
    for text in texts[name]:
        ids = TOKENIZERS[name].encode(text, add_special=False, parse_special=True)
        assert ids == TWINS[name].encode(text, add_special_tokens=False).ids


@given(
    text=st.lists(
        st.sampled_from(
            ["<x>", "<y>", " ", "\n", "the", "a", "é", "e\u0301", "_", "9", "²", "Ⓐ", "\x1c", "\u3000"]
        )
    ).map("".join),
    flags=st.tuples(*[st.booleans()] * 8),
)
def test_a_special_token_takes_the_place_that_its_flags_allow(text: str, flags: tuple[bool, ...]) -> None:
    """White space to the left or right of it, and words next to it, are looked at as the library does."""
    names = ("lstrip", "rstrip", "single_word", "normalized")
    found = [
        AddedToken(token, special=True, **dict(zip(names, each, strict=True)))
        for token, each in (("<x>", flags[:4]), ("<y>", flags[4:]))
    ]
    cores = [read_gguf_vocabulary(gpt2_metadata()).core for _ in range(2)]
    for core in cores:
        core.add_tokens(found)
    ours, theirs = Tokenizer(Vocabulary(core=cores[0])), cores[1]
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False, parse_special=True) == expected


def test_merges_that_spell_a_special_token_never_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = gpt2_metadata(["<x>"])
    tokens = metadata["tokenizer.ggml.tokens"] + ["<x"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [*metadata["tokenizer.ggml.merges"], "< x", "<x >"],
        "tokenizer.ggml.pre": "uncut",
    }
    monkeypatch.setitem(SPLIT_RULES, "uncut", SplitRule(("\n",)))
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("a<x>b"))
    assert tokenizer.decode(tokenizer.encode("a<x>b")) == "a<x>b"
    marked_up = tokenizer.encode("<x>a<\ufdd2x>b<x>", parse_special=True, guard="\ufdd2")  # as in a chat
    assert [i for i, token in enumerate(marked_up) if token == 0] == [0, len(marked_up) - 1]
    assert tokenizer.decode(marked_up, skip_special=False) == "<x>a<x>b<x>"


def test_bos_is_added_once_as_the_checkpoint_says() -> None:
    with_bos = spm_tokenizer(add_bos_token=True)
    assert with_bos.encode("a")[0] == 1
    assert with_bos.encode("<s>a", parse_special=True).count(1) == 1
    assert with_bos.encode("a", add_special=False)[0] != 1
    assert with_bos.encode("<s>a").count(1) == 1  # typed by a user: text, after the real one
    assert spm_tokenizer(add_bos_token=False).encode("a")[0] != 1
    assert spm_tokenizer(add_eos_token=True).encode("a")[-1] == 2


@pytest.mark.parametrize("bad", [-1, 10**9, "3", None])
def test_ids_outside_the_vocabulary_are_refused(bad: Any) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(RequestError, match="ids are 0 to"):
            use(bad)


def test_a_token_knows_its_bytes() -> None:
    byte_level, spm = TOKENIZERS["byte-level"], TOKENIZERS["sentencepiece"]
    assert byte_level.token_bytes(id_of(byte_level, "Ġthe")) == b" the"
    assert byte_level.token_bytes(id_of(byte_level, "ðŁ")) == b"\xf0\x9f"
    assert byte_level.token_text(id_of(byte_level, "ðŁ")) == "\ufffd"
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert spm.token_bytes(id_of(spm, "▁the")) == b" the"
    assert spm.token_bytes(id_of(spm, "<0xE2>")) == b"\xe2"
    assert {byte_level.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}


def test_a_word_after_a_special_token_has_one_space_in_front_either_way() -> None:
    """Some vocabularies mark every stretch of text, some only the first: templates write the gap or not."""
    every = TOKENIZERS["sentencepiece"]
    vocabulary = read_gguf_vocabulary(spm_metadata())
    vocabulary.core.normalizer = None
    vocabulary.core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    only_first = Tokenizer(vocabulary)
    assert (every.gap_after_special, only_first.gap_after_special) == ("", " ")
    assert gpt2_tokenizer().gap_after_special == ""
    ids = [t.encode(f"<s>{t.gap_after_special}the</s>", parse_special=True) for t in (every, only_first)]
    assert ids[0] == ids[1] == [1, id_of(every, "▁the"), 2]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        TOKENIZERS["byte-level"].encode("\ud800")


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = gpt2_tokenizer()
    text = "the inner <|im_end|> 한글 " * 50
    expected = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            found = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
            if found != expected or tokenizer.decode(found[0]) != text:
                wrong.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_directory_with_tokenizer_json_is_read(tmp_path: Path) -> None:
    library_twin(gpt2_metadata()).save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": [{"name": "rag", "template": "t"}, {"name": "default", "template": "d"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.published_chat_template) == (1, (2,), "d")
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.vocab_size == TOKENIZERS["byte-level"].vocab_size
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path / "tokenizer.json").published_chat_template == "file"


@pytest.mark.parametrize(
    "flags", [{"rstrip": True}, {"special": False}, {"lstrip": True, "single_word": True}]
)
@pytest.mark.parametrize("is_new", [False, True])
def test_the_config_decides_on_added_tokens_as_in_the_reference(
    flags: dict[str, bool], is_new: bool, tmp_path: Path
) -> None:
    """Its flags win over those in tokenizer.json, and its further tokens are added."""
    core = library_twin(gpt2_metadata())
    core.save(str(tmp_path / "tokenizer.json"))
    plain = {"content": "<|im_end|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    declared = {"2": plain | flags}
    if is_new:
        declared[str(core.get_vocab_size())] = plain | {"content": "<new>"} | flags
    config = {"added_tokens_decoder": declared, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("the <|im_end|>  in", "a<new>the <new>\n", "x <|im_end|><new> a"):
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ids == reference(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert read_plain_json(tmp_path) is None


def test_vocab_and_merges_give_the_same_ids(tmp_path: Path) -> None:
    metadata = gpt2_metadata(pre="gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"][3:]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""]
    (tmp_path / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    added = {str(len(tokens)): {"content": "<|endoftext|>", "special": True}}
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, twin = Tokenizer.from_directory(tmp_path), Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        assert tokenizer.encode(text) == [i - 3 for i in twin.encode(text)]
    assert tokenizer.eos_ids == (len(tokens),)


def test_unreadable_directories_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        Tokenizer.from_directory(tmp_path / "missing")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="convert it"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xc3")
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: not text; give a directory or a tokenizer\.json"
    ):
        Tokenizer.from_directory(tmp_path / "model.gguf")
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_unigram_vocabulary_with_a_metaspace_decoder_is_read(tmp_path: Path, scheme: str) -> None:
    """Such a file comes from T5Tokenizer, for instance; the reference is the library's own decoder."""
    core = tokenizers.Tokenizer(tokenizers.models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(["the inner cat", "a cat in the inn", "an inner thing"] * 5, trainer)
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("the cat", " the  inner cat ", "in</s> the"):
        ids = core.encode(text).ids
        assert tokenizer.encode(text, parse_special=True) == ids
        assert tokenizer.decode(ids) == core.decode(ids)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.decoder = tokenizers.decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decoder is WordPiece"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tokenizer_class": 3}, "of a 3"),
        ({"added_tokens_decoder": {"x": {"content": "<e>"}}}, "map ids to tokens, got 'x'"),
    ],
)
def test_a_damaged_tokenizer_config_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": None}))
    assert Tokenizer.from_directory(tmp_path).encode("ab") == [2]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("kind", [CheckpointError, RequestError])
def test_what_the_library_panics_about_becomes_an_error_of_ours(kind: type[InferError]) -> None:
    panic = type("PanicException", (BaseException,), {})
    for raised in (panic("index out of bounds"), Exception("index out of bounds")):
        with pytest.raises(kind, match="index out of bounds"), library_errors(kind):
            raise raised
    for bug in (KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(bug)), library_errors(kind):
            raise bug


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_has_the_ids_the_library_gives_it(name: str) -> None:
    text = " ".join(TEXTS[:-1]) * (2 * LONG_TEXT // 40)
    assert len(text) > LONG_TEXT
    bare = TOKENIZERS[name].encode(text, add_special=False)
    assert bare == TWINS[name].encode(text, add_special_tokens=False).ids


def test_others_run_while_a_long_text_is_encoded() -> None:
    """Without a forced switch between threads, a thread that keeps the lock lets no other run."""
    tokenizer, text = TOKENIZERS["byte-level"], "the inner on a 日本語 " * 10_000
    is_encoding, num_ticks = False, 0

    def encode() -> None:
        nonlocal is_encoding
        is_encoding = True
        tokenizer.encode(text)
        is_encoding = False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        while thread.is_alive():
            num_ticks += is_encoding
            time.sleep(0.0002)  # lets go of the lock
    finally:
        sys.setswitchinterval(interval)
    assert num_ticks > 0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    text = "\ufffe" * (100 * longest)  # of 3 tokens a character
    assert len(tokenizer.encode(text, context_len=100)) > 100, "it might fit: only the tokens can tell"
    for parse_special in (False, True):
        with pytest.raises(ContextOverflow, match="prompt has at least .* context length is 100") as caught:
            tokenizer.encode("x" * 10**6, parse_special=parse_special, context_len=100)
    assert caught.value.param == "prompt"


@given(st.text(st.sampled_from("aǖ ế각\u0308\u0304\u1161\u11a8\u1100u<|>_"), max_size=60))
def test_no_text_that_fits_is_refused(text: str) -> None:
    """The limit holds whatever the vocabulary does to the text first."""
    for tokenizer in (*TOKENIZERS.values(), gpt2_tokenizer(pre="qwen2")):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.encode(text, add_special=False, context_len=len(ids)) == ids
