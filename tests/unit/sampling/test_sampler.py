"""A row's token is its own affair: not its neighbours', not its index', not its batch's.

Neighbours here are as awkward as can be: greedy, penalised, biased, banned, flat (so that the filters
put every token in order), NaN. Equality is exact throughout.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from infer.sampling.params import NO_TOKEN, SamplingParams
from infer.sampling.sampler import SampleRow, _apply_mask, sample
from tests.unit.sampling.sampling_rows import GREEDY, PLAIN, random_logits, row

VOCAB = 1500
INF = float("inf")
NAN = float("nan")

MIXED_PARAMS = [
    PLAIN,
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_p=0.999),
    SamplingParams(top_k=40),
    SamplingParams(top_k=600, top_p=0.99),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=50.0, top_p=0.95),  # flat: needs every token in order
    SamplingParams(repetition_penalty=1.3, temperature=0.0),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, top_k=20),
    SamplingParams(logit_bias={3: 4.0, 700: -100.0}, top_p=0.8),
]


def mixed_rows() -> list[SampleRow]:
    return [
        row(params, seed=i, position=i * 3, tokens=(1, 2, 3, 3, 9), num_prompt=2, banned=(5,) * (i % 2))
        for i, params in enumerate(MIXED_PARAMS)
    ]


def coarse(logits: torch.Tensor) -> torch.Tensor:
    """bfloat16 logits: full of ties, as real models make them."""
    return logits.bfloat16().float()


@pytest.mark.parametrize("make", [lambda x: x, coarse], ids=["fine", "coarse"])
def test_a_row_alone_and_in_a_batch_gives_the_same_token(make) -> None:  # type: ignore[no-untyped-def]
    rows = mixed_rows()
    for attempt in range(10):
        logits = make(random_logits(len(rows), VOCAB, seed=attempt, spread=2.0))
        together = sample(logits, rows).ids
        assert together == [sample(logits[i : i + 1], [rows[i]]).ids[0] for i in range(len(rows))]


@given(order=st.permutations(range(len(MIXED_PARAMS))), size=st.integers(1, len(MIXED_PARAMS)))
def test_the_index_and_the_company_do_not_matter(order: list[int], size: int) -> None:
    rows, logits = mixed_rows(), coarse(random_logits(len(MIXED_PARAMS), VOCAB, spread=2.0))
    alone = sample(logits, rows).ids
    chosen = order[:size]
    assert sample(logits[chosen], [rows[i] for i in chosen]).ids == [alone[i] for i in chosen]


def test_ties_at_the_edge_of_a_filter_do_not_depend_on_the_neighbours() -> None:
    """Whole-number logits: hundreds of tokens tie at the edge, and a neighbour widens the candidates."""
    logits = random_logits(2, VOCAB, spread=2.0).round()
    flat = row(SamplingParams(temperature=80.0, top_p=0.99))
    for params in (SamplingParams(top_k=40), SamplingParams(top_p=0.5), SamplingParams(top_k=200, top_p=0.9)):
        for seed in range(40):
            own = row(params, seed=seed)
            assert sample(logits, [own, flat]).ids[:1] == sample(logits[:1], [own]).ids


def test_threads_do_not_matter() -> None:
    rows, logits = mixed_rows(), coarse(random_logits(len(MIXED_PARAMS), 40_000, spread=2.0))
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append([sample(logits, rows).ids, sample(logits[3:4], rows[3:4]).ids])
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_a_filter_that_keeps_the_winner_does_not_change_it() -> None:
    """Noise belongs to a token id: a filtered draw equals the plain one unless the filter removed it."""
    logits = random_logits(200, 800, spread=2.5)
    plain = sample(logits, [row(seed=i) for i in range(200)]).ids
    for params in (SamplingParams(top_k=799), SamplingParams(top_p=0.9999), SamplingParams(min_p=1e-5)):
        filtered = sample(logits, [row(params, seed=i) for i in range(200)]).ids
        same = sum(a == b for a, b in zip(plain, filtered, strict=True))
        assert same >= 198  # the filters above remove at most one token in ten thousand by weight


def test_the_same_seed_and_position_give_the_same_token_and_others_differ() -> None:
    logits = torch.zeros(1, 50_000)  # flat: two independent draws agree once in 50,000
    ids = [
        sample(logits, [row(seed=s, position=p)]).ids[0]
        for s, p in [(1, 5), (1, 5), (2, 5), (1, 6), (5, 1), (-1, 5), (2**63 - 1, 5)]
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 6


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [700, 900]] = 3.0
    assert sample(logits, [row(GREEDY), row(GREEDY)]).ids == [700, 0]


def test_top_k_of_one_is_greedy_even_among_ties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [700, 900]] = 3.0
    params = SamplingParams(top_k=1, temperature=1.5)
    assert {sample(logits, [row(params, seed=s)]).ids[0] for s in range(20)} == {700}


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-39, 5e-324])
def test_a_tiny_temperature_approaches_greedy_and_never_breaks(temperature: float) -> None:
    logits = random_logits(8, VOCAB, spread=20.0) + 1000.0
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1),
    ):
        ids = sample(logits, [row(params, seed=s) for s in range(8)]).ids
        assert ids == torch.argmax(logits, dim=-1).tolist()


def test_bias_bans_and_penalties_come_in_the_documented_order() -> None:
    """Bias first, so that a penalty multiplies the biased logit; a ban outlasts any bias."""
    logits = torch.tensor([[1.0, 4.9, 0.0]])
    doubled = SamplingParams(temperature=0.0, logit_bias={0: 4.0}, repetition_penalty=0.5)
    # token 0: (1 + 4) / 0.5 = 10 > 4.9. Penalty before bias would give 1 / 0.5 + 4 = 6 as well, so:
    halved = SamplingParams(temperature=0.0, logit_bias={0: 4.0}, repetition_penalty=2.0)
    # token 0: (1 + 4) / 2 = 2.5 < 3; penalty before bias would give 1 / 2 + 4 = 4.5 > 3
    assert sample(logits, [row(doubled, tokens=(0,), num_prompt=1)]).ids == [0]
    assert sample(torch.tensor([[1.0, 3.0, 0.0]]), [row(halved, tokens=(0,), num_prompt=1)]).ids == [1]
    banned = SamplingParams(temperature=0.0, logit_bias={0: 100.0})
    assert sample(logits, [row(banned, banned=(0, 1))]).ids == [2]


def test_penalties_come_before_temperature_and_filters() -> None:
    """Against transformers' order: penalise, then temper, then cut to the two likeliest."""
    logits = random_logits(1, 50, seed=8)
    penalised = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([[4, 7, 11]]), logits.clone())
    two_best = set(torch.topk(penalised[0], 2).indices.tolist())
    params = SamplingParams(repetition_penalty=1.8, top_k=2, temperature=5.0)
    rows = [row(params, seed=s, tokens=(4, 7, 11), num_prompt=3) for s in range(60)]
    assert set(sample(logits.expand(60, -1), rows).ids) == two_best


