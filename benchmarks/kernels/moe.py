"""Time the experts of a mixture, at the shapes of Mixtral 8x7B and Qwen3-30B-A3B.

python -m benchmarks.kernels.moe [--out FILE] [--device cpu|cuda]

The bytes of a case are the weights of the experts that its tokens chose, each once, and the tokens: with few
tokens nothing else matters. The competitor on a GPU sends every token through every expert in
batched products, which is what PyTorch can do without asking the device which experts were chosen. On the
CPU the loop over the chosen experts is the product, and is compared with the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.elementwise.gated_activation import gated_activation_reference
from infer.kernels.moe.grouped import experts_mlp, experts_mlp_reference, route

# D, F, E, C
MODELS = {"Mixtral 8x7B": (4096, 14336, 8, 2), "Qwen3-30B-A3B": (2048, 768, 128, 8)}
TINY = {"tiny": (256, 128, 16, 2)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)


def experts_cases(device: torch.device) -> Iterator[Case]:
    """Every model at every number of tokens; something a CPU can do in a moment where there is no GPU."""
    on_gpu = device.type == "cuda"
    for name, sizes in (MODELS if on_gpu else TINY).items():
        weights = _make_weights(*sizes[:3], device)
        for num_tokens in TOKENS if on_gpu else TOKENS[:6]:
            yield _case(name, sizes, num_tokens, weights, device)


def _make_weights(
    hidden_size: int, size: int, num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gate_up = torch.empty(num_experts, 2 * size, hidden_size, device=device, dtype=dtype).normal_(0, 0.02)
    down = torch.empty(num_experts, hidden_size, size, device=device, dtype=dtype).normal_(0, 0.02)
    return gate_up, down


def _case(
    name: str,
    sizes: tuple[int, int, int, int],
    num_tokens: int,
    weights: tuple[torch.Tensor, torch.Tensor],
    device: torch.device,
) -> Case:
    hidden_size, size, num_experts, num_choices = sizes
    gate_up, down = weights

    def make_inputs() -> tuple[torch.Tensor, ...]:
        x = torch.randn(num_tokens, hidden_size, device=device).to(gate_up.dtype)
        logits = torch.randn(num_tokens, num_experts, device=device)
        return (x, *route(logits, num_choices, normalized=True))

    def every_expert(x: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        gated_ETF = gated_activation_reference(torch.matmul(x, gate_up.transpose(1, 2)), "silu")
        shares_TE = x.new_zeros(num_tokens, num_experts).scatter_(
            1, experts_TC.long(), weights_TC.to(x.dtype)
        )
        return torch.einsum("etd,te->td", torch.matmul(gated_ETF, down.transpose(1, 2)), shares_TE)

    # as many experts as independent tokens choose on average
    num_busy = num_experts * (1 - (1 - num_choices / num_experts) ** num_tokens)
    num_elements = num_busy * 3 * hidden_size * size + 2 * num_tokens * hidden_size
    return Case(
        kernel="experts_mlp",
        shape=f"{name}, {num_tokens} tokens",
        dtype=gate_up.dtype,
        num_bytes=int(num_elements * gate_up.element_size()),
        make_inputs=make_inputs,
        reference=lambda x, experts_TC, weights_TC: experts_mlp_reference(
            x, experts_TC, weights_TC, gate_up, down, "silu"
        ),
        implementations={
            "infer": lambda x, experts_TC, weights_TC: experts_mlp(
                x, experts_TC, weights_TC, gate_up, down, activation="silu"
            ),
            "every expert": every_expert,
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time the experts of a mixture", [experts_cases]))
