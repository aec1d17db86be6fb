"""The `ollama` package against a live server: every call it has says what the engine says, or why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ollama", reason="the ollama package is not installed")
import ollama  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

from infer.sampling.params import SamplingParams  # noqa: E402
from scripts.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.actor import Actor, read_encoder, reasoned, serve_actor  # noqa: E402
from tests.support.live_server import LiveServer, serve_model  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
OPTIONS = {"temperature": 0, "num_predict": 10}
MESSAGES = [{"role": "user", "content": "Where is the river?"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-qwen3")
    make_checkpoint("qwen3", directory)
    with serve_model(directory) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=live.url) as made:
        yield made


def both(message: Any) -> str:
    """Reasoning and text: an untrained model begins to reason and finds no end."""
    return (message.thinking or "") + (message.content or "")


def test_chat_is_the_offline_answer(live: LiveServer, client: ollama.Client) -> None:
    expected = live.oracle.chat(MESSAGES, GREEDY)[0]
    for name in ("tiny", "tiny:latest"):
        answer = client.chat(name, MESSAGES, options=OPTIONS)
        assert answer.model == name
        assert both(answer.message) == (expected.outputs[0].reasoning or "") + expected.text
        assert (answer.done, answer.done_reason) == (True, "length")
        assert answer.prompt_eval_count == len(expected.prompt_token_ids)
        assert answer.eval_count == 10
        times = (answer.total_duration, answer.prompt_eval_duration, answer.eval_duration)
        assert all(time is not None and 0 < time < 60e9 for time in times)
        assert answer.created_at is not None and answer.created_at.endswith("Z")


def test_a_stream_joins_to_the_whole_answer(client: ollama.Client) -> None:
    pieces = list(client.chat("tiny", MESSAGES, options=OPTIONS, stream=True))
    whole = client.chat("tiny", MESSAGES, options=OPTIONS)
    assert "".join(both(piece.message) for piece in pieces) == both(whole.message)
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 2
    assert (pieces[-1].eval_count, pieces[-1].done_reason) == (10, "length")


class River(BaseModel):
    """An answer that ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    depth: int = Field(ge=0, le=99)


def test_a_schema_is_followed(client: ollama.Client) -> None:
    schema = River.model_json_schema()
    answer = client.chat("tiny", MESSAGES, format=schema, think=False, options={"num_predict": 120})
    River.model_validate_json(answer.message.content or "")
    made = client.generate("tiny", "a river", format=schema, think=False, options={"num_predict": 120})
    River.model_validate_json(made.response or "")


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def play(prompt: str) -> str:
    """Look at the weather if there is a tool for it, then say what it was."""
    if "<tool_response>" in prompt:
        return reasoned(prompt, "So.", "It rains in Rome." if "rain" in prompt else "Nobody knows.")
    if "get_weather" in prompt:
        return reasoned(prompt, "A tool knows.", f"Let me look.\n{CALL}")
    text = "Rome is old ### and large."
    return text if prompt.endswith("</think>\n\n") else reasoned(prompt, "Easy.", text)


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    """A client with a key, of a server whose model says what `play` tells it."""
    encoder = read_encoder("qwen3", tmp_path_factory.mktemp("ollama") / "qwen3")
    with (
        serve_actor(Actor(encoder, play), encoder, api_key=("secret",)) as url,
        ollama.Client(host=url, headers={"Authorization": "Bearer secret"}) as made,
    ):
        yield made


