"""Beam search against a search that looks at every continuation of every beam."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from infer.errors import RequestError
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.execution.row_book import RowBook
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.oracle import VOCAB_SIZE, OracleWorld, offers, prompt_of
from tests.support.running import Running
from tests.support.simple_beams import beam_search
from tests.support.thinned import thinned

BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0}


def run(world: OracleWorld, **params: Any) -> OracleWorld:
    world.add("t", prompt_of(7), **(BEAMS | params))
    world.run()
    return world


@pytest.mark.parametrize(
    ("width", "every", "max_tokens"), thinned((1, 2, 5, 8), (0, 3, 40), (1, 2, 12), keep=3)
)
def test_the_hypotheses_are_those_of_an_exhaustive_search(width: int, every: int, max_tokens: int) -> None:
    """Many stops at once: none of them may take the place of a continuation."""
    stops = tuple(range(0, VOCAB_SIZE, every)) if every else ()
    world = OracleWorld(eos_ids=stops, num_blocks=100)
    for number in range(6):
        prompt = prompt_of(5, start=number)
        world.add(str(number), prompt, n=width, max_tokens=max_tokens, **BEAMS)
    world.run()
    assert world.verify() == 6


def test_n_of_them_come_back_best_first() -> None:
    world = run(OracleWorld(eos_ids=tuple(range(0, VOCAB_SIZE, 20))), n=3, best_of=6)
    assert sorted(index for _, index in world.finished) == [0, 1, 2]
    means = [world.finished["t", i].cumulative_logprob / len(world.tokens["t", i]) for i in range(3)]
    assert means == sorted(means, reverse=True)
    assert world.verify() == 1


def test_one_beam_is_greedy_decoding() -> None:
    world = run(OracleWorld(), n=1, max_tokens=9)
    tokens = prompt_of(7)
    for _ in range(9):
        tokens.append(offers(tokens, 1)[0][0])
    assert world.tokens["t", 0] == tokens[7:]


def test_a_stop_token_of_the_request_is_the_reason_and_the_models_own_is_not() -> None:
    tokens = prompt_of(7)
    best = offers(tokens, 3)[0][0]
    own = run(OracleWorld(), n=2, stop_token_ids=(best,), max_tokens=4)
    model = run(OracleWorld(eos_ids=(best,)), n=2, max_tokens=4)
    for world, reason in ((own, best), (model, None)):
        stopped = [output for output in world.finished.values() if output.finish_reason == "stop"]
        assert stopped
        assert {output.stop_reason for output in stopped} == {reason}


def test_no_beam_stops_before_min_tokens() -> None:
    stops = tuple(range(0, VOCAB_SIZE, 4))
    world = run(OracleWorld(eos_ids=stops), n=3, min_tokens=4, max_tokens=8)
    assert "stop" in {output.finish_reason for output in world.finished.values()}
    wanted = beam_search(
        lambda tokens: offers(tokens, 3 + len(stops)),
        prompt_of(7),
        width=3,
        max_tokens=8,
        stop_ids=stops,
        min_tokens=4,
    )
    assert [tuple(world.tokens["t", index]) for index in range(3)] == [beam.output for beam in wanted]
    assert min(len(beam.output) for beam in wanted) > 4


def test_where_everything_is_forbidden_the_request_fails_and_none_waits() -> None:
    world = OracleWorld(eos_ids=tuple(range(VOCAB_SIZE)))
    run(world, n=3, min_tokens=2)
    assert [world.finished["t", index].finish_reason for index in range(3)] == ["error"] * 3
    assert "found 0 outputs, 3 were asked for" in str(world.finished["t", 0].error)


def test_each_beam_offers_enough_for_all_its_stops() -> None:
    request = Request(request_id="r", prompt=(1, 2), params=SamplingParams(n=4, **BEAMS))
    group = SequenceGroup(request, max_total=9, stop_ids=(5, 6, 7), seed=0)
    running = Running(PagedKVCachePool(4, 4))
    running.enter(Sequence(0, group, 0, [1, 2]), 2)
    (entry,) = RowBook().enter(running.order(Chunk(0, 0, 2, 1)))
    assert entry.sample_row(2).num_logprobs == 4 + 3


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": 0.5}, "use_beam_search"),
        ({"top_p": 0.5}, "use_beam_search"),
        ({"presence_penalty": 1.0}, "use_beam_search"),
        ({"logit_bias": {3: 5.0}}, "use_beam_search"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_what_beam_search_cannot_honour_is_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**(BEAMS | {"n": 2} | params))
    assert caught.value.param == param


def test_prompt_logprobs_come_with_the_outputs() -> None:
    world = run(OracleWorld(), n=2, prompt_logprobs=0, max_tokens=3)
    rows = world.finished["t", 0].prompt_logprobs
    assert rows is not None
    assert [row and row.token_id for row in rows] == [None, *prompt_of(7)[1:]]


def test_equal_scores_are_settled_the_same_way_every_time() -> None:
    """A model with ties everywhere: the search ends, and twice the same."""

    def tied(world: OracleWorld) -> OracleWorld:
        compute = world.runner.compute

        def compute_with_ties(order: StepOrder, masks: StepMasks) -> StepResult:
            result = compute(order, masks)
            for rows in result.logprobs:
                for row in rows:
                    if isinstance(row, RowLogprobs):
                        object.__setattr__(row, "top", tuple((token, -1.0) for token, _ in row.top))
            return result

        world.runner.compute = compute_with_ties  # type: ignore[method-assign]
        return run(world, n=4, max_tokens=random.Random(1).randrange(5, 9))

    assert tied(OracleWorld()).tokens == tied(OracleWorld(placement_seed=3)).tokens
