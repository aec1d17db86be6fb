"""Which products go to the linear that holds its weights early, how they are cut, what is compiled when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer import LLM, SamplingParams
from infer.errors import DeviceLost
from infer.kernels.linear import pdl as linear_ahead
from infer.kernels.linear import prepared as prepared_linears
from infer.kernels.linear import small as linear_small
from infer.kernels.linear.pdl import AHEAD
from infer.kernels.linear.pdl_configs import AheadConfig, can_launch, choose_config
from infer.kernels.linear.prepared import Matrix, PreparedLinears
from infer.kernels.linear.triton_configs import GemvConfig, SkinnyConfig
from infer.kernels.linear.wgmma import WGMMA, WGMMA_MORE
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.layers.linear import Linear, set_invariant
from infer.layers.prepare import matrices_of, prepare_linears
from infer.models.model import Model
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, make_checkpoint, raw_config

GPU = torch.device("cuda", 0)
CPU = -1  # as tensors count devices
CONFIG = AheadConfig(1, 8)
D, F, QKV = 1024, 3072, 4096
MATRICES = [
    Matrix(QKV, D, reads=True),
    Matrix(D, 2048, writes=True),
    Matrix(F, D, "silu", reads=True),
    Matrix(D, F, writes=True),
]


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, AheadConfig]]:
    """Nothing prepared; a GPU that can; a compiler and a driver that do as they are told."""
    known: dict[Any, AheadConfig] = {}
    monkeypatch.setattr(AHEAD, "ready", known)
    monkeypatch.setattr(WGMMA, "ready", {})
    monkeypatch.setattr(prepared_linears, "is_for", lambda device: device.type == "cuda")
    monkeypatch.setattr(linear_ahead, "_load", Mock())
    prepared_linears.cubin.cache_clear()
    yield known
    prepared_linears.cubin.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    asked: list[dict[str, int]] = []

    def make_cubin(source: Path, arch: str, defines: dict[str, int]) -> bytes:
        assert (source, arch) == (linear_ahead.SOURCE, "sm_90")
        asked.append(defines)
        return b"cubin"

    monkeypatch.setattr(build, "make_cubin", make_cubin)
    return asked


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 1024, False), AheadConfig(2, 8, depth=2)),  # no more blocks than multiprocessors
        ((1024, 2048, False), AheadConfig(1, 16, depth=2)),
        ((3072, 1024, True), AheadConfig(2, 8, depth=2)),
        ((1024, 3072, False), AheadConfig(1, 16, depth=3)),
        ((3072, 2048, False), AheadConfig(2, 16, depth=2)),
        ((8192, 2048, True), AheadConfig(1, 4, depth=4)),  # many rows: small blocks
        ((2048, 8192, False), AheadConfig(1, 16, depth=2)),
        ((1152, 6912, False), AheadConfig(1, 16, depth=3)),  # seven turns: nothing comes out even
        ((960, 576, False), AheadConfig(1, 8, depth=2)),  # nine chunks
        ((4096, 2048, True), AheadConfig(2, 8, depth=1)),  # 16 warps would not fit the registers
        ((64, 64, False), AheadConfig(1, 1, depth=1)),
        ((64, 100, False), None),
        ((60, 64, False), None),
    ],
)
def test_the_rule(shape: tuple[int, int, bool], expected: AheadConfig | None) -> None:
    N, K, gated = shape
    assert choose_config(8, N, K, gated=gated) == expected
    for num_tokens in (1, 8, 16, 32):
        config = choose_config(num_tokens, N, K, gated=gated)
        assert config is None or can_launch(config, num_tokens, N, K, gated=gated, adds=not gated)


def test_all_that_a_model_asks_for_is_compiled_once(compiled: list[dict[str, int]], ready: Any) -> None:
    assert AHEAD.prepare(MATRICES + MATRICES[:1], GPU)
    kinds = [(d["N"], d["K"], d["ACTIVATION"], d["ADDS"], d["PARTS"]) for d in compiled]
    assert sorted(kinds) == sorted(
        [
            (QKV, D, 0, 0, 0), (QKV, D, 0, 0, 1), (D, 2048, 0, 0, 0), (D, 2048, 0, 1, 0),
            (F, D, 1, 0, 0), (F, D, 1, 0, 1), (D, F, 0, 0, 0), (D, F, 0, 1, 0),
        ]
    )  # fmt: skip
    assert {d["MT"] for d in compiled} == {1}
    assert isinstance(linear_ahead._load, Mock) and linear_ahead._load.call_count == len(compiled)
    assert ready == {
        (0, 1, matrix.N, matrix.K, bool(matrix.activation)): choose_config(
            8, matrix.N, matrix.K, gated=bool(matrix.activation)
        )
        for matrix in MATRICES
    }


def test_more_tokens_are_more_variants(
    compiled: list[dict[str, int]], ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AHEAD, "tokens", range(1, 17))
    assert AHEAD.prepare(MATRICES, GPU)
    assert [d["MT"] for d in compiled].count(2) == len(compiled) / 2 == 8
    assert {tiles for _, tiles, *_ in ready} == {1, 2}


@pytest.mark.parametrize(
    "odd_one",
    [
        Matrix(12288, 4096, "silu", reads=True),  # a wide stream
        Matrix(151936, 1024),  # a head
        Matrix(1024, 1000),
        Matrix(1020, 1024),
    ],
)
def test_a_model_is_prepared_whole_or_not_at_all(
    odd_one: Matrix, compiled: list[dict[str, int]], ready: Any
) -> None:
    assert not AHEAD.prepare([*MATRICES, odd_one], GPU)
    assert not compiled and not ready


def test_other_devices_compile_nothing(compiled: list[dict[str, int]], ready: Any) -> None:
    assert not AHEAD.prepare(MATRICES, torch.device("cpu")) and not AHEAD.prepare([], GPU)
    assert not compiled and not ready


def test_without_a_compiler_triton_computes_and_the_log_says_why(
    ready: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_the_third(*_: Any, asked: list[int] = []) -> bytes:  # noqa: B006
        asked.append(1)
        if len(asked) == 3:
            raise build.BuildError("neither NVRTC nor nvcc could: no space")
        return b"cubin"

    monkeypatch.setattr(build, "make_cubin", fail_at_the_third)
    with caplog.at_level(logging.INFO, "infer"):
        assert not AHEAD.prepare(MATRICES, GPU)
    assert not ready
    assert [record.getMessage() for record in caplog.records] == [
        "Triton computes linears of 1 to 8 tokens: linear/pdl.cu is to be compiled and "
        "neither NVRTC nor nvcc could: no space"
    ]


def test_what_was_prepared_is_used_where_it_fits(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ready[CPU, 1, 64, 128, False] = CONFIG
    x, w = torch.zeros(8, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)

    def config(x: torch.Tensor, w: torch.Tensor = w, *, gated: bool = False) -> AheadConfig | None:
        return AHEAD.config_for(x, w, 64, 128, gated=gated)

    wide = torch.zeros(9, 256, dtype=torch.bfloat16)
    assert config(x) is config(x[:1]) is config(wide[1:, 128:]) is CONFIG
    assert config(wide[:, :128]) is None  # nine tokens
    assert config(x, gated=True) is None
    assert config(x.half()) is None
    assert config(wide[1:, 1:129]) is None  # its rows start at no multiple of 16 bytes
    assert config(torch.zeros(2, 132, dtype=torch.bfloat16)[:, :128]) is None
    assert config(x, torch.zeros(64, 256, dtype=torch.bfloat16)[:, :128]) is None
    monkeypatch.setattr(AHEAD, "enabled", False)
    assert config(x) is None


def test_either_kernel_may_add_for_the_other(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's can read so many parts and no more; dot products neither add nor read."""
    many, few = torch.zeros(8192, 64, dtype=torch.bfloat16), torch.zeros(64, 8192, dtype=torch.bfloat16)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(linear_small, "use_triton", lambda _: True)
    monkeypatch.setattr(linear_small, "gemv_config", lambda *_: None)
    monkeypatch.setattr(linear_small, "skinny_config", lambda *_: SkinnyConfig(64, 64, 1, 4, 3))

    def can_add() -> bool:
        return linear_small.can_add(x, many, few, gated=False)

    writer, reader = (CPU, 1, 8192, 64, False), (CPU, 1, 64, 8192, False)
    ready[writer] = AheadConfig(2, 8)  # 256 parts
    assert can_add()
    ready[writer] = AheadConfig(1, 8)
    assert not can_add()
    ready[reader] = CONFIG
    assert can_add()
    del ready[writer]
    assert can_add()
    x = x[:1]
    monkeypatch.setattr(linear_small, "gemv_config", lambda *_: GemvConfig(1, 64, 1))
    assert not can_add()
    ready[writer] = CONFIG
    assert can_add()
    del ready[reader]
    assert not can_add()