ASK: Any = {"model": "fake", "messages": [{"role": "user", "content": "How is Rome?"}]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_round_trip(actor: ollama.Client, is_stream: bool) -> None:
    if is_stream:
        pieces = [piece.message for piece in actor.chat(**ASK, tools=[get_weather], stream=True)]
    else:
        pieces = [actor.chat(**ASK, tools=[get_weather]).message]
    calls = [call for piece in pieces for call in piece.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Rome"})
    ]
    assert "".join(piece.thinking or "" for piece in pieces) == "A tool knows."
    assert "".join(piece.content or "" for piece in pieces).strip() == "Let me look."
    (made,) = [piece for piece in pieces if piece.tool_calls]
    result = {
        "role": "tool",
        "tool_name": "get_weather",
        "content": get_weather(**calls[0].function.arguments),
    }
    last = actor.chat("fake", [*ASK["messages"], made, result], tools=[get_weather])
    assert (last.message.content, last.done_reason) == ("It rains in Rome.", "stop")


def test_think_says_whether_the_model_reasons(actor: ollama.Client) -> None:
    for think in (None, True, "high"):
        message = actor.chat(**ASK, think=think).message
        assert (message.thinking, message.content) == ("Easy.", "Rome is old ### and large.")
    message = actor.chat(**ASK, think=False, options={"stop": ["###"]}).message
    assert (message.thinking, (message.content or "").rstrip()) == (None, "Rome is old")
    made = actor.generate("fake", "How is Rome?", think=True)
    assert (made.thinking, made.response) == ("Easy.", "Rome is old ### and large.")


def test_a_wrong_key_is_refused(actor: ollama.Client) -> None:
    with ollama.Client(host=str(actor._client.base_url), headers={"Authorization": "Bearer no"}) as wrong:
        with pytest.raises(ollama.ResponseError, match="^no valid key was given") as caught:
            wrong.list()
        assert caught.value.status_code == 401


def test_generate_answers_and_its_context_goes_on(live: LiveServer, client: ollama.Client) -> None:
    question = MESSAGES[0]["content"]
    first = client.generate("tiny", question, options=OPTIONS)
    expected = live.oracle.chat(MESSAGES, GREEDY)[0]
    assert (first.thinking or "") + (first.response or "") == (
        expected.outputs[0].reasoning or ""
    ) + expected.text
    assert first.context is not None
    assert len(first.context) == (first.prompt_eval_count or 0) + 10
    second = client.generate("tiny", question, context=first.context, options=OPTIONS)
    assert (second.prompt_eval_count or 0) >= len(first.context) + (first.prompt_eval_count or 0) - 1
    pieces = list(client.generate("tiny", question, options=OPTIONS, stream=True))
    assert pieces[-1].context == first.context


def test_raw_continues_the_prompt(live: LiveServer, client: ollama.Client) -> None:
    made = client.generate("tiny", "Once there was", raw=True, options=OPTIONS)
    assert made.response == live.oracle.generate("Once there was", GREEDY)[0].text
    assert made.context is None


def test_embeddings_are_the_offline_vectors(live: LiveServer, client: ollama.Client) -> None:
    texts = ["The sky is blue", "Where is it?"]
    expected = live.oracle.embed(texts)
    made = client.embed("tiny", texts)
    assert [list(vector) for vector in made.embeddings] == [
        pytest.approx(each, abs=1e-5) for each in expected
    ]
    assert (made.prompt_eval_count or 0) > 2
    assert list(client.embeddings("tiny", texts[0]).embedding) == pytest.approx(expected[0], abs=1e-5)


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    (running,) = client.ps().models
    assert (running.name, running.context_length) == ("tiny:latest", 256)
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == 256
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template


def test_a_model_is_loaded_and_pulled_but_not_changed(client: ollama.Client) -> None:
    assert client.generate("tiny").done_reason == "load"
    assert client.pull("tiny").status == "success"
    assert [each.status for each in client.pull("tiny", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="unloads a model"):
        client.generate("tiny", keep_alive=0)
    changes: list[Callable[[], Any]] = [
        lambda: client.delete("tiny"),
        lambda: client.copy("tiny", "other"),
        lambda: client.push("tiny"),
        lambda: client.create("other", from_="tiny"),
    ]
    for change in changes:
        with pytest.raises(ollama.ResponseError, match="the operator chooses the models") as caught:
            change()
        assert caught.value.status_code == 400


def test_an_unknown_model_is_not_found(client: ollama.Client) -> None:
    for ask in (
        lambda: client.chat("gone", MESSAGES),
        lambda: list(client.chat("gone", MESSAGES, stream=True)),
        lambda: client.generate("gone", "hi"),
        lambda: client.embed("gone", "hi"),
        lambda: client.show("gone"),
        lambda: client.pull("gone"),
    ):
        with pytest.raises(ollama.ResponseError, match='^model "gone" not found') as caught:
            ask()
        assert caught.value.status_code == 404


def test_a_wrong_option_is_told_by_its_own_name(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature must be") as caught:
        client.chat("tiny", MESSAGES, options={"temperature": -1})
    assert caught.value.status_code == 400


def test_logprobs_come_with_the_answer(client: ollama.Client) -> None:
    answer = client.chat("tiny", MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 10
    assert all(len(each.top_logprobs or ()) == 2 for each in answer.logprobs)
    pieces = client.chat("tiny", MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2, stream=True)
    streamed = [each for piece in pieces for each in piece.logprobs or ()]
    assert [each.token for each in streamed] == [each.token for each in answer.logprobs]
