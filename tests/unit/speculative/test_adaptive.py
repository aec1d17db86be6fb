"""How many drafts each sequence gets: the optimum of brute force, and a loop that gives up and recovers."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product

import msgspec
import pytest

from infer.speculative.adaptive import (
    LEAST_GAIN,
    MOST_PROBE_STEPS,
    PRIOR_RATE,
    PROBE_STEPS,
    Acceptance,
    DraftLengths,
    MissedText,
    StepCosts,
)

# 8B in bf16 on an H200: flat while the weights are read, bound by arithmetic from about 184 tokens on
H200 = StepCosts.measured([(1, 3.97e-3), (64, 4.05e-3), (184, 4.5e-3), (368, 8.5e-3)], gap_s=0.4e-3)


def speed(
    costs: StepCosts, rows: Sequence[tuple[float, int]], counts: Sequence[int], num_others: int
) -> float:
    """Expected tokens per second, written out as in the definition."""
    tokens = num_others + sum(
        1 + sum(rate**depth for depth in range(1, count + 1))
        for (rate, _), count in zip(rows, counts, strict=True)
    )
    seconds = costs.seconds(len(rows) + num_others + sum(counts))
    if any(counts):
        seconds += costs.gap_s + costs.draft_s * max(counts)
    return tokens / seconds


def best_speed(
    costs: StepCosts, rows: Sequence[tuple[float, int]], num_others: int, room: int | None
) -> float:
    """The speed of the best of all allocations."""
    every = itertools.product(*(range(available + 1) for _, available in rows))
    return max(
        speed(costs, rows, counts, num_others) for counts in every if room is None or sum(counts) <= room
    )


def random_costs(source: random.Random) -> StepCosts:
    tokens = sorted(source.sample(range(40), source.randint(1, 6)))
    return StepCosts.measured(
        [(each, source.uniform(1, 2) + source.choice([0, 0.2]) * each) for each in tokens],
        gap_s=source.choice([0.0, 0.1, 1.0]),
        draft_s=source.choice([0.0, 0.0, 0.05, 0.4]),
    )


# -- costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_ahead", "gap_s", "longest", "expected"),
    [
        (False, 0.9, 3, 1.0 + 0.9 + 2 * 0.1 + 3 * (0.2 + 2 * 0.05)),  # one after the other
        (True, 0.9, 8, 1.0 + 8 * 0.3),  # the device is never idle
        (True, 3.0, 1, 3.0 + 2 * 0.1),  # it is
    ],
)
def test_a_device_that_is_ahead_waits_only_for_a_slower_host(
    is_ahead: bool, gap_s: float, longest: int, expected: float
) -> None:
    costs = StepCosts(
        ((1, 1.0),), gap_s=gap_s, draft_s=0.2, draft_row_s=0.05, row_gap_s=0.1, is_ahead=is_ahead
    )
    assert costs.with_drafts(1.0, 2, 2, longest) == pytest.approx(expected)


def test_seconds_are_interpolated_and_extrapolated() -> None:
    costs = StepCosts(((2, 1.0), (4, 2.0), (8, 2.5)))
    found = [costs.seconds(tokens) for tokens in (0, 1, 2, 3, 4, 6, 8, 12)]
    assert found == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 3.0])


def test_one_pair_is_a_constant() -> None:
    assert [StepCosts(((4, 2.0),)).seconds(tokens) for tokens in (1, 4, 100)] == [2.0, 2.0, 2.0]


def test_measurements_are_made_monotone() -> None:
    """The step of 2 tokens was disturbed: one of 8 tokens was faster."""
    costs = StepCosts.measured([(8, 1.2), (1, 1.0), (2, 5.0), (4, 1.3), (16, 3.0)])
    assert costs.pairs == ((1, 1.0), (2, 1.2), (4, 1.2), (8, 1.2), (16, 3.0))


def test_random_measurements_never_fall() -> None:
    source = random.Random(0)
    for _ in range(200):
        costs = random_costs(source)
        seconds = [costs.seconds(tokens) for tokens in range(80)]
        assert all(less <= later + 1e-12 for less, later in itertools.pairwise(seconds))


def test_a_roofline_is_flat_and_then_rises() -> None:
    costs = StepCosts.roofline(4.0e-3, 2.0e-5)
    assert costs.seconds(1) == costs.seconds(200) == 4.0e-3
    assert costs.seconds(400) == pytest.approx(8.0e-3)
    assert StepCosts.roofline(4.0e-3, 0.0).seconds(10_000) == 4.0e-3


def test_costs_survive_json() -> None:
    costs = StepCosts.measured([(1, 0.1), (7, 1 / 3)], gap_s=0.1, draft_s=1e-9)
    assert msgspec.json.decode(json.dumps(asdict(costs)), type=StepCosts) == costs


@pytest.mark.parametrize(
    ("pairs", "gap_s", "message"),
    [
        ((), 0.0, "need pairs"),
        (((-1, 1.0),), 0.0, "need pairs"),
        (((1, 0.0),), 0.0, "need pairs"),
        (((1, math.nan),), 0.0, "need pairs"),
        (((1, 1.0), (1, 2.0)), 0.0, r"must ascend, got \(1, 1.0\) before \(1, 2.0\)"),
        (((1, 2.0), (2, 1.0)), 0.0, "must ascend"),
        (((1, 2.0), (2, math.nan)), 0.0, "must ascend"),
        (((1, 2.0), (2, math.inf)), 0.0, "seconds of step costs must be finite"),
        (((1, 2.0),), -1.0, "gap_s of step costs must be finite and not negative, got -1.0"),
    ],
)
def test_impossible_costs_are_refused(
    pairs: tuple[tuple[int, float], ...], gap_s: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(pairs, gap_s)


# -- the choice -------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    costs = StepCosts(((2, 4.0), (3, 4.1)))
    assert DraftLengths(costs).choose([(0.8, 4), (0.3, 4)]) == [4, 1]


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all_allocations(seed: int) -> None:
    source = random.Random(seed)
    rates = [0.0, 0.05, 0.3, 0.5, 0.8, 0.95, 1.0]
    for _ in range(60):
        costs = random_costs(source)
        rows = [
            (source.choice([source.choice(rates), source.random()]), source.randint(0, 4))
            for _ in range(source.randint(1, 4))
        ]
        num_others, room = source.choice([0, 0, 3, 20]), source.choice([None, None, 0, 1, 3])
        counts = DraftLengths(costs).choose(rows, num_others, room)
        assert all(0 <= count <= available for count, (_, available) in zip(counts, rows, strict=True))
        assert room is None or sum(counts) <= room
        best, plain = (
            best_speed(costs, rows, num_others, room),
            speed(costs, rows, [0] * len(rows), num_others),
        )
        is_worth_it = len(rows) + num_others == 1 or best > (1 + LEAST_GAIN) * plain
        expected = best if is_worth_it else plain
        assert speed(costs, rows, counts, num_others) == pytest.approx(expected, rel=1e-12)
        assert is_worth_it or not any(counts)


def test_no_rows_and_no_drafts() -> None:
    lengths = DraftLengths(H200)
    assert lengths.choose([]) == []
    assert lengths.choose([], num_others=5) == []
    assert lengths.choose([(0.9, 0), (0.9, 0)]) == [0, 0]


def test_of_equal_rows_the_first_gets_the_draft() -> None:
    lengths = DraftLengths(StepCosts(((3, 1.0), (4, 1.0), (5, 100.0))))
    assert lengths.choose([(0.5, 3)] * 3) == [1, 0, 0]
    assert lengths.choose([(1.0, 3)] * 3) == [1, 0, 0]


def test_drafts_that_gain_nothing_are_not_taken() -> None:
    assert DraftLengths(StepCosts(((1, 1.0),))).choose([(0.0, 4)]) == [0]


def test_a_gap_is_paid_once_for_all_rows() -> None:
    """A gap of half a step is too much for one likely draft, and little for a draft of each of eight."""
    costs = StepCosts(((1, 1.0),), gap_s=0.5)
    assert DraftLengths(costs).choose([(0.4, 1)]) == [0]
    assert DraftLengths(costs).choose([(0.7, 1)] * 8) == [1] * 8


def test_a_draft_model_pays_for_the_longest_window() -> None:
    free = DraftLengths(StepCosts(((1, 1.0),)))
    paid = DraftLengths(StepCosts(((1, 1.0),), draft_s=0.2))
    rows = [(0.7, 8), (0.5, 8)]
    assert free.choose(rows) == [8, 8]
    assert paid.choose(rows) == [2, 2]


def test_sequences_without_drafts_count() -> None:
    """One row's drafts must not slow two hundred others by more than they gain."""
    costs = StepCosts.roofline(4.0e-3, 2.0e-5)
    assert DraftLengths(costs).choose([(0.8, 4)], num_others=10) == [4]
    assert DraftLengths(costs).choose([(0.8, 4)], num_others=250) == [0]


