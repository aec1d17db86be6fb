"""The real openai package against a real server: sync, async, streams, and errors as its own classes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model

MESSAGES: Any = [{"role": "user", "content": "Where is the river?"}]
FIXED = {"chat_template_kwargs": {"date_string": "1 May 2024"}}
WORDS = ("the", "engine", "river", "clock", "word", "time", "sky", "blue", "count", "steps", "answer")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("sdk") / "llama"
    make_checkpoint("llama", directory)
    with serve_model(directory, max_n=4) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.base_url, api_key="any", max_retries=0, timeout=30) as made:
        yield made


def test_models_are_listed(live: LiveServer, client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == live.model
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == live.oracle.context_len
    assert client.models.retrieve(live.model).id == live.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_the_offline_answer(live: LiveServer, client: OpenAI) -> None:
    answer = client.completions.create(
        model=live.model,
        prompt=["the river", "a clock"],
        max_tokens=8,
        n=2,
        seed=4,
        logprobs=2,
        extra_body={"top_k": 50, "ignore_eos": True},
    )
    params = SamplingParams(max_tokens=8, n=2, seed=4, logprobs=2, top_k=50, ignore_eos=True)
    offline = live.oracle.generate(["the river", "a clock"], params)
    wanted = [output for each in offline for output in each.outputs]
    assert [choice.text for choice in answer.choices] == [output.text for output in wanted]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(
        [row.logprob for row in wanted[0].logprobs or ()], abs=1e-4
    )


def test_a_chat_is_the_offline_answer(live: LiveServer, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=live.model,
        messages=MESSAGES,
        max_completion_tokens=10,
        seed=9,
        logprobs=True,
        top_logprobs=1,
        extra_body=FIXED,
    )
    params = SamplingParams(max_tokens=10, seed=9)
    offline = live.oracle.chat(MESSAGES, params, template_options=FIXED["chat_template_kwargs"])[0]
    assert answer.choices[0].message.content == offline.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == len(offline.token_ids)


def test_streams_join_to_the_whole(live: LiveServer, client: OpenAI) -> None:
    options: Any = {
        "model": live.model,
        "messages": MESSAGES,
        "max_tokens": 12,
        "seed": 2,
        "extra_body": FIXED,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_helper_for_streams_assembles_the_answer(live: LiveServer, client: OpenAI) -> None:
    options: Any = {"model": live.model, "messages": MESSAGES, "seed": 2, "stop": ["e", "a", "o"]}
    with client.chat.completions.stream(**options, extra_body=FIXED) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**options, extra_body=FIXED)
    assert whole.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_embeddings_arrive_as_numbers(live: LiveServer, client: OpenAI) -> None:
    texts = ["the river", "a clock"]
    packed = client.embeddings.create(model=live.model, input=texts)  # the package asks for base64 by itself
    plain = client.embeddings.create(model=live.model, input=texts, encoding_format="float")
    for text, one, other in zip(texts, packed.data, plain.data, strict=True):
        (wanted,) = live.oracle.embed(text, pooling="last", normalize=True)  # of the length 1, as OpenAI's
        assert one.embedding == pytest.approx(wanted, abs=1e-4)
        assert other.embedding == pytest.approx(wanted, abs=1e-4)


def test_hundreds_at_once_get_what_they_would_get_alone(live: LiveServer) -> None:
    """Random requests, half of them streams, some of which leave early: every full answer is the oracle's."""
    rng = random.Random(7)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 6))),
            "max_tokens": rng.randint(1, 16),
            "seed": i,
            "temperature": rng.choice([0, 1.0]),
            "stop": rng.choice([None, ["e"], [" the", "\n"]]),
        }
        for i in range(200)
    ]

    async def ask(client: AsyncOpenAI, body: dict[str, Any], number: int) -> str | None:
        if number % 2 == 0:
            whole = await client.completions.create(model=live.model, **body)
            return str(whole.choices[0].text)
        stream = await client.completions.create(model=live.model, **body, stream=True)
        if number % 10 == 1:
            async for _ in stream:
                break
            await stream.close()
            return None
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str | None]:
        async with AsyncOpenAI(base_url=live.base_url, api_key="any", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, body, i) for i, body in enumerate(bodies)))

    answers = asyncio.run(main())
    params = [
        SamplingParams(
            **{name: value for name, value in body.items() if name != "prompt" and value is not None}
        )
        for body in bodies
    ]
    offline = live.oracle.generate([body["prompt"] for body in bodies], params)
    wrong = [i for i, text in enumerate(answers) if text is not None and text != offline[i].text]
    assert wrong == []
    assert sum(text is not None for text in answers) == 180


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"prompt": "x", "temperature": 500}, openai.UnprocessableEntityError),
        ({"prompt": "x", "model": "other"}, openai.UnprocessableEntityError),
        ({"prompt": "x" * 5000}, openai.UnprocessableEntityError),
        ({"prompt": "x", "extra_body": {"max_tokns": 1}}, openai.UnprocessableEntityError),
        ({"prompt": {"a": 1}}, openai.BadRequestError),
        ({"prompt": "x", "timeout": 30, "extra_body": {"timeout": 0.00001}}, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_packages_own_classes(
    live: LiveServer, client: OpenAI, options: dict[str, Any], kind: type[openai.APIStatusError], stream: bool
) -> None:
    given: dict[str, Any] = {"model": live.model, "stream": stream} | options
    with pytest.raises(kind) as caught:
        client.completions.create(**given)
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_an_unknown_route_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_a_failure_in_mid_stream_is_raised_to_the_reader(live: LiveServer, client: OpenAI) -> None:
    options: Any = {"model": live.model, "prompt": "x", "max_tokens": 240, "stream": True}
    with pytest.raises(openai.APIError, match="not complete after 0.05 s"):
        for _ in client.completions.create(**options, extra_body={"timeout": 0.05, "ignore_eos": True}):
            pass
