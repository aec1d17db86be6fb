"""Speculation decides how fast a text comes, never what it says.

Each test serves the same requests with drafts and without, and compares tokens, ends and logprobs. A model
that drafts for itself shows most: its drafts are all right, so whatever is computed twice must agree, however
sequences were cached, swapped, recomputed, forked or ended in between. After every step the books balance.
"""

from __future__ import annotations

import functools
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine import draft_model, machine, step_costs
from infer.engine.build import build_engine
from infer.engine.draft_model import DraftModel
from infer.engine.engine import Engine
from infer.engine.speculation import Speculation
from infer.execution.device import PendingStep
from infer.execution.gpu import step as device_step
from infer.execution.gpu.device import GpuDevice
from infer.execution.order import VERIFY, StepOrder
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.speculative.adaptive import StepCosts
from infer.speculative.proposer import Proposer, Wish
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.books import check_books
from tests.support.checkpoints import FAMILIES, MOE_FAMILIES
from tests.support.failing_allocator import FailingAllocator, FailingEngine
from tests.support.kv_store import fill_store
from tests.support.thinned import thinned

ALL_FAMILIES = FAMILIES + MOE_FAMILIES
VOCAB_SIZE = 397
SIZES = Sizes(vocab_size=VOCAB_SIZE, context_len=96)  # sliding windows are 16 tokens
# drafts pay in the batches of these tests, if some are right; a GPU makes them before the host is ready
COSTS = StepCosts(((1, 1e-3), (128, 4e-3)), gap_s=1e-9, is_ahead=True)
SMALL: dict[str, Any] = {"num_blocks": 22, "block_size": 4, "max_batch_size": 6}
LOOKUP: dict[str, Any] = {"speculative_method": "ngram", "adaptive_speculation": False}
on_both = pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ROOT.append(tmp_path_factory.mktemp("speculation"))
    return ROOT[-1]


ROOT: list[Path] = []


@functools.cache
def checkpoint(family: str) -> str:
    """The directory of a tiny random model."""
    make_checkpoint(family, ROOT[-1] / family, sizes=SIZES, seed=1)
    return str(ROOT[-1] / family)


@functools.cache
def target(family: str) -> LoadedModel:
    return load_model(resolve_model(checkpoint(family), show_progress=False), dtype="float32", device="cpu")


def engine_of(family: str = "qwen3", *, on_gpu: bool = False, **knobs: Any) -> Engine:
    """An engine whose caches, the drafts' included, hold NaN wherever nothing was written."""
    settings = EngineConfig.from_knobs(**({"num_blocks": 128, "block_size": 4} | knobs))
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: on_gpu):
        engine = build_engine(settings, target(family), step_costs=COSTS)
    device = engine.device
    assert isinstance(device, GpuDevice if on_gpu else TorchDevice)
    fill_store(device.store, float("nan"))
    drafter = engine.speculation and engine.speculation._drafter
    if isinstance(drafter, DraftModel):
        assert isinstance(drafter._device, TorchDevice | GpuDevice)
        fill_store(drafter._device.store, float("nan"))
    return engine


def self_draft(family: str, count: int, **knobs: Any) -> dict[str, Any]:
    """The knobs with which a model drafts for itself, as many as it can."""
    own: dict[str, Any] = {"draft_model": checkpoint(family), "adaptive_speculation": False}
    return own | {"num_speculative_tokens": count} | knobs


class Answer(NamedTuple):
    """What one sequence of a request got."""

    tokens: list[int]
    logprobs: list[float]
    reasons: list[str]


Answers = dict[tuple[str, int], Answer]


def check(engine: Engine) -> None:
    """Raise unless the books balance."""
    check_books(engine.scheduler)
    assert engine.scheduler.pool.audit_blocks() == []


def collect(answers: Answers, outputs: Iterable[StepOutput]) -> None:
    for output in outputs:
        assert output.finish_reason != "error", output
        answer = answers.setdefault((output.request_id, output.index), Answer([], [], []))
        assert not answer.reasons, "it goes on after its end"
        answer.tokens.extend(output.token_ids)
        answer.logprobs.extend(row.logprob for row in output.logprobs)
        answer.reasons.extend(filter(None, [output.finish_reason]))


def serve(engine: Engine, requests: Seq[Request], *, every: int = 0) -> Answers:
    """Serve requests, all at once or one after `every` steps."""
    answers: Answers = {}
    waiting = list(requests)
    for number in itertools.count():
        while waiting and (not every or number % every == 0):
            engine.add(waiting.pop(0))
            if every:
                break
        if not (waiting or engine.has_work):
            break
        collect(answers, engine.step())
        check(engine)
    assert engine.scheduler.pool.usage().num_used == 0
    if (speculation := engine.speculation) is not None:
        assert not (speculation._limits or speculation._lengths._known), "all sequences are forgotten"
    return answers