@pytest.mark.parametrize("num_rows", [1, 8, 32, 64, 128, 184, 256])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 0.95])
def test_on_a_large_gpu_drafts_fade_with_the_batch_and_never_lose(num_rows: int, rate: float) -> None:
    rows = [(rate, 7)] * num_rows
    counts = DraftLengths(H200).choose(rows)
    without = speed(H200, rows, [0] * num_rows, 0)
    assert speed(H200, rows, counts, 0) >= without
    if num_rows == 1:
        assert counts[0] >= 1
    if num_rows >= 64 and rate <= 0.1 or num_rows >= 128 and rate <= 0.3 or num_rows >= 184 and rate <= 0.7:
        assert not any(counts)


# -- acceptance -------------------------------------------------------------------------------------


def test_counts_of_windows() -> None:
    known = Acceptance()
    for num_drafts, num_accepted in [(3, 3), (3, 1), (2, 0), (4, 1), (0, 0)]:
        known.update(num_drafts, num_accepted)
    assert (known.num_windows, known.num_drafts, known.num_accepted) == (4, 12, 5)
    assert known.by_length == [1, 2, 0, 1]
    assert known.by_position == [3, 1, 1]


def test_drafts_after_a_refusal_are_not_judged() -> None:
    short, long = Acceptance(), Acceptance()
    short.update(2, 1)
    long.update(7, 1)
    assert short.rate == long.rate
    whole = Acceptance()
    whole.update(1, 1)
    assert whole.rate > PRIOR_RATE > short.rate


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8, 0.97])
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_the_rate_is_estimated_without_bias(rate: float, num_drafts: int) -> None:
    """Windows end at a refusal, so the share of drafts that are kept says less than the rate."""
    source, known, found = random.Random(1), Acceptance(), []
    for _ in range(4000):
        run = next((n for n in range(num_drafts) if source.random() >= rate), num_drafts)
        known.update(num_drafts, run)
        found.append(known.rate)
    # means over windows weigh short memories and long ones alike: a few hundredths of bias remain
    assert sum(found) / len(found) == pytest.approx(rate, abs=0.06)
    assert all(0 <= each <= 1 for each in found)


