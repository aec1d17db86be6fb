"""`--quantization auto`: matrix by matrix in the bits that keep what the file holds."""

from __future__ import annotations

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.cli.flags import knobs_from
from infer.cli.main import build_parser, main
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError
from infer.kernels.cpu.library import library
from infer.layers.linear import ExpertLinear, Linear, Projected
from infer.loader import dtype, forms
from infer.loader import quantization as quantization_module
from infer.loader.find.source import resolve_model
from infer.loader.formats.gguf_quants import FOUR_BITS
from infer.loader.forms import is_four_bit
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.quantization import Held, choose_rule
from infer.loader.weight_plan import kept_bytes as bytes_of
from infer.loader.weight_plan import num_weights, plan_weights, stored_matrices
from infer.quant.packed import Packed, PackedRuns
from infer.sampling.params import SamplingParams
from infer.tools.replay import replay_config
from tests.support.c_library import use_library
from tests.support.checkpoints import reference_model
from tests.support.tiny import run_engine
from tests.unit.loader.tiny_files import write_directory, write_gguf

CPU = torch.device("cpu")
needs_c = pytest.mark.skipif(library() is None, reason="needs a C compiler")
FIVE = 5 in getattr(library(), "linear", ())  # NEON keeps 5 and 6 bits in int8
needs_five = pytest.mark.skipif(not FIVE, reason="5 bits are kept in int8 here")
# What a "Q4_K_M" file is like: most in 4 bits, and some matrices in more, among them parts of fused ones.
MIXED = {"output.weight": "Q8_0", "ffn_up": "Q5_0", "1.attn_v": "F16", "token_embd": "Q8_0"}


@functools.cache
def reference(family: str = "llama") -> Any:
    sizes = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    return reference_model(family, dtype=torch.float32, **sizes)


def load(path: Path, quantization: str = "auto", **knobs: Any) -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", quantization=quantization, **knobs)


def bits(loaded: LoadedModel) -> dict[str, int | tuple[int, ...]]:
    """Of every linear layer, by its name; of each run of parts, where they differ."""
    layers = {name: m.stored for name, m in loaded.model.named_modules() if isinstance(m, Linear)}
    return {
        name: tuple(run.bits for run in stored.runs) if isinstance(stored, PackedRuns) else stored.bits
        for name, stored in layers.items()
        if isinstance(stored, Packed)
    }


def packed(loaded: LoadedModel, name: str) -> Packed:
    layer = loaded.model.get_submodule(name)
    assert isinstance(layer, Projected) and isinstance(layer.stored, Packed)
    return layer.stored


def kept_bytes(loaded: LoadedModel) -> int:
    return bytes_of(loaded.model)


@needs_c
def test_each_matrix_of_a_mixed_file_has_the_bits_that_keep_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED)
    loaded, exact = load(path), load(path, "fp32").model
    found = bits(loaded)
    assert loaded.weights == "int4+int8" and loaded.dtype is torch.float32
    assert found.pop("head") == 8
    for layer in range(3):
        mine = {
            name.rpartition(".")[2]: n for name, n in found.items() if name.startswith(f"layers.{layer}.")
        }
        gate_up = 5 if FIVE else (4, 8)
        assert mine == {"qkv": (4, 8) if layer == 1 else 4, "out": 8, "gate_up": gate_up, "down": 4}
    for name in [*found, "head"]:
        stored, weight = packed(loaded, name), exact.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        kept = stored.matrices[0].dequantized()  # in a fused one, parts after the first may be rounded
        assert torch.equal(kept, weight[: len(kept)]), name
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(stored.multiply(x), x @ stored.dequantized().T, rtol=1e-3, atol=1e-3)
        assert (stored.dequantized() - weight).norm() < 0.01 * weight.norm()


@needs_c
def test_a_recorded_step_fills_the_columns_of_each_run(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED)
    wanted = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for is_recorded in (True, False):
        engine = build_engine(EngineConfig.from_knobs(num_blocks=32, record_cpu_step=is_recorded), load(path))
        answers.append(run_engine(engine, [([3, 1, 4, 1, 5], wanted), ([9, 2, 6], wanted)]))
    assert answers[0] == answers[1]