_PLAIN: dict[tuple[str, bool, str], Answers] = {}


def plain(requests: Seq[Request], family: str = "qwen3", *, on_gpu: bool = False) -> Answers:
    """What an engine without drafts answers, computed once for equal requests."""
    key = family, on_gpu, repr([(request.prompt, request.params) for request in requests])
    if key not in _PLAIN:
        _PLAIN[key] = serve(engine_of(family, on_gpu=on_gpu), requests)
    return _PLAIN[key]


def assert_same(found: Answers, expected: Answers) -> None:
    """Equal tokens and ends, and logprobs as equal as float32 allows."""
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        assert answer.tokens == expected[key].tokens, key
        assert answer.reasons == expected[key].reasons, key
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4), key


def totals(engine: Engine) -> tuple[int, int]:
    """How many drafts were judged, and how many of them were right."""
    assert engine.speculation is not None
    return engine.speculation.totals.num_drafts, engine.speculation.totals.num_accepted


def prompts_of(count: int, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Prompts of many lengths, half of which begin alike."""
    rng = random.Random(seed)
    start = [rng.randrange(20, VOCAB_SIZE) for _ in range(longest)]
    found = []
    for number in range(count):
        shared = start[: rng.randrange(longest)] if number % 2 else []
        found.append((*shared, *(rng.randrange(20, VOCAB_SIZE) for _ in range(rng.randint(1, 8)))))
    return found


def requests_of(kinds: Seq[dict[str, Any]], seed: int = 0, **fields: Any) -> list[Request]:
    usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": 17}
    return [
        Request(
            request_id=str(number),
            prompt=prompt,
            params=SamplingParams(**(usual | {"ignore_eos": "structured" not in kind} | kind)),
            **fields,
        )
        for number, (prompt, kind) in enumerate(zip(prompts_of(len(kinds), seed), kinds, strict=True))
    ]


MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "seed": 2, "max_tokens": 9},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01, "seed": 3, "max_tokens": 30},
    {"temperature": 1.0, "seed": 4, "n": 3, "max_tokens": 11},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "max_tokens": 40},
    {"temperature": 1.0, "seed": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 12)), "logprobs": 0},
    {"max_tokens": 1},
    {"max_tokens": 2, "logprobs": 1},
    {"logit_bias": {25: 3.0, 30: -2.0}, "temperature": 1.0, "seed": 5},
]
DEPENDENT: list[dict[str, Any]] = [  # on all tokens before, so a draft that ignores that may be wrong
    {"repetition_penalty": 1.4, "temperature": 0.8, "seed": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"temperature": 1.0, "seed": 3, "min_tokens": 5, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"repetition_penalty": 1.2, "n": 2, "temperature": 1.0, "seed": 7, "logprobs": 1},
    {},
]


# -- a model that drafts for itself -----------------------------------------------------------------------


def test_a_model_that_drafts_is_not_prepared_for_what_only_requests_ask_for() -> None:
    engine = engine_of("llama", on_gpu=True, **self_draft("llama", 5))
    assert engine.speculation is not None
    drafter = engine.speculation._drafter
    assert isinstance(drafter, DraftModel) and isinstance(engine._device, GpuDevice)
    assert isinstance(drafter._device, GpuDevice)
    assert not [*drafter._device.rare_orders()] and len([*engine._device.rare_orders()]) == 8


@pytest.mark.parametrize(("family", "on_gpu"), thinned(ALL_FAMILIES, (False, True), keep=5))
def test_a_model_that_drafts_for_itself_is_always_right(family: str, on_gpu: bool) -> None:
    """Greedy and drawn, alone and together, forks, ends inside of windows, logprobs of every position."""
    count = 1 + (ALL_FAMILIES.index(family) + 4 * on_gpu) % 7
    requests = requests_of(MIX)
    expected = plain(requests, family, on_gpu=on_gpu)
    engine = engine_of(family, on_gpu=on_gpu, **self_draft(family, count))
    assert_same(serve(engine, requests), expected)
    assert_same(serve(engine, requests, every=3), expected)  # prompts that are cached, and come one by one
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 60
    assert engine.scheduler.pool.usage().num_hit_tokens > 0


PRESSURE: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute", **SMALL},
    "swap": {"preemption": "swap", "swap_blocks": 40, **SMALL},
    "chunked": {"prefill_chunk_size": 3, "max_num_batched_tokens": 8, **SMALL},
    "no prefix cache": {"use_prefix_caching": False, **SMALL},
}


@pytest.mark.parametrize(
    ("pressure", "family", "on_gpu"), thinned(PRESSURE, ("llama", "mistral", "gemma3"), (False, True), keep=4)
)
def test_a_cache_too_small_leaves_it_right(pressure: str, family: str, on_gpu: bool) -> None:
    """Texts that it drafts from were preempted, swapped, forked, or found in the prefix cache."""
    knobs, count = PRESSURE[pressure], {"llama": 3, "mistral": 4, "gemma3": 5}[family]
    if family == "gemma3":
        knobs = knobs | {"num_blocks": 60}  # it has several tables
    requests = requests_of(MIX + MIX[:5], seed=3)
    expected = plain(requests, family, on_gpu=on_gpu)
    engine = engine_of(family, on_gpu=on_gpu, **self_draft(family, count, **knobs))
    assert_same(serve(engine, requests, every=1), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 9
    if pressure in ("recompute", "swap") and family == "llama":
        assert engine.scheduler.num_preemptions > 0


@on_both
def test_what_depends_on_all_tokens_before(on_gpu: bool) -> None:
    """Drafts of a model ignore penalties and bans, so some are wrong."""
    requests = requests_of(DEPENDENT)
    expected = plain(requests, on_gpu=on_gpu)
    engine = engine_of(on_gpu=on_gpu, **self_draft("qwen3", 4))
    assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert 0 < num_accepted < num_drafts


@on_both
def test_constrained_sequences(on_gpu: bool) -> None:
    pytest.importorskip("llguidance")
    properties = {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    kinds: list[dict[str, Any]] = [
        {"structured": {"json_schema": schema}, "temperature": 1.0, "seed": 4, "max_tokens": 40},
        {"structured": {"regex": "[a-c]{3,30}"}, "logprobs": 0, "max_tokens": 20},
        {"structured": {"regex": "(ab|cd)+e"}, "temperature": 1.0, "seed": 5},
        {"structured": {"choice": ["engine", "river", "clock"]}},
        {},
        {"temperature": 1.0, "seed": 1},
    ]
    requests = requests_of(kinds)
    expected = plain(requests, on_gpu=on_gpu)
    for knobs in (self_draft("qwen3", 4), LOOKUP):
        engine = engine_of(on_gpu=on_gpu, **knobs)
        assert_same(serve(engine, requests), expected)
        assert totals(engine)[0] > 0 or knobs is LOOKUP, "a text of a few tokens may have nothing to look up"


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("method", ["self", "ngram"])
def test_deterministic_logprobs_are_the_same_bits(method: str) -> None:
    """With the C kernels: a row of a window is computed as it would be alone."""
    knobs: dict[str, Any] = {"attention_backend": "auto", "deterministic": True}
    requests = requests_of([kind | {"logprobs": 1} for kind in MIX])
    expected = serve(engine_of(**knobs), requests)
    more = self_draft("qwen3", 5) if method == "self" else LOOKUP
    engine = engine_of(**knobs, **more)
    assert serve(engine, requests) == expected
    num_drafts, num_accepted = totals(engine)
    assert num_drafts > 0 and (num_accepted == num_drafts or method == "ngram")


FORMS: list[dict[str, Any]] = [  # every second one is slow
    {"quantization": "int8", "cpu_products": "fast"},
    {"quantization": "int4"},
    {"quantization": "int4", "kv_cache_dtype": "fp8"},
    {"quantization": "none", "kv_cache_dtype": "int8"},
]


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "pair", thinned(zip(FORMS, ("llama", "qwen3", "mistral", "gemma3"), strict=True), keep=2), ids=repr
)
def test_packed_weights_and_caches_on_a_cpu(pair: tuple[dict[str, Any], str]) -> None:
    """Swapped, cached and drawn: the same to the last bit where weights are packed."""
    form, family = pair
    knobs: dict[str, Any] = {"attention_backend": "auto", **form}
    source = resolve_model(checkpoint(family), show_progress=False)
    requests = repetitive(5) + [
        replace(asked, request_id=f"mix {asked.request_id}") for asked in requests_of(MIX[:6], seed=5)
    ]
    found = []
    small: dict[str, Any] = {"preemption": "swap", "swap_blocks": 40, **SMALL}
    for more in {}, LOOKUP | {"num_speculative_tokens": 7}, LOOKUP | small, self_draft(family, 5):
        with mock.patch(f"{__name__}.target", lambda family: load_as(source, form["quantization"])):
            engine = engine_of(family, **knobs, **more)
        found.append(serve(engine, requests, every=2))
        assert not more or totals(engine)[1] > 5
    for answers in found[1:]:
        assert_same(answers, found[0])
        if form["quantization"] != "none":
            assert answers == found[0], "a row of a window is computed as it would be alone"


def load_as(source: Any, quantization: str) -> LoadedModel:
    dtype = "float32" if quantization == "none" else "auto"
    return load_model(source, dtype=dtype, device="cpu", quantization=quantization)


# -- drafts that are looked up ----------------------------------------------------------------------------


def repetitive(count: int, seed: int = 0, **kinds: Any) -> list[Request]:
    """Prompts that repeat a phrase, and biases that make outputs repeat themselves as well."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        phrase = [rng.randrange(20, VOCAB_SIZE) for _ in range(rng.randint(3, 6))]
        kind: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.7, "seed": number}
        kind |= {"logit_bias": dict.fromkeys(phrase, 9.0), "logprobs": 1 if number % 3 == 0 else None} | kinds
        params = SamplingParams(max_tokens=24, ignore_eos=True, **kind)
        requests.append(Request(request_id=str(number), prompt=tuple(phrase * 3), params=params))
    return requests