def test_more_accepted_than_drafted_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 of 2 drafts"):
        Acceptance().update(2, 3)


# -- the loop ---------------------------------------------------------------------------------------


def run(lengths: DraftLengths, steps: range, num_rows: int, is_right: bool, available: int = 4) -> list[int]:
    """The drafts of each step, for sequences whose drafts are all right or all wrong."""
    found = []
    for step in steps:
        counts = lengths.lengths(step, [(seq_id, available) for seq_id in range(num_rows)])
        found.append(sum(counts))
        judge(lengths, counts, counts if is_right else [0] * num_rows)
    return found


def judge(lengths: DraftLengths, counts: Sequence[int], accepted: Sequence[int]) -> None:
    """Learn from a step, and charge the time it lost, as an engine does."""
    num_drafted = sum(count > 0 for count in counts)
    if num_drafted:
        kept_s, draft_s = lengths.costs.per_draft(len(counts), num_drafted, sum(counts), max(counts))
        for seq_id, count in enumerate(counts):
            lengths.update(seq_id, count, accepted[seq_id])
        lengths.charge(sum(counts) * draft_s - sum(accepted) * kept_s)


def test_a_new_sequence_is_tried() -> None:
    assert DraftLengths(H200).lengths(0, [(7, 4)]) == [4]


def test_drafts_that_are_always_wrong_are_switched_off() -> None:
    found = run(DraftLengths(H200), range(40 * PROBE_STEPS), num_rows=1, is_right=False)
    num_windows = next(step for step, count in enumerate(found) if not count)
    assert num_windows <= 28, "a draft costs next to nothing: the first windows lose the time of three steps"
    probed = [step for step in range(num_windows + 1, len(found)) if found[step] and not found[step - 1]]
    assert probed, "now and then they are tried again"
    lost_s = sum(H200.with_drafts(H200.seconds(1 + count), 1, 1, count) - 3.97e-3 for count in found if count)
    assert lost_s <= 0.01 * len(found) * 3.97e-3


