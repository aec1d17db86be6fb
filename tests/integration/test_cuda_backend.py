"""An engine whose decode attention is the CUDA kernel, emulated: the tokens are those of the reference."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config.knobs import refuse
from infer.config.machine_rules import Machine, device_faults
from infer.config.profiles.cpu import CPU
from infer.config.profiles.find import KNOWN_GPUS
from infer.config.settings import EngineConfig
from infer.engine import build, machine
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.gpu import step as device_step
from infer.kernels.attention import decode, decode_cuda
from infer.kernels.attention.decode_cuda import CudaKernel
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.runtime.profiles import using_profile
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.kernels.emulated_cuda import EmulatedLaunch, plan_on_host
from tests.support.thinned import thinned
from tests.support.tiny import random_prompts, run_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
REQUESTS = [(prompt, PARAMS) for prompt in random_prompts(3)]
SIZES = Sizes(hidden_size=256, vocab_size=300, context_len=60)  # heads of 64; windows are 16 tokens
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for family in ("qwen3", "gemma3"):
        FOLDERS[family] = tmp_path_factory.mktemp("tiny") / family
        make_checkpoint(family, FOLDERS[family], sizes=SIZES, seed=1)


@functools.cache
def load(family: str, dtype: str) -> LoadedModel:
    source = resolve_model(str(FOLDERS[family]), revision=None, show_progress=False)
    return load_model(source, dtype=dtype, device="cpu")


def make_engine(family: str, *, dtype: str = "float16", **knobs: Any) -> Engine:
    config = EngineConfig.from_knobs(num_blocks=64, max_batch_size=2, **knobs)
    return build.build_engine(config, load(family, dtype))


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return run_engine(make_engine(family, attention_backend="naive"), REQUESTS)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedLaunch]:
    loaded: dict[Any, EmulatedLaunch] = {}
    launches: list[EmulatedLaunch] = []  # by the name of their kernel: they are compiled side by side

    def prepare(kernel: CudaKernel, defines: Any, device: int, pdl: bool) -> EmulatedLaunch:
        if (kernel, defines) not in loaded:
            loaded[kernel, defines] = EmulatedLaunch(defines, kernel.source, kernel.types)
            launches[:] = [made for _, made in sorted(loaded.items(), key=lambda item: item[0][0].name)]
        return loaded[kernel, defines]

    monkeypatch.setattr(decode_cuda, "prepare_launch", prepare)
    monkeypatch.setattr(decode_cuda, "index_of", lambda device: 0)
    monkeypatch.setattr(decode_cuda, "launch_options", lambda device: {"PDL": False})
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    monkeypatch.setattr(device_step, "use_triton", lambda tensor: True)  # as on a GPU
    for module in (decode_cuda, device_step):
        monkeypatch.setattr(module, "gpu_of", lambda device: KNOWN_GPUS["h200"])
    monkeypatch.setattr(DecodeWork, "plan", plan_on_host)
    return launches


@pytest.mark.parametrize(("family", "most"), thinned(("qwen3", "gemma3"), (0, 256), keep=2))
def test_attention_by_the_cuda_kernels_changes_no_token(
    family: str, most: int, emulated: list[EmulatedLaunch]
) -> None:
    with using_profile(replace(CPU, attention=replace(CPU.attention, projected_heads=most))):
        engine = make_engine(family, attention_backend="cuda")
    assert len(emulated) == 2, "the kernels are compiled when the engine is built, not in its first step"
    made = run_engine(engine, REQUESTS)
    launches = emulated[most > 0].grids
    assert len(launches) >= 2 * 2 * 2, "two layers, two batches, two tokens each after the first"
    assert len(emulated) == 2 and made == expected(family)


MANY, FEW = "attend_decode_cuda", "attend_projected_cuda"
FEW_BY_TRITON = "attend_projected_reference"  # which stands in for Triton on a CPU


@pytest.mark.parametrize(
    ("most", "faster", "expected_rows"),
    [
        (0, 256, {MANY: {1, 2}, FEW: set(), FEW_BY_TRITON: set()}),
        (2, 256, {MANY: {2}, FEW: {1}, FEW_BY_TRITON: set()}),
        (4, 256, {MANY: set(), FEW: {1, 2}, FEW_BY_TRITON: set()}),
        (4, 2, {MANY: set(), FEW: {1}, FEW_BY_TRITON: {2}}),
    ],
    ids=str,
)
def test_auto_gives_rows_to_the_fastest_kernel(
    most: int,
    faster: int,
    expected_rows: dict[str, set[int]],
    emulated: list[EmulatedLaunch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two kv heads per row: where 2 heads are few, one row is few and two are many."""
    tuned = replace(CPU.attention, projected_heads=most, cuda_projected_heads={64: faster})
    seen: dict[str, set[int]] = {name: set() for name in expected_rows}

    def attend(name: str, real: Any, given: torch.Tensor, *inputs: Any, **options: Any) -> torch.Tensor:
        seen[name].add(len(given))
        result: torch.Tensor = real(given, *inputs, **options)
        return result

    for name in seen:
        spy = functools.partial(attend, name, getattr(decode, name))
        monkeypatch.setattr(decode, name, spy)
    with using_profile(replace(CPU, attention=tuned)):
        engine = make_engine("qwen3", attention_backend="auto")
    device: Any = engine._device
    attention = device.launcher.attention
    attention.backend = attention.work.backend = "auto"  # as on a GPU
    made = run_engine(engine, REQUESTS)
    assert seen == expected_rows
    assert made == expected("qwen3")