@pytest.mark.parametrize(
    ("method", "is_adaptive", "on_gpu"), thinned(("ngram", "suffix"), (True, False), (False, True), keep=2)
)
def test_what_is_looked_up_changes_nothing(method: str, is_adaptive: bool, on_gpu: bool) -> None:
    requests = repetitive(8)
    expected = plain(requests, on_gpu=on_gpu)
    knobs: dict[str, Any] = {"speculative_method": method, "adaptive_speculation": is_adaptive}
    engine = engine_of(on_gpu=on_gpu, **knobs)
    for every in (0, 4):
        assert_same(serve(engine, requests, every=every), expected)
    small = engine_of(on_gpu=on_gpu, preemption="swap", swap_blocks=40, **SMALL, **knobs)
    assert_same(serve(small, requests, every=1), expected)
    assert small.scheduler.num_preemptions > 0
    assert totals(engine)[1] > 50 and totals(small)[1] > 2, "drafts are right in windows that did occur"


def test_penalties_of_looked_up_windows() -> None:
    requests = repetitive(6, repetition_penalty=1.1, presence_penalty=0.2)
    expected = plain(requests)
    engine = engine_of(speculative_method="ngram", adaptive_speculation=False)
    assert_same(serve(engine, requests), expected)
    assert totals(engine)[1] > 20


