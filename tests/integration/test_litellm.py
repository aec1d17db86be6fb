"""LiteLLM against a live server, through the two prefixes people use for servers of their own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:pydantic.*")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
MESSAGES = [{"role": "user", "content": "Where is the river?"}]
both_prefixes = pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])


@functools.cache
def litellm() -> Any:
    """The library, imported by the first test that runs: each process that collects would take seconds."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
    return pytest.importorskip("litellm")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-qwen3")
    make_checkpoint("qwen3", directory)
    with serve_model(directory) as server:
        yield server


def complete(live: LiveServer, prefix: str, **fields: Any) -> Any:
    return litellm().completion(
        model=f"{prefix}/{live.model}",
        api_base=live.base_url,
        api_key="any",
        messages=MESSAGES,
        temperature=0,
        num_retries=0,
        **fields,
    )


@both_prefixes
def test_a_completion_is_the_offline_answer(live: LiveServer, prefix: str) -> None:
    answer = complete(live, prefix, max_tokens=10)
    expected = live.oracle.chat(MESSAGES, GREEDY)[0]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)


@both_prefixes
def test_a_stream_joins_to_the_offline_answer(live: LiveServer, prefix: str) -> None:
    chunks = list(complete(live, prefix, max_tokens=10, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == live.oracle.chat(MESSAGES, GREEDY)[0].text
    assert chunks[-1].usage.completion_tokens == 10


class Answer(BaseModel):
    """An answer that ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    depth: int = Field(ge=0, le=99)


@both_prefixes
def test_a_response_format_is_followed(live: LiveServer, prefix: str) -> None:
    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = complete(live, prefix, max_tokens=120, response_format=Answer, extra_body=no_thinking)
    Answer.model_validate_json(answer.choices[0].message.content)


@both_prefixes
def test_an_error_becomes_litellms_own_with_our_words(live: LiveServer, prefix: str) -> None:
    with pytest.raises(litellm().exceptions.ContextWindowExceededError, match="set max_tokens <= ") as caught:
        complete(live, prefix, max_tokens=10_000)
    assert "maximum context length is 256 tokens" in str(caught.value)


def test_a_text_completion_continues_the_prompt(live: LiveServer) -> None:
    answer = litellm().text_completion(
        model=f"text-completion-openai/{live.model}",
        api_base=live.base_url,
        api_key="any",
        prompt="Once there was",
        temperature=0,
        max_tokens=10,
    )
    assert answer.choices[0].text == live.oracle.generate("Once there was", GREEDY)[0].text