@needs_c
@pytest.mark.parametrize(
    ("kind", "form", "reason"),
    [
        ("Q4_0", "int4", "the file holds 4-bit weights, which it keeps"),
        ("Q4_1", "int4", "the file holds 4-bit weights, which it keeps"),
        pytest.param("Q5_0", "int4+int8", "int5 where the file has 5 bits, int8 elsewhere", marks=needs_five),
        ("Q8_0", "int8", "the file holds packed weights"),
        ("F16", "int8", "the file holds 16-bit weights"),
        ("BF16", "int8", "the file holds 16-bit weights"),
        ("F32", "fp32", "the file holds float32"),
        ("Q4+Q8", "int4+int8", "int4 where the file has 4 bits, int8 elsewhere"),
    ],
)
def test_the_form_has_a_name_and_the_log_says_why(
    kind: str, form: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"ffn_up": "Q8_0"} if kind == "Q4+Q8" else None
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_0" if kinds else kind, kinds=kinds)
    with caplog.at_level(logging.INFO, logger="infer.loader.load"):
        assert load(path).weights == load(path, "gguf").weights == form
    with pytest.raises(ConfigError, match=r"is gptq, but this checkpoint is stored as GGUF \(.*gguf, .*int8"):
        load(path, "gptq")
    assert f"weights are kept as {form} ({reason})" in caplog.messages


@needs_five
@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_the_plan_counts_5_bits_and_the_model_has_the_numbers_of_the_file(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind=kind, kinds={"token_embd": "Q8_0"})
    loaded, exact = load(path), load(path, "fp32").model
    found = bits(loaded)
    assert found.pop("head") == 8 and set(found.values()) == {5}
    headers = read_headers(resolve_model(str(path), show_progress=False))
    plan = plan_weights(headers, quantization="auto", dtype="auto", device=CPU)
    assert bytes_of(plan.skeleton) == kept_bytes(loaded)
    for name in found:
        stored, weight = packed(loaded, name), exact.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor) and torch.equal(stored.dequantized(), weight), name
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(stored.multiply(x), x @ weight.T, rtol=1e-3, atol=1e-3)


@needs_c
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_16_bits_is_int8(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", reference_model("llama", dtype=dtype))
    for asked in ("auto", "int4+int8"):
        loaded = load(path, asked)
        assert loaded.weights == "int8" and set(bits(loaded).values()) == {8}


@needs_c
@pytest.mark.parametrize(("asked", "others"), [("int8", 8), ("int4", 4)])
def test_one_form_for_all_is_what_one_form_says(asked: str, others: int, tmp_path: Path) -> None:
    found = bits(load(write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED), asked))
    assert found.pop("head") == 8 and set(found.values()) == {others}


def test_what_decides_before_the_file_does() -> None:
    held = Held(None, bits=frozenset({4}))
    with use_library(None):
        assert choose_rule("auto", "auto", CPU, held).label == "fp32"
        with pytest.raises(ConfigError, match="needs the C kernels"):
            choose_rule("int4+int8", "auto", CPU, held)
    assert choose_rule("auto", "float32", CPU, held).label == "fp32"
    with pytest.raises(ConfigError, match="int4\\+int8 computes in float32, but dtype is bfloat16"):
        choose_rule("int4+int8", "bfloat16", CPU, held)


@needs_c
def test_the_transposed_matrices_of_gpt2_keep_their_numbers_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference("gpt2"), kind="Q4_0")
    loaded, exact = load(path), load(path, "fp32").model
    assert loaded.weights == "int4"
    for name, layer in exact.named_modules():
        if isinstance(layer, Linear) and layer is not exact.head:
            assert torch.equal(packed(loaded, name).matrices[0].dequantized(), layer.weight), name