@on_both
def test_salts_do_not_draft_for_each_other(on_gpu: bool) -> None:
    """The answer to one salt is no draft for the same question under another."""
    knobs: dict[str, Any] = {"speculative_method": "suffix", "adaptive_speculation": False}
    (asked,) = requests_of([{"temperature": 1.0, "seed": 8, "max_tokens": 40}], seed=5)
    drafts = {}
    for salt in ("a", "b"):
        engine = engine_of(on_gpu=on_gpu, **knobs)
        before = serve(engine, [_salted(asked, "a")])
        assert totals(engine) == (0, 0), "random text does not repeat itself"
        assert_same(serve(engine, [_salted(asked, salt)]), before)
        drafts[salt] = totals(engine)[1]
    assert drafts["a"] > 10 and drafts["b"] == 0


def _salted(request: Request, salt: str) -> Request:
    return replace(request, cache_salt=salt)


# -- proposers that lie -----------------------------------------------------------------------------------


class Liar:
    """Proposes whatever `say` says of a wish; a `Proposer`."""

    def __init__(self, say: Callable[[Wish], Seq[int]]) -> None:
        self._say = say
        self.num_asked = 0

    def propose(self, wishes: Seq[Wish]) -> list[Seq[int]]:
        self.num_asked += len(wishes)
        return [self._say(wish) for wish in wishes]

    def has_match(self, wish: Wish) -> bool:
        return True

    def finish(self, wish: Wish) -> None:
        pass


RNG = random.Random(0)
LIES: dict[str, Callable[[Wish], Seq[int]]] = {
    "wrong": lambda wish: [21] * wish.num_drafts,
    "random": lambda wish: [RNG.randrange(VOCAB_SIZE) for _ in range(RNG.randint(0, wish.num_drafts))],
    "ends": lambda wish: [0, 1, 2][: wish.num_drafts],
    "no tokens": lambda wish: [VOCAB_SIZE, 1 << 40][: wish.num_drafts],
    "one, then no token": lambda wish: [21, VOCAB_SIZE][: wish.num_drafts],
    "negative": lambda wish: [-1, 5][: wish.num_drafts],
    "too many": lambda wish: [21] * 50,
    "empty": lambda wish: (),
    "arrays": lambda wish: array("I", [33] * wish.num_drafts),
}


def lied_to(engine: Engine, proposer: Proposer) -> Speculation:
    """Let another proposer serve an engine."""
    assert engine.speculation is not None
    engine.speculation._proposer = proposer
    return engine.speculation