def make_model(family: str) -> Model:
    chosen = get_family(family)
    return chosen.build(chosen.read_config(raw_config(family, Sizes()))).bfloat16()


def make_layers(family: str) -> torch.nn.ModuleList:
    return make_model(family).layers


@pytest.mark.parametrize(
    ("family", "num_kinds", "adds"),
    [("llama", 4, True), ("qwen2", 4, True), ("qwen3", 4, True), ("gemma3", 4, False), ("gpt2", 4, False)],
)
def test_the_matrices_of_a_model(family: str, num_kinds: int, adds: bool) -> None:
    layers = make_layers(family)
    matrices = matrices_of(layers)
    assert len(matrices) == num_kinds
    qkv, out, up, down = matrices
    assert [matrix.reads for matrix in matrices] == [adds, False, adds, False]
    assert [matrix.writes for matrix in matrices] == [False, adds, False, adds]
    assert qkv.bias == (family in ("qwen2", "gpt2")) and out.N == down.N == qkv.K == up.K
    assert up.activation == {"gemma3": "gelu_tanh", "gpt2": ""}.get(family, "silu") and up.N == down.K
    set_invariant(layers, True)
    assert matrices_of(layers) == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_have_kernels_of_their_own(family: str) -> None:
    assert matrices_of(make_layers(family)) == []


