"""Checkpoints in every published quantized format: loaded, planned for, and answering as what they stand for.

Each is written from a tiny random model (tools/quantize.py) and compared with a dense checkpoint of the
numbers that its tensors mean, so what is tested is the way from the disk to the tokens; that the numbers are
right is tests/unit/loader/test_stored_formats.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import LLM, SamplingParams
from infer.cli.main import main
from infer.cli.quantize import SCHEMES
from infer.errors import CheckpointError, ConfigError
from infer.kernels.cpu.library import library
from infer.layers.linear import Projected
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.pooling import Pooling, read_pooling
from infer.loader.weight_plan import kept_bytes
from infer.quant.packed import Packed
from infer.tokenizer.directory_vocab import TOOL_TEMPLATE
from infer.tools.quantize import ALL_NAMES, SCHEME_NAMES, Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.step import run_step
from tests.support.thinned import thinned

needs_c = pytest.mark.skipif(library() is None, reason="needs a C compiler")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(20, 50))]
RECIPES = {
    **{scheme: Recipe(scheme=scheme, group_size=32) for scheme in SCHEME_NAMES},
    "gptq-3": Recipe(scheme="gptq", bits=3, group_size=64, symmetric=False),
    "gptq-2-v2": Recipe(scheme="gptq", bits=2, group_size=32, symmetric=False, version=2),
    "gptq-8": Recipe(scheme="gptq", bits=8, group_size=-1),
    "gptq-actorder": Recipe(scheme="gptq", group_size=32, act_order=True),
    "ct-w4a16-asym": Recipe(scheme="ct-w4a16", group_size=64, symmetric=False),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@cache
def dense_checkpoint(root: Path, family: str) -> Path:
    make_checkpoint(family, root / family, sizes=Sizes(hidden_size=64, num_experts=4), seed=3)
    return root / family


@cache
def quantized_pair(root: Path, family: str, recipe: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and a dense one of the numbers that it stands for."""
    source = resolve_model(str(dense_checkpoint(root, family)), show_progress=False)
    path, plain = root / f"{family}-{recipe}", root / f"{family}-{recipe}-plain"
    quantize_checkpoint(source, path, RECIPES[recipe])
    plain.mkdir()
    for file in source.path.iterdir():
        if file.suffix != ".safetensors":
            (plain / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, stored in read_headers(resolve_model(str(path), show_progress=False)).tensors.items():
        tensors[name] = torch.empty(stored.shape)
        stored.copy_to(tensors[name])
    save_file(tensors, plain / "model.safetensors")
    return path, plain


def load(path: Path, quantization: str = "auto", dtype: str = "auto") -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", dtype=dtype, quantization=quantization)


def answers(path: Path, **knobs: Any) -> list[list[int]]:
    llm = LLM(str(path), device="cpu", num_blocks=64, **knobs)
    return [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]


def logits(path: Path) -> torch.Tensor:
    """Of every token of every prompt, in float32."""
    return torch.cat(run_step(load(path, "none", "float32").model, PROMPTS))


def edit_config(path: Path, **settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))