def test_without_a_gap_wrong_drafts_stop_when_they_cost_more_than_they_promise() -> None:
    costs = StepCosts(((1, 3.97e-3), (2, 3.99e-3)))  # half a percent for a draft
    found = run(DraftLengths(costs), range(8 * PROBE_STEPS), num_rows=1, is_right=False)
    assert 0 not in found[:20] and 0 in found
    assert sum(found) * 0.02e-3 <= 0.01 * len(found) * 3.97e-3


def test_sequences_without_drafts_are_probed_in_one_step() -> None:
    """The gap is paid once for all of them, not in the step of each."""
    lengths = DraftLengths(H200)
    for step in range(40):  # arriving one after the other
        run(lengths, range(step, step + 1), num_rows=min(step + 1, 16), is_right=False)
    found = run(lengths, range(40, 30 * PROBE_STEPS), num_rows=16, is_right=False)
    probes = [count for before, count in pairwise(found) if count and not before]
    assert len(probes) > 2 and set(probes) == {16}
    assert sum(count > 0 for count in found[-20 * PROBE_STEPS :]) <= PROBE_STEPS


def test_text_that_becomes_predictable_gets_drafts_again() -> None:
    lengths = DraftLengths(H200)
    run(lengths, range(200), num_rows=1, is_right=False)
    found = run(lengths, range(200, 200 + 8 * PROBE_STEPS), num_rows=1, is_right=True)
    probe = next(step for step, count in enumerate(found) if count)
    assert probe <= 6 * PROBE_STEPS, "three steps of time were lost, a two-hundredth of the time"
    assert min(found[probe + 4 :]) == 4


def test_text_that_stops_being_predictable_loses_its_drafts() -> None:
    lengths = DraftLengths(H200)
    assert run(lengths, range(300), num_rows=1, is_right=True)[-1] == 4
    found = run(lengths, range(300, 1400), num_rows=1, is_right=False)
    assert 0 in found[:100]
    assert sum(count > 0 for count in found[100:]) <= 0.25 * len(found), "what was gained pays for probes"


def test_a_text_that_begins_with_words_hard_to_draft_keeps_its_drafts() -> None:
    """The drafts of a window that were right, from a trained head: rare at first, then nearly all."""
    costs = StepCosts(((1, 0.54e-3), (9, 0.57e-3)), gap_s=0.8e-3, draft_s=0.04e-3, is_ahead=True)
    costs = replace(costs, plain=((1, 0.51e-3), (9, 0.55e-3)))
    hard, easy = [0, 3, 1, 0, 0, 1, 2, 1, 0, 0, 0, 0], [5, 2, 3, 5, 1, 4, 5, 5, 0, 4] * 6
    lengths = DraftLengths(costs)
    for step, right in enumerate([*hard, *easy]):
        counts = lengths.lengths(step, [(0, 5)])
        assert counts[0], f"no drafts in window {step}"
        judge(lengths, counts, [min(right, counts[0])])


def test_a_drafter_that_is_right_only_when_probed_gains_little() -> None:
    lengths, found = DraftLengths(H200), []
    for step in range(20 * PROBE_STEPS):
        counts = lengths.lengths(step, [(0, 4)])
        found += counts
        judge(lengths, counts, [min(counts[0], int(step % PROBE_STEPS == 0 and step > 0))])
    assert sum(found[PROBE_STEPS:]) / 19 <= 32  # drafts in PROBE_STEPS steps


def test_no_probes_where_even_right_drafts_would_lose() -> None:
    found = run(DraftLengths(H200), range(4 * PROBE_STEPS), num_rows=400, is_right=False, available=2)
    assert not any(found[1:])


def test_a_probe_waits_until_there_is_something_to_try() -> None:
    lengths = DraftLengths(H200)
    for _ in range(40):
        lengths.update(0, 1, 0)
    for step in range(PROBE_STEPS, PROBE_STEPS + 10):
        assert lengths.lengths(step, [(0, 0)]) == [0]
    assert lengths.lengths(PROBE_STEPS + 10, [(0, 3)]) == [1]


def test_a_row_with_drafts_keeps_them_while_others_are_probed() -> None:
    lengths = DraftLengths(H200)
    for _ in range(60):
        lengths.lengths(0, [(0, 4), (1, 4)])
        lengths.update(0, 4, 4)
        lengths.update(1, 4, 0)
    assert lengths.lengths(1, [(0, 4), (1, 4)])[0] == 4
    assert lengths.lengths(PROBE_STEPS, [(0, 4), (1, 4)]) == [4, 1]


