"""What a Python program may hand to `LLM` and `AsyncLLM`, and what it is told when that cannot be."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from infer import LLM, AsyncLLM, SamplingParams
from infer.errors import (
    BatchFailed,
    ConfigError,
    ContextOverflow,
    DeviceLost,
    EngineError,
    EngineStopped,
    RequestError,
)
from infer.scheduling.request import Request, StepOutput

KNOBS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "num_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
IDS = [300, 301, 302]


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> LLM:
    return LLM(checkpoint, **KNOBS)


# -- names that are unknown -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"dtpye": "float32"}, "unknown knob 'dtpye'; did you mean 'dtype'"),
        ({"max_modle_len": 64}, "unknown knob 'max_modle_len'; did you mean 'max_seq_len'"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel must be False, .* tensor_parallel_size"),
        ({"temperature": 0}, r"temperature belongs to the params: SamplingParams\(temperature=...\)"),
    ],
)
def test_a_knob_that_is_none_is_told_the_one_that_was_meant(
    checkpoint: str, make: Any, knobs: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(checkpoint, **knobs)


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_the_spellings_of_other_engines_are_taken(checkpoint: str, make: Any) -> None:
    spelled = {"max_model_len": 64, "num_gpu_blocks": 8, "max_num_seqs": 3, "enable_prefix_caching": False}
    llm = make(checkpoint, device="cpu", enforce_eager=True, tensor_parallel_size=1, **spelled)
    assert llm.context_len == 64
    assert (llm.config.cache.num_blocks, llm.config.scheduler.max_batch_size) == (8, 3)
    assert (llm.config.cache.use_prefix_caching, llm.config.run.use_cuda_graphs) == (False, False)
    closed = llm.close()
    if closed is not None:
        asyncio.run(closed)


# -- prompts of all kinds -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        np.array(IDS),
        np.array(IDS, dtype=np.int32),
        [np.int64(i) for i in IDS],
        tuple(IDS),
        torch.tensor(IDS),
        [np.array(IDS)],
        np.array([IDS]),
        [torch.tensor(IDS)],
    ],
    ids=lambda prompts: f"{type(prompts).__name__}-{type(prompts[0]).__name__}",
)
def test_integers_of_any_make_are_token_ids(llm: LLM, prompts: Any) -> None:
    (answer,) = llm.generate(prompts, GREEDY)
    assert answer.token_ids == llm.generate(IDS, GREEDY)[0].token_ids
    assert json.dumps(answer.to_dict()["prompt_token_ids"]) == json.dumps(IDS)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (None, "got NoneType"),
        ({"role": "user"}, "got dict"),
        (5, "got int"),
        (["a", 1], "prompt 1 of 2: a prompt must be text or token ids, got int"),
        (["a", None], "prompt 1 of 2: .*got NoneType"),
        ([{"role": "user"}, "a"], "prompt 0 of 2: .*got dict"),
        (["a", b"b"], "prompt 1 of 2: .*got bytes"),
        ([IDS, [1, 2.5]], r"prompt 1 of 2: .*must hold integers, got 2.5 \(float\)"),
        (np.array([0.5]), "got float"),
        ([1, "a"], "must hold integers, got 'a'"),
        ([True], "got bool"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_type_and_place(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


def test_a_refused_prompt_keeps_its_error_class_and_gets_its_place(llm: LLM) -> None:
    too_long = [300] * (llm.context_len + 1)
    with pytest.raises(ContextOverflow, match="prompt 2 of 3: prompt has") as caught:
        llm.generate([IDS, IDS, too_long], GREEDY)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextOverflow, match="^prompt has"):
        llm.generate(too_long, GREEDY)


# -- a list of which some fail --------------------------------------------------------------------


def test_the_answers_of_the_others_survive_a_failure(llm: LLM) -> None:
    everything = tuple(range(llm.model_config.vocab_size))
    stuck = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=everything)
    with pytest.raises(
        BatchFailed, match="prompt 1 of 3 failed: .*own parameters .* forbid every token"
    ) as caught:
        llm.generate([IDS, IDS, [305]], [GREEDY, stuck, GREEDY])
    first, second, third = caught.value.outputs
    assert second is None
    assert first.token_ids == llm.generate(IDS, GREEDY)[0].token_ids
    assert third.token_ids == llm.generate([305], GREEDY)[0].token_ids


def test_the_answers_before_an_engine_dies_survive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = llm.engine.step, 0

    def make_nine() -> list[StepOutput]:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 9:
            raise DeviceLost("the device failed")
        return step()

    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", make_nine)
        with pytest.raises(BatchFailed, match="prompt 1 of 2 failed: the device failed") as caught:
            llm.generate([IDS, IDS], [GREEDY, long])
    assert isinstance(caught.value.__cause__, DeviceLost)
    assert [output and len(output.token_ids) for output in caught.value.outputs] == [4, None]


# -- options of a request -------------------------------------------------------------------------


def test_options_reach_the_engine(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, **KNOBS)
    seen: list[Request] = []
    add = llm.engine.add

    def adding(request: Request) -> None:
        seen.append(request)
        add(request)

    monkeypatch.setattr(llm.engine, "add", adding)
    options: Any = {"priority": -3, "deadline": 12.5, "cache_salt": "mine"}
    messages = [{"role": "user", "content": "hi"}]
    llm.generate([IDS, IDS], GREEDY, **options)
    llm.chat(messages, GREEDY, **options)
    list(llm.stream(IDS, GREEDY, **options))
    list(llm.stream_chat(messages, GREEDY, **options))
    assert [(r.priority, r.deadline, r.cache_salt) for r in seen] == [(-3, 12.5, "mine")] * 5
    llm.generate(IDS, GREEDY)
    assert (seen[-1].priority, seen[-1].deadline, seen[-1].cache_salt) == (0, None, "")


@pytest.mark.parametrize("options", [{"priority": "high"}, {"deadline": "soon"}, {"cache_salt": 7}])
def test_options_of_the_wrong_type_are_refused(llm: LLM, options: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(IDS, GREEDY, **options)
    assert caught.value.param in options


# -- parameters -----------------------------------------------------------------------------------


def test_conversations_have_params_of_their_own_and_a_bar_as_prompts_have(llm: LLM) -> None:
    chats = [[{"role": "user", "content": word}] for word in ("a", "b")]
    lengths = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    answers = llm.chat(chats, lengths, show_progress=True)
    assert [len(answer.token_ids) for answer in answers] == [2, 5]
    assert answers[1].token_ids == llm.chat(chats[1], lengths[1])[0].token_ids
    with pytest.raises(RequestError, match="2 conversations but 1 sampling parameters"):
        llm.chat(chats, lengths[:1])
    for wrong in (4, {"max_tokens": 4}):
        with pytest.raises(RequestError, match="params must be SamplingParams, got (int|dict)"):
            llm.chat(chats, wrong)  # type: ignore[arg-type]


def test_a_model_is_not_copied_and_says_so(llm: LLM) -> None:
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="^LLM cannot be pickled or copied; make one in each process"):
            copied(llm)


# -- the same for many callers --------------------------------------------------------------------


def test_an_async_model_knows_what_a_plain_one_does(checkpoint: str, llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as many:
            messages = [{"role": "user", "content": "hi"}]
            assert many.name == llm.name
            assert many.tokenizer.vocab_size == llm.tokenizer.vocab_size
            assert many.has_chat_template == llm.has_chat_template
            assert many.sampling_defaults == llm.sampling_defaults
            assert await many.encode("the river") == llm.encode("the river")
            assert await many.encode_chat(messages) == llm.encode_chat(messages)
            wanted = llm.generate(IDS, GREEDY)[0].token_ids
            assert (await many.generate(np.array(IDS), GREEDY, priority=2)).token_ids == wanted  # type: ignore[arg-type]
            for bad in (None, {"a": 1}, b"x"):
                with pytest.raises(RequestError, match="must be text or token ids"):
                    await many.generate(bad, GREEDY)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="priority must be"):
                await anext(many.stream(IDS, GREEDY, priority="x"))  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_beams_cannot_stream(checkpoint: str, n: int) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as many:
            beams = SamplingParams(n=n, use_beam_search=True, temperature=0.0, max_tokens=3)
            with pytest.raises(RequestError, match="beam search choose at the end, so they cannot stream"):
                await anext(many.stream(IDS, beams))
            with pytest.raises(RequestError, match="cannot stream"):
                await anext(many.stream_chat([{"role": "user", "content": "hi"}], beams))
            assert len((await many.generate(IDS, beams)).outputs) == n

    asyncio.run(main())


# -- threads --------------------------------------------------------------------------------------

IN_USE = "one thread at a time; use AsyncLLM"


def in_a_thread(call: Callable[[], object]) -> object:
    """What a call returns in a thread of its own; raises what it raised there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


