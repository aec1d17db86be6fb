"""From bodies to requests: what the client gave, over the model's defaults, within the operator's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig, SchedulerConfig
from infer.engine.stats import EngineStats
from infer.errors import RequestError, TemplateError, UnknownModel
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from infer.server.protocol.schemas import ChatRequest, CompletionRequest
from infer.server.protocol.translate import Job, make_params, open_chat, open_completion
from infer.server.state import RequestRecord, ServerState, recording
from tests.support.fake_client import FakeClient
from tests.support.wire import make_state


@pytest.fixture
def state(oracle: LLM) -> ServerState:
    return make_state(oracle.encoder, max_prompts=3, max_n=4, request_timeout=60.0)


def complete(state: ServerState, **fields: Any) -> Job:
    body = CompletionRequest.model_validate({"prompt": "the river"} | fields)
    return asyncio.run(open_completion(body, state))


def chat(state: ServerState, **fields: Any) -> Job:
    messages = [{"role": "user", "content": "Who are you?"}]
    return asyncio.run(open_chat(ChatRequest.model_validate({"messages": messages} | fields), state))


@pytest.mark.parametrize(("open_job", "encode"), [(complete, "encode_all"), (chat, "open_chat")])
def test_an_adapter_that_is_unloaded_while_its_prompt_is_read_does_not_become_its_model(
    state: ServerState, monkeypatch: pytest.MonkeyPatch, open_job: Callable[..., Job], encode: str
) -> None:
    """The engine, which no longer has it, refuses the request."""
    state.adapters["sql"] = "tiny"
    encoder = state.models["tiny"].encoder
    read = getattr(encoder, encode)

    def unload_and_read(*given: Any, **options: Any) -> Any:
        state.adapters.clear()
        return read(*given, **options)

    monkeypatch.setattr(encoder, encode, unload_and_read)
    with recording(RequestRecord("a", 0.0)):
        assert [request.adapter for request in open_job(state, model="sql").requests] == ["sql"]


def test_every_sampling_field_arrives(state: ServerState) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "n": 2,
        "best_of": 3,
        "logprobs": 4,
        "max_tokens": 9,
    }
    wanted = SamplingParams(**given | {"logit_bias": {17: -1.5}})
    assert complete(state, **given, logit_bias={"17": -1.5}).params == wanted


def test_a_completion_makes_16_tokens_and_a_chat_as_many_as_fit(state: ServerState) -> None:
    assert complete(state).params == SamplingParams(max_tokens=16)
    assert chat(state).params == SamplingParams(max_tokens=None)


def test_the_models_defaults_stand_where_the_client_says_nothing(oracle: LLM) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}

    model: Any = SimpleNamespace(encoder=SimpleNamespace(sampling_defaults=defaults))

    def made(**fields: Any) -> SamplingParams:
        body = CompletionRequest.model_validate({"prompt": "x"} | fields)
        state = ServerState(config=ServerConfig())
        return asyncio.run(make_params(body, model, state, max_tokens=4, logprobs=None))

    assert made() == SamplingParams(max_tokens=4, **defaults)  # type: ignore[arg-type]
    assert made(temperature=0) == SamplingParams(max_tokens=4, **defaults | {"temperature": 0})  # type: ignore[arg-type]
    assert made(use_beam_search=True) == SamplingParams(max_tokens=4, temperature=0, use_beam_search=True)


def test_texts_are_encoded_as_the_model_wants_and_ids_are_taken_as_they_are(
    state: ServerState, oracle: LLM
) -> None:
    job = complete(state, prompt=["the river", "a clock"])
    assert [list(request.prompt) for request in job.requests] == [
        oracle.encode("the river"),
        oracle.encode("a clock"),
    ]
    assert job.prompts == ("the river", "a clock")
    assert complete(state, prompt=[[5, 6], [7]]).requests[0].prompt == (5, 6)
    assert complete(state, prompt=[5, 6]).prompts == (None,)
    bare = complete(state, prompt="the river", add_special_tokens=False).requests[0].prompt
    assert list(bare) == oracle.encode("the river")[1:]


def test_a_conversation_is_encoded_by_the_template(state: ServerState, oracle: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    assert list(chat(state).requests[0].prompt) == oracle.encode_chat(messages)
    options = {"date_string": "1 May 2024"}
    assert list(chat(state, chat_template_kwargs=options).requests[0].prompt) == oracle.encode_chat(
        messages, template_options=options
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for choice in ("none", "auto", None):
        shown = chat(state, tools=tools, tool_choice=choice, chat_template_kwargs=options)
        visible = None if choice == "none" else tools
        wanted = oracle.encode_chat(messages, tools=visible, template_options=options)
        assert list(shown.requests[0].prompt) == wanted


def test_other_fields_of_a_request_arrive(state: ServerState) -> None:
    job = complete(state, prompt=["a", "b"], priority=-3, cache_salt="mine", timeout=5)
    assert [request.priority for request in job.requests] == [-3, -3]
    assert {request.cache_salt for request in job.requests} == {"mine"}
    assert all(request.deadline is not None for request in job.requests)
    assert job.time_limit_s == 5
    assert complete(state, timeout=600).time_limit_s == 60
    assert complete(state).time_limit_s == 60
    assert len({request.request_id for request in (*job.requests, *complete(state).requests)}) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"prompt": ["a", "b", "c", "d"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"stream": True, "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    state: ServerState, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        complete(state, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "9" * 30])
def test_a_key_of_logit_bias_that_is_no_token_id_says_what_is_allowed(state: ServerState, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        complete(state, logit_bias={key: 1})
    assert str(caught.value) == (
        f'logit_bias maps token ids to numbers from -100 to 100, as {{"17": -1.5}}, got the key {key!r}; '
        "/tokenize gives the ids of a text"
    )


@pytest.mark.parametrize("n", [0, 5, 1000])
def test_the_servers_limit_is_the_one_that_a_client_hears_of(state: ServerState, n: int) -> None:
    with pytest.raises(RequestError) as caught:
        complete(state, n=n)
    assert str(caught.value) == f"n must be an integer in [1, 4], got {n}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"chat_template_kwargs": {"evil": 1}}, "evil"),
    ],
)
def test_what_a_chat_cannot_honour_is_refused_by_name(
    state: ServerState, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(state, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("ask", [complete, chat])
def test_max_tokens_has_two_spellings_that_must_agree(state: ServerState, ask: Callable[..., Job]) -> None:
    assert ask(state, max_tokens=3, max_completion_tokens=3).params.max_tokens == 3
    assert ask(state, max_completion_tokens=5).params.max_tokens == 5
    with pytest.raises(RequestError, match="max_tokens is 3 and max_completion_tokens is 4"):
        ask(state, max_tokens=3, max_completion_tokens=4)


@pytest.mark.parametrize(
    ("num_clients", "num_places", "max_queue", "fits"),
    [(1, 1, 1, False), (2, 1, 1, True), (1, 2, 1, True), (1, 1, 2, True), (1, 1, None, True)],
)
def test_more_prompts_than_an_idle_server_takes_are_refused_for_good(
    oracle: LLM, num_clients: int, num_places: int, max_queue: int | None, fits: bool
) -> None:
    clients = [FakeClient() for _ in range(num_clients)]
    for client in clients:
        client.snapshot = EngineStats(max_batch_size=num_places)
    state = make_state(oracle.encoder, *clients)
    state.models["tiny"].config = EngineConfig(scheduler=SchedulerConfig(max_queue=max_queue))
    if fits:
        assert len(complete(state, prompt=["a", "b", "c"]).requests) == 3
        return
    with pytest.raises(RequestError, match="prompt has 3 prompts, but only 2 may run or wait") as caught:
        complete(state, prompt=["a", "b", "c"])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [["a", ""], [[5], []]])
def test_a_prompt_of_several_that_has_no_tokens_is_named(state: ServerState, prompt: list[Any]) -> None:
    with pytest.raises(RequestError, match="prompt 1 has no tokens; give at least one") as caught:
        complete(state, prompt=prompt, add_special_tokens=False)
    assert caught.value.param == "prompt"


def test_an_unknown_model_is_refused(state: ServerState) -> None:
    with pytest.raises(UnknownModel, match="'tinny' is not served here; did you mean 'tiny'"):
        complete(state, model="tinny")


def test_a_model_without_a_template_does_not_chat(state: ServerState, oracle: LLM) -> None:
    class BaseEncoder:
        has_chat_template, think = False, None
        sampling_defaults: dict[str, float] = {}

    state.models["tiny"].encoder = BaseEncoder()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="no chat template; use /v1/completions") as caught:
        chat(state)
    assert not isinstance(caught.value, TemplateError)
