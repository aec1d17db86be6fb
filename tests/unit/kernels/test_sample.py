"""The draw follows softmax, and its noise is a good hash of (seed, position, token id).

Frequencies are judged by a chi-square test: seeds are fixed, so a p-value above 1e-4 is a fact of the
code and not of luck. Everything else is exact.
"""

from __future__ import annotations

import pytest
import torch

from infer.kernels.sampling.gumbel import (
    argmax_rows,
    draw,
    draw_rows,
    gumbel_noise,
    noise_keys,
    row_blocks,
    topk_rows,
)

NUM_DRAWS = 40_000


def keys_of(seeds: range, positions: range) -> torch.Tensor:
    return torch.tensor([noise_keys(s, p) for s in seeds for p in positions], dtype=torch.int32)


def all_ids(vocab_size: int) -> torch.Tensor:
    return torch.arange(vocab_size).unsqueeze(0)


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How often pure chance would stray at least this far from `probs`."""
    expected = probs.double() * counts.sum()
    assert expected.min() >= 5, "merge rare cells: the chi-square law needs about five per cell"
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor(counts.numel() - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def gumbel_quantile_counts(noise: torch.Tensor, num_cells: int = 64) -> torch.Tensor:
    """How many values fall into each of `num_cells` cells of equal probability: the CDF is exp(-exp(-g))."""
    uniform = torch.exp(-torch.exp(-noise.double().flatten()))
    return torch.bincount((uniform * num_cells).long().clamp(max=num_cells - 1), minlength=num_cells)


def even(num_cells: int) -> torch.Tensor:
    return torch.full((num_cells,), 1 / num_cells, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
def test_a_token_is_drawn_as_often_as_softmax_says(spread: float) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * spread
    keys = keys_of(range(5, 6), range(NUM_DRAWS))
    columns = draw(logits.expand(NUM_DRAWS, -1), keys, all_ids(24))
    counts = torch.bincount(columns, minlength=24)
    assert chi_square_p_value(counts, torch.softmax(logits, dim=-1)) > 1e-4


def test_a_fresh_seed_per_draw_follows_the_same_law() -> None:
    """One draw per request, all at the same position: the first token of many requests."""
    logits = torch.linspace(-2, 2, 16)
    keys = keys_of(range(-NUM_DRAWS // 2, NUM_DRAWS // 2), range(7, 8))
    counts = torch.bincount(draw(logits.expand(NUM_DRAWS, -1), keys, all_ids(16)), minlength=16)
    assert chi_square_p_value(counts, torch.softmax(logits, dim=-1)) > 1e-4


def test_the_noise_has_the_gumbel_law_across_ids_positions_and_seeds() -> None:
    by_id = gumbel_noise(keys_of(range(1), range(1)), all_ids(100_000))
    by_position = gumbel_noise(keys_of(range(1), range(NUM_DRAWS)), torch.tensor([[17]]))
    by_seed = gumbel_noise(keys_of(range(NUM_DRAWS), range(1)), torch.tensor([[17]]))
    for noise in (by_id, by_position, by_seed):
        assert chi_square_p_value(gumbel_quantile_counts(noise), even(64)) > 1e-4


@pytest.mark.parametrize("between", ["ids", "positions", "seeds"])
def test_neighbours_are_independent(between: str) -> None:
    """Pairs of neighbouring noises fill an 8 x 8 grid of equally likely cells evenly."""
    if between == "ids":
        noise = gumbel_noise(keys_of(range(3), range(1)), all_ids(40_001))
        first, second = noise[:, :-1], noise[:, 1:]
    elif between == "positions":
        noise = gumbel_noise(keys_of(range(3, 4), range(20_001)), all_ids(4))
        first, second = noise[:-1], noise[1:]
    else:
        noise = gumbel_noise(keys_of(range(20_001), range(3, 4)), all_ids(4))
        first, second = noise[:-1], noise[1:]
    cells = [(torch.exp(-torch.exp(-x.double().flatten())) * 8).long() for x in (first, second)]
    counts = torch.bincount(cells[0] * 8 + cells[1], minlength=64)
    assert chi_square_p_value(counts, even(64)) > 1e-4


@pytest.mark.parametrize("step", [1, 2, 3, 4, 16, 64, 256, 1024, 4096, 32768])
def test_no_correlation_at_any_distance_between_ids(step: int) -> None:
    noise = gumbel_noise(keys_of(range(8), range(1)), all_ids(65_536)).double()
    noise = noise - noise.mean(dim=-1, keepdim=True)
    near, far = noise[:, :-step].flatten(), noise[:, step:].flatten()
    correlation = (near * far).mean() / (near.std() * far.std())
    assert abs(correlation) < 5 / near.numel() ** 0.5  # five standard errors of independent noise


def test_the_most_extreme_hashes_still_give_finite_noise() -> None:
    """Keys are searched that send id 0 to the largest and the smallest hash there is.

    The mixer is a bijection of 32-bit words, so each output is reached; it is inverted here step by step.
    """
    for hash_value in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        noise = gumbel_noise(torch.tensor([[key0_for(hash_value), 0]], dtype=torch.int32), all_ids(1))
        assert torch.isfinite(noise).all(), f"hash {hash_value:#x} gives {noise.item()}"
        assert -3 < noise.item() < 23


def key0_for(hash_value: int) -> int:
    """The first key that makes id 0 hash to `hash_value` when the second key is 0."""
    mask = 0xFFFFFFFF
    x = hash_value ^ (hash_value >> 16)
    x = (x * pow(0x846CA68B, -1, 1 << 32)) & mask
    x = x ^ (x >> 15) ^ (x >> 30)
    x = (x * pow(0x7FEB352D, -1, 1 << 32)) & mask
    x = x ^ (x >> 16)
    return x - (1 << 32) if x >= 1 << 31 else x


def test_large_noises_are_finely_graded() -> None:
    """Equal noises go to the lower id: a coarse uniform would favour the front of a large vocabulary."""
    noise = gumbel_noise(keys_of(range(1), range(20)), all_ids(151_936)).flatten()
    contenders = noise[noise > 5.0]  # 1 in 150, where the winners of flat distributions are found
    assert contenders.numel() > 15_000
    assert torch.unique(contenders).numel() > contenders.numel() - 100


def test_a_noise_depends_on_its_id_alone_not_on_its_column() -> None:
    keys = keys_of(range(2), range(3))
    whole = gumbel_noise(keys, all_ids(1000))
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for ids in (shuffled, shuffled[:257], torch.arange(3, 20), torch.tensor([999])):
        assert torch.equal(gumbel_noise(keys, ids.unsqueeze(0)), whole[:, ids])


def test_a_removed_token_is_never_drawn() -> None:
    logits = torch.zeros(8)
    logits[[0, 3, 7]] = float("-inf")
    columns = draw(logits.expand(2000, -1), keys_of(range(2000), range(1)), all_ids(8))
    assert set(columns.tolist()) == {1, 2, 4, 5, 6}


def test_removing_tokens_leaves_the_race_of_the_others_untouched() -> None:
    logits = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    keys = keys_of(range(500), range(1))
    winner = draw(logits, keys, all_ids(64))
    loser = (winner + 1) % 64
    without = logits.scatter(1, loser.unsqueeze(1), float("-inf"))
    assert torch.equal(draw(without, keys, all_ids(64)), winner)


def test_the_keys_tell_every_seed_and_position_apart() -> None:
    pairs = [(s, p) for s in (-(2**63) + 1, -1, 0, 1, 2, 2**63 - 1) for p in range(3000)]
    assert len({noise_keys(s, p) for s, p in pairs}) == len(pairs)
    assert all(-(2**31) <= key < 2**31 for pair in pairs for key in noise_keys(*pair))


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 17, 4097, 50_257])
@pytest.mark.parametrize("temperature", [1e-38, 0.3, 1.0, 4.0, 1e30])
def test_what_is_drawn_from_the_likely_ids_is_what_is_drawn_from_all(
    vocab_size: int, temperature: float
) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(8)) * 3
    logits[0] = 0.0  # all are likely
    logits[1, 1:] = float("-inf")
    logits[2:6] = logits[2:6].round()  # ties
    keys, temperature_S = keys_of(range(24), range(9, 10)), torch.full((24,), temperature)
    for rows in (slice(0, 24), slice(1, 24)):  # with and without the row that has too many
        best, peak = logits[rows].argmax(dim=1), logits[rows].amax(dim=1, keepdim=True)
        expected = draw((logits[rows] - peak) / temperature, keys[rows], all_ids(vocab_size))
        assert torch.equal(draw_rows(logits[rows], best, temperature_S[rows], keys[rows]), expected)


def test_a_row_that_has_no_next_token_disturbs_no_other() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(9))
    logits[0, 5], logits[2] = float("nan"), float("-inf")
    keys, one = keys_of(range(3), range(1)), torch.ones(3)
    alone = draw_rows(logits[1:2], logits[1:2].argmax(dim=1), one[:1], keys[1:2])
    for rows in (slice(0, 1), slice(0, 2), slice(1, 3), slice(0, 3)):
        drawn = draw_rows(logits[rows], argmax_rows(logits[rows]), one[rows], keys[rows])
        assert len(drawn) == rows.stop - rows.start and (rows == slice(0, 1) or alone in drawn)


@pytest.mark.parametrize("vocab_size", [1, 7, 511, 512, 513, 1024, 1537, 50_257])
def test_the_largest_of_a_row_is_found_wherever_it_is(vocab_size: int) -> None:
    x = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3)).round(decimals=1)  # many ties
    x[3] = float("-inf")
    x[4, -1] = 100.0
    expected = [row.index(max(row)) for row in x.tolist()]
    assert argmax_rows(x).tolist() == expected


def test_the_largest_of_a_strided_slice_is_found() -> None:
    x = torch.randn(4, 3000, generator=torch.Generator().manual_seed(4))
    assert torch.equal(argmax_rows(x[::2, 5:2000]), torch.argmax(x[::2, 5:2000], dim=-1))


def test_a_nan_counts_as_the_largest() -> None:
    x = torch.randn(2, 2000)
    x[1, 1234] = float("nan")
    assert argmax_rows(x).tolist() == [int(torch.argmax(x[0])), 1234]


@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (300, 256), (1000, 3), (20_001, 256), (50_257, 40)])
@pytest.mark.parametrize("decimals", [0, 6])
def test_the_k_largest_of_a_row_are_found(vocab_size: int, k: int, decimals: int) -> None:
    x = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(6)).round(decimals=decimals)
    x[1, vocab_size // 3 :] = float("-inf")
    x[2, -1] = 50.0
    x[3] = torch.linspace(0, 9, vocab_size)  # the k largest side by side
    values, columns = topk_rows(x, k)
    assert torch.equal(values, torch.topk(x, k, dim=-1).values)
    assert torch.equal(x.gather(1, columns), values)
    assert all(len(set(row)) == k for row in columns.tolist())


def test_a_row_of_nan_does_not_disturb_the_k_largest_of_another() -> None:
    x = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(7))
    expected = torch.topk(x[1], 50).values
    x[0] = float("nan")
    values, columns = topk_rows(x, 50)
    assert torch.equal(values[1], expected)
    assert int(columns.min()) >= 0 and int(columns.max()) < 20_000


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("num_rows", "row_len"), [(1, 10), (64, 151_936), (3, 10**8), (0, 5)])
def test_blocks_of_rows_cover_each_row_once(num_rows: int, row_len: int, device: str) -> None:
    x = torch.empty(1, 1, device=device).expand(num_rows, row_len)
    blocks = list(row_blocks(x))
    assert [i for block in blocks for i in range(num_rows)[block]] == list(range(num_rows))
    assert device == "cpu" or len(blocks) <= 1
