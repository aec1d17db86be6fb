"""What a caller of `LLM` gets: the right tokens, from a cache of any size, whatever else is being served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.engine.engine import Engine
from infer.errors import ContextOverflow, EngineError, RequestError
from infer.execution.device import PendingStep
from infer.execution.order import StepOrder
from infer.frontend.llm import LLM
from infer.frontend.outputs import OutputBuilder
from infer.sampling.params import SamplingParams, sequence_seed
from infer.scheduling.request import Request
from scripts.make_checkpoint import make_checkpoint
from tests.support.books import check_books
from tests.support.checkpoints import FAMILIES, build_like, reference_model
from tests.support.fetched import fetched_model
from tests.support.simple_loop import (
    all_logprobs,
    beam_search,
    generate_greedy,
    generate_sampled,
    model_offers,
)
from tests.support.thinned import thinned
from tests.support.tiny import (
    CONTEXT_LEN,
    SIZES,
    drain,
    greedy,
    is_close,
    make_engine,
    random_prompts,
    run_engine,
    tiny_model,
)

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_checkpoint("llama", path, sizes=SIZES, seed=1)
    return path


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    """With a cache of 40 blocks of 4 tokens; afterwards nothing may be left in it."""
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", num_blocks=40, block_size=4)
    yield llm
    check_idle(llm.engine)


def check_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.num_requests == 0
    check_books(engine.scheduler.pool)
    assert engine.scheduler.pool.audit_blocks() == []
    assert engine.scheduler.pool.usage().num_used == 0


# -- many prompts ---------------------------------------------------------------------------------


def test_hundreds_of_prompts_in_a_small_cache_are_answered_as_if_each_were_alone(llm: LLM) -> None:
    prompts = random_prompts(220, seed=3, longest=30)
    params = [greedy(1 + number % 9) for number in range(220)]
    answers = llm.generate(prompts, params)
    assert llm.engine.scheduler.num_preemptions > 0
    model = tiny_model("llama").model
    for prompt, answer, one in zip(prompts, answers, params, strict=True):
        assert answer.prompt_token_ids == prompt
        assert answer.token_ids == generate_greedy(model, prompt, one.max_tokens or 0)
        assert answer.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_does_not_depend_on_the_neighbours(family: str) -> None:
    """Greedy and seeded requests alone, and in crowds of two kinds."""
    prompts = random_prompts(6, seed=5)
    params = [greedy(8), SamplingParams(seed=7, max_tokens=8, top_k=20, ignore_eos=True)]
    mine = [(prompt, param) for prompt in prompts[:3] for param in params]
    alone = [run_engine(make_engine(family), [request])[0] for request in mine]
    for seed in (1, 2):
        crowd = [
            (prompt, SamplingParams(seed=seed, n=2, max_tokens=5 + seed))
            for prompt in random_prompts(7, seed=seed)
        ]
        assert run_engine(make_engine(family), [*crowd[:3], *mine, *crowd[3:]])[3:9] == alone


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_prompt_of_whole_blocks_may_be_fully_cached(block_size: int) -> None:
    engine = make_engine(block_size=block_size)
    prompt = random_prompts(2)[1]
    assert len(prompt) == 32
    wanted = [[generate_greedy(tiny_model("llama").model, prompt, 10)]]
    assert [run_engine(engine, [(prompt, greedy(10))]) for _ in range(3)] == [wanted] * 3
    engine.add(Request(request_id="r", prompt=tuple(prompt), params=greedy(2)))
    assert drain(engine)[-1].num_cached == 31


# -- limits ---------------------------------------------------------------------------------------


def test_the_context_may_be_filled_to_the_last_token_and_not_beyond(llm: LLM) -> None:
    prompt = list(range(50))
    (answer,) = llm.generate(prompt, greedy(CONTEXT_LEN - 50))
    assert len(answer.token_ids) == 10
    assert answer.token_ids == generate_greedy(tiny_model("llama").model, prompt, 10)
    with pytest.raises(ContextOverflow, match="set max_tokens <= 10"):
        llm.generate(prompt, greedy(CONTEXT_LEN - 50 + 1))
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        llm.generate(list(range(CONTEXT_LEN)), greedy(1))


def test_without_params_a_short_context_ends_the_answer_and_is_no_error(llm: LLM) -> None:
    prompt = list(range(1, CONTEXT_LEN - 5))
    [answer] = llm.generate(prompt)
    streamed = [token for delta in llm.stream(prompt) for token in delta.token_ids]
    assert 1 <= len(answer.outputs[0].token_ids) <= 6
    assert 1 <= len(streamed) <= 6
    with pytest.raises(ContextOverflow):  # who asks for more than there is, is told
        llm.generate(prompt, SamplingParams())
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        llm.generate([1] * (CONTEXT_LEN + 1))


def test_a_prompt_larger_than_the_whole_cache_is_refused_and_the_queue_goes_on(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", num_blocks=8, block_size=4)
    stream = llm.stream(list(range(20)), greedy(8))
    first = next(stream)
    with pytest.raises(ContextOverflow, match="is 33 tokens; shorten the prompt to at most 32 tokens"):
        llm.generate(list(range(40)), greedy(8))
    assert llm.context_len == 33, "32 in the cache, and the last token, which is never computed"
    rest = [delta.token_ids[0] for delta in stream]
    assert [first.token_ids[0], *rest] == generate_greedy(tiny_model("llama").model, list(range(20)), 8)
    check_idle(llm.engine)


def test_a_bad_prompt_in_a_list_leaves_nothing_of_the_others_behind(llm: LLM) -> None:
    bads: list[Any] = [[], [9999], ["x"], list(range(CONTEXT_LEN))]
    for bad in bads:
        with pytest.raises(RequestError):
            llm.generate([[1, 2, 3], bad, [4, 5]], greedy(4))
        check_idle(llm.engine)
        assert llm._streams == {}
    with pytest.raises(RequestError, match="2 prompts but 1 sampling parameters"):
        llm.generate([[1], [2]], [greedy(4)])


# -- several sequences ----------------------------------------------------------------------------


def test_n_sequences_are_n_requests_with_the_seeds_of_their_indices(llm: LLM) -> None:
    prompt = list(range(1, 22))
    params = SamplingParams(n=4, seed=11, max_tokens=9, ignore_eos=True)
    (answer,) = llm.generate(prompt, params)
    model = tiny_model("llama").model
    assert [output.token_ids for output in answer.outputs] == [
        generate_sampled(model, prompt, params, seed=sequence_seed(11, index)) for index in range(4)
    ]
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 4


def test_best_of_returns_the_likeliest_by_mean_logprob(llm: LLM) -> None:
    prompt = list(range(1, 12))
    stop = (5, 17, 100, 201, 202, 203, 204, 205)
    params = SamplingParams(n=2, best_of=5, seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=stop)
    (answer,) = llm.generate(prompt, params)
    model = tiny_model("llama").model
    scored = []
    for index in range(5):
        seed = sequence_seed(3, index)
        output = generate_sampled(model, prompt, params, seed=seed, stop_ids=stop)
        logprobs = all_logprobs(model, [*prompt, *output])[len(prompt) - 1 :]
        total = sum(float(logprobs[place, token]) for place, token in enumerate(output))
        scored.append((total / len(output), output, total))
    scored.sort(key=lambda item: -item[0])
    assert [output.token_ids for output in answer.outputs] == [output for _, output, _ in scored[:2]]
    totals = [output.cumulative_logprob for output in answer.outputs]
    assert totals == pytest.approx([total for _, _, total in scored[:2]], abs=1e-3)


def test_n_sequences_hold_the_prompt_once(llm: LLM) -> None:
    stream = llm.stream(list(range(24)), SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.pool.usage().num_used == 6, "24 tokens in blocks of 4, for all four"
    next_step = [next(stream) for _ in range(7)]
    assert {delta.index for delta in next_step} == {0, 1, 2, 3}
    assert llm.engine.scheduler.pool.usage().num_used == 6 + 4
    stream.close()


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5])
def test_a_chunk_of_as_many_tokens_as_it_forks_into_samples_from_its_last(num_prompt: int) -> None:
    params = SamplingParams(n=num_prompt, seed=2, max_tokens=3, ignore_eos=True)
    prompt = list(range(7, 7 + num_prompt))
    model = tiny_model("llama").model
    wanted = [
        generate_sampled(model, prompt, params, seed=sequence_seed(2, index)) for index in range(num_prompt)
    ]
    assert run_engine(make_engine(), [(prompt, params)]) == [wanted]


# -- beam search ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "width"), thinned(FAMILIES, (1, 2, 4), keep=3))
def test_beam_search_equals_transformers(family: str, width: int) -> None:
    """The law is theirs with length_penalty=1 and early_stopping=False; many stops, so that beams end."""
    changes: dict[str, Any] = {} if family == "gpt2" else {"max_position_embeddings": 64}
    if family == "gemma2":  # a low cap makes many logits equal, and beams are told apart by them
        changes["final_logit_softcapping"] = 30.0
    reference = reference_model(family, **changes)
    model = build_like(reference)
    stop_ids = list(range(10, 90))
    num_ended = 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(90, 199, (5 + seed,), generator=generator).tolist()
        ours = beam_search(
            model_offers(model), prompt, width=width, max_tokens=10, stop_ids=frozenset(stop_ids)
        )
        theirs = transformers_beams(reference, prompt, width, stop_ids)
        assert [list(beam.output) for beam in ours] == [output for output, _ in theirs]
        for beam, (_, score) in zip(ours, theirs, strict=True):
            assert beam.mean == pytest.approx(score, abs=1e-4)
        num_ended += sum(beam.finish_reason == "stop" for beam in ours)
    repeats = family in ("gpt2", "gemma2")  # which say little else when they are this small
    assert num_ended > 0 or width == 1 or repeats


def transformers_beams(
    reference: Any, prompt: list[int], width: int, stop_ids: list[int]
) -> list[tuple[list[int], float]]:
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=stop_ids,
            pad_token_id=0,
            length_penalty=1.0,
            early_stopping=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [until_stop(row, stop_ids) for row in found.sequences[:, len(prompt) :].tolist()]
    if width == 1:  # greedy search there has no scores of its own
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + outputs[0]])).logits[0]
        rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return [(outputs[0], float(rows.gather(1, torch.tensor(outputs).T).mean()))]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def until_stop(row: list[int], stop_ids: list[int]) -> list[int]:
    """Without the padding after the first stop."""
    ends = [place for place, token in enumerate(row) if token in stop_ids]
    return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize(
    ("family", "knobs"),
    thinned(
        FAMILIES,
        (
            {},
            {"block_size": 1, "num_blocks": 130, "prefill_chunk_size": 3},
            {"block_size": 2, "num_blocks": 32, "preemption": "recompute"},
            {"block_size": 2, "num_blocks": 32, "preemption": "swap", "swap_blocks": 80},
        ),
        keep=4,
    ),
)
def test_beams_in_the_engine_are_those_of_the_exhaustive_search(family: str, knobs: dict[str, Any]) -> None:
    """What the test above ties to transformers, through forks, copies, preemptions and swaps."""
    model = tiny_model(family).model
    stop_ids = tuple(range(10, 40))
    engine = make_engine(family, **knobs)
    prompts = [prompt[:12] for prompt in random_prompts(4, seed=9)]
    params = SamplingParams(
        use_beam_search=True, temperature=0.0, n=3, max_tokens=9, stop_token_ids=stop_ids, ignore_eos=True
    )
    outputs = run_engine(engine, [(prompt, params) for prompt in prompts])
    assert ("preemption" in knobs) == (engine.scheduler.num_preemptions > 0)
    for prompt, made in zip(prompts, outputs, strict=True):
        wanted = beam_search(model_offers(model), prompt, width=3, max_tokens=9, stop_ids=frozenset(stop_ids))
        assert made == [list(beam.output) for beam in wanted]


# -- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "knobs"),
    thinned(
        FAMILIES,
        ({}, {"prefill_chunk_size": 5}, {"kv_cache_backend": "naive"}, {"block_size": 2, "num_blocks": 19}),
        keep=4,
    ),
)
def test_logprobs_are_those_of_the_reference(family: str, knobs: dict[str, Any]) -> None:
    """Twice the same prompt, so that the second time the prefix cache has it."""
    engine, model = make_engine(family, **knobs), tiny_model(family).model
    prompts = [prompt for prompt in random_prompts(5, seed=2, longest=24) for _ in range(2)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(seed=number, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    outputs = drain(engine)
    assert ("num_blocks" in knobs) == (engine.scheduler.num_preemptions > 0)
    for number, prompt in enumerate(prompts):
        mine = [output for output in outputs if output.request_id == str(number)]
        tokens = [*prompt, *(token for output in mine for token in output.token_ids)]
        expected = all_logprobs(model, tokens)
        assert mine[0].prompt_logprobs is not None
        assert mine[0].prompt_logprobs[0] is None
        rows = [*mine[0].prompt_logprobs[1:], *(row for output in mine for row in output.logprobs)]
        assert len(rows) == len(tokens) - 1
        for place, (row, token) in enumerate(zip(rows, tokens[1:], strict=True)):
            assert row is not None
            assert row.token_id == token
            assert is_close(row.logprob, expected[place, token])
            values, ids = expected[place].topk(len(row.top))
            assert [token_id for token_id, _ in row.top] == ids.tolist()
            assert all(is_close(own, other) for (_, own), other in zip(row.top, values, strict=True))
            assert len(row.top) == (2 if place < len(prompt) - 1 else 3)
            assert row.rank == int((expected[place] > expected[place, token]).sum()) + 1


def test_a_batch_costs_each_step_only_what_it_made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt is asked in every step whether it is done, and no piece is kept that is not read."""
    asked: list[OutputBuilder] = []
    is_finished: Any = vars(OutputBuilder)["is_finished"].fget

    def count(builder: OutputBuilder) -> bool:
        asked.append(builder)
        assert all(not stream.deltas for stream in llm._streams.values())
        return bool(is_finished(builder))

    monkeypatch.setattr(OutputBuilder, "is_finished", property(count))
    answers = llm.generate([[number, 2, 3] for number in range(30)], greedy(9))
    assert len(answers) == 30
    assert len(asked) == 30


