"""Mixtures of experts: the reference on the CPU, and the rules for tiles."""

from __future__ import annotations

import itertools

import torch

from infer.kernels.moe.grouped import by_expert, choose_tiles, experts_mlp, max_blocks, route


def test_an_expert_that_no_token_chose_is_not_computed() -> None:
    called: list[int] = []

    def one_expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
        called.append(expert)
        return rows * (expert + 1)

    experts = torch.tensor([[4, 1], [1, 6]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    y = by_expert(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), experts, weights, one_expert)

    assert called == [1, 4, 6]
    assert y.tolist() == [[4.25, 8.5], [13.5, 18.0]]  # 0.75 * 5 + 0.25 * 2 and 0.5 * 2 + 0.5 * 7 times


def test_one_expert_with_weight_one_is_a_plain_mlp() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(3, 8), torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    y = experts_mlp(x, torch.ones(3, 1).int(), torch.ones(3, 1), gate_up, down, activation="silu")
    gate, up = (x @ gate_up[1].T).chunk(2, dim=-1)
    torch.testing.assert_close(y, (torch.nn.functional.silu(gate) * up) @ down[1].T)


def test_shares_are_probabilities_among_all_or_add_up_to_one() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).log()  # probabilities 0, 1/3, 2/3
    experts, shares = route(logits, 1, normalized=False)
    assert experts.tolist() == [[2]]
    torch.testing.assert_close(shares, torch.tensor([[2 / 3]]))
    torch.testing.assert_close(route(logits, 1, normalized=True)[1], torch.ones(1, 1))


def test_the_most_blocks_are_reached_and_never_passed() -> None:
    for num_rows, num_experts, block in itertools.product(range(1, 9), range(1, 5), (2, 3)):
        splits = (
            split
            for split in itertools.product(range(num_rows + 1), repeat=num_experts)
            if sum(split) == num_rows
        )
        needed = max(sum(-(-count // block) for count in split) for split in splits)
        assert max_blocks(num_rows, num_experts, block) == needed


def test_tiles_grow_with_the_rows_of_an_expert_but_not_along_k() -> None:
    heights = {rows: choose_tiles(rows, 8, 2)[0].block_t for rows in (1, 64, 128, 256, 512, 16384)}
    assert heights == {1: 16, 64: 16, 128: 32, 256: 64, 512: 64, 16384: 128}
    for rows in (1, 64, 128, 4096, 65536):
        gate_up, down = choose_tiles(rows, 8, 2)
        assert gate_up.block_k == down.block_k == 64 and gate_up.block_t == down.block_t
    assert choose_tiles(65536, 8, 4)[0].block_k == 32
