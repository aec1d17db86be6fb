"""The experts of many rows in CUDA C++ (linear/grouped.cu) on a real GPU: results, bits, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.linear.cuda import is_for
from infer.kernels.moe.grouped import experts_mlp, order_rows, route
from infer.kernels.moe.many import BLOCK_ROWS, MIN_ROWS, ManyRows
from infer.kernels.runtime.profiles import gpu_of
from tests.gpu.graphs import capture
from tests.kernels.moe_contract import assert_near

CUDA = torch.device("cuda")
D, F, E, C = 2048, 768, 128, 8  # Qwen3-30B-A3B


def make_kernels(activation: str = "silu", hidden_size: int = D, size: int = F) -> tuple[ManyRows, ManyRows]:
    if not is_for(gpu_of(CUDA)):
        pytest.skip("needs a whole Hopper")
    both = ManyRows(size, hidden_size, activation), ManyRows(hidden_size, size, "")
    for kernel in both:
        kernel.load(CUDA)
    return both


def make_experts(
    num_experts: int = E, hidden_size: int = D, size: int = F
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.empty(num_experts, 2 * size, hidden_size, device="cuda", dtype=torch.bfloat16)
    down = torch.empty(num_experts, hidden_size, size, device="cuda", dtype=torch.bfloat16)
    return gate_up.normal_(0, 0.02), down.normal_(0, 0.02)


def exact(
    x: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """In float64, one expert after the other."""
    outputs = torch.zeros(x.shape, device="cuda", dtype=torch.float64)
    for expert in range(len(gate_up)):
        tokens, choices = (experts_TC == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        outputs.index_add_(0, tokens, result * weights_TC[tokens, choices].double().unsqueeze(1))
    return outputs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestManyRows:
    @pytest.mark.parametrize("num_tokens", [MIN_ROWS * E // C, 1000, 2501, 9000])
    def test_results(self, num_tokens: int) -> None:
        torch.manual_seed(num_tokens)
        gate_up, down = make_experts()
        wide = torch.randn(num_tokens, D + 64, device="cuda").bfloat16()
        x = wide[:, :D]  # rows with gaps between them
        routed = route(torch.randn(num_tokens, E, device="cuda"), C, normalized=True)
        y = experts_mlp(x, *routed, gate_up, down, activation="silu", many=make_kernels())
        assert_near(y, exact(x, *routed, gate_up, down))

    def test_uneven_experts(self) -> None:
        """Experts with no row, one row, whole blocks, and most of the rows."""
        torch.manual_seed(0)
        first, second = make_kernels()
        gate_up, down = make_experts(8)
        counts = [0, 1, BLOCK_ROWS, 3 * BLOCK_ROWS, 64, 65, 0, 4001]
        experts = torch.arange(8, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
        experts_TC = experts[torch.randperm(len(experts), device="cuda")].int().unsqueeze(1)
        weights_TC = torch.rand(len(experts), 1, device="cuda")
        x = torch.randn(len(experts), D, device="cuda").bfloat16()
        order = order_rows(experts_TC, 8, BLOCK_ROWS)
        gated = first.multiply(x, gate_up, len(x), *order, None, rows_per_input=1)
        y = second.multiply(gated, down, len(x), *order, weights_TC)
        assert_near(y, exact(x, experts_TC, weights_TC, gate_up, down))

    def test_sizes_that_cut_a_tile(self) -> None:
        """Tiles at the end of a matrix hold rows of the next expert, which are not stored."""
        torch.manual_seed(0)
        hidden_size, size = 320, 192
        gate_up, down = make_experts(4, hidden_size, size)
        x = torch.randn(700, hidden_size, device="cuda").bfloat16()
        routed = route(torch.randn(700, 4, device="cuda"), 2, normalized=False)
        both = make_kernels("silu", hidden_size, size)
        y = experts_mlp(x, *routed, gate_up, down, activation="silu", many=both)
        assert_near(y, exact(x, *routed, gate_up, down))

    def test_the_same_input_gives_the_same_bits_in_a_graph(self) -> None:
        torch.manual_seed(1)
        both, (gate_up, down) = make_kernels(), make_experts()
        x, logits = torch.randn(2048, D, device="cuda").bfloat16(), torch.randn(2048, E, device="cuda")

        def step() -> torch.Tensor:
            routed = route(logits, C, normalized=True)
            return experts_mlp(x, *routed, gate_up, down, activation="silu", many=both)

        graph, y = capture(step)
        for _ in range(5):
            x.normal_()
            logits.normal_()
            graph.replay()
            assert torch.equal(y, step())
