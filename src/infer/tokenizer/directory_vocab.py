"""A tokenizer from the files of a model directory.

    tokenizer.json            all of it, in the library's own format             read first
    vocab.json + merges.txt   the older format of a byte-level BPE (GPT-2, Qwen 2)
    tokenizer_config.json     names of the special tokens, flags of added tokens and further ones, whether a
                              prompt begins with BOS, chat template
    special_tokens_map.json   names of the special tokens, where the file above is missing
    chat_template.jinja       the chat template, in directories written by recent tools; a second one for
                              requests with tools in additional_chat_templates/tool_use.jinja
    chat_template.json        the chat template of older multimodal models, which their processors read

A lone tokenizer.model (sentencepiece) is refused: it is a format of its own, and every model with one is
also published with a tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from infer.errors import CheckpointError
from infer.tokenizer.growth import check_growth
from infer.tokenizer.vocabulary import SPLIT_RULES, Vocabulary, add_tokens, byte_level_core, joined_template

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# tokenizer_class -> split rule of a vocab.json with merges.txt
_SPLIT_RULE_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def read_directory_vocabulary(path: Path) -> Vocabulary:
    """Build the tokenizer's parts from a model directory, or from a tokenizer.json itself."""
    directory = path.parent if path.is_file() else path
    config = _read_config(directory)
    if path.is_file():
        core = _read_tokenizer_json(path)
        _declare_again(core, config)
    elif (directory / "tokenizer.json").is_file():
        core = _read_tokenizer_json(directory / "tokenizer.json")
        _declare_again(core, config)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        core = _read_vocab_and_merges(directory, config)
    else:
        raise CheckpointError(_nothing_found(directory))
    _mark_special(core, config)
    eos_names = config.get("eos_token")
    eos = [_find_id(core, name) for name in (eos_names if isinstance(eos_names, list) else [eos_names])]
    return Vocabulary(
        core=core,
        bos_id=_find_id(core, config.get("bos_token")),
        eos_ids=tuple(token_id for token_id in eos if token_id is not None),
        add_bos=_read_flag(config, "add_bos_token"),
        add_eos=_read_flag(config, "add_eos_token"),
        chat_template=_read_template(directory, config),
    )


class _StoredToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False


class _StoredNormalizer(msgspec.Struct):
    normalizer: Any = None


class _StoredTokenizer(_StoredNormalizer):
    """The keys of a tokenizer.json that decide whether it can be used as it is."""

    added_tokens: list[_StoredToken] = []
    padding: Any = None
    truncation: Any = None


def read_plain_json(path: Path) -> str | None:
    """Return the text of a tokenizer.json that can be used unchanged: no padding, special tokens marked.

    None: it must be changed, or cannot be read; `read_directory_vocabulary` takes twice as long.
    """
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.is_file():
        return None
    text = _read_text(file)
    try:
        stored = msgspec.json.decode(text, type=_StoredTokenizer)
    except msgspec.MsgspecError:
        return None
    check_growth(stored.normalizer, file)
    marked = {token.content for token in stored.added_tokens if token.special}
    config = _read_config(file.parent)
    is_plain = marked.issuperset(_named_special(config)) and not _differing(stored.added_tokens, config)
    return text if is_plain and stored.padding is None and stored.truncation is None else None


