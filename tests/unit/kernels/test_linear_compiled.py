"""Which products run in CUDA C++, how their matrices are cut, what is compiled and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer.config.profiles.find import KNOWN_GPUS
from infer.errors import DeviceLost
from infer.kernels.linear import compiled as compiled_linears
from infer.kernels.linear import cuda as cuda_linears
from infer.kernels.linear import pdl
from infer.kernels.linear import small as linear_small
from infer.kernels.linear.coded import CodedForm
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.pdl import PdlConfig, can_launch, choose_config
from infer.kernels.linear.triton_configs import GemvConfig, SkinnyConfig
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime.profiles import gpu_of
from infer.layers.bind import bind
from infer.layers.linear import Linear
from infer.models.model import Model
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, raw_config

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CONFIG = PdlConfig(1, 8)
D, F, QKV = 1024, 3072, 4096
MATRICES = [
    Matrix(QKV, D, reads=True),
    Matrix(D, 2048, writes=True),
    Matrix(F, D, "silu", reads=True),
    Matrix(D, F, writes=True),
]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that can, and a driver that loads what it is given."""
    here = gpu_of(CPU)
    monkeypatch.setattr(
        compiled_linears, "gpu_of", lambda device: KNOWN_GPUS["h200"] if device.type == "cuda" else here
    )
    monkeypatch.setattr(cuda_linears, "load_variant", Mock())
    cuda_linears.cubin.cache_clear()
    yield
    cuda_linears.cubin.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What the compiler was asked for of pdl.cu."""
    asked: list[dict[str, int]] = []

    def make_cubin(source: Path, arch: str, defines: dict[str, int]) -> bytes:
        if source == pdl.SOURCE:
            assert arch == "sm_90"
            asked.append(defines)
        return b"cubin"

    monkeypatch.setattr(build, "make_cubin", make_cubin)
    return asked


def load(matrices: list[Matrix], device: torch.device = GPU) -> CompiledLinears:
    linears = CompiledLinears(device)
    for matrix in matrices:
        linears.want(matrix)
    linears.load()
    return linears


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 1024, False), PdlConfig(2, 8, depth=2)),  # no more blocks than multiprocessors
        ((1024, 2048, False), PdlConfig(1, 16, depth=2)),
        ((3072, 1024, True), PdlConfig(2, 8, depth=2)),
        ((1024, 3072, False), PdlConfig(1, 16, depth=3)),
        ((3072, 2048, False), PdlConfig(2, 16, depth=2)),
        ((8192, 2048, True), PdlConfig(1, 4, depth=4)),  # many rows: small blocks
        ((2048, 8192, False), PdlConfig(1, 16, depth=2)),
        ((1152, 6912, False), PdlConfig(1, 16, depth=3)),  # seven turns: nothing comes out even
        ((960, 576, False), PdlConfig(1, 8, depth=2)),  # nine chunks
        ((4096, 2048, True), PdlConfig(2, 8, depth=1)),  # 16 warps would not fit the registers
        ((64, 64, False), PdlConfig(1, 1, depth=1)),
        ((64, 100, False), None),
        ((60, 64, False), None),
    ],
)
def test_the_rule(shape: tuple[int, int, bool], expected: PdlConfig | None) -> None:
    N, K, gated = shape
    assert choose_config(8, N, K, gated=gated) == expected
    for num_tokens in (1, 8, 16, 32):
        config = choose_config(num_tokens, N, K, gated=gated)
        assert config is None or can_launch(config, num_tokens, N, K, gated=gated, adds=not gated)


def test_all_that_a_model_asks_for_is_compiled_once(compiled: list[dict[str, int]]) -> None:
    linears = load(MATRICES + MATRICES[:1])
    kinds = [(d["N"], d["K"], d["ACTIVATION"], d["ADDS"], d["PARTS"]) for d in compiled]
    assert sorted(kinds) == sorted(
        [
            (QKV, D, 0, 0, 0), (QKV, D, 0, 0, 1), (D, 2048, 0, 0, 0), (D, 2048, 0, 1, 0),
            (F, D, 1, 0, 0), (F, D, 1, 0, 1), (D, F, 0, 0, 0), (D, F, 0, 1, 0),
        ]
    )  # fmt: skip
    assert {d["MT"] for d in compiled} == {1}
    assert linears.pdl.ready == {
        (1, matrix.N, matrix.K, bool(matrix.activation), None): choose_config(
            8, matrix.N, matrix.K, gated=bool(matrix.activation)
        )
        for matrix in MATRICES
    }


@pytest.mark.parametrize(
    "odd_one",
    [
        Matrix(12288, 4096, "silu", reads=True),  # a wide stream
        Matrix(151936, 1024),  # a head
        Matrix(1024, 1000),
        Matrix(1020, 1024),
    ],
)
def test_a_kernel_is_loaded_for_all_matrices_or_for_none(
    odd_one: Matrix, compiled: list[dict[str, int]]
) -> None:
    assert not load([*MATRICES, odd_one]).pdl.ready and not compiled


@pytest.mark.parametrize("form", [CodedForm("fp8"), CodedForm("int4", 128), CodedForm("int4", 32, True)])
def test_coded_matrices_have_their_kernels_one_by_one(
    form: CodedForm, compiled: list[dict[str, int]]
) -> None:
    """Rows of 288 columns have no cut, the others keep theirs: few tokens of small ones in pdl.cu."""
    small, wide, odd = (Matrix(1024, K, form=form) for K in (1024, 2048, 288))
    head = Matrix(151936, 1024, form=form)
    linears = load([small, odd, wide, head])
    few = {(tokens, 1024, K) for tokens in (8, 16) for K in (1024, 2048) if not form.has_minima}
    assert {key[:3] for key in linears.coded_pdl.ready} == few | {(1, *key[1:]) for key in few}
    most = 1024 if form.codes == "fp8" else 512
    cut = {key[:3] for key in linears.coded.ready}
    assert {key[1:] for key in cut} == {(1024, 1024), (1024, 2048), (151936, 1024)}
    assert max(tokens for tokens, *_ in cut) == most
    for tokens in (8, 16):
        assert {key for key in cut if key[0] == tokens} == {(tokens, N, K) for _, N, K in cut} - few


def test_other_devices_compile_nothing(compiled: list[dict[str, int]]) -> None:
    assert not load(MATRICES, CPU).is_wanted and not load([]).is_wanted
    assert not compiled


def test_without_a_compiler_triton_computes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_the_third(*_: Any, asked: list[int] = []) -> bytes:  # noqa: B006
        asked.append(1)
        if len(asked) == 3:
            raise build.BuildError("NVRTC failed: no space")
        return b"cubin"

    monkeypatch.setattr(build, "make_cubin", fail_at_the_third)
    linears = CompiledLinears(GPU)
    with caplog.at_level(logging.INFO, "infer"):
        assert not linears.pdl.load(MATRICES, GPU)
    assert not linears.pdl.ready
    assert [record.getMessage() for record in caplog.records] == [
        "Triton computes linears of 1 to 8 tokens: pdl.cu cannot be compiled: NVRTC failed: no space"
    ]


def test_what_was_loaded_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_small, "use_triton", lambda _: True)
    monkeypatch.setattr(linear_small, "gemv_config", lambda *_: None)
    monkeypatch.setattr(linear_small, "skinny_config", lambda *_: None)
    linears = CompiledLinears(CPU)
    linears.pdl.ready[1, 64, 128, False, None] = CONFIG
    x, w = torch.zeros(8, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)

    def config(x: torch.Tensor, w: torch.Tensor = w, *, gated: bool = False) -> object:
        return linear_small._plan(x, w, gated=gated, compiled=linears)

    wide = torch.zeros(9, 256, dtype=torch.bfloat16)
    assert config(x) is config(x[:1]) is config(wide[1:, 128:]) is CONFIG
    assert config(wide[:, :128]) is None  # nine tokens
    assert config(x, gated=True) is None
    assert config(x.half()) is None
    assert config(wide[1:, 1:129]) is None  # its rows start at no multiple of 16 bytes
    assert config(torch.zeros(2, 132, dtype=torch.bfloat16)[:, :128]) is None
    assert config(x, torch.zeros(64, 256, dtype=torch.bfloat16)[:, :128]) is None


def test_either_kernel_may_add_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's can read so many parts and no more; dot products neither add nor read."""
    many, few = torch.zeros(8192, 64, dtype=torch.bfloat16), torch.zeros(64, 8192, dtype=torch.bfloat16)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(linear_small, "use_triton", lambda _: True)
    monkeypatch.setattr(linear_small, "gemv_config", lambda *_: None)
    monkeypatch.setattr(linear_small, "skinny_config", lambda *_: SkinnyConfig(64, 64, 1, 4, 3))
    linears = CompiledLinears(CPU)
    ready = linears.pdl.ready

    def can_add() -> bool:
        return linear_small.can_add(x, many, few, gated=False, compiled=linears)

    writer, reader = (1, 8192, 64, False, None), (1, 64, 8192, False, None)
    ready[writer] = PdlConfig(2, 8)  # 256 parts
    assert can_add()
    ready[writer] = PdlConfig(1, 8)
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


