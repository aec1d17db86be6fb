"""The kernels of a mixture of experts on a real GPU: their contract, real shapes, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.moe.grouped import experts_mlp, experts_mlp_reference, route, route_reference
from tests.gpu.graphs import capture
from tests.kernels.moe_contract import MoeContract, assert_near

REAL = {"Mixtral 8x7B": (4096, 14336, 8, 2), "Qwen3-30B-A3B": (2048, 768, 128, 8)}  # D, F, E, C
TOKENS = [1, 2, 7, 16, 64, 333, 2048]


def make_experts(model: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_size, size, num_experts, _ = REAL[model]
    gate_up = torch.empty(num_experts, 2 * size, hidden_size, device="cuda", dtype=dtype).normal_(0, 0.02)
    down = torch.empty(num_experts, hidden_size, size, device="cuda", dtype=dtype).normal_(0, 0.02)
    return gate_up, down


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestCompiledExperts(MoeContract):
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("model", REAL)
class TestRealShapes:
    def test_experts_mlp_in_bfloat16(self, model: str) -> None:
        torch.manual_seed(0)
        hidden_size, _, num_experts, num_choices = REAL[model]
        gate_up, down = make_experts(model)
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16()
            logits = torch.randn(num_tokens, num_experts, device="cuda").bfloat16().float()
            experts_TC, weights_TC = route(logits, num_choices, normalized=True)
            y = experts_mlp(x, experts_TC, weights_TC, gate_up, down, activation="silu")
            # In float32 one expert after the other: float64 copies of all experts would not fit.
            outputs = torch.zeros(num_tokens, hidden_size, device="cuda", dtype=torch.float64)
            for expert in range(num_experts):
                own = (experts_TC == expert).nonzero()
                if len(own):
                    gate, up = (x[own[:, 0]].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
                    result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
                    share = weights_TC[own[:, 0], own[:, 1]].double()
                    outputs.index_add_(0, own[:, 0], result * share.unsqueeze(1))
            assert_near(y, outputs)

    def test_the_same_input_gives_the_same_bits_again(self, model: str) -> None:
        hidden_size, _, num_experts, num_choices = REAL[model]
        gate_up, down = make_experts(model)
        for num_tokens in (1, 16, 333):
            x = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16()
            routed = route(torch.randn(num_tokens, num_experts, device="cuda"), num_choices, normalized=True)
            first = experts_mlp(x, *routed, gate_up, down, activation="silu")
            for _ in range(20):
                assert torch.equal(experts_mlp(x, *routed, gate_up, down, activation="silu"), first)

    @pytest.mark.parametrize("num_tokens", [1, 8, 64])
    def test_a_captured_graph_follows_its_inputs(self, model: str, num_tokens: int) -> None:
        """Other tokens choose other experts: whatever the first ones did must not be frozen in the graph."""
        hidden_size, _, num_experts, num_choices = REAL[model]
        gate_up, down = make_experts(model)
        x = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, num_experts, device="cuda")

        def step() -> torch.Tensor:
            routed = route(logits, num_choices, normalized=True)
            return experts_mlp(x, *routed, gate_up, down, activation="silu")

        graph, y = capture(step)
        for _ in range(5):
            x.normal_()
            logits.normal_()
            graph.replay()
            assert torch.equal(y, step())

    def test_route(self, model: str) -> None:
        _, _, num_experts, num_choices = REAL[model]
        logits = torch.randn(2048, num_experts, device="cuda")
        experts_TC, weights_TC = route(logits, num_choices, normalized=False)
        expected, their_weights = route_reference(logits, num_choices, False)
        assert torch.equal(experts_TC, expected)
        torch.testing.assert_close(weights_TC, their_weights)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_float32_is_exact_enough_for_parity() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(8, 2 * 512, 1024, device="cuda") * 0.03
    down = torch.randn(8, 1024, 512, device="cuda") * 0.04
    x = torch.randn(300, 1024, device="cuda")
    routed = route(torch.randn(300, 8, device="cuda"), 2, normalized=True)
    exact = experts_mlp_reference(
        x.double(), routed[0], routed[1].double(), gate_up.double(), down.double(), "silu"
    )
    assert_near(experts_mlp(x, *routed, gate_up, down, activation="silu"), exact)
