"""Time the linears of few tokens against F.linear, at the shapes of real models.

python -m benchmarks.kernels.linear_small [--models NAME ...] [--tokens M ...] [--out FILE]
python -m benchmarks.kernels.linear_small --sweep [--all] [--apply] [--budget SECONDS]

Two questions are asked for each number of tokens. One matrix alone: how much of the bandwidth of a read does
it reach? The weight is one of many copies that overflow the L2 cache, and the calls are replayed from a
CUDA graph. All matrices of a model as a chain, in the order of a decoding step, with the norms and gates
between them, without attention: how much of the step's roofline is left to gain?

The competitor is what the engine would do without them: `add_rms_norm`, F.linear, `gated_activation`.
`--sweep` tries other tiles (see linear_sweep.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernels.report import environment
from benchmarks.kernels.timing import time_calls
from benchmarks.machine import parse, write
from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.elementwise.rms_norm import add_rms_norm
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import (
    can_add,
    linear,
    linear_add,
    linear_of_sum,
    norm_linear,
)

EPS = 1e-6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROTATED_BYTES = 320 << 20  # several times the L2 cache
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear of a layer; `num_outputs` counts the gate half only when gated."""

    name: str
    num_outputs: int
    num_inputs: int
    gated: bool = False
    norm: bool = False  # a norm and the residual come before it

    @property
    def num_rows(self) -> int:
        """Rows of the stored weight."""
        return self.num_outputs * (2 if self.gated else 1)

    @property
    def num_bytes(self) -> int:
        """What every call has to read."""
        return self.num_rows * self.num_inputs * 2

    def make_weight(self) -> torch.Tensor:
        """A weight as a trained model might have it."""
        return torch.randn(self.num_rows, self.num_inputs, device="cuda", dtype=_DTYPE) * 0.02


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of one model."""

    name: str
    num_layers: int
    hidden: int
    qkv: int
    attention: int  # outputs of attention: inputs of o
    intermediate: int
    vocabulary: int

    @property
    def layer(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """The matrices of a layer, in the order of a step."""
        return (
            Matrix("qkv", self.qkv, self.hidden, norm=True),
            Matrix("o", self.hidden, self.attention),
            Matrix("gate_up", self.intermediate, self.hidden, gated=True, norm=True),
            Matrix("down", self.hidden, self.intermediate),
        )

    @property
    def head(self) -> Matrix:
        """The matrix behind the last layer."""
        return Matrix("head", self.vocabulary, self.hidden, norm=True)

    @property
    def num_bytes(self) -> int:
        """All weights of a step."""
        return self.num_layers * sum(matrix.num_bytes for matrix in self.layer) + self.head.num_bytes


MODELS = (
    Model("Qwen3-0.6B", 28, 1024, 4096, 2048, 3072, 151936),
    Model("Llama-3.2-1B", 16, 2048, 3072, 2048, 8192, 128256),
    Model("Qwen3-8B", 36, 4096, 6144, 4096, 12288, 151936),
)

Call = Callable[..., torch.Tensor]


def ours(matrix: Matrix) -> Call:
    """The call the engine makes for this matrix."""
    if matrix.gated:
        return lambda x, residual, gain, w: norm_linear(x, residual, gain, EPS, 0.0, w, activation="silu")[0]
    if matrix.norm:
        return lambda x, residual, gain, w: norm_linear(x, residual, gain, EPS, 0.0, w)[0]
    return lambda x, residual, gain, w: linear(x, w)


def library(matrix: Matrix) -> Call:
    """The same by the library's matrix product."""

    def call(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if matrix.norm:
            x, _ = add_rms_norm(x, residual, gain, eps=EPS)
        y = F.linear(x, w)
        return gated_activation(y, activation="silu") if matrix.gated else y

    return call


def make_inputs(
    matrix: Matrix, num_tokens: int, weights: list[torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """x, residual, norm weight and one of the weights, for every call of the graph."""
    K = matrix.num_inputs
    x, residual = (torch.randn(num_tokens, K, device="cuda", dtype=_DTYPE) for _ in range(2))
    gain = torch.rand(K, device="cuda", dtype=_DTYPE) + 0.5
    return [(x, residual, gain, w) for w in weights]


def make_weights(matrix: Matrix) -> list[torch.Tensor]:
    """So many copies that the cache has forgotten one before it comes again."""
    return [matrix.make_weight() for _ in range(max(2, -(-_ROTATED_BYTES // matrix.num_bytes)))]


def read_gb_per_s() -> float:
    """The ceiling: the best of a few reductions over 2 GiB."""
    source = torch.randn(1 << 29, device="cuda")
    device, num_bytes = source.device, source.numel() * source.element_size()
    reductions: tuple[Call, ...] = (torch.sum, torch.amax, lambda x: torch.linalg.vector_norm(x, ord=1))
    return max(num_bytes / time_calls(call, [(source,)] * 2, device) / 1e9 for call in reductions)


def relative_error(matrix: Matrix, inputs: tuple[torch.Tensor, ...]) -> float:
    """Of our result against the library's, relative to the largest element."""
    expected = library(matrix)(*inputs).float()
    return float((ours(matrix)(*inputs).float() - expected).abs().max() / expected.abs().max())


def time_matrix(model: Model, matrix: Matrix, tokens: list[int], ceiling: float) -> list[dict[str, object]]:
    """One row per number of tokens."""
    rows: list[dict[str, object]] = []
    weights = make_weights(matrix)
    for num_tokens in tokens:
        inputs = make_inputs(matrix, num_tokens, weights)
        error = relative_error(matrix, inputs[0])
        device = weights[0].device
        seconds = {name: time_calls(call(matrix), inputs, device) for name, call in IMPLEMENTATIONS.items()}
        rows.append(_row(model, matrix.name, num_tokens, matrix.num_bytes, seconds, ceiling, error))
    return rows


def time_chain(model: Model, tokens: list[int], ceiling: float) -> list[dict[str, object]]:
    """All matrices of a step, each with weights of its own."""
    layers = [[matrix.make_weight() for matrix in model.layer] for _ in range(model.num_layers)]
    head = model.head.make_weight()
    gain = torch.rand(model.hidden, device="cuda", dtype=_DTYPE) + 0.5
    rows: list[dict[str, object]] = []
    for num_tokens in tokens:
        x = torch.randn(num_tokens, model.hidden, device="cuda", dtype=_DTYPE)
        chains: dict[str, Call] = {
            "ours": lambda x: _our_step(model, x, gain, layers, head),
            "library": lambda x: _library_step(model, x, gain, layers, head),
        }
        seconds = {name: time_calls(chain, [(x,)] * 2, x.device) for name, chain in chains.items()}
        rows.append(_row(model, "chain", num_tokens, model.num_bytes, seconds, ceiling, None))
    return rows


def _our_step(
    model: Model, x: torch.Tensor, gain: torch.Tensor, layers: list[list[torch.Tensor]], head: torch.Tensor
) -> torch.Tensor:
    stream: torch.Tensor | ResidualSum = x
    residual = torch.zeros_like(x)
    readers = [*(qkv for qkv, *_ in layers[1:]), None]
    for (qkv, o, gate_up, down), reader in zip(layers, readers, strict=True):
        y, residual = read_stream(stream, residual, gain, qkv, gated=False)
        y = y[:, : model.attention]  # the first columns stand in for attention's output
        stream = write_stream(y, o, residual, gain, gate_up, gated=True)
        y, residual = read_stream(stream, residual, gain, gate_up, gated=True)
        stream = write_stream(y, down, residual, gain, reader, gated=False)
    return read_stream(stream, residual, gain, head, gated=False)[0]


def read_stream(
    x: torch.Tensor | ResidualSum,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    w: torch.Tensor,
    *,
    gated: bool,
    compiled: CompiledLinears | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As a dense projection does it (quant/dense.py)."""
    activation = "silu" if gated else ""
    if isinstance(x, ResidualSum):
        return linear_of_sum(x, EPS, w, activation=activation, compiled=compiled), x.sum_MN
    return norm_linear(x, residual, gain, EPS, 0.0, w, activation=activation, compiled=compiled)


def write_stream(
    x: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    reader: torch.Tensor | None,
    *,
    gated: bool,
    compiled: CompiledLinears | None = None,
) -> torch.Tensor | ResidualSum:
    """As a dense projection does it (quant/dense.py)."""
    if reader is None or not can_add(x, w, reader, gated=gated, compiled=compiled):
        return linear(x, w, compiled=compiled)
    return linear_add(ResidualInput(residual, gain, 0.0), x, w, compiled=compiled)


def _library_step(
    model: Model, x: torch.Tensor, gain: torch.Tensor, layers: list[list[torch.Tensor]], head: torch.Tensor
) -> torch.Tensor:
    residual = torch.zeros_like(x)
    for qkv, o, gate_up, down in layers:
        y, residual = add_rms_norm(x, residual, gain, eps=EPS)
        x = F.linear(F.linear(y, qkv)[:, : model.attention], o)
        y, residual = add_rms_norm(x, residual, gain, eps=EPS)
        x = F.linear(gated_activation(F.linear(y, gate_up), activation="silu"), down)
    return F.linear(add_rms_norm(x, residual, gain, eps=EPS)[0], head)


IMPLEMENTATIONS: dict[str, Callable[[Matrix], Call]] = {"ours": ours, "library": library}


def _row(
    model: Model,
    name: str,
    num_tokens: int,
    num_bytes: int,
    seconds: dict[str, float],
    ceiling: float,
    error: float | None,
) -> dict[str, object]:
    shares = {which: num_bytes / time / 1e9 / ceiling for which, time in seconds.items()}
    print(
        f"{model.name:13} {name:8} M={num_tokens:<4}"
        + "".join(f" {which} {seconds[which] * 1e6:8.1f} us {shares[which]:4.0%}" for which in seconds)
        + ("" if error is None else f"  error {error:.1e}"),
        flush=True,
    )
    return {
        "model": model.name,
        "matrix": name,
        "tokens": num_tokens,
        "us": {which: time * 1e6 for which, time in seconds.items()},
        "share_of_read": shares,
        "error": error,
    }


def main(argv: list[str] | None = None) -> int:
    """Parse the flags and run what they ask for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description="time the linears of few tokens")
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--chain", action="store_true", help="only all matrices of a model one after another")
    parser.add_argument("--sweep", action="store_true", help="try other tiles and print the best as JSON")
    parser.add_argument(
        "--apply", action="store_true", help="with --sweep: write them into config/profiles/hopper_h200.py"
    )
    parser.add_argument(
        "--all", action="store_true", help="with --sweep: also what stands alone, the head and dot products"
    )
    parser.add_argument("--budget", type=float, default=220.0, help="seconds that --sweep may take")
    arguments = parse(parser, argv)
    models = [model for model in MODELS if not arguments.models or model.name in arguments.models]

    with torch.inference_mode():
        if arguments.sweep:
            from benchmarks.kernels.linear_sweep import run_sweep

            return run_sweep(
                models, arguments.budget, everything=arguments.all, apply=arguments.apply, out=arguments.out
            )
        ceiling = read_gb_per_s()
        facts = environment(torch.device("cuda")) | {"read_gb_per_s": ceiling}
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        rows: list[dict[str, object]] = []
        for model in models:
            for matrix in () if arguments.chain else (*model.layer, model.head):
                rows += time_matrix(model, matrix, arguments.tokens, ceiling)
            rows += time_chain(model, arguments.tokens, ceiling)
    write({"environment": facts, "results": rows}, arguments.out)
    wrong = [row for row in rows if isinstance(row["error"], float) and not row["error"] < 2e-2]
    print(f"{len(rows) - len(wrong)} of {len(rows)} agree with the library")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
