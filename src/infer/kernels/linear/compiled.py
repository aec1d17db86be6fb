"""The CUDA C++ linears of one model on one GPU: created by the binder, used by the model's projections.

These kernels load weights while the previous kernel still runs (PDL). A Triton kernel between two of them
breaks this overlap, and the mix is slower than either kind alone. So each of the first three kernels is
loaded for all matrices that projections request (`want`), or for none: if one matrix does not fit, or the
compiler is missing, all of them stay with Triton. With coded weights, Triton is several times slower, so each
matrix with a configuration gets its kernel, independent of the others.

    up to 8 tokens      all matrices of the layers, of small models                             pdl.py
    2 to 64 tokens      all matrices of the layers, and the head if it fits                     wgmma.py
    65 to 128 tokens    gates, and matrices that write into the residual stream                 wgmma.py
    up to 16 tokens     coded weights, matrices of small models (of 2,048: to 8)                pdl.py
    1 to 512 tokens     coded weights, all other matrices (fp8: to 1,024)                       wgmma.py
    up to 8 tokens      experts, if their kernels were registered by `use`                      moe/few.py
    1 to 128 tokens     matrices of the layers in a step with LoRA adapters              wgmma.py, shrink.py

    linears = CompiledLinears(device)
    linears.want(matrix) ...            by projections, while they are prepared
    linears.compiler()()                in a thread: compilers run without using the GPU; meanwhile, steps
                                        are traced to compile their other kernels (compile_ahead.py)
    linears.load()                      before the first step runs
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from infer.config.profiles.find import Gpu
from infer.kernels.linear import pdl, wgmma
from infer.kernels.linear.cuda import CudaLinear, Matrix, OtherKernel, are_pieces, compile_variants, is_for
from infer.kernels.linear.low_rank import LowRankStack
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.problems import LinearProblem
from infer.kernels.linear.shrink import Shrink, takes
from infer.kernels.linear.wgmma import WgmmaConfig
from infer.kernels.runtime.choice import Declined, Way
from infer.kernels.runtime.cuda_build import BuildError
from infer.kernels.runtime.profiles import gpu_of

logger = logging.getLogger(__name__)

CudaConfig = PdlConfig | WgmmaConfig
LinearWay = Way[LinearProblem, CudaConfig]


class CompiledLinears:
    """The products of one model that run in CUDA C++, with the configurations of their kernels."""

    def __init__(self, device: torch.device, *, gpu: Gpu | None = None) -> None:
        """`gpu`: the GPU to choose for, instead of the device's own."""
        self.device, self.gpu = device, gpu or gpu_of(device)
        self._enabled = is_for(self.gpu)
        profile = self.gpu.profile.linear
        most, most_coded = profile.wgmma_tokens, max(profile.coded_tokens, profile.fp8_tokens)
        self.pdl = pdl.make_kernel(profile)
        self.wgmma = wgmma.make_kernel(profile, range(2, most + 1))  # one token needs no tensor cores
        self.wgmma_more = wgmma.make_kernel(profile, range(most + 1, profile.wgmma_gate_tokens + 1))
        self.coded_pdl = pdl.make_kernel(profile, coded=True)
        self.coded = wgmma.make_kernel(profile, range(1, most_coded + 1), coded=True)
        self.low_rank = wgmma.make_kernel(profile, range(1, wgmma.MAX_TOKENS + 1), low_rank=True)
        self._kernels = (self.pdl, self.wgmma, self.wgmma_more, self.coded_pdl, self.coded)
        ways: list[LinearWay] = [Way(kernel.name, kernel.covers) for kernel in self._kernels]
        self.dense_ways, self.coded_ways = tuple(ways[:3]), tuple(ways[3:])
        self.pdl.why_not = self.wgmma.why_not = Declined("only for the matrices of the layers")
        self.wgmma_more.why_not = Declined("only for gates, and matrices that write into the residual stream")
        if not self._enabled:
            sms = f"compute capability 9.0 and {profile.num_sms} SMs"
            for kernel in self._kernels:
                kernel.why_not = Declined(f"only for {sms}")
        self._coded: dict[Matrix, None] = {}
        self._layers: dict[Matrix, None] = {}
        self._heads: dict[Matrix, None] = {}
        self._low_rank: dict[Matrix, None] = {}
        self._shrink = Shrink()
        self._others: list[OtherKernel] = []

    def use(self, kernel: OtherKernel) -> None:
        """Compile and load these kernels, too, if the GPU supports them."""
        if self._enabled:
            self._others.append(kernel)

    def want(self, matrix: Matrix, *, is_head: bool = False) -> None:
        """Register a matrix of the layers, or the head; the layers get kernels even if the head does not."""
        if self._enabled and matrix.form is not None:
            self._coded[matrix] = None
        elif self._enabled:
            (self._heads if is_head else self._layers)[matrix] = None

    def want_low_rank(self, matrix: Matrix, stack: LowRankStack) -> None:
        """Register a matrix whose tokens may have adapters."""
        if self._enabled and takes(stack):
            self._low_rank[matrix] = None
            if self._shrink not in self._others:
                self._others.append(self._shrink)
            self._shrink.want(stack)

    @property
    def is_wanted(self) -> bool:
        """True if there is anything to compile."""
        return bool(self._layers or self._coded or self._others)

    def compiler(self) -> Callable[[], None]:
        """Return a function for a thread that compiles everything `load` will load, without using the GPU."""
        wanted = [variant for kernel, matrices in self._uses() for variant in kernel.expect(matrices)]
        wanted += [variant for kernel in self._others for variant in kernel.expect()]

        def run() -> None:
            with suppress(BuildError):  # `load` will report it
                compile_variants(wanted)

        return run

    def load(self) -> bool:
        """Compile and load all registered kernels, before any step runs. False: fewer than expected."""
        expected = self.num_ready
        for kernel, matrices in self._uses():
            kernel.load(matrices, self.device)
        for other in self._others:
            try:
                other.load(self.device)
            except BuildError as error:
                other.num_ready = 0
                what = "LoRA adapters" if other is self._shrink else "experts"
                logger.info("Triton computes %s: their kernels cannot be compiled: %s", what, error)
        return self.num_ready == expected

    @property
    def num_ready(self) -> tuple[int, ...]:
        """The number of shapes or variants for which each kernel is compiled, or expected to be."""
        return (
            *(len(kernel.ready) for kernel in (*self._kernels, self.low_rank)),
            *(other.num_ready for other in self._others),
        )

    def _uses(self) -> list[tuple[CudaLinear[Any], list[Matrix]]]:
        """The kernels and their matrices."""
        layers, coded = list(self._layers), list(self._coded)
        heads = [head for head in self._heads if self.wgmma.choose(self.wgmma.tokens[-1], head) is not None]
        return [
            (self.pdl, layers),
            (self.wgmma, [*layers, *heads] if layers else []),
            (self.wgmma_more, [matrix for matrix in layers if matrix.activation or matrix.writes]),
            (self.coded_pdl, coded),
            (self.coded, coded),
            (self.low_rank, list(self._low_rank)),
        ]

    def find_low_rank(
        self, x_MX: torch.Tensor, w: torch.Tensor, N: int, K: int, stack: LowRankStack, *, gated: bool
    ) -> WgmmaConfig | None:
        """The configuration of a product with adapters in it; None: adapters add to the finished product."""
        if not self._shrink.num_ready or not takes(stack):
            return None
        problem = LinearProblem(len(x_MX), N, K, gated, x_MX.dtype, self.gpu, is_aligned=are_pieces(x_MX, w))
        config = self.low_rank.covers(problem)
        return None if isinstance(config, Declined) else config