# -- streams --------------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_whole_answer(llm: LLM) -> None:
    for seed in range(5):
        params = SamplingParams(seed=seed, max_tokens=12, n=2, logprobs=1)
        (whole,) = llm.generate("Once there was", params)
        deltas = list(llm.stream("Once there was", params))
        for output in whole.outputs:
            mine = [delta for delta in deltas if delta.index == output.index]
            assert "".join(delta.text for delta in mine) == output.text
            assert [token for delta in mine for token in delta.token_ids] == output.token_ids
            assert [row.token_id for delta in mine for row in delta.logprobs] == output.token_ids
            assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == output.finish_reason


def test_interleaved_streams_and_a_batch_between_them_get_their_own_tokens(llm: LLM) -> None:
    model = tiny_model("llama").model
    prompts = random_prompts(4, seed=8, longest=20)
    streams = [llm.stream(prompt, greedy(10)) for prompt in prompts[:3]]
    got: list[list[int]] = [[], [], []]
    for turn in (0, 1, 1, 2, 0):
        got[turn] += next(streams[turn]).token_ids
    (batch,) = llm.generate(prompts[3], greedy(6))
    assert batch.token_ids == generate_greedy(model, prompts[3], 6)
    for turn, stream in enumerate(streams):
        got[turn] += [token for delta in stream for token in delta.token_ids]
    assert got == [generate_greedy(model, prompt, 10) for prompt in prompts[:3]]


