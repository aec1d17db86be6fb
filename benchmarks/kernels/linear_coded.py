"""Time chains of layers with coded weights (kernels/linear/coded.py), each matrix cut as the rule says.

    python -m benchmarks.kernels.linear_coded [--models 8b 0.6b] [--forms bf16 fp8 int4] [--tokens 1 64 256]

A chain is qkv, o, gate and up, down of several layers, captured into a graph, each kernel reading what the
one before has added; attention is left out. What no kernel with prologue and epilogue multiplies is a norm, a
product of the library (of W unpacked, where it is coded) and a gate, as in an engine; `--unpacked` does so
with all coded weights. Kernels are compiled side by side before the first chain. The bytes of all layers
together do not fit the L2 cache. Beside the time of a layer stands the share of it that reading its weights
takes at 4.2 TB/s (an H200).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infer.config.profiles.hopper_h200 import H200
from infer.kernels.elementwise.rms_norm import add_rms_norm
from infer.kernels.linear import pdl, wgmma
from infer.kernels.linear.coded import FLOATS, FOUR_BITS, TABLED, CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import coded_linear
from infer.kernels.linear.cuda import Matrix, Variant, compile_variants
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import launch, launch_add, launch_of_sum, linear, norm_linear
from infer.kernels.linear.wgmma import WgmmaConfig

EPS, BYTES_PER_S, REPEATS = 1e-6, 4.2e12, 15
FORMS = {
    "bf16": None,
    "fp8": CodedForm("fp8"),
    "fp8-blocks": CodedForm("fp8", 128, scale_rows=128),
    "int8": CodedForm("int8"),
    "int4": CodedForm("int4", 128),
    "int4-32": CodedForm("int4", 32),
    "int4-minima": CodedForm("int4", 32, has_minima=True),
    "e5m2": CodedForm("e5m2"),
    "nf4": CodedForm("nf4", 64),
    "lut4": CodedForm("lut4"),
}

Weights = torch.Tensor | CodedWeights
Plan = PdlConfig | WgmmaConfig | None  # None: the library's product


class Shape(NamedTuple):
    """The matrices of a layer."""

    hidden: int
    qkv: int
    attended: int
    intermediate: int
    num_layers: int  # of the chain

    def matrices(self, form: CodedForm | None) -> dict[str, Matrix]:
        """Each with what it has around it."""
        D, qkv, o, F, _ = self
        return {
            "qkv": Matrix(qkv, D, reads=True, form=form),
            "o": Matrix(D, o, writes=True, form=form),
            "gate_up": Matrix(F, D, "silu", reads=True, form=form),
            "down": Matrix(D, F, writes=True, form=form),
        }


MODELS = {
    "8b": Shape(4096, 6144, 4096, 12288, 6),
    "1b": Shape(2048, 3072, 2048, 8192, 16),
    "0.6b": Shape(1024, 4096, 2048, 3072, 28),
}


def random_weights(num_rows: int, size: int, form: CodedForm | None) -> Weights:
    """Codes of any kind: what they stand for does not change the time."""
    if form is None:
        return torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda") * 0.02
    w = CodedWeights.empty(num_rows, size, *form, device="cuda")
    codes = torch.randint(0, 16, (min(num_rows, 1024), size), dtype=torch.uint8, device="cuda")
    if form.codes not in FOUR_BITS:
        codes = codes.view(FLOATS.get(form.codes, torch.int8))
    tables = torch.randn(len(codes), 16, device="cuda") if form.codes in TABLED else None
    scales = torch.full((len(codes), -(-size // (w.form.group or size))), 1e-3, device="cuda")
    for first in range(0, num_rows, len(codes)):
        count = min(len(codes), num_rows - first)
        minima = -scales[:count] if form.has_minima else None
        own = tables if tables is None else tables[: count if form.codes == "lut4" else 1]
        w.fill(first, codes[:count], scales[:count], minima, tables=own)
    return w


def choose(num_tokens: int, matrix: Matrix) -> Plan:
    """The cut that an engine's product of so many tokens has."""
    tuned = H200.linear
    most = tuned.pdl_tokens if matrix.form is None else tuned.coded_pdl_tokens
    few = pdl.choose(num_tokens, matrix) if num_tokens <= most else None
    N, K, gated = matrix.N, matrix.K, bool(matrix.activation)
    if isinstance(few, PdlConfig):
        return few
    if matrix.form is not None:
        return wgmma.choose_coded(num_tokens, N, K, matrix.form, gated=gated)
    most = tuned.wgmma_gate_tokens if gated or matrix.writes else tuned.wgmma_tokens
    return wgmma.choose_config(num_tokens, N, K, gated=gated) if 1 < num_tokens <= most else None