def test_logit_bias_is_added_to_the_logit() -> None:
    logits = torch.zeros(1, 4)
    params = SamplingParams(logit_bias={2: 2.0})
    rows = [row(params, seed=s) for s in range(5000)]
    share = sample(logits.expand(5000, -1), rows).ids.count(2) / 5000
    e2 = torch.tensor(2.0).exp().item()
    assert share == pytest.approx(e2 / (e2 + 3), abs=0.025)  # about four standard errors


@pytest.mark.parametrize(
    "params", [PLAIN, GREEDY, SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(min_p=0.3)]
)
def test_the_only_allowed_token_comes(params: SamplingParams) -> None:
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 1234] = -7.0
    assert sample(logits, [row(params)]).ids == [1234]
    all_but_nine = tuple(i for i in range(VOCAB) if i != 9)
    assert sample(random_logits(1, VOCAB), [row(params, banned=all_but_nine)]).ids == [9]


@pytest.mark.parametrize("params", MIXED_PARAMS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_with_a_broken_logit_has_no_token_and_disturbs_no_other(
    params: SamplingParams, value: float
) -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows) + 1, VOCAB)
    expected = sample(logits[1:], rows)
    logits[0, 321] = value
    broken = row(params, tokens=(1, 2), num_prompt=1, num_logprobs=3)
    found = sample(logits, [broken, *rows])
    assert found.ids == [NO_TOKEN, *expected.ids]
    assert found.logprobs == [None, *expected.logprobs]