@needs_c
def test_a_transposed_matrix_of_a_safetensors_file_is_packed_as_well(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", reference("gpt2"))
    exact = load(path, "fp32").model.get_submodule("layers.0.mlp.up").weight
    kept = packed(load(path, "int8"), "layers.0.mlp.up").matrices[0]
    assert isinstance(exact, torch.Tensor)
    torch.testing.assert_close(kept.dequantized(), exact, rtol=0, atol=exact.abs().max().item() / 200)


@needs_c
@pytest.mark.parametrize(
    ("kinds", "form", "gate_up", "down"),
    [({}, "int4", 4, 4), ({"1.ffn_up_exps": "Q8_0"}, "int4+int8", 8, 4)],
)
def test_the_experts_of_a_layer_have_one_form(
    kinds: dict[str, str], form: str, gate_up: int, down: int, tmp_path: Path
) -> None:
    loaded = load(write_gguf(tmp_path / "m.gguf", reference("mixtral"), kind="Q4_0", kinds=kinds))
    assert loaded.weights == form
    for name, expected in {"layers.1.mlp.gate_up": gate_up, "layers.1.mlp.down": down}.items():
        experts = loaded.model.get_submodule(name)
        assert isinstance(experts, ExpertLinear)
        assert {matrix.bits for matrix in packed(loaded, name).matrices} == {expected}


@needs_c
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kinds", [{}, MIXED], ids=["Q4_0", "mixed"])
def test_the_plan_counts_what_is_kept(family: str, kinds: dict[str, str], tmp_path: Path) -> None:
    """From headers alone, where both counts of the parameters agree."""
    model = reference_model(family, hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path / "m.gguf", model, kind="Q4_0", kinds=kinds)
    headers, loaded = read_headers(resolve_model(str(path), show_progress=False)), load(path)
    skeletons = [
        plan_weights(headers, quantization=form, dtype="auto", device=CPU).skeleton
        for form in (loaded.weights, "int8", "int4")
    ]
    stored = sum(math.prod(source.tensor.shape) for source in headers.sources if source.module)
    assert num_weights(skeletons[0]) == num_weights(loaded.model) == stored
    planned, all_int8, all_int4 = map(bytes_of, skeletons)
    assert planned == pytest.approx(kept_bytes(loaded), rel=0.02)
    assert planned == all_int4 if not kinds else 1.05 * all_int4 < planned < 0.95 * all_int8


@needs_c
@pytest.mark.parametrize("asked", [[], ["--cpu-weights", "int8"], ["--dtype", "float32"]])
def test_the_plan_prints_flags_that_keep_the_same_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED)
    assert main(["plan", str(path), "--device", "cpu", "--json", *asked]) == 0
    plan = json.loads(capsys.readouterr().out)
    config = EngineConfig.from_knobs(**knobs_from(build_parser().parse_args(["generate", *plan["flags"]])))
    loaded = load(path, config.load.quantization, dtype=config.load.dtype)
    assert plan["weight_format"] == {"fp32": "float32"}.get(loaded.weights, loaded.weights)
    assert main(["plan", str(path), "--device", "cpu", *asked]) == 0
    assert f"parameters in {plan['weight_format']}" in capsys.readouterr().out
    if not asked:
        assert plan["weight_format"] == "int4+int8"


@needs_c
def test_a_record_names_the_form_so_that_a_replay_keeps_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED)
    loaded = load(path)
    facts: list[RunFacts] = []

    class Observer:
        def on_start(self, found: RunFacts) -> None:
            facts.append(found)

    build_engine(EngineConfig.from_knobs(num_blocks=8), loaded, observer=Observer())  # type: ignore[arg-type]
    config = replay_config(facts[0], str(path))
    assert config.load.quantization == "int4+int8"
    again = load(path, config.load.quantization, dtype=config.load.dtype)
    assert again.weights == "int4+int8" and bits(again) == bits(loaded)


def test_the_types_that_int4_keeps() -> None:
    assert {kind.name for kind in FOUR_BITS} == {"Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0"}


def test_what_counts_as_a_matrix_of_the_layers(tmp_path: Path) -> None:
    """Neither embedding, head and router, nor norms; parts of a fused one and all experts are one."""
    path = write_gguf(tmp_path / "m.gguf", reference("mixtral"), kind="Q4_0", kinds={"ffn_down_exps": "Q8_0"})
    headers = read_headers(resolve_model(str(path), show_progress=False))
    found = stored_matrices(headers)
    assert {name.partition(".")[2].partition(".")[2] for name in found} == {
        "attention.qkv",
        "attention.out",
        "mlp.gate_up",
        "mlp.down",
    }
    bits = {
        name.removeprefix("layers.2."): 4 if is_four_bit(tensors) else 8
        for name, tensors in found.items()
        if ".2." in name
    }
    assert bits == {"attention.qkv": 4, "attention.out": 4, "mlp.gate_up": 4, "mlp.down": 8}


@pytest.mark.parametrize("knobs", [{"quantization": "bf16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_a_form_that_this_cpu_is_slow_at_is_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, knobs: dict[str, Any]
) -> None:
    monkeypatch.setattr(quantization_module, "cpu_flags", lambda: "flags : avx512_bf16")
    monkeypatch.setattr(dtype, "cpu_has_amx", lambda: False)
    path = write_directory(tmp_path / "m", reference())
    with caplog.at_level(logging.WARNING, "infer"):
        load(path, **knobs)
    (record,) = caplog.records
    assert "is slow on this CPU" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "infer"):
        load(path)
    assert caplog.records == []


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_plan_for_a_gpu_does_not_ask_for_the_c_kernels(
    is_gguf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a first start on a GPU would wait for their compiler."""

    def compiled() -> None:
        raise AssertionError("the C kernels were asked for")

    if is_gguf:
        path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q4_1", kinds=MIXED)
    else:
        path = write_directory(tmp_path / "m", reference())
    headers = read_headers(resolve_model(str(path), show_progress=False))
    monkeypatch.setattr(forms, "library", compiled)
    monkeypatch.setattr(quantization_module, "library", compiled)
    plan = plan_weights(headers, quantization="auto", dtype="auto", device=torch.device("cpu"), home="cuda")
    assert plan.rule.label == "as stored"