def variants(shape: Shape, form: CodedForm | None, num_tokens: int) -> Iterator[Variant]:
    """What is to be compiled for a chain with so many tokens."""
    for matrix in shape.matrices(form).values():
        plan = choose(num_tokens, matrix)
        outer = matrix, num_tokens, matrix.writes, matrix.reads
        if isinstance(plan, PdlConfig):
            yield pdl.variant_for(plan, *outer)
        elif plan is not None:
            yield wgmma.variant_for(plan, *outer)


@dataclass
class Chain:
    """Layers of one shape and form, and how each matrix is cut."""

    shape: Shape
    form: CodedForm | None

    def __post_init__(self) -> None:
        self.matrices = self.shape.matrices(self.form)
        self.layers = [
            {
                name: random_weights(m.N * (2 if m.activation else 1), m.K, self.form)
                for name, m in self.matrices.items()
            }
            for _ in range(self.shape.num_layers)
        ]
        self.gain = torch.ones(self.shape.hidden, dtype=torch.bfloat16, device="cuda")

    def take(self, num_tokens: int) -> None:
        """Cut the matrices for so many tokens, as the rule says."""
        self.plans = {name: choose(num_tokens, matrix) for name, matrix in self.matrices.items()}
        self.x = torch.randn(num_tokens, self.shape.hidden, device="cuda").bfloat16()

    @property
    def layer_bytes(self) -> int:
        """The weights of one layer."""
        return sum(
            w.num_bytes if isinstance(w, CodedWeights) else w.numel() * 2 for w in self.layers[0].values()
        )

    def run(self) -> torch.Tensor:
        """All layers, and the residual stream after them."""
        state: ResidualSum | tuple[torch.Tensor, torch.Tensor] = (self.x, self.x)
        for layer in self.layers:
            y, residual = self.read(state, layer, "qkv")
            state = self.write(y[:, : self.shape.attended], residual, layer, "o", "gate_up")
            y, residual = self.read(state, layer, "gate_up")
            state = self.write(y, residual, layer, "down", "qkv")
        return state.sum_MN if isinstance(state, ResidualSum) else state[0]

    def read(
        self,
        state: ResidualSum | tuple[torch.Tensor, torch.Tensor],
        layer: dict[str, Weights],
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of the normalised stream, and the stream."""
        plan, w, activation = self.plans[name], layer[name], self.matrices[name].activation
        if isinstance(state, ResidualSum):
            assert plan is not None
            return launch_of_sum(plan, state, w, eps=EPS, activation=activation), state.sum_MN
        if plan is None and isinstance(w, torch.Tensor):
            return norm_linear(*state, self.gain, EPS, 0.0, w, activation=activation)
        normed, residual = add_rms_norm(*state, self.gain, eps=EPS, offset=0.0)
        return self.multiply(normed, w, plan, activation), residual

    def write(
        self, y: torch.Tensor, residual: torch.Tensor, layer: dict[str, Weights], name: str, reader: str
    ) -> ResidualSum | tuple[torch.Tensor, torch.Tensor]:
        """The sum with the stream if `reader` has a kernel for it; else the product, and the stream."""
        plan = self.plans[name]
        if plan is not None and self.plans[reader] is not None:
            return launch_add(plan, ResidualInput(residual, self.gain, 0.0), y, layer[name])
        return self.multiply(y, layer[name], plan, ""), residual

    def multiply(self, x: torch.Tensor, w: Weights, plan: Plan, activation: str) -> torch.Tensor:
        """One product without a prologue."""
        if plan is not None:
            return launch(plan, x, w, activation=activation)
        if isinstance(w, torch.Tensor):
            return linear(x, w, activation=activation)
        return coded_linear(x, w, activation=activation)


def time_graph(step: Callable[[], torch.Tensor]) -> float:
    """Median seconds of a replay."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--forms", nargs="+", default=["bf16", "fp8", "int4"], choices=FORMS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument("--unpacked", action="store_true", help="coded weights in the library's products")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    if not args.unpacked:
        asked = itertools.product(args.models, args.forms, args.tokens)
        compile_variants(
            list(
                dict.fromkeys(v for model, form, n in asked for v in variants(MODELS[model], FORMS[form], n))
            )
        )
    for model in args.models:
        for form in args.forms:
            chain = Chain(MODELS[model], FORMS[form])
            for num_tokens in args.tokens:
                chain.take(num_tokens)
                if args.unpacked:
                    chain.plans = dict.fromkeys(chain.plans)
                seconds = time_graph(chain.run) / chain.shape.num_layers
                share = chain.layer_bytes / BYTES_PER_S / seconds
                layer = f"{seconds * 1e6:7.2f} us a layer  {share:5.1%}"
                print(f"{model:5} {form:12} {num_tokens:3} tokens  {layer}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
