"""What the kernels of a mixture of experts promise, under Triton's interpreter and on a GPU.

The traps are those of `kernel_contract.py`: inputs framed by NaN, outputs that start as NaN. Products are
compared with float64, so that a float32 kernel has to be right to the last few bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import ACTIVATIONS
from infer.kernels.moe import grouped as moe
from infer.kernels.moe.grouped import (
    Tiles,
    choose_tiles,
    experts_mlp,
    experts_mlp_reference,
    max_blocks,
    order_rows,
    route,
    route_reference,
)
from infer.kernels.runtime.dispatch import use_triton
from tests.kernels.kernel_contract import FramedTensor, nan_in_fresh_memory

# Of the result, relative to its largest element; half precision rounds the gate and each expert's output.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
D, SIZE = 70, 45  # multiples of no block
SHAPES = [(1, 4, 1), (1, 8, 2), (5, 4, 2), (5, 8, 1), (33, 4, 1), (33, 8, 2)]  # T, E, C


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the tolerance of the type, of the largest element."""
    assert actual.is_contiguous() and actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[actual.dtype], f"{error:.1e}"  # NaN fails, too


class MoeContract:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture(autouse=True)
    def small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiles, groups and chunks so small that every loop goes round more than once."""
        monkeypatch.setattr(moe, "choose_tiles", lambda *_: (Tiles(16, 64, 64, num_warps=4),) * 2)
        monkeypatch.setattr(moe, "_CHUNK", 16)
        monkeypatch.setattr(moe, "_PART_ROWS", 20)
        monkeypatch.setattr(moe, "_GROUP", 3)
        monkeypatch.setattr(moe, "_BLOCK_D", 64)

    def choices(self, num_tokens: int, num_experts: int, num_choices: int) -> torch.Tensor:
        """Different experts for each token."""
        order = torch.rand(num_tokens, num_experts, device=self.device).argsort(dim=1)
        return order[:, :num_choices].int().contiguous()

    def experts(self, num_experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices that keep the size of what they multiply."""
        gate_up = torch.randn(num_experts, 2 * SIZE, D, device=self.device) * D**-0.5
        down = torch.randn(num_experts, D, SIZE, device=self.device) * SIZE**-0.5
        return gate_up.to(dtype), down.to(dtype)

    def check(
        self, experts_TC: torch.Tensor, num_experts: int, dtype: torch.dtype, activation: str = "silu"
    ) -> None:
        x = FramedTensor((len(experts_TC), D), dtype, self.device)
        weights_TC = torch.rand(experts_TC.shape, device=self.device)
        gate_up, down = self.experts(num_experts, dtype)
        with nan_in_fresh_memory():
            y = experts_mlp(x.view, experts_TC, weights_TC, gate_up, down, activation=activation)
        exact = experts_mlp_reference(
            x.view.double(), experts_TC, weights_TC.double(), gate_up.double(), down.double(), activation
        )
        assert_near(y, exact)
        x.assert_untouched()

    def test_the_kernels_and_not_the_references_are_under_test(self) -> None:
        assert use_triton(torch.zeros(1, device=self.device))

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_experts_mlp(self, shape: tuple[int, int, int]) -> None:
        self.check(self.choices(*shape), shape[1], torch.float32)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_experts_mlp_in_half_precision(self, dtype: torch.dtype) -> None:
        self.check(self.choices(5, 4, 2), 4, dtype)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_every_activation(self, activation: str) -> None:
        self.check(self.choices(3, 4, 2), 4, torch.float32, activation)

    @pytest.mark.parametrize("expert", [0, 3])
    def test_all_tokens_may_choose_the_same_expert(self, expert: int) -> None:
        self.check(torch.full((33, 1), expert, dtype=torch.int32, device=self.device), 4, torch.float32)

    def test_the_tiles_that_the_rules_choose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moe, "choose_tiles", choose_tiles)
        self.check(self.choices(40, 3, 2), 3, torch.float32)

    def test_no_token(self) -> None:
        gate_up, down = self.experts(4, torch.float32)
        nothing = torch.empty(0, 2, device=self.device)
        y = experts_mlp(
            torch.empty(0, D, device=self.device), nothing.int(), nothing, gate_up, down, activation="silu"
        )
        assert y.shape == (0, D)
        assert route(torch.empty(0, 4, device=self.device), 2, normalized=True)[0].shape == (0, 2)

    def test_a_token_has_the_same_bits_in_every_batch(self) -> None:
        x = torch.randn(20, D, device=self.device).bfloat16()
        experts_TC, weights_TC = self.choices(20, 4, 2), torch.rand(20, 2, device=self.device)
        gate_up, down = self.experts(4, torch.bfloat16)
        whole = experts_mlp(x, experts_TC, weights_TC, gate_up, down, activation="silu")
        for first, last in ((0, 1), (17, 20)):
            some = slice(first, last)
            y = experts_mlp(x[some], experts_TC[some], weights_TC[some], gate_up, down, activation="silu")
            assert torch.equal(y, whole[some])

    def test_invariant_tiles_do_not_depend_on_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []

        def count(*sizes: Any) -> Any:
            seen.append(sizes[0])
            return choose_tiles(*sizes)

        monkeypatch.setattr(moe, "choose_tiles", count)
        x, weights_TC = torch.randn(20, D, device=self.device), torch.rand(20, 2, device=self.device)
        experts_TC, (gate_up, down) = self.choices(20, 4, 2), self.experts(4, torch.float32)
        whole = experts_mlp(x, experts_TC, weights_TC, gate_up, down, activation="silu", invariant=True)
        y = experts_mlp(
            x[:1], experts_TC[:1], weights_TC[:1], gate_up, down, activation="silu", invariant=True
        )
        assert torch.equal(y, whole[:1]) and seen == [1, 1]

    def test_an_unknown_activation_is_refused(self) -> None:
        gate_up, down = self.experts(4, torch.float32)
        x = torch.zeros(1, D, device=self.device)
        with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
            experts_mlp(x, self.choices(1, 4, 1), torch.ones(1, 1), gate_up, down, activation="swish")

    @pytest.mark.parametrize("block_t", [2, 16])
    @pytest.mark.parametrize("shape", [(1, 8, 2), (5, 4, 2), (33, 8, 2), (40, 2, 1)], ids=str)
    def test_each_block_holds_rows_of_one_expert_in_order(
        self, shape: tuple[int, int, int], block_t: int
    ) -> None:
        num_rows, num_experts = shape[0] * shape[2], shape[1]
        experts_TC = self.choices(*shape)
        row_order, block_experts = (part.cpu() for part in order_rows(experts_TC, num_experts, block_t))
        of_row = experts_TC.flatten().tolist()
        expected: list[list[int]] = []
        for expert in range(num_experts):
            rows = [row for row in range(num_rows) if of_row[row] == expert]
            expected += [rows[i : i + block_t] for i in range(0, len(rows), block_t)]
        assert len(block_experts) == max_blocks(num_rows, num_experts, block_t) >= len(expected)
        for block, rows in enumerate(expected):
            padded = row_order[block * block_t : (block + 1) * block_t].tolist()
            assert padded == rows + [num_rows] * (block_t - len(rows))
            assert block_experts[block] == of_row[rows[0]]
        assert (block_experts[len(expected) :] == -1).all()

    @pytest.mark.parametrize("normalized", [True, False])
    @pytest.mark.parametrize(
        "shape", [(1, 4, 1), (5, 8, 2), (33, 5, 3), (4, 128, 8), (3, 4, 4)], ids=str
    )  # T, E, C
    def test_route(self, shape: tuple[int, int, int], normalized: bool) -> None:
        num_tokens, num_experts, num_choices = shape
        logits = FramedTensor((num_tokens, num_experts), torch.float32, self.device)
        with nan_in_fresh_memory():
            experts_TC, weights_TC = route(logits.view, num_choices, normalized=normalized)
        expected, their_weights = route_reference(logits.view, num_choices, normalized)
        assert experts_TC.dtype == torch.int32 and torch.equal(experts_TC, expected)
        torch.testing.assert_close(weights_TC, their_weights)

    def test_of_two_equal_experts_the_first_is_chosen(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]], device=self.device)
        assert route(logits, 3, normalized=True)[0].tolist() == [[1, 2, 3]]

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN
    def test_damaged_logits_never_lead_to_an_expert_that_does_not_exist(self) -> None:
        for damage in (torch.nan, torch.inf, -torch.inf):
            logits = torch.full((2, 5), damage, device=self.device)
            logits[1] = 0.0
            experts_TC, weights_TC = route(logits, 2, normalized=True)
            assert int(experts_TC.min()) >= 0 and int(experts_TC.max()) < 5
            assert weights_TC[0].isnan().all() and weights_TC[1].tolist() == [0.5, 0.5]