@pytest.mark.parametrize(
    ("lie", "is_adaptive", "on_gpu"), thinned(LIES, (True, False), (False, True), keep=4)
)
def test_lies_change_nothing(lie: str, is_adaptive: bool, on_gpu: bool) -> None:
    kinds = [kind | {"ignore_eos": number % 2 == 0} for number, kind in enumerate(MIX)]
    requests = requests_of(kinds, seed=6)
    expected = plain(requests, on_gpu=on_gpu)
    engine = engine_of(on_gpu=on_gpu, speculative_method="ngram", adaptive_speculation=is_adaptive)
    speculation = lied_to(engine, Liar(LIES[lie]))
    for every in (0, 5):
        assert_same(serve(engine, requests, every=every), expected)
    has_lied = lie not in ("no tokens", "negative", "empty")
    assert (speculation.totals.num_drafts > 0) is has_lied or lie == "ends"


@pytest.mark.parametrize("lie", ["wrong", "random", "too many", "arrays"])
def test_a_liar_is_switched_off(lie: str) -> None:
    """Windows until its drafts cost more than they promise, then some now and then to see if it is honest."""
    engine = engine_of(speculative_method="ngram")
    speculation = lied_to(engine, Liar(LIES[lie]))
    for asked in requests_of([{"max_tokens": 60}] * 3):
        serve(engine, [asked])
    assert 0 < speculation.totals.num_windows < 100
    lost_s = -speculation.totals.saved_s
    assert 0 < lost_s < 0.02 * 3 * 60 * speculation.costs.without_drafts(1)


def test_a_request_gets_no_more_than_it_asked_for_from_a_liar() -> None:
    (asked,) = requests_of([{"num_speculative_tokens": 2}])
    engine = engine_of(**LOOKUP)
    speculation = lied_to(engine, Liar(LIES["too many"]))
    serve(engine, [asked])
    assert speculation.totals.num_drafts <= 2 * speculation.totals.num_windows


@on_both
def test_a_draft_model_without_numbers_changes_nothing(on_gpu: bool) -> None:
    """Logits that are not finite give no token, and no token is no draft."""
    requests = requests_of(MIX)
    expected = plain(requests, on_gpu=on_gpu)
    engine = engine_of(on_gpu=on_gpu, **self_draft("qwen3", 3))
    drafter: Any = engine.speculation and engine.speculation._drafter
    for parameter in drafter._device.model.parameters():
        parameter.data.fill_(float("nan"))
    assert_same(serve(engine, requests), expected)
    assert totals(engine)[0] > 0


@on_both
def test_what_a_draft_model_has_to_hear_of_is_bounded(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables change for as long as nothing is drafted; then their rows begin anew."""
    monkeypatch.setattr(draft_model, "MOST_CHANGES", 30)
    engine = engine_of(on_gpu=on_gpu, **self_draft("qwen3", 3))
    drafter: Any = engine.speculation and engine.speculation._drafter
    kinds: list[dict[str, Any]] = [{"num_speculative_tokens": 0}, {}, {"max_tokens": 30}]
    requests = requests_of(kinds)
    expected = plain(requests, on_gpu=on_gpu)
    for _ in range(2):
        assert_same(serve(engine, requests, every=5), expected)
        serve(engine, requests_of([{"num_speculative_tokens": 0, "max_tokens": 40}] * 4, seed=1))
        assert len(drafter._changes) <= 30
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 20


@on_both
def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_can_see(
    on_gpu: bool, tmp_path: Path
) -> None:
    make_checkpoint("qwen3", tmp_path / "short", sizes=replace(SIZES, context_len=32), seed=1)
    requests = requests_of([{"max_tokens": 60}] * 2)
    expected = plain(requests, on_gpu=on_gpu)
    knobs = self_draft("qwen3", 5, draft_model=str(tmp_path / "short"))
    engine = engine_of(on_gpu=on_gpu, **knobs)
    assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 5


@on_both
@pytest.mark.parametrize(
    ("family", "knobs", "longest"),
    [
        ("mistral", {"num_blocks": 12, "max_batch_size": 1, "prefill_chunk_size": 8}, (32, 48)),
        ("qwen3", {"block_size": 64, "num_blocks": 8}, (64, 96)),
    ],
    ids=["more places in a table than blocks", "context that ends inside a block"],
)
def test_steps_are_measured_within_cache_and_context(
    family: str,
    knobs: dict[str, Any],
    longest: tuple[int, int],
    on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU doubles the tokens of a window while they fit; a GPU takes the last captured size that fits."""
    monkeypatch.setattr(step_costs, "MOST_SECONDS", 100.0)
    usual = {"block_size": 4, "max_num_batched_tokens": 8, "speculative_method": "ngram"}
    settings = EngineConfig.from_knobs(**usual | knobs)
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: on_gpu):
        engine = build_engine(settings, target(family))
    assert engine.speculation is not None and engine.context_len == SIZES.context_len
    assert engine.speculation.costs.pairs[-1][0] == longest[on_gpu]


