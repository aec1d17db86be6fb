"""The experts of few tokens, and coded experts in order, on a real GPU: real shapes, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from infer.config.profiles.hopper_h200 import H200
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.cuda import is_for
from infer.kernels.moe.coded_cuda import GroupedLinear
from infer.kernels.moe.coded_grouped import coded_expert_rows, expand_stack
from infer.kernels.moe.few import ExpertShape, FewExperts
from infer.kernels.moe.grouped import route, sum_choices
from infer.kernels.runtime.profiles import gpu_of
from infer.quant.rounding import round_rows
from tests.gpu.graphs import capture
from tests.kernels.moe_contract import assert_near

D, F, E, C = 2048, 768, 64, 8  # Qwen3-30B-A3B with half of its experts
FORMS = [CodedForm("fp8"), CodedForm("fp8", 128, False, 128), CodedForm("int4", 128), CodedForm("int8")]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_for(gpu_of(torch.device("cuda"))), reason="kernels for Hopper"
    ),
]


def dense(rows: int, size: int) -> torch.Tensor:
    return torch.empty(E, rows, size, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)


def coded(rows: int, size: int, form: CodedForm) -> CodedWeights:
    one = CodedWeights.empty(rows, size, *form, device="cuda")
    stacks = {
        name: torch.zeros((E, *t.shape), dtype=t.dtype, device="cuda") for name, t in one.tensors().items()
    }
    for expert, numbers in enumerate(dense(rows, size)):
        parts = {name: stack[expert] for name, stack in stacks.items()}
        one.with_tensors(parts).fill(0, *round_rows(numbers, one.form))
    return one.with_tensors(stacks)


def expected_of(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One expert after the other in float64."""
    experts_TC, weights_TC = route(logits, C, normalized=True)
    outputs = torch.zeros(len(x), D, device="cuda", dtype=torch.float64)
    for expert in range(E):
        own = (experts_TC == expert).nonzero()
        gate, up = (x[own[:, 0]].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        outputs.index_add_(0, own[:, 0], result * weights_TC[own[:, 0], own[:, 1]].double().unsqueeze(1))
    return outputs


@pytest.mark.parametrize("form", [None, *FORMS])
def test_few_tokens_in_a_graph(form: CodedForm | None) -> None:
    torch.manual_seed(0)
    stacks = [dense(2 * F, D), dense(D, F)] if form is None else [coded(2 * F, D, form), coded(D, F, form)]
    plain = [
        stack if isinstance(stack, torch.Tensor) else expand_stack(stack, torch.float32) for stack in stacks
    ]
    forms = [stack.form if isinstance(stack, CodedWeights) else None for stack in stacks]
    few = FewExperts(ExpertShape(D, F, E, C, True, "silu", *forms), H200.linear)
    few.load(torch.device("cuda"))
    for num_tokens in (1, 3, 8):
        assert few.is_for(num_tokens)
        x, logits = (torch.randn(num_tokens, n, device="cuda").bfloat16() for n in (D, E))

        def run(x: torch.Tensor = x, logits: torch.Tensor = logits) -> torch.Tensor:
            y = few.down(few.gated(x, 0.0, logits, stacks[0]), logits, stacks[1])
            assert isinstance(y, torch.Tensor)
            return y

        first = run().clone()
        assert_near(first, expected_of(x, logits, plain[0], plain[1]))
        graph, y = capture(run)
        for _ in range(20):
            graph.replay()
        assert torch.equal(y, first)


@pytest.mark.parametrize("form", FORMS)
def test_coded_rows_in_order_and_unpacked(form: CodedForm) -> None:
    torch.manual_seed(0)
    gate_up, down = coded(2 * F, D, form), coded(D, F, form)
    plain = [expand_stack(stack, torch.float32) for stack in (gate_up, down)]
    both = GroupedLinear(gate_up.form, F, D, "silu"), GroupedLinear(down.form, D, F, "")
    for kernel in both:
        kernel.load(torch.device("cuda"))
        assert kernel.num_ready
    for num_tokens in (9, 33, 100, 250, 400):  # the last with all matrices unpacked
        x, logits = (torch.randn(num_tokens, n, device="cuda").bfloat16() for n in (D, E))
        routed = route(logits, C, normalized=True)
        y = sum_choices(coded_expert_rows(x, *routed, gate_up, down, activation="silu", compiled=both))
        assert_near(y, expected_of(x, logits, plain[0], plain[1]))