class GpuStore:
    """What a backend is chosen by, of a store on a GPU."""

    device = torch.device("cuda")
    dtype = torch.float16
    keys, scales = (torch.empty(0, dtype=dtype),), (None,)


def prepare(asked: str, *, block_size: int = 16, max_batch_size: int = 256) -> str:
    store: Any = GpuStore()
    config = load("qwen3", "float16").config
    chosen = device_step.choose_backend(("triton", asked), config, store, block_size)
    return device_step.compile_backend(chosen, config, store, block_size, max_batch_size)


def test_auto_compiles_for_many_rows_only_where_a_batch_may_have_them(emulated: list[EmulatedLaunch]) -> None:
    assert prepare("auto", max_batch_size=128) == "auto" and len(emulated) == 1
    assert prepare("auto", max_batch_size=129) == "auto" and len(emulated) == 2
    assert [prepare(backend) for backend in ("triton", "invariant", "cuda")] == [
        "triton",
        "invariant",
        "cuda",
    ]


def test_auto_goes_without_what_cannot_be_had_and_says_so_once(
    emulated: list[EmulatedLaunch], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "infer"):
        assert prepare("auto", block_size=8) == "triton"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "block_size to be a multiple of 16, and it is 8" in caplog.text
    with pytest.raises(ConfigError, match="attention_backend=cuda needs block_size to be a multiple of 16"):
        prepare("cuda", block_size=8)


def test_what_a_kernel_cannot_serve_is_known_before_any_is_compiled(emulated: list[EmulatedLaunch]) -> None:
    """Steps are gone through while compilers run: with heads of 16, they must know already."""
    store: Any = GpuStore()
    config = replace(load("qwen3", "float16").config, head_dim=16)
    assert device_step.choose_backend(("triton", "auto"), config, store, 16) == "triton"
    with pytest.raises(ConfigError, match="heads of 64 or 128, and this model's have 16"):
        device_step.choose_backend(("triton", "cuda"), config, store, 16)
    assert not emulated


@pytest.mark.parametrize("bend", [{"attention_softcap": 50.0}, {"attention_sinks": True}], ids=str)
def test_scores_that_are_not_plain_are_left_to_triton(
    emulated: list[EmulatedLaunch], bend: dict[str, Any]
) -> None:
    store: Any = GpuStore()
    config = replace(load("qwen3", "float16").config, **bend)
    assert device_step.choose_backend(("triton", "auto"), config, store, 16) == "triton"
    with pytest.raises(ConfigError, match="attention_backend=cuda cannot be used with qwen3"):
        device_step.choose_backend(("triton", "cuda"), config, store, 16)
    assert not emulated


def test_a_model_the_kernel_cannot_serve_is_refused_when_the_engine_is_built(
    emulated: list[EmulatedLaunch],
) -> None:
    with pytest.raises(ConfigError, match="needs 16-bit numbers, and the model.s are float32"):
        make_engine("qwen3", dtype="float32", attention_backend="cuda")


def test_flash_and_cuda_need_a_gpu() -> None:
    for backend in ("flash", "cuda"):
        with pytest.raises(ConfigError, match=f"attention_backend={backend} needs a GPU"):
            refuse(device_faults(EngineConfig.from_knobs(attention_backend=backend), Machine(device="cpu")))