def test_other_types_stay_as_they_are() -> None:
    assert matrices_of(make_layers("llama").half()) == []


def test_each_kernel_is_prepared_for_what_it_is_good_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is large and has many tiles; above 64 tokens what attention reads is the library's."""
    model = make_model("llama")
    asked: dict[int, list[Matrix]] = {}
    monkeypatch.setattr(
        PreparedLinears, "prepare", lambda self, matrices, _: asked.__setitem__(id(self), matrices)
    )
    prepare_linears(model.layers, model.head, torch.device("cpu"))()
    assert not asked
    prepare_linears(model.layers, model.head, GPU)()
    layers = matrices_of(model.layers)
    assert asked[id(AHEAD)] == layers
    assert asked[id(WGMMA)] == [*layers, Matrix(Sizes().vocab_size, Sizes().hidden_size)]
    assert asked[id(WGMMA_MORE)] == layers[1:] and layers[0].K < layers[0].N


def test_who_waits_for_the_linears_learns_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run beside the rest of an engine's build; what they raise is not lost with their thread."""
    model = make_model("llama")
    has_begun = threading.Event()

    def compile_linears(*_: object) -> None:
        has_begun.wait(60)
        raise DeviceLost("no more")

    monkeypatch.setattr(PreparedLinears, "compile", compile_linears)
    wait = prepare_linears(model.layers, model.head, GPU)  # does not wait
    has_begun.set()
    with pytest.raises(DeviceLost, match="no more"):
        wait()


def test_a_head_that_does_not_fit_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token more than a multiple of 8: the layers do not suffer for it."""
    model = make_model("llama")
    asked: dict[int, list[Matrix]] = {}
    monkeypatch.setattr(
        PreparedLinears, "prepare", lambda self, matrices, _: asked.__setitem__(id(self), matrices)
    )
    head = Linear(Sizes().hidden_size, 1001, bias=False).bfloat16()
    prepare_linears(model.layers, head, GPU)()
    assert asked[id(WGMMA)] == matrices_of(model.layers)


@pytest.mark.parametrize(("num_sms", "is_for"), [(132, True), (144, True), (114, False), (16, False)])
def test_the_cuts_are_for_whole_hoppers(num_sms: int, is_for: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "num_sms", lambda _: num_sms)
    assert prepared_linears.is_for(GPU) == is_for


def test_an_engine_prepares_the_layers_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)
    prepared = Mock()
    monkeypatch.setattr("infer.engine.build.prepare_linears", prepared)
    llm = LLM(str(tmp_path), device="cpu")
    layers, head, device = prepared.call_args.args
    assert len(layers) == Sizes().num_layers and device == torch.device("cpu")
    assert head.weight.shape == (Sizes().vocab_size, Sizes().hidden_size)
    prepared.return_value.assert_called_once_with()  # waited for, before any step
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