def test_a_second_thread_is_refused_at_once_and_the_first_is_not_disturbed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = llm.generate(IDS, GREEDY)[0].token_ids
    open_stream = llm.stream(IDS, GREEDY)
    refused: list[str] = []
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(IDS, GREEDY),
        lambda: llm.embed(IDS),
        lambda: llm.stream(IDS, GREEDY),
        lambda: next(open_stream),
        open_stream.close,
        llm.close,
    ]
    step = llm.engine.step

    def step_while_others_call() -> list[StepOutput]:
        for call in calls[len(refused) :]:
            with pytest.raises(EngineError, match=IN_USE) as caught:
                in_a_thread(call)
            refused.append(str(caught.value))
        return step()

    monkeypatch.setattr(llm.engine, "step", step_while_others_call)
    assert llm.generate(IDS, GREEDY)[0].token_ids == wanted
    assert len(refused) == len(calls)
    assert [i for delta in open_stream for i in delta.token_ids] == wanted, "a refusal harms no stream"


def test_a_second_thread_may_take_over(llm: LLM) -> None:
    wanted = llm.generate(IDS, GREEDY)[0].token_ids
    answer: Any = in_a_thread(lambda: llm.generate(IDS, GREEDY))
    assert answer[0].token_ids == wanted
    stream = llm.stream(IDS, GREEDY)
    first = next(stream)
    rest: Any = in_a_thread(lambda: list(stream))
    assert [i for delta in (first, *rest) for i in delta.token_ids] == wanted


