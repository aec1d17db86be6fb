"""Steps of one to five tokens per sequence, some of them taken back: what speculation will do to the books.

Before a step some sequences get drafts: the first ones are what the oracle will say, the rest are wrong. The
step computes them all and refuses those behind the first wrong one, so the batch state takes tokens back in
nearly every step, while sequences fork, search with beams, are swapped, recomputed, aborted and find their
prompts in the prefix cache. After every step every book is checked, and every token must be the oracle's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from infer.cache.layout import COPY, SWAP_IN, SWAP_OUT
from infer.config.speculation import MAX_DRAFTS
from infer.errors import EngineError
from infer.sampling.params import sequence_seed
from infer.scheduling.request import StepOutput
from infer.scheduling.sequence import Sequence
from tests.stress.test_token_oracle import EOS_IDS, SQUEEZED, Traffic, make_world
from tests.support.oracle import VOCAB_SIZE, OracleWorld, next_token, prompt_of
from tests.support.thinned import thinned
from tests.support.toggles import pairwise_rows

NUM_DRAFTS = 4
ROWS = [row for row in pairwise_rows() if row["kv_cache_backend"] != "naive"]


class Speculation:
    """Proposes drafts before each step of a world, and counts what became of them."""

    def __init__(
        self, world: OracleWorld, seed: object, share: float = 0.8, max_drafts: int = NUM_DRAFTS
    ) -> None:
        self.world, self.share, self.max_drafts = world, share, max_drafts
        self.events: Counter[str] = Counter()
        self._rng = random.Random(str(seed))
        self._step = world.step
        world.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[StepOutput]:
        """Propose, step, and look at what was computed."""
        scheduler, state = self.world.scheduler, self.world.scheduler.state
        for seq in scheduler.running:
            is_ready = seq.num_pending == 1 and seq.num_tokens == len(seq.tokens)
            if is_ready and not seq.is_beam and seq.num_samples == 1 and self._rng.random() < self.share:
                scheduler.propose(seq, self._drafts(seq))
                self.events["most of one"] = max(self.events["most of one"], len(seq.drafts))
        outputs = self._step()
        assert self._check_counts()
        self.events["several tokens"] += sum(len(output.token_ids) > 1 for output in outputs)
        if self.world.plans and self.world.plans[-1].step == scheduler.step:
            self.events["drafts"] += self.world.plans[-1].chunks.num_drafts
        self.events["left over"] += state.num_drafts  # the budget did not reach them
        return outputs

    def _drafts(self, seq: Sequence) -> list[int]:
        """So many right ones, and as many wrong ones behind them."""
        seed, tokens = sequence_seed(seq.group.seed, seq.index), list(seq.tokens)
        drafts: list[int] = []
        for _ in range(self._rng.randint(0, self.max_drafts)):
            drafts.append(next_token(tokens + drafts, seed))
        num_wrong = self._rng.randint(0, self.max_drafts - len(drafts))
        return drafts + [self._rng.randrange(VOCAB_SIZE) for _ in range(num_wrong)]

    def _check_counts(self) -> bool:
        """Whether what is left of each sequence is known, but for the drafts that wait for the next step."""
        return self.world.engine.has_step_in_flight or all(
            seq.num_tokens == len(seq.tokens) + len(seq.drafts) and seq.num_computed < seq.num_tokens
            for seq in self.world.scheduler.sequences()
        )


@pytest.mark.parametrize(("number", "squeeze"), thinned(range(len(ROWS)), ({}, SQUEEZED), keep=2))
def test_refused_drafts_change_no_token(number: int, squeeze: dict[str, Any]) -> None:
    world = make_world(ROWS[number] | squeeze)
    speculation = Speculation(world, f"drafts {number}")
    Traffic(world, f"drafts {number}", num_requests=30, plain_share=0.6).run()

    assert world.verify() > 5
    assert speculation.events["drafts"] > 20
    world.check_idle()


@pytest.mark.parametrize(
    ("windows", "chunk_len", "preemption"),
    thinned(((7,), (None, 6, 6), (5, 12), (None, None, 1)), (1, 6), ("recompute", "swap"), keep=2),
)
def test_windows_leave_room_for_drafts(
    windows: tuple[int | None, ...], chunk_len: int, preemption: str
) -> None:
    """However short the chunks of a prompt are: a table with a window holds the drafts of a step as well."""
    world = OracleWorld(
        windows=windows, block_size=2, num_blocks=24 * len(windows), prefill_chunk_size=chunk_len,
        preemption=preemption, num_host_blocks=30, eos_ids=EOS_IDS,
    )  # fmt: skip
    speculation = Speculation(world, f"windows {windows}", max_drafts=MAX_DRAFTS + 2)
    Traffic(world, f"windows {windows}", num_requests=40, plain_share=0.6).run()

    assert world.verify() > 5
    assert speculation.events["drafts"] > 100
    assert MAX_DRAFTS - 1 <= speculation.events["most of one"] <= MAX_DRAFTS
    world.check_idle()


def test_drafts_meet_every_event() -> None:
    """What the test above claims is worth something only if the rare things do happen in it."""
    events: Counter[str] = Counter()
    for seed in range(4):
        swaps: dict[str, Any] = {"preemption": "swap", "num_host_blocks": 20} if seed % 2 else {}
        world = OracleWorld(block_size=2, num_blocks=24, eos_ids=EOS_IDS, **swaps)
        speculation = Speculation(world, seed)
        Traffic(world, f"events {seed}", num_requests=60, plain_share=0.7).run()
        world.verify()
        usage = world.pool.usage()
        events.update(speculation.events)
        events.update(world.runner.num_transfers)
        events["preempted"] += world.scheduler.num_preemptions
        events["hit tokens"] += usage.num_hit_tokens
        events["evicted"] += usage.num_evicted_blocks
        events["aborted"] += len(world.aborted)
        events["forked"] += sum(request.params.n > 1 for request in world.requests.values())
    names = ("several tokens", "drafts", "preempted", "hit tokens", "evicted", "aborted", "forked")
    for name in (*names, COPY, SWAP_OUT, SWAP_IN):
        assert events[name] > 5, events


def decode_alone(num_drafts: int) -> tuple[OracleWorld, Sequence]:
    """A world in which one sequence of nine tokens is about to compute its last one and wrong drafts."""
    world = OracleWorld(block_size=4)
    world.add("a", prompt_of(8), max_tokens=20)
    world.step()
    seq = world.seq("a")
    world.scheduler.propose(seq, [VOCAB_SIZE - 1] * num_drafts)
    return world, seq


def test_counts_move_back_and_the_reservation_stays() -> None:
    world, seq = decode_alone(num_drafts=3)
    assert (seq.num_tokens, seq.num_computed, seq.num_pending) == (12, 8, 4)
    world.step()
    assert world.plans[-1].chunks.num_tokens == 4
    assert (seq.num_tokens, seq.num_computed, seq.num_reserved) == (10, 9, 12)
    world.run()
    assert world.verify() == 1


def test_drafts_never_reach_beyond_the_last_token() -> None:
    world = OracleWorld()
    world.add("a", prompt_of(8), max_tokens=3)
    world.step()
    seq = world.seq("a")
    drafts = [next_token([*seq.tokens], 0)]
    world.scheduler.propose(seq, [*drafts, 1, 2, 3])
    assert seq.drafts == tuple(drafts), "two more tokens fit, and the second is drawn behind the first"
    world.step()
    assert world.finished["a", 0].finish_reason == "length"
    assert world.verify() == 1


def test_what_is_committed_is_never_taken_back() -> None:
    world, seq = decode_alone(num_drafts=3)
    plan = world.scheduler.plan()
    world.runner.run(world.engine._host.order(plan)).wait()
    world.scheduler.advance(plan)
    state = world.scheduler.state
    with pytest.raises(EngineError, match="cannot take back its first token"):
        state.retract(plan.chunks, np.array([4]))
    seq.tokens.extend(seq.drafts)
    world.scheduler.commit(plan)  # too early: the block of the drafts is full, and may be shared from here on
    with pytest.raises(EngineError, match="of a block that is committed"):
        state.retract(plan.chunks, np.array([1]))
    assert (seq.num_tokens, seq.num_computed) == (13, 12), "nothing has moved"