def wanted_of(
    model: Model, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool = False
) -> tuple[list[Matrix], list[Matrix]]:
    """What the projections of a model ask for: of its layers, and of its head."""
    layers: dict[Matrix, None] = {}
    heads: dict[Matrix, None] = {}

    def want(self: CompiledLinears, matrix: Matrix, *, is_head: bool = False) -> None:
        if self._enabled:
            (heads if is_head else layers)[matrix] = None

    monkeypatch.setattr(CompiledLinears, "want", want)
    bind(model, GPU, deterministic=deterministic)
    return list(layers), list(heads)


@pytest.mark.parametrize(
    ("family", "adds"),
    [("llama", True), ("qwen2", True), ("qwen3", True), ("gemma3", False), ("gpt2", False)],
)
def test_the_matrices_of_a_model(family: str, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind once; the first qkv reads no sum, the last down writes none: they are kinds of their own."""
    layers, heads = wanted_of(make_model(family), monkeypatch)
    sizes = Sizes()
    assert heads == [Matrix(sizes.vocab_size, sizes.hidden_size)]
    assert {m.bias for m in layers if m.N > m.K and not m.activation} == {family in ("qwen2", "gpt2")}
    assert {m.K for m in layers if m.reads} == ({sizes.hidden_size} if adds else set())
    assert {m.N for m in layers if m.writes} == ({sizes.hidden_size} if adds else set())
    assert len({(m.N, m.K, m.activation) for m in layers}) == 4
    assert len(layers) == (6 if adds else 4)
    gated = {m.activation for m in layers} - {""}
    assert gated == {"gemma3": {"gelu_tanh"}, "gpt2": set()}.get(family, {"silu"})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_have_kernels_of_their_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tokens share is asked for: qkv, out, which writes a sum, and the router, which reads it."""
    model, sizes = make_model(family), Sizes()
    layers, heads = wanted_of(model, monkeypatch)
    assert heads == [Matrix(sizes.vocab_size, sizes.hidden_size)]
    router = model.get_submodule("layers.0.mlp.router")
    assert isinstance(router, Linear)
    assert Matrix(router.spec.num_rows, sizes.hidden_size, reads=True) in layers
    assert len({(m.N, m.K) for m in layers}) == 3 and not any(m.activation for m in layers)
    assert [m.N for m in layers if m.writes] == [sizes.hidden_size]


def test_other_types_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted_of(make_model("llama").half(), monkeypatch) == ([], [])


def test_one_matrix_of_another_type_leaves_the_others_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    whole, _ = wanted_of(model, monkeypatch)
    model.get_submodule("layers.0.mlp.down").half()
    assert {m for m in whole if m.K < m.N} <= set(wanted_of(model, monkeypatch)[0])


def test_each_kernel_is_loaded_for_what_it_is_good_at(compiled: list[dict[str, int]]) -> None:
    """The head is large and has many tiles; above 64 tokens what attention reads is cuBLAS's."""
    linears = CompiledLinears(GPU)
    for matrix in MATRICES:
        linears.want(matrix)
    linears.want(Matrix(151936, D), is_head=True)
    linears.want(Matrix(1001, D), is_head=True)  # no multiple of 8: it stays alone
    linears.load()

    def shapes(kernel: Any) -> set[tuple[int, int]]:
        return {(N, K) for _, N, K, *_ in kernel.ready}

    layers = {(matrix.N, matrix.K) for matrix in MATRICES}
    assert shapes(linears.pdl) == layers
    assert shapes(linears.wgmma) == layers | {(151936, D)}
    assert shapes(linears.wgmma_more) == layers - {(QKV, D)}


def test_steps_can_be_gone_through_while_compilers_run(compiled: list[dict[str, int]]) -> None:
    """What is looked up is already known, and nothing is compiled or loaded for it."""
    linears = CompiledLinears(GPU)
    for matrix in MATRICES:
        linears.want(matrix)
    run = linears.compiler()
    expected = dict(linears.pdl.ready), dict(linears.wgmma.ready), dict(linears.wgmma_more.ready)
    assert all(expected) and not compiled
    run()
    assert linears.load() and linears.load()
    assert expected == (linears.pdl.ready, linears.wgmma.ready, linears.wgmma_more.ready)


def test_what_was_expected_is_forgotten_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise build.BuildError("there is no compiler")

    monkeypatch.setattr(build, "make_cubin", fail)
    linears = CompiledLinears(GPU)
    for matrix in MATRICES:
        linears.want(matrix)
    linears.compiler()()
    assert any(linears.num_ready) and not linears.load(), "steps were gone through with other kernels"
    assert not any(linears.num_ready)


def test_waiting_for_the_linears_raises_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run beside the rest of an engine's build; what they raise is not lost with their thread."""
    model = make_model("llama")
    has_begun = threading.Event()

    def fail() -> None:
        has_begun.wait(60)
        raise DeviceLost("no more")

    monkeypatch.setattr(CompiledLinears, "compiler", lambda linears: fail)
    wait = bind(model, GPU, deterministic=False)  # does not wait
    has_begun.set()
    with pytest.raises(DeviceLost, match="no more"):
        wait()


@pytest.mark.parametrize(("num_sms", "is_for"), [(132, True), (144, True), (114, False), (16, False)])
def test_the_cuts_are_for_whole_hoppers(num_sms: int, is_for: bool) -> None:
    assert cuda_linears.is_for(replace(KNOWN_GPUS["h200"], num_sms=num_sms)) == is_for