@pytest.mark.parametrize(("knobs", "is_windowed"), [({}, False), ({"speculative_decoding": False}, True)])
def test_only_a_model_that_drafts_keeps_blocks_behind_a_window(
    knobs: dict[str, Any], is_windowed: bool
) -> None:
    """A draft model that is named and not used changes nothing."""
    engine = engine_of("mistral", **self_draft("mistral", 3, **knobs))
    (asked,) = requests_of([{"max_tokens": 60}])
    engine.add(asked)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.pool.usage().num_used)
    assert (most * 4 < 60) is is_windowed


def test_lengths_chosen_for_a_smaller_batch_are_not_used() -> None:
    """Sequences without drafts have joined since: all of them have a place in every step."""
    kinds: list[dict[str, Any]] = [{"max_tokens": 60}]
    kinds += [{"num_speculative_tokens": 0, "max_tokens": 30}] * 7
    first, *others = requests_of(kinds, seed=2)
    knobs = self_draft("qwen3", 5, max_num_batched_tokens=9, max_batch_size=9, prefill_chunk_size=9)
    engine = engine_of(on_gpu=True, **knobs | {"adaptive_speculation": True})
    engine.add(first)
    while not totals(engine)[0]:
        engine.step()
    for request in others:
        engine.add(request)
    run, are_whole = engine.device.run, list[bool]()

    def note(order: StepOrder) -> PendingStep:
        if VERIFY in order.kinds:
            are_whole.append(order.num_rows == len(engine.scheduler.running))
        return run(order)

    with mock.patch.object(engine.device, "run", note):
        while engine.has_work:
            engine.step()
    assert are_whole and all(are_whole)