def test_a_stream_knows_its_times_though_it_is_read_later(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    early, late = llm.stream("the cat", params), llm.stream("the dog", params)
    assert late.seconds == (0.0, 0.0)
    list(early)
    ran = late.seconds
    assert 0 < ran[0] < ran[1]
    list(late)
    assert late.seconds == ran


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_a_stream_gives_its_blocks_back_at_once(llm: LLM, num_read: int) -> None:
    """Even one whose first piece has not been read."""
    stream = llm.stream(list(range(20)), greedy(30))
    for _ in range(num_read):
        next(stream)
    stream.close()
    check_idle(llm.engine)
    assert llm._streams == {}
    assert list(stream) == []


def test_a_stream_that_is_dropped_is_closed(llm: LLM) -> None:
    """By the next that is done with the engine: the garbage collector may come in the middle of a step."""
    stream = llm.stream(list(range(20)), greedy(30))
    next(stream)
    del stream
    llm.generate([1, 2, 3], greedy(1))
    check_idle(llm.engine)
    assert llm._streams == {}


def test_a_stream_may_be_collected_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, dropped = llm.stream([1, 2, 3], greedy(8)), llm.stream([4, 5, 6], greedy(8))
    got = [*next(kept).token_ids]
    next(dropped)
    doomed = [dropped]
    del dropped
    device: Any = llm.engine._device
    run = device.run

    def run_and_collect(order: StepOrder) -> PendingStep:
        step: PendingStep = run(order)
        doomed.clear()
        return step

    monkeypatch.setattr(device, "run", run_and_collect)
    got += [token for delta in kept for token in delta.token_ids]
    assert got == generate_greedy(tiny_model("llama").model, [1, 2, 3], 8)
    check_idle(llm.engine)


def test_an_id_that_only_the_model_has_may_stand_in_a_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may have more rows than its tokenizer has tokens; such an id has no text."""
    last = llm.model_config.vocab_size - 1
    monkeypatch.setattr(llm.tokenizer, "vocab_size", last)
    (answer,) = llm.generate([[1, 2, last]], greedy(2))
    assert answer.token_ids == generate_greedy(tiny_model("llama").model, [1, 2, last], 2)
    with pytest.raises(RequestError, match=f"token id {last + 1}"):
        llm.generate([[1, 2, last + 1]], greedy(2))


def test_a_request_whose_text_cannot_begin_does_not_reach_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **fields: object) -> None:
        raise RequestError("no text")

    monkeypatch.setattr("infer.frontend.text_model.OutputBuilder", refuse)
    with pytest.raises(RequestError, match="no text"):
        llm.stream([1, 2, 3], greedy(2))
    assert llm.engine.num_requests == 0


def test_best_of_and_beams_do_not_stream(llm: LLM) -> None:
    for params in (
        SamplingParams(best_of=2, max_tokens=3),
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=3),
    ):
        with pytest.raises(RequestError, match="cannot stream"):
            llm.stream([1, 2, 3], params)
    (answer,) = llm.generate(
        [1, 2, 3], SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=3)
    )
    assert [output.index for output in answer.outputs] == [0, 1]


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{}, {"n": 3}, {"best_of": 3}, {"n": 2, "use_beam_search": True, "temperature": 0.0}],
    ids=["one", "n", "best_of", "beams"],
)
def test_a_model_that_raises_is_an_error_and_no_endless_wait(
    llm: LLM, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_out_of_memory(order: StepOrder) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._device, "run", raise_out_of_memory)
        with pytest.raises(EngineError, match="MemoryError in step 1"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=4, **params))
    (answer,) = llm.generate([1, 2, 3], greedy(4))
    assert answer.token_ids == generate_greedy(tiny_model("llama").model, [1, 2, 3], 4)


def test_a_request_that_forbids_every_token_fails_alone(llm: LLM) -> None:
    """Everything below min_tokens is a stop: no token is left to choose from."""
    everything = tuple(range(llm.model_config.vocab_size))
    stuck = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=everything)
    neighbour = llm.stream([1, 2, 3], greedy(6))
    first = next(neighbour)
    with pytest.raises(EngineError, match="own parameters .* forbid every token"):
        llm.generate([4, 5], stuck)
    rest = [token for delta in neighbour for token in delta.token_ids]
    assert [*first.token_ids, *rest] == generate_greedy(tiny_model("llama").model, [1, 2, 3], 6)


# -- the default model ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [6, pytest.param(None, marks=pytest.mark.slow)], ids=["begins", "goes on"])
def test_the_default_model_continues_as_transformers_does(limit: int | None) -> None:
    """Greedy tokens recorded with transformers from the same file, all cases in one batch."""
    fetched_model()
    recorded = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))
    llm = LLM(dtype="float32", device="cpu", max_seq_len=512, prefill_chunk_size=32)
    cases = recorded["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=limit or recorded["max_new_tokens"])
    answers = llm.generate([case["prompt_ids"] for case in cases], params)
    for case, answer in zip(cases, answers, strict=True):
        assert answer.token_ids == case["output_ids"][:limit]
        if limit is None:
            assert answer.outputs[0].finish_reason == case["finish"]
            assert case["kind"] != "text" or answer.text == case["output_text"]
    texts = [case for case in cases if case["kind"] == "text"]
    few = SamplingParams(temperature=0.0, max_tokens=4)  # of prompts as texts: they become the same ids
    answers = llm.generate([case["prompt"] for case in texts], few)
    assert [answer.token_ids for answer in answers] == [case["output_ids"][:4] for case in texts]
    check_idle(llm.engine)
