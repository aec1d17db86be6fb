"""Constrained and free sequences side by side in caches far too small; every output is checked.

The model is the token oracle, which draws among what a mask allows. Whatever goes wrong with a block, a copy,
a mask or the place of a token becomes another token than a loop without cache, batch or engine draws. That
loop shows every output to a guide that has seen nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from infer.engine.engine import Engine
from infer.errors import RequestError
from infer.execution.host_sampling import sequence_seed
from infer.execution.runner import StepResult
from infer.sampling.params import SamplingParams
from infer.sampling.structured import Reasoning, Structured
from infer.scheduling.plan import StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.sequence import Sequence
from infer.structured.guide import ENDED, Guide
from tests.support import words
from tests.support.oracle import OracleRunner, OracleWorld, next_token
from tests.support.walks import allowed_ids
from tests.support.words import EOS_IDS, THINK_END, VOCAB_SIZE, ids_of, token_of

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "yes"]}, "age": {"type": "integer", "maximum": 9999}, "items": {}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Structured.json_schema(PERSON),
    Structured.json_schema(PERSON, whitespace=" "),
    Structured.json_object(),
    Structured.regex("(ab|no)+[0-9]{2}"),
    Structured.choice(["yes", "no", "abc12"]),
    Structured.grammar('start: "abc" ("12" | "no")*'),
    Structured.regex("[0-9]{2}", triggers=("a", "no")),  # letters that the oracle often draws
]
SWAPS = PreemptionCost(swap_seconds=0.1, recompute_seconds=1.0)


def draw(seen: Seq[int], seed: int, allowed: np.ndarray | None) -> int:
    """What the oracle says next, among what is allowed."""
    token = next_token(seen, seed)
    if allowed is None:
        return token % VOCAB_SIZE
    return int(allowed[(token * 7919 + len(seen)) % len(allowed)])


class MaskedOracle(OracleRunner):
    """An oracle that draws among what is allowed."""

    vocab_size = VOCAB_SIZE

    def run(self, plan: StepPlan, sequences: Seq[Sequence]) -> StepResult:
        return self.begin(plan, sequences).sample([])()

    def begin(self, plan: StepPlan, sequences: Seq[Sequence]) -> OracleStep:
        return OracleStep(self, plan, sequences)

    def forward(self, plan: StepPlan, sequences: Seq[Sequence]) -> tuple[StepResult, list[list[int]]]:
        """Write and read the cache; what each chunk's last token sees."""
        result, size = super().run(plan, sequences), self.pool.block_size
        stops, rows = plan.chunks.stops.tolist(), plan.chunks.rows.tolist()
        tables = [
            self.state.tables[:, row, : -(-stop // size)] for row, stop in zip(rows, stops, strict=True)
        ]
        starts = plan.chunks.starts.tolist()
        return result, [self._read(*each) for each in zip(sequences, tables, starts, stops, strict=True)]


class OracleStep:
    """A step that has read the cache when it begins, as a device has, and draws when its masks are there."""

    def __init__(self, runner: MaskedOracle, plan: StepPlan, sequences: Seq[Sequence]) -> None:
        self._runner, self._plan, self._sequences = runner, plan, sequences
        self._result, self._seen = runner.forward(plan, sequences)
        self._masks_KW = np.empty((0, -(-VOCAB_SIZE // 32)), dtype=np.int32)

    def masks(self, num_rows: int) -> np.ndarray:
        self._masks_KW = np.zeros((num_rows, -(-VOCAB_SIZE // 32)), dtype=np.int32)
        return self._masks_KW

    def sample(self, numbers: Seq[int]) -> Callable[[], StepResult]:
        allowed = {number: bits_of(mask_W) for number, mask_W in zip(numbers, self._masks_KW, strict=True)}
        for number, (chunk, seq) in enumerate(zip(self._plan.chunks, self._sequences, strict=True)):
            seeds = [sequence_seed(seq.group.seed, seq.index + i) for i in range(chunk.num_samples)]
            drawn = tuple(draw(self._seen[number], seed, allowed.get(number)) for seed in seeds)
            if len(drawn) == 1:
                self._runner._latest[seq.seq_id] = (chunk.stop, drawn[0])
            self._result.ids[number] = drawn
        return lambda: self._result


def bits_of(mask_W: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:VOCAB_SIZE].nonzero()[0]


class GuidedWorld(OracleWorld):
    """A world whose requests may be constrained."""

    def __init__(self, *, steps_ahead: int = 0, jumps: bool = True, **knobs: Any) -> None:
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
        self.engine._requests.jumps = jumps

    def check_books(self) -> None:
        super().check_books()
        guides, live = self.engine._requests.guides, {seq.seq_id for seq in self.scheduler.sequences()}
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


def random_params(rng: random.Random, number: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "seed": number,
        "max_tokens": rng.randrange(1, 24),
    }
    if rng.random() < 0.2:
        params["best_of"] = params["n"] + 1
    if rng.random() < 0.2:
        params["logprobs"] = 1
    if rng.random() < 0.6:
        params["structured"] = rng.choice(CONSTRAINTS)
    if rng.random() < 0.3:
        limit = rng.choice((None, 0, 1, 4))
        forced = rng.choice(((), (*ids_of("no"), THINK_END), (THINK_END, token_of("a"))))
        params["reasoning"] = Reasoning(end_id=THINK_END, max_tokens=limit, forced=forced)
    return params


def send_and_run(world: GuidedWorld, seed: object, num_requests: int) -> Counter[str]:
    """Random requests and aborts until all is answered; counts of what happened."""
    rng, counts = random.Random(f"{seed}"), Counter[str]()
    starts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(30)] for _ in range(2)]
    num_sent = 0
    for _ in range(20_000):
        while num_sent < num_requests and rng.random() < 0.4:
            num_sent += 1
            own = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
            try:
                params = random_params(rng, num_sent)
                world.add(str(num_sent), rng.choice(starts)[: rng.randrange(20)] + own, **params)
            except RequestError:
                counts["refused"] += 1
        live = world.scheduler.sequences()
        if live and rng.random() < 0.02:
            world.abort(rng.choice(live).group.request.request_id)
        if rng.random() < 0.01:
            world.pool.reset_prefix_cache()
        world.step()
        if num_sent == num_requests and not world.engine.has_work:
            break
    else:
        raise AssertionError("not done after 20,000 steps")
    counts["preempted"] = world.scheduler.num_preemptions
    counts["checked"] = world.verify()
    return counts


WORLDS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "squeezed, recomputing": {"num_blocks": 24, "preemption": "recompute"},
    "squeezed, swapping": {
        "num_blocks": 24,
        "num_host_blocks": 40,
        "preemption": "swap",
        "cost": SWAPS,
    },
    "small steps": {"num_blocks": 40, "max_num_batched_tokens": 7, "prefill_chunk_size": 3},
    "no chunks": {"num_blocks": 40, "use_chunked_prefill": False},
    "no prefix cache": {"num_blocks": 40, "use_prefix_caching": False},
    "prompts first": {"num_blocks": 40, "scheduler_policy": "prefill_first"},
    "static batches": {"num_blocks": 40, "batching_mode": "static"},
    "no cache": {"num_blocks": 200, "kv_cache_backend": "naive"},
}


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("name", WORLDS)
def test_every_sequence_gets_what_its_constraint_and_the_model_say(name: str, steps_ahead: int) -> None:
    """What is appended without a step is what steps would have drawn, so both are compared with one loop."""
    world = GuidedWorld(steps_ahead=steps_ahead, jumps=(len(name) + steps_ahead) % 3 > 0, **WORLDS[name])
    counts = send_and_run(world, f"{name} {steps_ahead}", 30)
    assert counts["checked"] > 25
    if name.startswith("squeezed"):
        assert counts["preempted"] > 3


def test_jumps_save_steps() -> None:
    num_steps = []
    for jumps in (True, False):
        world = GuidedWorld(num_blocks=200, jumps=jumps)
        world.add("a", [5], structured=CONSTRAINTS[1], max_tokens=50)
        world.run()
        world.verify()
        num_steps.append(world.runner.num_steps)
    assert num_steps[0] < num_steps[1] * 0.8


def test_the_first_step_that_fails_ends_its_requests_and_no_others() -> None:
    world = GuidedWorld(num_blocks=200, steps_ahead=1)
    world.add("a", [5], structured=CONSTRAINTS[0], max_tokens=40)
    world.step()
    world.runner.fail_at = world.runner.num_steps + 1
    world.step()
    world.run()
    assert world.finished["a", 0].finish_reason == "error"
    world.add("b", [5], structured=CONSTRAINTS[0], max_tokens=40)
    world.run()
    assert world.finished["b", 0].finish_reason in ("stop", "length")
