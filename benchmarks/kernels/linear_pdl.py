"""Time the linears of a layer that load their weights before they wait, beside Triton's.

python -m benchmarks.kernels.linear_pdl [--out FILE]

A case is a layer without attention: qkv, o, gate and up, down, with the residual stream between them. Its
calls follow each other in one graph with other weights each time, as the layers of a model do: what these
kernels gain lies between them, and none of it is seen where a matrix is timed alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.linear_small import EPS, MODELS, Model, read_stream, write_stream
from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.residual import ResidualSum
from infer.kernels.linear.small import can_add

_DTYPE = torch.bfloat16


def linear_pdl_cases(device: torch.device) -> Iterator[Case]:
    """Few tokens of small models; nothing where the kernel cannot be had."""
    for model in MODELS:
        compiled = compile_model(model, device)
        if compiled.pdl.ready:
            yield from (_case(model, num_tokens, compiled) for num_tokens in (1, 8))


def compile_model(model: Model, device: torch.device) -> CompiledLinears:
    """Compile what its layers ask for."""
    matrices = [
        Matrix(
            matrix.num_outputs, matrix.num_inputs, "silu" if matrix.gated else "",
            reads=matrix.norm, writes=not matrix.norm,
        )
        for matrix in model.layer
    ]  # fmt: skip
    compiled = CompiledLinears(device)
    for matrix in matrices:
        compiled.want(matrix)
    compiled.load()
    return compiled


def _case(model: Model, num_tokens: int, compiled: CompiledLinears) -> Case:
    device = compiled.device

    def make_inputs() -> tuple[torch.Tensor, ...]:
        stream = torch.randn(num_tokens, model.hidden, device=device, dtype=_DTYPE)
        gain = torch.rand(model.hidden, device=device, dtype=_DTYPE) + 0.5
        squares = stream.double().square().sum(1)[None].contiguous()
        # small additions to the stream: its own rounding is then the error that is seen
        weights = [matrix.make_weight() * (1.0 if matrix.norm else 0.25) for matrix in model.layer]
        return (stream, stream * gain, squares, gain, *weights)

    def layer(
        stream: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, gain: torch.Tensor,
        qkv: torch.Tensor, o: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
        compiled: CompiledLinears | None = compiled,
    ) -> torch.Tensor:  # fmt: skip
        """As a layer between others does it; the sum after it."""
        is_added = can_add(stream, down, qkv, gated=False, compiled=compiled)
        x = ResidualSum(stream, scaled, squares) if is_added else stream
        y, residual = read_stream(x, None, gain, qkv, gated=False, compiled=compiled)
        x = write_stream(y[:, : model.attention], o, residual, gain, gate_up, gated=True, compiled=compiled)
        y, residual = read_stream(x, residual, gain, gate_up, gated=True, compiled=compiled)
        x = write_stream(y, down, residual, gain, qkv, gated=False, compiled=compiled)
        return x.sum_MN if isinstance(x, ResidualSum) else x + residual

    def by_triton(*inputs: torch.Tensor) -> torch.Tensor:
        return layer(*inputs, None)  # type: ignore[call-arg, arg-type]

    def in_float64(
        stream: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, gain: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        r, gains = stream.double(), gain.double()
        qkv, o, gate_up, down = (weight.double() for weight in weights)

        def norm(r: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(r, (model.hidden,), gains, EPS)

        r = r + (norm(r) @ qkv.T)[:, : model.attention] @ o.T
        gate, up = (norm(r) @ gate_up.T).chunk(2, dim=1)
        return (r + (torch.nn.functional.silu(gate) * up) @ down.T).to(_DTYPE)

    return Case(
        kernel="a layer's linears",
        shape=f"{model.name}, {num_tokens} token{'s' if num_tokens > 1 else ''}",
        dtype=_DTYPE,
        num_bytes=sum(matrix.num_bytes for matrix in model.layer),
        make_inputs=make_inputs,
        reference=in_float64,
        implementations={"infer": layer, "Triton": by_triton},
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time linears that load before they wait", [linear_pdl_cases]))
