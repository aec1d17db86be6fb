"""GGUF files that `infer quantize` writes, read by the `gguf` package and by this engine."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from infer.cli.main import main
from infer.errors import ConfigError
from infer.layers.linear import Projected
from infer.loader.find.source import resolve_model
from infer.loader.formats.gguf import GGMLType, read_gguf
from infer.loader.formats.gguf_quants import coded_rows
from infer.loader.load import LoadedModel, load_model
from infer.quant.coded import CodedRows
from infer.tokenizer.tokenizer import Tokenizer
from infer.tools.gguf_blocks import round_to_blocks
from infer.tools.gguf_writer import KINDS
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.step import run_step

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 16,
    "beta_fast": 8.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-scaled": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "cohere2": ("cohere2", {"sliding_window": 16}),
    "ministral3": ("ministral3", {}),
    "ministral3-edges": ("ministral3", {"rope_parameters": YARN}),
    "ministral3-plain": ("ministral3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mistral3": ("mistral3", {}),
}
TEXTS = ["Where is the river?", "It's 1984, isn't it?  def add(a, b):\n\treturn a + b", "Größe 東京 😀"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantize-gguf")


@functools.cache
def dense(root: Path, name: str) -> Path:
    family, changes = MODELS[name]
    sizes = Sizes(hidden_size=256, num_layers=2)
    make_checkpoint(family, root / name, sizes=sizes, dtype="bfloat16", seed=3, **changes)
    return root / name


@functools.cache
def written(root: Path, name: str, scheme: str) -> Path:
    out = root / f"{name}-{scheme}.gguf"
    quantize_checkpoint(
        resolve_model(str(dense(root, name)), show_progress=False), out, Recipe(scheme=scheme)
    )
    return out


def load(path: Path, home: str = "cuda") -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", dtype="float32", quantization="none", home=home)


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    layers = loaded.model.named_modules()
    return {name: layer.stored.dequantized() for name, layer in layers if isinstance(layer, Projected)}


@pytest.mark.parametrize("kind", KINDS.values())
def test_blocks_mean_what_another_reader_reads(kind: str) -> None:
    """Groups of one sign, of one number, and of zeros, too; no worse than the package's own rounding."""
    torch.manual_seed(0)
    rows = torch.randn(9, 768) * 0.02
    rows[1], rows[2], rows[3] = rows[1].abs(), -rows[2].abs(), 0.25
    rows[4, :300] = 0
    rows[5, 7] = 3.0
    packed = round_to_blocks(rows, kind)
    theirs = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])
    held = coded_rows(packed, GGMLType[kind])
    assert isinstance(held, CodedRows)
    torch.testing.assert_close(held.numbers(), torch.from_numpy(theirs), rtol=1e-6, atol=1e-7)
    error = (held.numbers() - rows)[0].norm() / rows[0].norm()
    assert error < {"Q8_0": 0.006, "Q4_0": 0.095, "Q4_1": 0.075, "Q4_K": 0.078}[kind]
    assert (held.numbers()[4, :256] == 0).all()
    torch.testing.assert_close(held.numbers()[3], rows[3], rtol=2e-3, atol=0)
    if kind != "Q4_K":  # the package does not write it
        known = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
        known_rows = torch.from_numpy(gguf.dequantize(known, gguf.GGMLQuantizationType[kind]))
        assert (held.numbers() - rows).norm() < 1.02 * (known_rows - rows).norm()


@pytest.mark.parametrize("scheme", KINDS)
def test_another_reader_finds_header_and_weights(scheme: str, root: Path) -> None:
    reader, kind = gguf.GGUFReader(written(root, "llama", scheme)), KINDS[scheme]
    fields, config = reader.fields, load(dense(root, "llama")).config
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.embedding_length"].contents() == config.hidden_size
    assert fields["llama.attention.head_count_kv"].contents() == config.num_kv_heads
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == config.vocab_size
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.1.ffn_up.weight"].tensor_type.name == kind
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    found = weights(load(written(root, "llama", scheme)))
    up = tensors["blk.1.ffn_up.weight"]
    theirs = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type))
    ours = found["layers.1.mlp.gate_up"][len(theirs) :]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_made_of(name: str, root: Path) -> None:
    """The same text in the same tokens, the same ends, and the same logits up to rounding to 8 bits."""
    before, after = load(dense(root, name)), load(written(root, name, "gguf-q8_0"))
    known = Tokenizer.from_directory(dense(root, name))
    tokenizer = Tokenizer.from_gguf(read_gguf(written(root, name, "gguf-q8_0")).metadata)
    for text in TEXTS:
        assert tokenizer.encode(text) == known.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == known.decode(known.encode(text))
    assert tokenizer.bos_id == known.bos_id and tokenizer.special_ids == known.special_ids
    assert set(after.eos_ids) == set(before.eos_ids)
    for key, weight in weights(before).items():
        error = (weights(after)[key] - weight).norm() / weight.norm()
        assert error < 0.007, (key, float(error))
    logits = [torch.cat(run_step(loaded.model, [list(range(3, 40)), [7]])) for loaded in (before, after)]
    assert (logits[1] - logits[0]).norm() < 0.05 * logits[0].norm()