def test_a_forgotten_sequence_is_reported_and_starts_anew() -> None:
    lengths = DraftLengths(H200)
    lengths.lengths(0, [(5, 4)])
    lengths.update(5, 4, 2)
    known = lengths.forget(5)
    assert (known.num_drafts, known.num_accepted) == (4, 2)
    lengths.update(5, 4, 4)  # a window that came back after an abort
    assert lengths.forget(5) == Acceptance()


def test_equal_calls_give_equal_lengths() -> None:
    def play() -> list[list[int]]:
        source, lengths, found = random.Random(3), DraftLengths(H200), []
        for step in range(500):
            wishes = [(seq_id, source.randint(0, 5)) for seq_id in range(source.randint(0, 6))]
            found.append(lengths.lengths(step, wishes, source.randint(0, 40)))
            for (seq_id, _), count in zip(wishes, found[-1], strict=True):
                lengths.update(seq_id, count, source.randint(0, count))
        return found

    assert play() == play()


# -- sequences that a head follows ------------------------------------------------------------------


def test_few_sequences_are_tried_while_drafts_are_wrong_and_all_once_they_are_right() -> None:
    """The first is tried, then the next after 8, 16, 32, 64, 64; a right trial brings the others back."""
    lengths = DraftLengths(H200)
    for _ in range(40):
        lengths.totals.update(4, 0)
    tried = [number for number in range(300) if lengths.is_tried(1, 8)]
    assert tried == [0, 8, 24, 56, 120, 184, 248]
    for _ in range(20):
        lengths.totals.update(4, 4)
    assert all(lengths.is_tried(1, 8) for _ in range(20))


def test_a_trial_gets_a_probe_at_once_and_no_batch_that_is_too_large_has_any() -> None:
    lengths = DraftLengths(H200)
    for _ in range(40):
        lengths.totals.update(4, 0)
    lengths.begin(1)
    assert lengths.lengths(5000, [(1, 8)]) == [1], "a probe"
    for _ in range(40):
        lengths.update(1, 1, 0)
    lengths.charge(1.0)
    assert lengths.lengths(5100, [(1, 8)]) == [0], "the next one waits"
    assert lengths.is_tried(1, 8)
    lengths.begin(2)
    assert lengths.is_worth_it(5101, [(2, 8)])
    assert lengths.lengths(5101, [(2, 8)]) == [1]
    largest = lengths.most_rows(16)
    assert largest > 1
    assert not any(lengths.is_tried(largest + 1, 8) for _ in range(200))
    assert any(lengths.is_tried(largest, 8) for _ in range(200))


def test_nothing_is_tried_where_even_right_drafts_would_not_pay() -> None:
    lengths = DraftLengths(StepCosts(((1, 1e-3), (128, 128e-3)), gap_s=1e-3))
    assert not any(lengths.is_tried(1, 8) for _ in range(200))


def judge_wrong(lengths: DraftLengths) -> None:
    for _, seq_id in product(range(40), range(8)):
        lengths.update(seq_id, 1, 0)


def test_the_cost_of_a_trial_adds_to_what_is_owed() -> None:
    """After it the next probe waits as long as the debt says, though a new sequence is among the rows."""
    lengths, rows = DraftLengths(H200), [(seq_id, 8) for seq_id in range(8)]
    for _ in range(40):
        lengths.totals.update(4, 0)
    assert any(lengths.lengths(5000, rows)), "a probe"
    judge_wrong(lengths)
    lengths.charge(5.0)
    assert lengths.is_tried(8, 8)
    assert any(lengths.lengths(5100, rows)), "the trial's"
    judge_wrong(lengths)
    probed = next(step for step in range(5101, 6150) if any(lengths.lengths(step, rows)))
    assert probed == 5100 + MOST_PROBE_STEPS, "5 s are owed, so the wait is the longest"


def test_a_probe_that_has_no_room_is_not_waited_for() -> None:
    """Windows of five tokens would pay off for 64 rows, but a step has room for two tokens of each."""
    costs = StepCosts(((64, 5.5), (128, 13.5), (320, 18.7)))
    wishes = [(seq_id, 8) for seq_id in range(64)]
    lengths = DraftLengths(costs)
    assert lengths.is_worth_it(PROBE_STEPS, wishes)
    assert not any(lengths.lengths(PROBE_STEPS, wishes, room=64))
    assert not DraftLengths(costs).is_worth_it(PROBE_STEPS, wishes, room=64)