@pytest.mark.parametrize("params", MIXED_PARAMS)
def test_a_row_with_every_token_forbidden_or_broken_has_no_token(params: SamplingParams) -> None:
    for value in (-INF, NAN):
        logits = torch.full((1, VOCAB), value)
        assert sample(logits, [row(params, tokens=(1, 2), num_prompt=1)]).ids == [NO_TOKEN]


def test_a_banned_nan_is_harmless() -> None:
    logits = random_logits(1, VOCAB)
    logits[0, 5] = NAN
    assert sample(logits, [row(GREEDY, banned=(5,))]).ids[0] not in (5, NO_TOKEN)


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 10_000])
def test_a_token_id_outside_the_vocabulary_is_refused_loudly(token_id: int) -> None:
    """The engine checks requests against the vocabulary; should it forget, nothing may pass in silence."""
    logits = random_logits(1, VOCAB)
    with pytest.raises(AssertionError, match=rf"logit_bias has token ids \[{token_id}\]"):
        sample(logits, [row(SamplingParams(logit_bias={token_id: 1.0}))])
    with pytest.raises(AssertionError, match=rf"banned has token ids \[{token_id}\]"):
        sample(logits, [row(banned=(token_id,))])
    with pytest.raises(AssertionError, match=r"banned has token ids \[-1\]"):
        sample(logits, [row(banned=(-1,))])


def test_logprobs_are_those_of_the_model_before_any_adjustment() -> None:
    logits = random_logits(1, VOCAB)
    params = SamplingParams(
        temperature=0.3, top_k=5, repetition_penalty=1.5, logit_bias={8: 100.0}, logprobs=2
    )
    found = sample(logits, [row(params, tokens=(1,), num_prompt=1, num_logprobs=2)])
    reference = torch.log_softmax(logits[0].double(), dim=-1)
    assert found.ids == [8]
    (logprobs,) = found.logprobs
    assert logprobs is not None and logprobs.token_id == 8
    assert logprobs.logprob == pytest.approx(reference[8].item(), abs=1e-5)
    assert [token_id for token_id, _ in logprobs.top] == torch.topk(reference, 2).indices.tolist()


def test_logits_are_left_as_they_were() -> None:
    rows, logits = mixed_rows(), random_logits(len(MIXED_PARAMS), VOCAB)
    before = logits.clone()
    sample(logits, rows)
    for i, one in enumerate(rows):
        sample(logits[i : i + 1], [one])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_sample_like_their_float32_values(dtype: torch.dtype) -> None:
    rows, logits = mixed_rows(), random_logits(len(MIXED_PARAMS), VOCAB).to(dtype)
    assert sample(logits, rows).ids == sample(logits.float(), rows).ids


def test_no_rows_give_no_samples() -> None:
    found = sample(torch.zeros(0, VOCAB), [])
    assert (found.ids, found.logprobs) == ([], [])


@pytest.mark.parametrize("num_words", [0, 1, 2, 7, 31, 62, 63])
def test_a_mask_forbids_all_that_it_does_not_allow(num_words: int) -> None:
    """Narrow or wide, also bits behind the vocabulary and logits that are not numbers."""
    generator = torch.Generator().manual_seed(num_words)
    vocab_size = 63 * 32 - 9
    for number in range(5):
        mask_W = torch.zeros(63, dtype=torch.int32)
        words = torch.randperm(63, generator=generator)[:num_words]
        mask_W[words] = torch.randint(-(2**31), 2**31, (num_words,), generator=generator).int()
        mask_W[62] |= -(2**31)
        logits_V = torch.randn(vocab_size, generator=generator)
        logits_V[number::50] = torch.nan
        bits_V = torch.tensor([int(mask_W[i // 32]) >> i % 32 & 1 for i in range(vocab_size)])
        expected_V = torch.where(bits_V.bool(), logits_V, -torch.inf)
        _apply_mask(logits_V, mask_W)
        assert torch.equal(logits_V.nan_to_num(9.0), expected_V.nan_to_num(9.0))
