"""Time chains of layers with coded weights (kernels/linear/coded.py), each matrix cut as the rule says.

    python -m benchmarks.kernels.linear_coded [--models 8b 0.6b] [--forms fp8 int4] [--tokens 1 16 32 64]

A chain is qkv, o, gate and up, down of several layers, captured into a graph, each kernel reading what the
one before has added; attention is left out. The bytes of all layers together do not fit the L2 cache. Beside
the time of a layer stands the share of it that reading its weights takes at 4.2 TB/s (an H200).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig, choose_coded

EPS, BYTES_PER_S, REPEATS = 1e-6, 4.2e12, 15
FORMS = {
    "fp8": CodedForm("fp8"),
    "fp8-blocks": CodedForm("fp8", 128, scale_rows=128),
    "int8": CodedForm("int8"),
    "int4": CodedForm("int4", 128),
    "int4-32": CodedForm("int4", 32),
    "int4-minima": CodedForm("int4", 128, has_minima=True),
}


class Shape(NamedTuple):
    """The matrices of a layer."""

    hidden: int
    qkv: int
    attended: int
    intermediate: int
    num_layers: int  # of the chain

    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """Outputs, inputs, gated."""
        D, qkv, o, F, _ = self
        return {"qkv": (qkv, D, False), "o": (D, o, False), "gate_up": (F, D, True), "down": (D, F, False)}


MODELS = {"8b": Shape(4096, 6144, 4096, 12288, 6), "0.6b": Shape(1024, 4096, 2048, 3072, 28)}


def random_weights(num_rows: int, size: int, form: CodedForm) -> CodedWeights:
    """Codes of any kind: what they stand for does not change the time."""
    w = CodedWeights.empty(num_rows, size, *form, device="cuda")
    codes = torch.randint(0, 16, (min(num_rows, 1024), size), dtype=torch.uint8, device="cuda")
    if form.codes != "int4":
        codes = codes.view(torch.int8) if form.codes == "int8" else codes.view(torch.float8_e4m3fn)
    scales = torch.full((len(codes), -(-size // (w.form.group or size))), 1e-3, device="cuda")
    for first in range(0, num_rows, len(codes)):
        count = min(len(codes), num_rows - first)
        w.fill(first, codes[:count], scales[:count], -scales[:count] if form.has_minima else None)
    return w


def make_chain(shape: Shape, form: CodedForm, num_tokens: int) -> tuple[Callable[[], torch.Tensor], int]:
    """A function that runs all layers, and the bytes of one of them."""
    sizes = shape.matrices()
    layers = [
        {name: random_weights(N * (1 + gated), K, form) for name, (N, K, gated) in sizes.items()}
        for _ in range(shape.num_layers)
    ]
    plans: dict[str, WgmmaConfig] = {}
    for name, (N, K, gated) in sizes.items():
        plan = choose_coded(num_tokens, N, K, layers[0][name].form, gated=gated)
        assert plan is not None, (name, N, K, form)
        plans[name] = plan
    gain = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
    squares = x.double().square().sum(1)[None]

    def step() -> torch.Tensor:
        total = ResidualSum(x, x, squares)
        for layer in layers:
            y = launch_of_sum(plans["qkv"], total, layer["qkv"], eps=EPS)[:, : shape.attended]
            total = launch_add(plans["o"], ResidualInput(total.sum_MN, gain, 0.0), y, layer["o"])
            y = launch_of_sum(plans["gate_up"], total, layer["gate_up"], eps=EPS, activation="silu")
            total = launch_add(plans["down"], ResidualInput(total.sum_MN, gain, 0.0), y, layer["down"])
        return total.sum_MN

    return step, sum(w.num_bytes for w in layers[0].values())


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
    parser.add_argument("--forms", nargs="+", default=["fp8", "int4"], choices=FORMS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 32, 64])
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    for model in args.models:
        for form in args.forms:
            for num_tokens in args.tokens:
                step, num_bytes = make_chain(MODELS[model], FORMS[form], num_tokens)
                seconds = time_graph(step) / MODELS[model].num_layers
                share = num_bytes / BYTES_PER_S / seconds
                layer = f"{seconds * 1e6:7.2f} us a layer  {share:5.1%}"
                print(f"{model:5} {form:12} {num_tokens:3} tokens  {layer}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