# -- catching up ------------------------------------------------------------------------------------


def test_positions_that_tokens_attend_to_take_time_in_both_models() -> None:
    costs = StepCosts(((1, 1.0),), seen_s=0.01, draft_seen_s=0.001)
    assert costs.without_drafts(2, 10) == pytest.approx(1.2)
    assert costs.seconds(6, 10) == pytest.approx(1.6)
    assert costs.with_drafts(1.6, 2, 2, 2, 10) == pytest.approx(1.6 + 2 * 2 * 10 * 0.001)
    assert costs.per_draft(2, 2, 4, 2, 10) == pytest.approx((0.6, (1.64 - 1.2) / 4))


@pytest.mark.parametrize(
    ("num_missed", "num_left", "count"), [(0, 1, 1), (20, 256, 1), (20, 16, 0), (500, 999, 0)]
)
def test_a_text_gets_drafts_if_they_repay_the_tokens_that_were_missed(
    num_missed: int, num_left: int, count: int
) -> None:
    """A draft gains half a step; 20 missed tokens take ten steps."""
    lengths = DraftLengths(StepCosts(((1, 1.0),), missed_token_s=0.5))
    assert lengths.lengths(0, [(1, 1)], missed=[MissedText(num_missed, num_left)]) == [count]


def test_a_probe_catches_up_with_as_many_texts_as_its_share_allows() -> None:
    costs = StepCosts(((1, 1.0), (8, 1.5)), missed_token_s=2.0)
    lengths, wishes = DraftLengths(costs), [(seq_id, 1) for seq_id in range(8)]
    assert lengths.lengths(0, wishes, missed=[MissedText(1, 1)] * 8) == [0] * 8, "two seconds in a step"
    texts = [MissedText(1, 1000)] * 8  # 5.12 steps of 1.5 seconds are three texts
    assert lengths.lengths(1, wishes, missed=texts) == [1] * 8, "at the first rate, no probe"
    judge_wrong(lengths)
    assert lengths.lengths(9 * PROBE_STEPS, wishes, missed=texts) == [1] * 3 + [0] * 5


def test_a_text_that_cannot_repay_stops_no_other() -> None:
    lengths, wishes = (
        DraftLengths(StepCosts(((1, 1.0),), missed_token_s=0.01)),
        [(each, 4) for each in range(8)],
    )
    texts = [MissedText(0, 100)] * 7 + [MissedText(8000, 16)]
    for step in (0, 9 * PROBE_STEPS):
        assert lengths.lengths(step, wishes, missed=texts) == [4] * 7 + [0]


def test_an_answer_that_still_holds_asks_no_draft_model_what_it_missed() -> None:
    lengths, wishes = DraftLengths(StepCosts(((1, 1.0),), missed_token_s=1.0)), [(7, 4)]
    texts = iter([MissedText(8000, 16)] * 2)
    assert not lengths.is_worth_it(0, wishes, missed=itertools.islice(texts, 1))
    assert not lengths.is_worth_it(1, wishes, missed=texts)
    assert len([*texts]) == 1


def test_a_probed_text_keeps_its_light_prior_until_it_is_judged() -> None:
    """Lengths are chosen again before the probe is judged, if drafts are made ahead."""
    rates = []
    for again in (False, True):
        lengths = DraftLengths(StepCosts(((1, 1.0), (2, 1.5))))
        for _ in range(40):
            lengths.update(7, 1, 0)
        lengths.begin(1)
        assert lengths.lengths(PROBE_STEPS, [(1, 1)]) == [1]
        if again:
            lengths.lengths(PROBE_STEPS + 1, [(1, 1)])
        known = lengths.update(1, 1, 1)
        assert known is not None
        rates.append(known.rate)
    assert rates[0] == rates[1] > 0.3


def test_costs_of_older_records_take_a_row_for_a_missed_token() -> None:
    assert StepCosts(((1, 1.0),), draft_row_s=0.25).catch_up_s(4) == 1.0


def test_a_text_without_drafts_has_the_rate_of_all_others() -> None:
    lengths = DraftLengths(StepCosts(((1, 1.0), (3, 2.0))))  # a draft pays from a rate of 0.5 on
    lengths.begin(2)
    assert lengths.lengths(0, [(1, 1)]) == [1]
    for _ in range(20):
        lengths.update(1, 1, 0)
    assert lengths.lengths(1, [(2, 1)]) == [0], "it began when the rate was PRIOR_RATE"