def copy_of(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize(("recipe", "family"), thinned(RECIPES, ("llama", "qwen3", "mixtral"), keep=3))
def test_it_is_the_dense_model_of_its_numbers(recipe: str, family: str, root: Path) -> None:
    path, plain = quantized_pair(root, family, recipe)
    assert torch.equal(logits(path), logits(plain))


@pytest.mark.parametrize("recipe", ["gptq-actorder", "awq", "fp8-channel"])
def test_it_answers_as_the_dense_model_of_its_numbers(recipe: str, root: Path) -> None:
    path, plain = quantized_pair(root, "mixtral", recipe)
    expected = answers(plain, dtype="float32", quantization="none")
    assert answers(path, dtype="float32", quantization="none") == expected


@pytest.mark.parametrize(
    ("family", "recipe"),
    thinned(
        ("qwen2", "gemma3", "gpt2", "qwen3_moe"), ("gptq", "gptq-actorder", "awq", "fp8-block", "nf4"), keep=2
    ),
)
def test_every_family(family: str, recipe: str, root: Path) -> None:
    """Biases, tied heads, matrices that are stored transposed, experts."""
    path, plain = quantized_pair(root, family, recipe)
    assert torch.equal(logits(path), logits(plain))


def projections(loaded: LoadedModel) -> dict[str, Any]:
    modules = loaded.model.named_modules()
    return {name: m.stored for name, m in modules if isinstance(m, Projected) and name.startswith("layers.")}


@needs_c
@pytest.mark.parametrize(
    ("recipe", "form", "error"),
    [
        ("gptq", "int4", 0.0),
        ("awq", "int4", 1e-3),
        ("ct-w4a16", "int4", 0.0),
        ("ct-w4a16-asym", "int4", 1e-3),
        ("gptq-3", "int4", 1e-3),
        ("gptq-2-v2", "int4", 1e-3),
        ("gptq-8", "int8", 0.0),
        ("ct-w8a16", "int8", 0.0),
        ("ct-int8", "int8", 1e-3),  # scales of float32, kept as float16
        ("gptq-actorder", "int4", 0.0),
        ("fp8-block", "int8", 0.01),
        ("fp8-tensor", "int8", 0.01),
        ("nf4", "int8", 0.01),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_on_a_cpu_it_stays_packed(family: str, recipe: str, form: str, error: float, root: Path) -> None:
    """The same integers where they fit; rounded to 8 bits in groups of 32 where they do not."""
    if (family, recipe) == ("mixtral", "gptq-actorder"):  # each expert has its own order of columns
        form, error = "int4+int8", 0.01
    check_packed(*quantized_pair(root, family, recipe), form, error)


@needs_c
@pytest.mark.parametrize(("recipe", "form", "error"), [("gptq", "int4", 0.0), ("nf4", "int8", 0.01)])
def test_matrices_that_a_model_stores_transposed_stay_packed(
    recipe: str, form: str, error: float, root: Path
) -> None:
    """GPT-2's; formats have rows of outputs for them, too."""
    check_packed(*quantized_pair(root, "gpt2", recipe), form, error)


def check_packed(path: Path, plain: Path, form: str, error: float) -> None:
    loaded, exact = load(path), load(plain, "none", "float32")
    assert loaded.weights == form and loaded.dtype is torch.float32
    for name, stored in projections(loaded).items():
        dense = projections(exact)[name]
        if not isinstance(stored, Packed):
            assert name.endswith(".router")
            continue
        for number in range(stored.spec.num_experts or 1):
            weights = dense.weight[number] if stored.spec.num_experts else dense.weight
            kept = stored.matrices[number].dequantized()
            assert float((kept - weights).abs().max()) <= error * float(weights.abs().max()), name


@needs_c
def test_the_integers_of_the_kernels_are_those_of_the_file(root: Path) -> None:
    """int8 from -128: the least one, which the kernels never make themselves."""
    path, _ = quantized_pair(root, "llama", "ct-int8")
    path = copy_of(path, root / "lowest")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][:, ::3] = -128
    save_file(tensors, path / "model.safetensors")
    stored = projections(load(path))["layers.0.mlp.down"]
    weights = tensors[name].float() * tensors[f"{name}_scale"].half().float()
    assert torch.equal(stored.matrices[0].dequantized(), weights)
    x = torch.randn(5, weights.shape[1])
    exact = (x.double() @ weights.double().T).float()
    torch.testing.assert_close(stored.multiply(x), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_a_mixed_file(root: Path, tmp_path: Path) -> None:
    """Dense layers, a fused matrix with dense and quantized parts, a quantized head: each by its tensors."""
    (path, plain), (other, _) = (quantized_pair(root, "llama", name) for name in ("gptq", "fp8-block"))
    tensors, numbers = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    from_other = load_file(other / "model.safetensors")
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{module}.{leaf}"]
        numbers[f"{module}.weight"] = tensors[f"{module}.weight"] = (
            torch.randn(numbers[f"{module}.weight"].shape).bfloat16().float()
        )
    module = "model.layers.1.mlp.down_proj"
    for leaf in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{module}.{leaf}"]
    codes, scale = from_other[f"{module}.weight"], from_other[f"{module}.weight_scale_inv"]
    tensors |= {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}
    numbers[f"{module}.weight"] = codes.float() * float(scale)
    head = numbers["lm_head.weight"]
    scale = head.abs().amax(1, keepdim=True) / 127
    tensors |= {"lm_head.weight": (head / scale).round().to(torch.int8), "lm_head.weight_scale": scale}
    numbers["lm_head.weight"] = tensors["lm_head.weight"].float() * scale
    mixed, dense = copy_of(path, tmp_path / "mixed"), copy_of(plain, tmp_path / "dense")
    save_file(tensors, mixed / "model.safetensors")
    save_file(numbers, dense / "model.safetensors")
    expected = answers(dense, dtype="float32", quantization="none")
    assert answers(mixed, dtype="float32", quantization="none") == expected
    loaded = load(mixed)
    assert loaded.weights == ("int4+int8" if library() else "fp32")
    assert {"gptq", "fp8", "compressed-tensors"} <= {
        part.partition(":")[0] for part in loaded.published_as.split("+")
    }


def test_what_quantizers_leave_beside_the_weights(root: Path, tmp_path: Path, caplog: Any) -> None:
    """Biases of zero for matrices that have none, and scales of a KV cache."""
    path, plain = quantized_pair(root, "llama", "gptq")
    other = copy_of(path, tmp_path / "other")
    tensors = load_file(path / "model.safetensors")
    attention = "model.layers.0.self_attn"
    tensors[f"{attention}.o_proj.bias"] = torch.zeros(64, dtype=torch.float16)
    tensors[f"{attention}.k_scale"] = torch.ones(1)
    save_file(tensors, other / "model.safetensors")
    with caplog.at_level(logging.INFO):
        assert answers(other, dtype="float32", quantization="none") == answers(
            plain, dtype="float32", quantization="none"
        )
    assert "scales of a KV cache are not used tensors=1" in caplog.text
    tensors[f"{attention}.o_proj.bias"][3] = 0.5
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"not part of this model: model.layers.0.self_attn.o_proj.bias"
    ):
        load(other)


def test_quantization_checks_what_is_on_disk(root: Path) -> None:
    gptq, plain = quantized_pair(root, "llama", "gptq")
    fp8, _ = quantized_pair(root, "llama", "fp8-channel")
    for path, names in ((gptq, ("gptq", "gptq_marlin")), (fp8, ("fp8", "compressed-tensors"))):
        for name in names:
            assert load(path, name).weights == load(path).weights
    with pytest.raises(
        ConfigError, match="quantization is awq, but this checkpoint is stored as gptq; .* gptq"
    ):
        load(gptq, "awq")
    with pytest.raises(
        ConfigError, match="quantization is gptq, but this checkpoint is stored as plain numbers .*int8, int4"
    ):
        load(plain, "gptq")
    assert load(gptq, "none").weights == "as stored"


def test_the_start_line_says_what_was_found_and_what_became_of_it(root: Path, caplog: Any) -> None:
    path, _ = quantized_pair(root, "llama", "gptq")
    with caplog.at_level(logging.INFO):
        answers(path, quantization="none", dtype="bfloat16")
    assert 'weights="gptq:int4-g32 ' in caplog.text and ', unpacked to bfloat16"' in caplog.text
    if library() is not None:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            answers(path)
        # codes of the file, and the head, whose plain numbers became codes here
        assert re.search(r", kept as [^\"]*int4 [\d.]+MiB, rounded to int8 [\d.]+MiB\"", caplog.text)


@pytest.mark.parametrize(("asked", "recipe"), thinned(("auto", "none"), ("gptq", "fp8-block", "nf4"), keep=2))
def test_the_plan_counts_it(recipe: str, asked: str, root: Path, capsys: Any) -> None:
    path, plain = quantized_pair(root, "llama", recipe)
    plans = []
    for model, form in ((path, asked), (plain, "none")):
        assert main(["plan", str(model), "--device", "cpu", "--quantization", form, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["num_parameters"] == plans[1]["num_parameters"]
    loaded = load(path, asked)
    tables = sum(table.numel() * table.element_size() for table in loaded.model.buffers())
    assert plans[0]["weights"] == kept_bytes(loaded.model) + tables


def test_the_plan_of_a_config_alone(root: Path, tmp_path: Path, capsys: Any) -> None:
    path, _ = quantized_pair(root, "llama", "gptq")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    assert main(["plan", str(tmp_path), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_format"] == ("int4" if library() else "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    old = {name: config["quantization_config"][name] for name in ("bits", "group_size", "sym")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": old}))
    assert main(["plan", str(tmp_path), "--device", "cpu", "--json"]) == 0  # of a tool that names no method
    assert json.loads(capsys.readouterr().out)["weight_format"] == ("int4" if library() else "float32")
    edit_config(tmp_path, quant_method="aqlm")
    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 2
    assert "quantized with 'aqlm', which is not supported; supported: gptq, awq" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["gptq", "awq", "ct-w4a16-asym", "fp8-block", "nf4"])
def test_a_matrix_of_another_size_is_refused(recipe: str, root: Path, tmp_path: Path) -> None:
    path, _ = quantized_pair(root, "llama", recipe)
    other, _ = quantized_pair(root, "qwen3", recipe)
    wrong = copy_of(path, tmp_path / "wrong")
    tensors, donor = load_file(path / "model.safetensors"), load_file(other / "model.safetensors")
    for name in [name for name in tensors if ".0.mlp.down_proj." in name]:
        tensors[name] = donor[name.replace("mlp.down_proj", "mlp.gate_proj")]
    save_file(tensors, wrong / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.weight is \[\d+, \d+\], not \[\d+, \d+\]"):
        load(wrong)


@pytest.mark.parametrize("recipe", ["gptq", "awq", "ct-w4a16-asym", "ct-int8", "fp8-block", "nf4"])
def test_broken_files_are_refused_or_read_as_they_are(recipe: str, root: Path, tmp_path: Path) -> None:
    """Every cut and every damaged header is a CheckpointError, and nothing else ever comes out."""
    path, _ = quantized_pair(root, "llama", recipe)
    broken = copy_of(path, tmp_path / "broken")
    data = (path / "model.safetensors").read_bytes()
    generator = torch.Generator().manual_seed(1)
    header = int.from_bytes(data[:8], "little")
    for _ in range(12):
        cut = int(torch.randint(0, len(data), (), generator=generator))
        (broken / "model.safetensors").write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load(broken)
        damaged = bytearray(data)
        damaged[8 + cut % header] ^= 1 << cut % 7
        (broken / "model.safetensors").write_bytes(bytes(damaged))
        with contextlib.suppress(CheckpointError):
            load(broken)


def test_settings_that_are_no_object(root: Path, tmp_path: Path) -> None:
    path, _ = quantized_pair(root, "llama", "gptq")
    other = copy_of(path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": [1]}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'quantization_config' in config.json must be an object"):
        load(other)


def test_settings_in_a_file_of_their_own(root: Path, tmp_path: Path) -> None:
    """As older tools write them: here the version of the zeros, without which every weight would be wrong."""
    path, plain = quantized_pair(root, "llama", "gptq-2-v2")
    other = copy_of(path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (other / "config.json").write_text(json.dumps(config))
    expected = answers(plain, dtype="float32", quantization="none")
    assert answers(other, dtype="float32", quantization="none") == expected
    (other / "quantize_config.json").unlink()
    assert answers(other, dtype="float32", quantization="none") != expected


def test_the_command_writes_what_is_read(root: Path, tmp_path: Path, capsys: Any) -> None:
    dense, out = str(dense_checkpoint(root, "llama")), tmp_path / "out"
    assert SCHEMES == ALL_NAMES
    words = [
        "quantize",
        dense,
        str(out),
        "--scheme",
        "gptq",
        "--bits",
        "3",
        "--group-size",
        "32",
        "--asymmetric",
    ]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert load(out, "gptq").published_as.startswith("gptq:int3-g32 ")
    for wrong, message in (
        (words, "is not empty; delete it or choose another directory"),
        (["quantize", str(out), str(tmp_path / "two"), "--scheme", "nf4"], "is quantized already"),
        ([*words[:2], str(tmp_path / "two"), *words[3:5], "--bits", "5"], "bits must be 2, 3, 4 or 8, got 5"),
        ([*words[:2], str(tmp_path / "two"), *words[3:5], "--group-size", "3"], "group_size must be -1"),
        ([*words[:2], str(tmp_path / "two.gguf"), *words[3:]], "its name must not end in .gguf, got"),
        ([*words[:2], "/dev/null/two", *words[3:]], "cannot write /dev/null/two: Not a directory"),
        ([*words[:2], "/dev/null/two.gguf", "--scheme", "gguf-q8_0"], "cannot write /dev/null/two.gguf"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_large_checkpoints_are_written_in_shards(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.tools.quantize.SHARD_BYTES", 20_000)
    source = resolve_model(str(dense_checkpoint(root, "llama")), show_progress=False)
    quantize_checkpoint(source, tmp_path / "out", RECIPES["gptq"])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "out"), logits(quantized_pair(root, "llama", "gptq")[0]))


def test_folders_that_say_how_a_model_is_used_are_copied(root: Path, tmp_path: Path) -> None:
    """Without them its vectors would be of other states, and its prompts with tools of another template."""
    shutil.copytree(dense_checkpoint(root, "llama"), tmp_path / "model")
    steps = [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "1_Pooling"}]
    for name, text in {
        "modules.json": json.dumps(steps),
        "1_Pooling/config.json": '{"pooling_mode": "mean"}',
        TOOL_TEMPLATE: "{{ tools }}",
        "onnx/config.json": "{}",
    }.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(text)
    source = resolve_model(str(tmp_path / "model"), show_progress=False)
    quantize_checkpoint(source, tmp_path / "out", RECIPES["gptq"])
    assert (
        read_pooling(tmp_path / "out")
        == read_pooling(tmp_path / "model")
        == Pooling(mode="mean", normalize=False)
    )
    assert (tmp_path / "out" / TOOL_TEMPLATE).read_text() == "{{ tools }}"
    assert not (tmp_path / "out" / "onnx").exists()