def test_a_file_has_the_name_of_its_model_and_not_of_a_snapshot(root: Path, tmp_path: Path) -> None:
    source = replace(resolve_model(str(dense(root, "llama")), show_progress=False), name="org/tiny")
    quantize_checkpoint(source, tmp_path / "a.gguf", Recipe(scheme="gguf-q8_0"))
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["general.name"].contents() == "tiny"


def test_rows_that_the_blocks_do_not_fill_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of 64 and 128: no Q4_K, whatever the name of the file will be."""
    make_checkpoint("qwen3", tmp_path / "qwen3", dtype="bfloat16", sizes=Sizes(hidden_size=64, num_layers=1))
    source = resolve_model(str(tmp_path / "qwen3"), show_progress=False)
    for scheme, said in (
        ("gguf-q4_k", ["rows of 7 of the 7 matrices do not fill blocks of Q4_K: these are written in Q4_1"]),
        ("gguf-q8_0", []),
    ):
        caplog.clear()
        quantize_checkpoint(source, tmp_path / f"{scheme}.gguf", Recipe(scheme=scheme))
        assert caplog.messages == said


def test_a_tokenizer_that_merges_nothing_is_written(root: Path, tmp_path: Path) -> None:
    """Each byte is a token, as in small models of characters."""
    shutil.copytree(dense(root, "qwen3"), tmp_path / "bytes")
    file = tmp_path / "bytes" / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    state["model"]["merges"] = []
    file.write_text(json.dumps(state), encoding="utf-8")
    out, source = tmp_path / "bytes.gguf", resolve_model(str(tmp_path / "bytes"), show_progress=False)
    quantize_checkpoint(source, out, Recipe(scheme="gguf-q8_0"))
    assert gguf.GGUFReader(out).fields["tokenizer.ggml.merges"].contents() == []
    known, found = Tokenizer.from_directory(source.path), Tokenizer.from_gguf(read_gguf(out).metadata)
    assert len(known.encode("abc")) == 3 and found.encode("abc") == known.encode("abc")


def test_what_is_no_gguf_file_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("gemma3", tmp_path / "gemma3", dtype="bfloat16")
    source, dense_source = (
        resolve_model(str(path), show_progress=False) for path in (tmp_path / "gemma3", dense(root, "llama"))
    )
    with pytest.raises(
        ConfigError, match="a gemma3 model cannot be written as GGUF; families: llama, mistral, qwen2, qwen3"
    ):
        quantize_checkpoint(source, tmp_path / "a.gguf", Recipe(scheme="gguf-q8_0"))
    assert not list(tmp_path.glob("a.gguf*"))
    with pytest.raises(ConfigError, match="its name must end in .gguf"):
        quantize_checkpoint(dense_source, tmp_path / "a", Recipe(scheme="gguf-q8_0"))
    (tmp_path / "b.gguf").touch()
    assert main(["quantize", str(dense_source.path), str(tmp_path / "b.gguf"), "--scheme", "gguf-q4_0"]) == 2
    assert "exists; delete it or choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("cohere2", {"tie_word_embeddings": False}, "a cohere2 model with a head of its own cannot"),
        ("cohere2", {"attention_bias": True}, "a cohere2 model with biases cannot"),
        (
            "cohere2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "with windows without a period",
        ),
        ("ministral3", {"rope_parameters": YARN | {"attention_factor": 1.5}}, "the attention factor 1.5 and"),
        ("ministral3", {"rope_parameters": LLAMA3}, "rope scaling 'llama3' .* only with yarn or none"),
        (
            "llama",
            {"rope_scaling": YARN},
            "a llama model with rope scaling 'yarn' .* only with linear, llama3",
        ),
    ],
)
def test_what_the_architecture_has_no_key_for_is_refused(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path / "model", sizes=Sizes(num_layers=2), dtype="bfloat16", **changes)
    source = resolve_model(str(tmp_path / "model"), show_progress=False)
    with pytest.raises(ConfigError, match=says):
        quantize_checkpoint(source, tmp_path / "a.gguf", Recipe(scheme="gguf-q8_0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_computes_the_same_from_the_weights_of_the_file(name: str, root: Path) -> None:
    """Names, order of rows and numbers as the `gguf` package knows them, in the network of transformers."""
    from transformers import AutoModelForCausalLM

    path = written(root, name, "gguf-q4_k")
    theirs = AutoModelForCausalLM.from_pretrained(dense(root, name), dtype=torch.float32)
    reader, config = gguf.GGUFReader(path), theirs.config
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored = {
        tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }
    weights = dict(theirs.state_dict())
    for key in weights.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        found = stored.pop(str(names.get_name(key, try_suffixes=(".weight", ".bias"))))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            key.split(".")[-2]
        )
        if name == "llama" and heads:  # the converter puts both halves of a pair side by side
            found = found.reshape(heads, -1, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)
        weights[key] = found
    assert not stored
    theirs.load_state_dict(weights)
    theirs.tie_weights()
    ids = list(range(3, 40))
    expected = theirs(torch.tensor([ids])).logits[0, -1]
    [found_logits] = run_step(load(path).model, [ids])
    torch.testing.assert_close(found_logits.flatten()[-len(expected) :], expected, rtol=1e-3, atol=1e-3)