@pytest.mark.parametrize(("knobs", "num_rows"), [({}, 2), (LOOKUP, 128)], ids=["without", "with"])
def test_attention_is_compiled_for_as_many_rows_as_windows_have(
    knobs: dict[str, Any], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of a window is a row: with a batch of two there may be 128."""
    found = list[int]()

    def note(chosen: str, config: Any, store: Any, block_size: int, max_rows: int) -> str:
        found.append(max_rows)
        return chosen

    monkeypatch.setattr(device_step, "compile_backend", note)
    engine_of(on_gpu=True, max_batch_size=2, **knobs)
    assert set(found) == {num_rows}


# -- what a request may ask for ---------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "on_gpu"), thinned((0, 1, 2, None), (False, True), keep=2))
def test_a_request_may_ask_for_fewer(asked: int | None, on_gpu: bool) -> None:
    engine = engine_of(on_gpu=on_gpu, **self_draft("qwen3", 4))
    requests = requests_of([{"num_speculative_tokens": asked}, {"num_speculative_tokens": asked, "n": 2}])
    with mock.patch.object(engine.scheduler, "propose", wraps=engine.scheduler.propose) as propose:
        serve(engine, requests)
    windows = [len(call.args[1]) for call in propose.call_args_list]
    assert max(windows, default=0) == (4 if asked is None else asked)
    assert bool(totals(engine)[0]) is (asked != 0)


# -- books ------------------------------------------------------------------------------------------------


def cached_texts(engine: Engine) -> Iterator[tuple[int, ...]]:
    """The text of every path of the prefix tree."""

    def walk(node: Any, text: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for label, child in node.children.items():
            ids = label if isinstance(label, bytes) else label[1]
            longer = (*text, *array("I", ids))
            yield longer
            yield from walk(child, longer)

    return walk(engine.scheduler.pool.tree._root, ())


@pytest.mark.parametrize(("method", "on_gpu"), thinned(("self", "lies"), (False, True), keep=2))
def test_only_kept_tokens_are_cached_and_aborts_leave_no_trace(method: str, on_gpu: bool) -> None:
    knobs = self_draft("qwen3", 5) if method == "self" else LOOKUP
    kinds = [kind for kind in MIX if "n" not in kind] * 2
    requests = requests_of(kinds, seed=9)
    expected = plain(requests, on_gpu=on_gpu)
    texts = {request.request_id: request.prompt for request in requests}
    whole = [(*texts[key], *answer.tokens) for (key, _), answer in expected.items()]
    engine = engine_of(on_gpu=on_gpu, **knobs)
    if method == "lies":
        lied_to(engine, Liar(LIES["random"]))
    rng, answers = random.Random(4), Answers()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        collect(answers, engine.step())
        check(engine)
        if rng.random() < 0.3 and (live := engine.scheduler.sequences()):
            engine.abort(rng.choice(live).request_id)
            check(engine)
        for text in cached_texts(engine):
            assert any(known[: len(text)] == text for known in whole), "a token was cached that was not kept"
    assert engine.scheduler.pool.usage().num_used == 0
    assert totals(engine)[0] > 0
    for key, answer in answers.items():
        assert answer.tokens == expected[key].tokens[: len(answer.tokens)], key


@pytest.mark.parametrize(
    ("first", "of_drafts", "on_gpu"), thinned((20, 90), (False, True), (False, True), keep=2)
)
def test_windows_that_find_no_memory(first: int, of_drafts: bool, on_gpu: bool) -> None:
    """Steps with drafts are run in halves, and so are those of the model that drafts; windows stay whole."""
    requests = requests_of([kind for kind in MIX if "n" not in kind], seed=7)
    expected = plain(requests, on_gpu=on_gpu)
    engine = engine_of(on_gpu=on_gpu, **self_draft("qwen3", 3))
    # allocations, of which a step there makes more, and all turns of a draft model even more
    every = (2903 if of_drafts else 701) if on_gpu else 151
    allocator = FailingAllocator(lambda number: number % every == first)
    drafter: Any = engine.speculation and engine.speculation._drafter
    FailingEngine(drafter if of_drafts else engine, allocator)
    assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_drafts > 50 and allocator.num_failed > 0
    assert num_accepted == num_drafts


def test_late_drafts_of_a_step_that_finds_no_memory_at_once() -> None:
    """The rows' state is sent before the drafts: the halves get drafts that are known."""
    requests = requests_of([{"max_tokens": 20}] * 3)
    expected = plain(requests, on_gpu=True)
    engine = engine_of(on_gpu=True, **self_draft("qwen3", 3))
    assert isinstance(engine.device, GpuDevice)
    apply, numbers = engine.device.rows.apply, itertools.count()

    def apply_some(order: StepOrder) -> None:
        if next(numbers) % 5 == 4:
            raise torch.OutOfMemoryError("no memory")
        apply(order)

    with mock.patch.object(engine.device.rows, "apply", apply_some):
        assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 20


def test_late_drafts_of_a_step_that_was_interrupted_are_for_no_other() -> None:
    first, second = requests_of([{"max_tokens": 20}] * 2)
    expected = serve(engine_of(on_gpu=True), [second])
    engine = engine_of(on_gpu=True, **self_draft("qwen3", 3))
    engine.add(first)
    while not totals(engine)[0]:
        engine.step()
    interrupted = mock.patch.object(engine._host, "order", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [output.finish_reason for output in engine.step()] == ["error"]
    assert_same(serve(engine, [second]), expected)


def test_drafts_go_on_after_a_window_that_was_aborted_before_it_was_read() -> None:
    """Ctrl-C while a step is waited for: its request is aborted, and nothing runs when it is judged."""
    first, second = requests_of([{"max_tokens": 20}] * 2)
    expected = serve(engine_of(), [second])
    engine = engine_of(**self_draft("qwen3", 3, adaptive_speculation=True))
    engine.add(first)
    while not totals(engine)[0]:
        engine.step()
    interrupted = mock.patch.object(engine, "_read", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort(first.request_id)
    engine.step()
    num_drafts = totals(engine)[0]
    assert_same(serve(engine, [second]), expected)
    assert totals(engine)[0] > num_drafts


@pytest.mark.parametrize("case", ["turns", "turns and steps", "no room"])
def test_turns_begin_before_the_window_before_is_read(case: str) -> None:
    """On a GPU, if there are blocks for one more window; without, the host says where they begin.

    Where they are over soon, the step that verifies them is launched with them.
    """
    requests = requests_of([{"max_tokens": 40}] * 2 + [{"max_tokens": 25, "temperature": 0.8}])
    expected = plain(requests, on_gpu=True)
    engine = engine_of(on_gpu=True, **self_draft("qwen3", 3))
    speculation, device = cast(Any, engine.speculation), cast(Any, engine.device)
    drafter = speculation._drafter
    for owner, name in ((drafter, "begin"), (drafter, "_enter"), (device.windows, "start")):
        setattr(owner, name, mock.Mock(side_effect=getattr(owner, name)))
    if case == "no room":
        inner = speculation._has_room
        speculation._has_room = lambda asked: not engine.scheduler.state.ahead and inner(asked)
    with mock.patch.object(StepCosts, "is_host_slower", lambda *_: case == "turns and steps"):
        assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 50
    num_windows = drafter.begin.call_count
    assert num_windows > 8
    assert drafter._enter.call_count > 5 if case == "no room" else drafter._enter.call_count <= 3
    num_launched = device.windows.start.call_count
    assert num_launched < num_windows / 2 if case == "turns and steps" else num_launched == num_windows


def test_a_batch_that_gets_smaller_takes_the_drafts_that_are_being_made() -> None:
    """Fewer sequences choose longer windows, one window late: the turns under way are not made again."""
    requests = requests_of([{"max_tokens": count} for count in (15, 25, 40, 55)])
    expected = plain(requests, on_gpu=True)
    engine = engine_of(on_gpu=True, **self_draft("qwen3", 5) | {"adaptive_speculation": True})
    speculation = cast(Any, engine.speculation)
    drafter, lengths = speculation._drafter, speculation._lengths

    def choose(step: int, wishes: list[tuple[int, int]], *_: object) -> list[int]:
        return [min(most, 6 - len(wishes)) for _, most in wishes]

    enter = mock.Mock(side_effect=drafter._enter)
    with mock.patch.object(lengths, "lengths", choose), mock.patch.object(drafter, "_enter", enter):
        assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 50
    assert speculation.totals.by_length[5] > 0  # the last one has long windows
    assert enter.call_count == 1


# -- when there are drafts, and when steps overlap --------------------------------------------------------


def test_no_drafts_while_prompts_wait_or_are_computed() -> None:
    engine = engine_of(**self_draft("qwen3", 3), prefill_chunk_size=4, max_batch_size=3)
    requests = requests_of([{"max_tokens": 20}] * 6, seed=2)
    seen, propose = list[bool](), engine.scheduler.propose

    def note(seq: Any, drafts: Seq[int]) -> None:
        scheduler = engine.scheduler
        behind = [each.num_pending - len(each.drafts) for each in scheduler.running]
        seen.append(set(behind) == {1} and not scheduler.may_admit)
        propose(seq, drafts)

    with mock.patch.object(engine.scheduler, "propose", note):
        serve(engine, requests, every=3)
    assert seen and all(seen)


def flights(engine: Engine, requests: Seq[Request]) -> list[int]:
    """How many steps are under way after each."""
    for request in requests:
        engine.add(request)
    found = []
    while engine.has_work:
        engine.step()
        found.append(len(engine._flights))
    return found


def test_steps_overlap_as_without_speculation_where_nothing_matches() -> None:
    kinds = [{"max_tokens": 30, "temperature": 1.0, "seed": each} for each in range(3)]
    requests = requests_of(kinds, seed=1)
    without = flights(engine_of(on_gpu=True), requests)
    engine = engine_of(on_gpu=True, speculative_method="ngram")
    assert engine._steps_ahead > 0 and max(without) > 0
    with mock.patch.object(engine.speculation._proposer, "has_match", lambda wish: False):  # type: ignore[union-attr]
        assert flights(engine, requests) == without
    assert totals(engine)[0] == 0


@pytest.mark.parametrize(("is_adaptive", "on_gpu"), thinned((True, False), (False, True), keep=2))
def test_drafts_leave_room_for_every_sequence_of_the_batch(is_adaptive: bool, on_gpu: bool) -> None:
    """A step has room for nine tokens: drafts of the last sequence would not fit beside eight others."""
    kinds: list[dict[str, Any]] = [{"num_speculative_tokens": 0, "max_tokens": 30}] * 8 + [{"max_tokens": 30}]
    requests = requests_of(kinds, seed=2)
    expected = plain(requests, on_gpu=on_gpu)
    knobs = self_draft("qwen3", 5, max_num_batched_tokens=9, max_batch_size=9, prefill_chunk_size=9)
    engine = engine_of(on_gpu=on_gpu, **knobs | {"adaptive_speculation": is_adaptive})
    assert_same(serve(engine, requests), expected)
    assert engine.scheduler.state.num_drafts == 0


@pytest.mark.parametrize(("is_adaptive", "on_gpu"), thinned((True, False), (False, True), keep=2))
def test_sequences_without_drafts_go_on_beside_many_windows(is_adaptive: bool, on_gpu: bool) -> None:
    """However many drafts there are in a step: what a row without any has drawn is known to the device."""
    kinds: list[dict[str, Any]] = [{"max_tokens": 16}] * 16
    alone: dict[str, Any] = {"num_speculative_tokens": 0, "max_tokens": 40}
    kinds += [
        alone,
        alone | {"temperature": 1.0, "seed": 1},
        alone | {"repetition_penalty": 1.3, "logprobs": 1},
    ]
    requests = requests_of(kinds, seed=8)
    expected = serve(engine_of(on_gpu=on_gpu, max_batch_size=20), requests)
    knobs = self_draft("qwen3", 12, max_batch_size=20, num_blocks=400)
    engine = engine_of(on_gpu=on_gpu, **knobs | {"adaptive_speculation": is_adaptive})
    assert_same(serve(engine, requests), expected)
    num_drafts, num_accepted = totals(engine)
    assert num_accepted == num_drafts > 100
