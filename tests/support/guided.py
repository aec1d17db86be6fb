"""A real engine over the token oracle whose requests may be constrained; its books are checked at each step.

The oracle draws among what a mask allows. `expected` is what a request must get: made token by token, without
cache, batch or overlap, by a guide that has seen nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from infer.constraints.guide import ENDED, Guide
from infer.engine.engine import Engine
from infer.execution.device import Pending, PendingStep
from infer.execution.order import StepMasks, StepOrder
from infer.sampling.params import SamplingParams, sequence_seed
from tests.support import words
from tests.support.oracle import OracleDevice, OracleWorld, next_token
from tests.support.walks import allowed_ids
from tests.support.words import EOS_IDS, VOCAB_SIZE


def draw(seen: Seq[int], seed: int, allowed: np.ndarray | None) -> int:
    """What the oracle says next, among what is allowed."""
    token = next_token(seen, seed)
    if allowed is None:
        return token % VOCAB_SIZE
    return int(allowed[(token * 7919 + len(seen)) % len(allowed)])


class MaskedOracle(OracleDevice):
    """An oracle that draws among what is allowed.

    It has read the cache when a step begins, as a device has, and draws when its masks are there.
    """

    vocab_size = VOCAB_SIZE

    def run(self, order: StepOrder) -> PendingStep:
        seen = self.forward(order)

        def launch(masks: StepMasks) -> Pending:
            result = self.draw(order, seen, masks)
            return lambda: result

        return PendingStep(order.flags, launch, self._memory)

    def choose(self, seen: Seq[int], seed: int, allowed: np.ndarray | None) -> int:
        return draw(seen, seed, allowed)


class GuidedWorld(OracleWorld):
    """A world whose requests may be constrained."""

    def __init__(
        self,
        *,
        steps_ahead: int = 0,
        jumps: bool = True,
        always_jumps: bool = False,
        num_stories: int = 0,
        **knobs: Any,
    ) -> None:
        super().__init__(eos_ids=EOS_IDS, steps_ahead=steps_ahead, **knobs)
        self.runner = MaskedOracle(self.pool, self.scheduler.state, len(self.runner.host))
        self.engine = Engine(
            self.scheduler,
            self.runner,
            context_len=self.engine.context_len,
            vocab_size=VOCAB_SIZE,
            eos_ids=EOS_IDS,
            observer=self.observer,
            steps_ahead=steps_ahead,
            token_bytes=words.token_bytes(),
        )
        self.engine.keep_stories(num_stories)
        guided = self.engine._guided
        guided.jumps = jumps
        if always_jumps:
            guided.is_worth_it = lambda num_saved, num_sequences: num_saved > 0

    def check_books(self) -> None:
        super().check_books()
        guides, live = self.engine._guided.guides, {seq.seq_id for seq in self.scheduler.sequences()}
        assert guides.keys() <= live

    def verify(self) -> int:
        num_checked = 0
        for request_id, request in self.requests.items():
            if request_id in self.aborted:
                continue
            for index in range(request.params.num_sequences):
                key = request_id, index
                tokens, reason = expected(request.prompt, request.params, index)
                assert self.tokens[key] == tokens, key
                assert self.finished[key].finish_reason == reason, key
                num_checked += 1
        return num_checked


def expected(prompt: Seq[int], params: SamplingParams, index: int) -> tuple[list[int], str]:
    """What a request must get, made token by token without any cache, batch or overlap."""
    assert params.seed is not None and params.max_tokens is not None
    guide: Guide | None = None
    if params.is_guided:
        grammar = None if params.structured is None else words.compiled(params.structured)
        guide = Guide(grammar, params.reasoning)
    seen, output = list(prompt), list[int]()
    seed = sequence_seed(params.seed, index)
    while len(output) < params.max_tokens:
        allowed = None
        if guide is not None and guide.has_mask:
            allowed = np.array(guide.forced()[:1]) if guide.forced() else allowed_ids(guide)
        token = draw(seen, seed, allowed)
        seen.append(token)
        output.append(token)
        if token in EOS_IDS:
            return output, "stop"
        if guide is not None:
            guide.consume((token,))
            assert guide.error is None
            if guide.state == ENDED and guide.grammar is not None:
                return output, "stop"
    return output, "length"
