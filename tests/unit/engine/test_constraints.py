"""Constrained requests in the engine: compiled aside, combined with every other parameter, ended rightly."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from infer.constraints import compiler as compiler_module
from infer.constraints import guide as guide_module
from infer.constraints.description import Reasoning, Structured
from infer.constraints.guide import Guide
from infer.engine.engine import Engine
from infer.errors import QueueFull, RequestError
from infer.execution.device import PendingStep
from infer.execution.order import AWAITS_MASKS, StepMasks, StepOrder
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from tests.support.guided import GuidedWorld, expected
from tests.support.oracle import OracleWorld, bits_of
from tests.support.words import EOS_IDS, THINK_END, VOCAB_SIZE, ids_of, text_of, token_of

DIGITS = Structured.regex("[0-9]{6}")
BAD = Structured(kind="regex", text="(", param="guided_regex")


class Aside:
    """An engine that compiles in threads; `wait` returns when the next constraint is compiled."""

    def __init__(self, **knobs: Any) -> None:
        self.world = GuidedWorld(num_blocks=100, **knobs)
        self._woken = threading.Semaphore(0)
        self.world.engine.compile_aside(self._woken.release)

    def wait(self) -> None:
        assert self._woken.acquire(timeout=60)

    @property
    def engine(self) -> Engine:
        return self.world.engine


def test_a_request_waits_beside_the_queue_while_it_is_compiled() -> None:
    aside = Aside()
    aside.world.add("a", [5], structured=Structured.regex("[0-9]{3}x"), max_tokens=20)
    engine = aside.engine
    assert engine.num_requests == 1 and engine.is_serving("a") and engine.stats().num_waiting == 1
    aside.wait()
    assert engine.has_work
    aside.world.run()
    assert aside.world.verify() == 1
    stats = engine.stats()
    assert sum(stats.grammar_times) == 1 and stats.grammar_s > 0 and not stats.num_grammar_failures


def test_a_request_that_an_observer_refuses_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = Aside()

    def refuse(step: int, request: Request) -> None:
        if request.request_id == "a":
            raise RequestError("it cannot be recorded", param="adapter")

    monkeypatch.setattr(aside.engine._observer, "on_add", refuse)
    for name in ("a", "b"):
        aside.world.add(name, [5], structured=DIGITS, max_tokens=20)
        aside.wait()
    outputs = aside.engine.step()
    assert [(each.request_id, each.error, each.param) for each in outputs if each.error] == [
        ("a", "it cannot be recorded", "adapter")
    ]
    assert not aside.engine.is_serving("a") and aside.engine.is_serving("b")


def test_while_it_is_compiled_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    compile_one = compiler_module._compile

    def compile_late(structured: Structured, *args: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return compile_one(structured, *args, **options)

    monkeypatch.setattr(compiler_module, "_compile", compile_late)
    aside = Aside(max_queue=1, max_batch_size=1)
    aside.world.add("a", [5], structured=DIGITS)
    assert not aside.engine.has_work
    aside.world.add("free", [5], max_tokens=3)
    aside.world.run()
    assert ("free", 0) in aside.world.finished, "others are served meanwhile"
    aside.world.add("b", [5], structured=Structured.regex("[a-z]{3}"))
    with pytest.raises(QueueFull):
        aside.world.add("c", [5], structured=Structured.regex("[a-z]{4}"))
    with pytest.raises(RequestError, match="already being served"):
        aside.world.add("a", [5])
    gate.set()
    aside.wait()
    aside.wait()
    aside.world.run()
    assert aside.world.verify() == 3


def test_a_constraint_that_cannot_be_compiled_is_the_last_output_of_its_request() -> None:
    aside = Aside()
    aside.world.add("a", [5], structured=BAD, n=2)
    aside.wait()
    outputs = aside.engine.step()
    assert [(out.index, out.finish_reason, out.param) for out in outputs] == [
        (0, "error", "guided_regex"),
        (1, "error", "guided_regex"),
    ]
    assert outputs[0].error == "guided_regex: the regex cannot be compiled: unclosed group"
    assert not aside.engine.is_serving("a") and not aside.engine.has_work
    assert aside.engine.stats().num_grammar_failures == 1


def test_constraints_that_cannot_be_compiled_are_no_lack_of_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    aside = Aside()
    for number in range(5):  # with nothing else to do in between
        aside.world.add(str(number), [5], structured=BAD)
        aside.wait()
        assert [out.finish_reason for out in aside.engine.step()] == ["error"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_without_threads_it_is_refused_at_once() -> None:
    world = GuidedWorld()
    with pytest.raises(RequestError, match="unclosed group") as caught:
        world.add("a", [5], structured=BAD)
    assert caught.value.param == "guided_regex" and not world.engine.is_serving("a")


def test_a_request_is_aborted_while_it_is_compiled_and_its_id_is_free_again() -> None:
    aside = Aside()
    aside.world.add("a", [5], structured=DIGITS, n=2)
    ended = aside.engine.abort("a")
    assert [(out.index, out.finish_reason) for out in ended] == [(0, "abort"), (1, "abort")]
    assert not aside.engine.is_serving("a") and aside.engine.abort("a") == []
    aside.world.add("a", [7], max_tokens=4)
    aside.world.run()
    assert aside.world.verify() == 1


def test_what_was_aborted_is_not_compiled_and_counts_until_a_thread_has_passed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, begun, seen = threading.Event(), threading.Semaphore(0), list[str]()
    compile_one = compiler_module._compile

    def compile_late(structured: Structured, *args: Any, **options: Any) -> Any:
        seen.append(structured.text)
        begun.release()
        assert gate.wait(60)
        return compile_one(structured, *args, **options)

    monkeypatch.setattr(compiler_module, "_compile", compile_late)
    aside = Aside(max_queue=6, max_batch_size=2)
    try:
        for text in ("a{2}", "a{3}"):  # as many as there are threads
            aside.world.add(text, [5], structured=Structured.regex(text))
            assert begun.acquire(timeout=60)
        with pytest.raises(QueueFull):
            for number in range(100):
                aside.world.add(f"b{number}", [5], structured=Structured.regex("b{2}"))
                aside.engine.abort(f"b{number}")
        assert number == 6, "with the two that run, as many as may wait beside two free places"
        aside.world.add("free", [5], max_tokens=3)  # needs no thread
    finally:
        gate.set()
    aside.wait()
    aside.wait()
    threads, both = aside.engine._compiling._threads, threading.Barrier(2)
    assert threads is not None
    for passed in [threads.submit(both.wait, 60) for _ in range(2)]:  # behind all that was aborted
        passed.result()
    aside.world.add("c", [5], structured=Structured.regex("c{2}"))
    aside.wait()
    aside.world.run()
    assert sorted(seen) == ["a{2}", "a{3}", "c{2}"] and aside.engine._compiling.num_jobs == 0
    assert sum(aside.engine.stats().grammar_times) == 3 and not aside.engine.stats().num_grammar_failures
    assert {aside.world.finished[name, 0].finish_reason for name in ("a{2}", "a{3}", "c", "free")} <= {
        "stop", "length",
    }  # fmt: skip


def test_seeds_follow_the_order_in_which_requests_take_their_place() -> None:
    """A record has the order of the queue, so a replay, which compiles at once, gives the same seeds."""
    aside, replayed = Aside(), GuidedWorld(num_blocks=100)
    aside.world.add("late", [5], structured=DIGITS, seed=None, max_tokens=9)
    aside.world.add("early", [6], seed=None, max_tokens=9)
    aside.wait()
    aside.world.run()
    for name, prompt, structured in (("early", 6, None), ("late", 5, DIGITS)):
        replayed.add(name, [prompt], structured=structured, seed=None, max_tokens=9)
    replayed.run()
    assert replayed.tokens == aside.world.tokens


def run_one(params: dict[str, Any], **knobs: Any) -> tuple[list[int], StepOutput, list[StepOutput]]:
    world = GuidedWorld(num_blocks=100, **knobs)
    world.add("a", [9, 9], **({"max_tokens": 40} | params))
    outputs: list[StepOutput] = []
    while world.engine.has_work:
        outputs += world.step()
    return world.tokens["a", 0], world.finished["a", 0], outputs


def test_the_token_that_ends_the_match_ends_the_output() -> None:
    tokens, last, _ = run_one({"structured": DIGITS})
    assert last.finish_reason == "stop" and last.stop_reason is None
    assert len(text_of(tokens)) == 6 and not set(EOS_IDS) & set(tokens)


def test_a_match_that_ends_with_the_last_token_allowed_is_complete() -> None:
    tokens, last, _ = run_one({"structured": Structured.regex("[3-9]{4}"), "max_tokens": 4})
    assert len(tokens) == 4 and last.finish_reason == "stop"
    _, last, _ = run_one({"structured": Structured.regex("[3-9]{5}"), "max_tokens": 4})
    assert last.finish_reason == "length"


def test_min_tokens_holds_back_an_end_that_is_optional_and_no_other() -> None:
    """Where the grammar allows nothing but the end, the output ends: it could only be wrong otherwise."""
    tokens, last, _ = run_one({"structured": DIGITS, "min_tokens": 30})
    assert len(tokens) <= 6 and last.finish_reason == "stop"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_logprobs_are_those_of_every_token(steps_ahead: int) -> None:
    structured = Structured.json_schema(
        {"type": "object", "properties": {"name": {"const": 1}}, "required": ["name"]}
    )
    plain, _, _ = run_one({"structured": structured}, steps_ahead=steps_ahead)
    tokens, _, outputs = run_one({"structured": structured, "logprobs": 1}, steps_ahead=steps_ahead)
    assert sum(len(output.logprobs) for output in outputs) == len(tokens)
    assert tokens == plain, "logprobs switch jumps off, which change no token"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_prompt_logprobs_come_with_the_first_token_where_there_is_one_way_to_write(steps_ahead: int) -> None:
    params = {"structured": Structured.choice(["yes, no"]), "prompt_logprobs": 0}
    _, _, outputs = run_one(params, steps_ahead=steps_ahead, always_jumps=True)
    (given,) = [out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None]
    assert len(given) == 2 and given[0] is None and given[1] is not None


def test_a_stop_token_ends_a_constrained_output() -> None:
    stop = token_of("12")
    tokens, last, _ = run_one({"structured": Structured.regex("(ab|12|no){20}"), "stop_token_ids": (stop,)})
    assert tokens[-1] == stop and last.finish_reason == "stop" and last.stop_reason == stop


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_reasoning_has_no_more_tokens_than_it_may(limit: int, steps_ahead: int) -> None:
    forced = (*ids_of("no"), THINK_END)
    params = {"reasoning": Reasoning(end_id=THINK_END, max_tokens=limit, forced=forced), "structured": DIGITS}
    for more in ({}, {"n": 2}, {"logprobs": 0}):
        tokens, _, _ = run_one(params | more, steps_ahead=steps_ahead)
        end = tokens.index(THINK_END)
        assert end <= limit + len(forced) - 1
        if end == limit + len(forced) - 1:
            assert tuple(tokens[limit : end + 1]) == forced
        assert text_of(tokens[end + 1 :]).isdigit()


def test_a_limit_that_is_reached_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 40)
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 40)
    world = GuidedWorld(num_blocks=100, steps_ahead=1)
    heavy = Structured(kind="regex", text="(a|b)*a(a|b){14}c", param="structured_outputs")
    world.add("heavy", [5], structured=heavy, max_tokens=50, n=2)
    world.add("light", [5], structured=DIGITS)
    world.add("free", [5], max_tokens=40)
    world.run()
    for index in range(2):
        last = world.finished["heavy", index]
        assert last.finish_reason == "error" and last.param == "structured_outputs"
        assert last.error is not None and "too complex" in last.error
    for name in ("light", "free"):
        request = world.requests[name]
        assert world.tokens[name, 0] == expected(request.prompt, request.params, 0)[0]


def test_no_request_fails_because_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the limits for itself, as have two that run side by side."""
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 400)
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 400)
    world = GuidedWorld(num_blocks=100)
    heavy = Structured(kind="regex", text="(a|b)*a(a|b){14}c")
    for number in range(20):
        world.add(f"{number}", [number], structured=heavy, max_tokens=30)
        world.add(f"{number}, too", [number], structured=heavy, max_tokens=30, seed=number)
        world.run()
    assert {last.finish_reason for last in world.finished.values()} <= {"stop", "length"}


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}], ids=["appended", "drawn"])
@pytest.mark.parametrize("text", ['root ::= "ab" root', 'start: "ab" start'])
def test_a_grammar_without_an_end_is_answered_alike_each_time(
    text: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More must follow than a matcher can look ahead for, than is asked for at once, and than may come."""
    monkeypatch.setattr(guide_module, "MAX_DUE", 20)
    world = GuidedWorld(num_blocks=100)
    for name in ("first", "second"):
        world.add(name, [5], structured=Structured.grammar(text), max_tokens=50, **params)
        world.run()
        assert world.finished[name, 0].finish_reason == "length", world.finished[name, 0].error
        assert text_of(world.tokens[name, 0]) == "ab" * 50


def test_outputs_of_a_constraint_that_fails_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GuidedWorld(num_blocks=100)
    world.add("a", [5], structured=DIGITS, n=3)
    world.step()
    before = world.engine.stats().num_output_tokens
    guide = world.engine._guided.guides[world.seqs("a")[0].seq_id]
    monkeypatch.setattr(Guide, "_consume", lambda self, token_id: setattr(self, "error", "a limit"))
    assert guide.error is None and {out.finish_reason for out in world.step()} == {"error"}
    assert world.engine.stats().num_output_tokens == before == 3


@pytest.mark.parametrize("moment", ["retire", "sample"])
def test_an_interrupt_between_the_model_and_the_sampler_leaves_the_books_balanced(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    world = GuidedWorld(num_blocks=100, steps_ahead=1)
    world.add("a", [5], structured=DIGITS)
    world.add("b", [6], max_tokens=30, ignore_eos=True)
    world.step()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    where: tuple[Any, str] = (world.engine, "_retire") if moment == "retire" else (PendingStep, "sample")
    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.engine.step()
    world.step()
    world.run()
    assert {world.finished[name, 0].finish_reason for name in "ab"} == {"error"}
    world.add("c", [7], structured=DIGITS)
    world.run()
    assert world.finished["c", 0].finish_reason == "stop"


def test_the_model_of_the_next_step_is_launched_before_ids_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has work while the host finds out what else the ids mean."""
    world = GuidedWorld(num_blocks=100, steps_ahead=2)
    device, engine, moves = world.runner, world.engine, list[tuple[str, int]]()
    run, conclude, sample = device.run, engine._conclude, PendingStep.sample

    def noted_run(order: StepOrder) -> PendingStep:
        assert order.flags & AWAITS_MASKS
        moves.append(("begin", order.step))
        return run(order)

    def noted_report(flight: Any) -> list[StepOutput]:
        moves.append(("report", flight.plan.step))
        return conclude(flight)

    def noted_sample(self: PendingStep, numbers: Sequence[int], positions: Sequence[int]) -> StepMasks:
        moves.append(("sample", 0))
        return sample(self, numbers, positions)

    monkeypatch.setattr(device, "run", noted_run)
    monkeypatch.setattr(engine, "_conclude", noted_report)
    monkeypatch.setattr(PendingStep, "sample", noted_sample)
    world.add("a", [5], structured=Structured.regex("[a-z]{40}"), max_tokens=8)
    world.run()
    order = [name for name, _ in moves]
    assert order[:2] == ["begin", "sample"]
    assert order[2:14] == ["begin", "sample"] + ["begin", "report", "sample"] * 3 + order[13:14]
    assert [step for name, step in moves if name == "report"] == sorted({step for _, step in moves if step})


def test_a_model_without_a_tokenizer_refuses_the_request() -> None:
    world = OracleWorld()
    with pytest.raises(RequestError, match="has no tokenizer") as caught:
        world.add("a", [5], structured=Structured.json_object(param="response_format"))
    assert caught.value.param == "response_format"


def test_ids_of_reasoning_must_be_the_model_s() -> None:
    world = GuidedWorld()
    with pytest.raises(RequestError, match="reasoning holds token id 5000") as caught:
        world.add("a", [5], reasoning=Reasoning(end_id=5000))
    assert caught.value.param == "reasoning"


def test_an_embedding_has_no_constraint() -> None:
    world = GuidedWorld()
    request = Request(request_id="a", prompt=(1,), params=SamplingParams(structured=DIGITS), pooling="last")
    with pytest.raises(RequestError, match="structured"):
        world.engine.add(request)


def test_a_batch_without_constraints_never_asks_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GuidedWorld(num_blocks=100, steps_ahead=3)
    world.add("a", [5], structured=Structured.choice(["yes"]))
    world.run()
    assert not world.engine._guided.guides

    def fail(*step: object) -> None:
        raise AssertionError("masks for a batch without constraints")

    monkeypatch.setattr(world.engine, "_sample", fail)
    world.add("b", [5], max_tokens=20, ignore_eos=True, reasoning=Reasoning(end_id=THINK_END))
    world.run()
    assert world.most_late > 1, "steps overlap as deep as without any of this"


def test_masks_are_asked_for_by_chunk_and_position() -> None:
    """The chunk of a guided sequence with drafts has a mask for each position, in order."""
    world = GuidedWorld(num_blocks=100)
    for name in ("a", "b"):
        world.add(name, [5], structured=DIGITS, max_tokens=20)
    world.add("free", [5], max_tokens=20)
    world.step()
    plan = world.scheduler.plan()
    guided, lines = world.engine._guided, list[np.ndarray]()

    def memory(num_masks: int) -> np.ndarray:
        lines.append(np.zeros((num_masks, -(-VOCAB_SIZE // 32)), dtype=np.int32))
        return lines[-1]

    names = [seq.request_id for seq in plan.chunks.sequences]
    first, second = names.index("a"), names.index("b")
    digit, letter = token_of("1"), token_of("x")
    seq, stop = plan.chunks.sequences[second], int(plan.chunks.stops[second])
    seq.drafts = (digit, letter, digit)
    numbers, positions = guided.fill(plan, None, memory)
    assert numbers == sorted([first, *[second] * 4]), "none of the free one"
    assert positions[numbers.index(second) :][:4] == [stop - 3, stop - 2, stop - 1, stop]
    masks = [set(bits_of(line, VOCAB_SIZE).tolist()) for line in lines[0]]
    own = masks[numbers.index(second) :][:4]
    assert own[0] == own[1] == masks[numbers.index(first)] and digit in own[0] and letter not in own[0]
    assert own[2] == own[3] == set(range(VOCAB_SIZE)), "after one that may not follow"
    seq.drafts = ()
    assert guided.fill(plan, None, memory) == (sorted([first, second]), [stop, stop])
