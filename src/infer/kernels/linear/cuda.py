"""Shared parts of the linears in CUDA C++: the compilation of variants, and their arguments.

A variant is a source file with the constants of one configuration, bias, prologue and epilogue. All variants
that a model's matrices can need are compiled in parallel before its first step (compiled.py).

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from infer.config.profiles.find import Gpu
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.problems import LinearProblem
from infer.kernels.linear.residual import Epilogue
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.choice import Declined
from infer.kernels.runtime.tensor_map import TensorMap, encoder

logger = logging.getLogger(__name__)

ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}  # values of ACTIVATION in linear/linear.cuh

Defines = tuple[tuple[str, int], ...]
Shape = tuple[int, int, int, bool, CodedForm | None]  # bucket of tokens, N, K, gated, form of weights
Config = TypeVar("Config")

_MAX_COMPILERS = 16
_NO_CUT = Declined("unsupported sizes, or too many tokens to be faster")
_NOT_ALIGNED = Declined("rows are not bfloat16, or do not start at multiples of 16 bytes")
_LONG_SECONDS = 1.0  # compile time worth a log line; cubins from disk take less


class Matrix(NamedTuple):
    """A matrix of a model, and the operations that may be fused into its product."""

    N: int
    K: int
    activation: str = ""  # activation of a gated matrix; N then counts the gate's rows
    bias: bool = False
    reads: bool = False  # True: reads a `ResidualSum` in its prologue
    writes: bool = False  # True: writes a `ResidualSum` in its epilogue
    form: CodedForm | None = None  # form of coded weights


class Variant(NamedTuple):
    """A kernel to compile and to load."""

    source: Path
    arch: str  # GPU architecture
    defines: Defines
    name: str  # function in the source
    num_threads: int
    types: tuple[Any, ...]  # types of its arguments
    shared_bytes: int = 0


@dataclass(slots=True)
class CudaLinear(Generic[Config]):
    """One kernel for a range of tokens, and the matrices of one model that it has been compiled for."""

    source: Path
    tokens: range
    bucket: Callable[[int], int]  # token counts in the same bucket share a kernel
    choose: Callable[[int, Matrix], Config | Declined | None]  # configuration for a token count and a matrix
    variant: Callable[[Config, Matrix, int, bool, bool], Variant]  # arguments: bucket, adding, reading parts
    is_for_each: bool = False  # True: a matrix without a cut does not keep the others from this kernel
    ready: dict[Shape, Config] = field(default_factory=dict)
    declined: dict[Shape, Declined] = field(default_factory=dict)  # matrices without a configuration
    why_not: Declined = Declined("nothing was compiled for it")  # reason for all other matrices

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"CUDA C++, {self.source.name}"

    def covers(self, problem: LinearProblem) -> Config | Declined:
        """The configuration of the loaded kernel for a matrix."""
        if problem.num_tokens not in self.tokens:
            return Declined(f"only for {self.tokens[0]} to {self.tokens[-1]} tokens")
        shape = (self.bucket(problem.num_tokens), problem.N, problem.K, problem.gated, problem.form)
        config = self.ready.get(shape)
        if config is None:
            return self.declined.get(shape, self.why_not)
        return config if problem.is_aligned else _NOT_ALIGNED

    def expect(self, matrices: Sequence[Matrix]) -> list[Variant]:
        """The variants to compile for these matrices; until `load`, `covers` assumes that they are ready."""
        chosen, variants = self._cut(matrices) or ({}, [])
        self.ready.update(chosen)
        return variants

    def load(self, matrices: Sequence[Matrix], device: torch.device) -> bool:
        """Compile and load all variants for these matrices; False if that fails (the log has the reason)."""
        cuts = self._cut(matrices)
        if cuts is None:
            return False
        chosen, variants = cuts
        start = time.perf_counter()
        try:
            compile_variants(variants)
            for variant in variants:
                load_variant(variant, build.index_of(device), dispatch.PDL)
        except build.BuildError as error:
            first, last = self.tokens[0], self.tokens[-1]
            logger.info(
                "Triton computes linears of %d to %d tokens: %s cannot be compiled: %s",
                first, last, self.source.name, error,
            )  # fmt: skip
            self.ready.clear()
            self.why_not = Declined(f"it cannot be compiled: {error}")
            return False
        if (seconds := time.perf_counter() - start) > _LONG_SECONDS:
            logger.info(
                "compiled linears source=%s variants=%d seconds=%.1f",
                self.source.name,
                len(variants),
                seconds,
            )
        self.ready.update(chosen)
        return True

    def _cut(self, matrices: Sequence[Matrix]) -> tuple[dict[Shape, Config], list[Variant]] | None:
        """The configurations of these matrices and their variants, without duplicates; None: not covered."""
        chosen: dict[Shape, Config] = {}
        variants: dict[Variant, None] = {}
        for bucket in dict.fromkeys(self.bucket(M) for M in self.tokens):
            num_tokens = max(M for M in self.tokens if self.bucket(M) == bucket)
            for matrix in matrices:
                config = self.choose(num_tokens, matrix) or _NO_CUT
                shape = (bucket, matrix.N, matrix.K, bool(matrix.activation), matrix.form)
                if not isinstance(config, Declined):
                    chosen[shape] = config
                elif self.is_for_each:
                    self.declined[shape] = config
                    continue
                else:
                    size = f"a matrix of {matrix.N} by {matrix.K}"
                    self.why_not = Declined(
                        f"only for all matrices of the layers or none: {size} has {config.why}"
                    )
                    return None
                variants |= dict.fromkeys(self._variants_of(matrix, config, bucket))
        return (chosen, list(variants)) if chosen else None

    def _variants_of(self, matrix: Matrix, config: Config, bucket: int) -> Iterator[Variant]:
        for adds, parts in ((False, False), (False, True), (True, False)):
            if (matrix.reads or not parts) and (matrix.writes or not adds):
                yield self.variant(config, matrix, bucket, adds, parts)


class OtherKernel:
    """A kernel other than a linear, compiled and loaded with the linears (compiled.py)."""

    num_ready = 0  # variants that can be launched, or are expected to be until `load`

    def variants(self) -> list[Variant]:
        """All variants to compile; none if a matrix is not supported."""
        raise NotImplementedError

    def expect(self) -> list[Variant]:
        """The variants to compile; until `load`, they are expected to be ready."""
        found = self.variants()
        self.num_ready = len(found)
        return found

    def load(self, device: torch.device) -> None:
        """Compile and load all variants; raises BuildError if that fails."""
        self.num_ready, found = 0, self.variants()
        compile_variants(found)
        for variant in found:
            load_variant(variant, build.index_of(device), dispatch.PDL)
        self.num_ready = len(found)


def are_pieces(x_MX: torch.Tensor, w: torch.Tensor | CodedWeights) -> bool:
    """Return True if every row is contiguous bfloat16 and starts at a multiple of 16 bytes."""
    stored = w.cells if isinstance(w, CodedWeights) else w
    return (
        x_MX.dtype is torch.bfloat16
        and stored.is_contiguous()
        and x_MX.stride(1) == 1
        and not (x_MX.stride(0) % 8 or x_MX.data_ptr() % 16 or stored.data_ptr() % 16)
    )


def outer_defines(activation: str, bias: bool, adds: bool, parts: bool) -> Defines:
    """The defines for a product's bias, gate, prologue and epilogue, as linear.cuh reads them."""
    return (
        ("BIAS", int(bias)),
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("ADDS", int(adds)),
        ("PARTS", int(parts)),
    )