def _read_config(directory: Path) -> dict[str, Any]:
    names = ("chat_template.json", "special_tokens_map.json", "tokenizer_config.json")
    found: dict[str, Any] = {}
    for name in names:
        found |= _read_json(directory / name)
    return found


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    with suppress(msgspec.MsgspecError):  # the library reports what is wrong with the file
        check_growth(msgspec.json.decode(text, type=_StoredNormalizer).normalizer, path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception for anything it cannot read
        raise CheckpointError(f"cannot read {path}: {error}; fetch the file again") from None


def _read_vocab_and_merges(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if kind not in _SPLIT_RULE_OF_CLASS:
        raise CheckpointError(
            f"{directory} has vocab.json and merges.txt of a {kind}, and these files do not say how it cuts "
            f"text; known classes: {', '.join(_SPLIT_RULE_OF_CLASS)}; add the model's tokenizer.json"
        )
    vocab = _read_json(directory / "vocab.json")
    if not vocab or any(not isinstance(token_id, int) for token_id in vocab.values()):
        raise CheckpointError(f"{directory / 'vocab.json'} must map tokens to ids; fetch the file again")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_read_text(directory / "merges.txt").split("\n")):
        if not line.strip() or (number == 0 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise CheckpointError(f"{directory / 'merges.txt'} line {number + 1}: expected two tokens")
        merges.append((pair[0], pair[1]))
    core = byte_level_core(vocab, merges, SPLIT_RULES[_SPLIT_RULE_OF_CLASS[kind]])
    add_tokens(core, _declared(config))
    return core


def _declared(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    declared = config.get("added_tokens_decoder")
    items = sorted(declared.items()) if isinstance(declared, dict) else []
    return {_to_id(key): _to_added_token(fields) for key, fields in items}


def _differing(known: Iterable[Any], config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of the config that a tokenizer.json lacks or has with other flags."""
    same = {tuple(getattr(token, name) for name in ("content", *_FLAGS)) for token in known}
    return {
        number: token
        for number, token in _declared(config).items()
        if tuple(getattr(token, name) for name in ("content", *_FLAGS)) not in same
    }


def _declare_again(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Set the flags of `added_tokens_decoder`, and add its tokens that tokenizer.json lacks.

    A token that is special in one of the files is special. A new token whose id is not the next is left out.
    """
    known = core.get_added_tokens_decoder()
    special = {token.content for token in known.values() if token.special}
    for number, token in sorted(_differing(known.values(), config).items()):
        next_id = max(core.get_vocab_size(with_added_tokens=False), *(1 + i for i in (-1, *known)))
        if core.token_to_id(token.content) is not None or number == next_id:
            token.special |= token.content in special
            core.add_tokens([token])
            known = core.get_added_tokens_decoder()


def _to_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder must map ids to tokens, got {key!r}"
        )
    return int(key)


def _to_added_token(fields: Any) -> AddedToken:
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
    return AddedToken(fields["content"], **{flag: bool(fields.get(flag, False)) for flag in _FLAGS})


def _mark_special(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Mark the tokens that the config lists as special, even if the vocabulary does not mark them."""
    known = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    missing = {
        text: AddedToken(text, special=True, normalized=False)
        for text in _named_special(config)
        if text not in known and core.token_to_id(text) is not None
    }
    core.add_special_tokens(list(missing.values()))


def _named_special(config: Mapping[str, Any]) -> list[str]:
    named = [config.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")]
    more = config.get("additional_special_tokens")
    named += more if isinstance(more, list) else []
    return [text for text in map(_token_text, named) if text]


def _find_id(core: tokenizers.Tokenizer, name: Any) -> int | None:
    text = _token_text(name)
    token_id = core.token_to_id(text) if text else None
    return None if token_id is None else int(token_id)


def _token_text(name: Any) -> str | None:
    """Return the text of a token, which config files give as a string or as an object that contains it."""
    text = name.get("content") if isinstance(name, dict) else name
    return text if isinstance(text, str) else None


def _read_flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    files = {"default": directory / "chat_template.jinja", "tool_use": directory / TOOL_TEMPLATE}
    named: dict[Any, Any] = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if not named:
        given = config.get("chat_template")
        entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
        named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return joined_template(named.get("default"), named.get("tool_use"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch the file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error if isinstance(error, OSError) else "not text; give a directory or a tokenizer.json"
        raise CheckpointError(f"cannot read {path}: {said}") from None


def _nothing_found(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} is not a directory; give a model directory or a tokenizer.json"
    if (directory / "tokenizer.model").is_file():
        return (
            f"{directory} has only a sentencepiece tokenizer.model; convert it to tokenizer.json with "
            "transformers (AutoTokenizer.from_pretrained(dir).save_pretrained(dir)) or fetch the model's own"
        )
    return f"{directory} has no tokenizer.json and no vocab.json with merges.txt; fetch the tokenizer files"