# -- vectors --------------------------------------------------------------------------------------


def test_integers_of_any_make_are_embedded(llm: LLM) -> None:
    (wanted,) = llm.embed(IDS)
    assert len(wanted) == llm.model_config.hidden_size
    assert math.hypot(*wanted) == pytest.approx(1.0)
    given: Any = [np.array(IDS), tuple(IDS)]
    for vector in llm.embed(given):
        assert vector == pytest.approx(wanted, abs=1e-5)
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [(None, "got NoneType"), (["a", 1], "got int"), ([[1, 2.5]], "must hold integers"), (b"x", "got bytes")],
)
def test_what_is_no_text_is_not_embedded(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.embed(prompts)


def test_an_async_model_embeds_while_it_generates(checkpoint: str, llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as many:
            answer, last, mean = await asyncio.gather(
                many.generate(IDS, GREEDY),
                many.embed("the river"),
                many.embed(IDS, pooling="mean", normalize=False),
            )
            assert answer.token_ids == llm.generate(IDS, GREEDY)[0].token_ids
            assert last == pytest.approx(llm.embed("the river")[0], abs=1e-5)
            assert mean == pytest.approx(llm.embed(IDS, pooling="mean", normalize=False)[0], abs=1e-5)
            with pytest.raises(RequestError, match="pooling must be one of last, mean, got 'max'"):
                await many.embed(IDS, pooling="max")

    asyncio.run(main())


# -- the end --------------------------------------------------------------------------------------


def test_a_closed_model_has_let_go_of_its_weights_and_says_so(checkpoint: str) -> None:
    with LLM(checkpoint, **KNOBS) as llm:
        llm.generate(IDS, GREEDY)
        device: Any = llm.engine._device
        weights = weakref.ref(device.model)
        del device
        assert weights() is not None
    assert weights() is None
    for call in (llm.generate, llm.embed, llm.stream):
        with pytest.raises(EngineStopped, match="this LLM was closed; make another one"):
            call(IDS)
    assert llm.encode("the river")  # the text side needs no engine
    llm.close()


def test_a_closed_model_of_an_event_loop_has_let_go_of_its_weights_too(checkpoint: str) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            await llm.generate(IDS, GREEDY)
            device: Any = llm.client._engine._device  # type: ignore[attr-defined]
            weights = weakref.ref(device.model)
            del device
            assert weights() is not None
        assert weights() is None
        await llm.close()

    asyncio.run(main())


def test_a_stream_of_a_closed_model_gives_what_it_has_and_ends(checkpoint: str) -> None:
    llm = LLM(checkpoint, **KNOBS)
    reading, waiting = llm.stream(IDS, GREEDY), llm.stream(IDS, GREEDY)
    next(reading)
    llm.close()
    for stream in (reading, waiting):
        with pytest.raises(EngineStopped):
            while True:
                next(stream)
        stream.close()
        assert list(stream) == []


def test_a_model_is_closed_when_its_block_fails(checkpoint: str) -> None:
    with pytest.raises(KeyError), LLM(checkpoint, **KNOBS) as llm:
        raise KeyError
    with pytest.raises(EngineStopped):
        llm.generate(IDS)


# -- plain data -----------------------------------------------------------------------------------


def test_logprobs_are_part_of_the_plain_data(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (answer,) = llm.generate(IDS, params)
    data = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    rows = answer.outputs[0].logprobs
    assert rows is not None
    assert [row["token_id"] for row in data["outputs"][0]["logprobs"]] == answer.token_ids
    assert data["outputs"][0]["logprobs"][0] == {
        "token_id": rows[0].token_id,
        "logprob": rows[0].logprob,
        "rank": 1,
        "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in rows[0].top],
    }
    assert data["prompt_logprobs"][0] is None
    assert len(data["prompt_logprobs"]) == len(IDS)
    assert llm.generate(IDS, GREEDY)[0].to_dict()["outputs"][0]["logprobs"] is None


# -- conversations --------------------------------------------------------------------------------


def test_a_text_is_a_conversation_of_one_message(llm: LLM, checkpoint: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (expected,) = llm.chat(messages, GREEDY)
    (answer,) = llm.chat("hello", GREEDY)
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.token_ids == expected.token_ids
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    assert [i for piece in llm.stream_chat("hello", GREEDY) for i in piece.token_ids] == expected.token_ids

    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as many:
            assert (await many.chat("hello", GREEDY)).token_ids == expected.token_ids

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            ["hello", "again"],
            'one conversation, which is a list of messages such as {"role": "user", "content": "..."}, or '
            "several conversations as a list of such lists; conversation 0 of 2 is str; to ask each text "
            'separately, give [[{"role": "user", "content": "..."}], '
            '[{"role": "user", "content": "..."}], ...]',
        ),
        ([[{"role": "user", "content": "hi"}], "hello"], "conversation 1 of 2 is str"),
        ([None], "conversation 0 of 1 is NoneType"),
        (b"hello", "got bytes"),
        (None, "got NoneType"),
        ({"role": "user", "content": "hi"}, "got dict"),
    ],
)
def test_what_is_no_conversation_is_told_what_is(llm: LLM, messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        llm.chat(messages, GREEDY)
    assert 'which is a list of messages such as {"role": "user", "content": "..."}' in str(caught.value)
    assert caught.value.param == "messages"


# -- which limit ----------------------------------------------------------------------------------


def test_a_prompt_too_long_is_told_which_limit_it_breaks_and_how_far_that_could_go(
    llm: LLM, checkpoint: str
) -> None:
    with pytest.raises(ContextOverflow) as caught:
        llm.generate([1] * 300, GREEDY)
    assert str(caught.value) == (
        "prompt has 300 tokens, but this model's maximum context length is 256 tokens; shorten the prompt "
        "to at most 255 tokens"
    )
    short = LLM(checkpoint, max_seq_len=64, **KNOBS)
    with pytest.raises(ContextOverflow) as caught:
        short.generate([1] * 62, GREEDY)
    assert str(caught.value) == (
        "prompt has 62 tokens and max_tokens is 4, but this model's maximum context length is 64 tokens; "
        "shorten the prompt or set max_tokens <= 2 (max_seq_len or the size of the KV cache sets this; the "
        "model itself allows 256)"
    )
    with pytest.raises(ContextOverflow, match=r"is 64 tokens; .* the model itself allows 256\)$"):
        short.engine.add(Request(request_id="e", prompt=(1,) * 65, pooling="last"))


def test_params_that_are_a_dictionary_are_named_so(llm: LLM) -> None:
    given: Any = {"temperature": 0}
    with pytest.raises(RequestError, match="params must be SamplingParams, got dict"):
        llm.generate("hi", given)