CODES = ("", "fp8", "int8", "int4", "e5m2", "lut4", "nf4", "fp4")  # order of `Weights` in codes.cuh


def form_defines(form: CodedForm | None) -> Defines:
    """The defines for coded weights, as codes.cuh reads them; none for weights of the tokens' type."""
    if form is None:
        return ()
    return (
        ("WEIGHTS", CODES.index(form.codes)),
        ("GROUP", form.group),
        ("MINIMA", int(form.has_minima)),
        ("SCALE_ROWS", form.scale_rows),
    )


class OuterArguments(NamedTuple):
    """The arguments of a kernel besides its operands and sizes."""

    addresses: tuple[int, ...]  # addresses of bias, y, residual, gain, sum and squares
    residual_bytes: int  # bytes from one row to the next
    num_parts: int
    offset: float


def outer_arguments(
    x_MK: torch.Tensor, w: torch.Tensor | CodedWeights, y_MN: torch.Tensor, epilogue: Epilogue
) -> OuterArguments:
    """Check that the kernels can read these tensors; missing tensors get an arbitrary address."""
    stored = w.cells if isinstance(w, CodedWeights) else w
    assert w.shape[1] == x_MK.shape[1] and stored.is_contiguous(), f"{w.shape} and {x_MK.shape}"
    assert isinstance(w, CodedWeights) or x_MK.dtype == w.dtype, (x_MK.dtype, stored.dtype)
    is_aligned = not (x_MK.stride(0) % 8 or x_MK.data_ptr() % 16 or stored.data_ptr() % 16)
    assert is_aligned and x_MK.stride(1) == 1, f"pieces of 16 bytes: {x_MK.stride()}"
    bias_N, _, add, prologue, _, _ = epilogue
    residual, gain, total, offset = x_MK, x_MK, y_MN, 0.0
    squares = y_MN if prologue is None else prologue.squares_PM
    if add is not None:
        (residual, gain, offset), (total, _, squares) = add
        assert residual.stride(0) % 2 == 0 and gain.dtype == x_MK.dtype, (residual.stride(), gain.dtype)
    tensors = (y_MN, residual, gain, total, squares)
    addresses = (0 if bias_N is None else bias_N.data_ptr(), *(tensor.data_ptr() for tensor in tensors))
    num_parts = 0 if prologue is None else len(squares)
    return OuterArguments(addresses, residual.stride(0) * 2, num_parts, offset)


def is_for(gpu: Gpu) -> bool:
    """Return True for a full Hopper GPU: clusters, PDL, TMA, and as many SMs as the configurations need."""
    return gpu.capability == (9, 0) and gpu.num_sms >= gpu.profile.linear.num_sms


def compile_variants(variants: Sequence[Variant]) -> None:
    """Compile many variants in parallel; raises BuildError if one fails."""
    with ThreadPoolExecutor(min(_MAX_COMPILERS, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda variant: cubin(*variant[:3]), variants))


@functools.cache
def cubin(source: Path, arch: str, defines: Defines) -> bytes:
    """The cubin of a file, compiled with these constants."""
    return build.make_cubin(source, arch, dict(defines))


@functools.cache
def load_variant(variant: Variant, device: int, with_pdl: bool) -> build.PreparedLaunch:
    """Compile and load one variant, once."""
    if TensorMap in variant.types:
        encoder()  # raises if the driver has no tensor maps, without which no launch works
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(variant.source, variant.arch, variant.defines))
        return kernels.prepare(
            variant.name, variant.num_threads, variant.types, pdl=with_pdl, shared_bytes=variant.shared_bytes
        )
