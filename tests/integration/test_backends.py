"""Every backend of an operation gives the tokens of every other one, and what a device has not is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from infer.config.backends import BACKENDS, OPERATIONS, available, choices
from infer.config.machine_rules import Machine, ModelFacts
from infer.config.profiles.generic import GENERIC
from infer.config.resolve import choose_backends, resolve
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library
from infer.layers.bind import bind
from infer.layers.linear import Projected
from infer.layers.mlp import MLP, GatedMLP
from infer.quant.dense import Dense
from infer.quant.projection import Projection
from infer.quant.reference import Reference
from infer.sampling.params import SamplingParams
from tests.support.thinned import thinned
from tests.support.tiny import make_engine, random_prompts, run_engine, tiny_model

CPU = Machine(device="cpu", has_c_attention=True)
GPU = Machine(device="cuda:0", has_gpu_kernels=True, profile=GENERIC)
ATTENTION = [name for name in available("attention", "cpu") if name != "c" or library() is not None]

REQUESTS = [
    (prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)) for prompt in random_prompts(5)
]


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return run_engine(make_engine(family, attention_backend="sdpa"), REQUESTS)


@pytest.mark.parametrize(  # families with soft caps, with windows
    ("family", "attention", "decode"), thinned(("qwen3", "gemma2", "gemma3"), ATTENTION, ATTENTION, keep=3)
)
def test_no_backend_of_attention_changes_a_token(family: str, attention: str, decode: str) -> None:
    engine = make_engine(
        family, attention_backend=attention, decode_attention_backend=decode, prefill_chunk_size=5
    )
    device = engine._device
    assert isinstance(device, TorchDevice) and device.attention == (attention, decode)
    assert run_engine(engine, REQUESTS) == expected(family)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_reference_of_an_mlp_changes_no_token(family: str) -> None:
    known = expected(family)  # first: the last engine that is built has the model
    assert run_engine(make_engine(family, mlp_backend="torch_ref"), REQUESTS) == known
    layers = [m for m in tiny_model(family).model.modules() if isinstance(m, Projected)]
    assert any(isinstance(layer.projection, Reference) for layer in layers)
    make_engine(family)  # the model goes on without
    assert not any(isinstance(layer.projection, Reference) for layer in layers)


def test_the_reference_multiplies_what_a_packed_matrix_stands_for() -> None:
    if library() is None:
        pytest.skip("needs a C compiler")
    from infer.quant.packed import Int8
    from infer.quant.projection import WeightSpec

    torch.manual_seed(1)
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    packed = Int8(WeightSpec(48, 64, torch.float32, torch.device("cpu")))
    packed.matrices[0].fill(weight, 0)
    reference = Reference(packed)
    torch.testing.assert_close(reference.multiply(x), x @ packed.matrices[0].dequantized().T)
    torch.testing.assert_close(reference.multiply(x), packed.multiply(x), rtol=1e-2, atol=1e-2)
    gate, up = reference.multiply(x).chunk(2, dim=-1)
    torch.testing.assert_close(reference.project(x, "silu"), torch.nn.functional.silu(gate) * up)


def test_a_scheme_that_cannot_unpack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dequantized", "lookup"):
        monkeypatch.setattr(Dense, name, getattr(Projection, name))
    with pytest.raises(ConfigError, match="^mlp_backend=torch_ref cannot be used with quantization=none, "):
        bind(tiny_model("llama").model, torch.device("cpu"), deterministic=False, mlp_backend="torch_ref")


@pytest.mark.parametrize(
    ("machine", "knobs", "expected"),
    [
        (CPU, {}, ("c", "c", "kernels")),
        (Machine(device="cpu"), {}, ("sdpa", "sdpa", "kernels")),
        (CPU, {"attention_backend": "naive"}, ("torch_ref", "torch_ref", "kernels")),
        (CPU, {"decode_attention_backend": "sdpa"}, ("c", "sdpa", "kernels")),
        (GPU, {}, ("auto", "auto", "kernels")),
        (GPU, {"attention_backend": "cuda"}, ("triton", "cuda", "kernels")),
        (GPU, {"attention_backend": "flash"}, ("flash", "triton", "kernels")),
        (
            GPU,
            {"attention_backend": "flash", "decode_attention_backend": "cuda"},
            ("flash", "cuda", "kernels"),
        ),
        (GPU, {"mlp_backend": "torch_ref"}, ("auto", "auto", "torch_ref")),
        (
            GPU,
            {"attention_backend": "sdpa", "decode_attention_backend": "torch_ref"},
            ("sdpa", "torch_ref", "kernels"),
        ),
    ],
)
def test_what_computes_an_operation(
    machine: Machine, knobs: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert choose_backends(EngineConfig.from_knobs(**knobs), machine) == expected


@pytest.mark.parametrize(
    ("machine", "knobs", "message"),
    [
        (
            CPU,
            {"attention_backend": "flash"},
            "attention_backend=flash needs a GPU, and the model is on cpu; use auto, c, sdpa or torch_ref",
        ),
        (CPU, {"decode_attention_backend": "cuda"}, "decode_attention_backend=cuda needs a GPU"),
        (
            GPU,
            {"decode_attention_backend": "c"},
            "decode_attention_backend=c needs a CPU, and the model is on cuda:0; "
            "use auto, triton, cuda, sdpa or torch_ref",
        ),
        (Machine(device="cpu"), {"attention_backend": "c"}, "attention_backend=c needs the attention kernel"),
        (
            GPU,
            {"decode_attention_backend": "sdpa"},
            "decode_attention_backend=sdpa cannot be used with attention_backend=auto on a GPU; "
            "use auto, triton, cuda or torch_ref",
        ),
        (
            GPU,
            {"attention_backend": "torch_ref", "decode_attention_backend": "cuda"},
            "use auto, sdpa or torch_ref",
        ),
        (
            GPU,
            {"decode_attention_backend": "torch_ref", "use_cuda_graphs": True},
            "with decode_attention_backend=torch_ref, which is plain PyTorch",
        ),
        (GPU, {"deterministic": True, "mlp_backend": "torch_ref"}, "not mlp_backend=torch_ref"),
        (
            GPU,
            {"deterministic": True, "decode_attention_backend": "cuda"},
            "decode_attention_backend=auto or triton, not cuda",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(machine: Machine, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig.from_knobs(**knobs), machine, ModelFacts(max_seq_len=64, num_layer_weights=9))


def test_graphs_are_off_where_the_reference_reads_lengths() -> None:
    facts = ModelFacts(max_seq_len=64, num_layer_weights=9)
    settings = EngineConfig.from_knobs(decode_attention_backend="torch_ref")
    assert not resolve(settings, GPU, facts).use_cuda_graphs
    assert resolve(settings, GPU, facts).uses_gpu_device


def test_every_operation_has_a_reference_and_a_fast_one_on_every_device() -> None:
    for operation in OPERATIONS:
        for device in ("cpu", "gpu"):
            assert {"torch_ref"} < set(available(operation, device))
        assert set(choices(operation)) >= {row.name for row in BACKENDS if operation in row.operations}


def test_layers_of_an_mlp_are_those_the_reference_is_given_to() -> None:
    model = tiny_model("llama").model
    bind(model, torch.device("cpu"), deterministic=False, mlp_backend="torch_ref")
    halves = [module for module in model.modules() if isinstance(module, GatedMLP | MLP)]
    inside = {id(layer) for half in halves for layer in half.modules()}
    for layer in model.modules():
        if isinstance(layer, Projected):
            assert isinstance(layer.projection, Reference) == (id(layer) in inside)
    bind(model, torch.device("cpu"), deterministic=False)
