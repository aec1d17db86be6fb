"""LangChain against a live server: chat models, completion models and embeddings say what the engine says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("langchain_openai")
import tiktoken  # noqa: E402
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field, SecretStr  # noqa: E402

from infer.sampling.params import SamplingParams  # noqa: E402
from scripts.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.live_server import LiveServer, serve_model  # noqa: E402

KEY = SecretStr("any")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTIONS = ["Where is the river?", "What is the time?", "Who are you?"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    return directory


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveServer]:
    with serve_model(checkpoint) as server:
        yield server


@pytest.fixture
def chat(live: LiveServer) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=live.base_url, api_key=KEY, model=live.model, temperature=0, max_completion_tokens=12
    )


@pytest.fixture
def completion(live: LiveServer) -> OpenAI:
    return OpenAI(base_url=live.base_url, api_key=KEY, model=live.model, temperature=0, max_tokens=12)


def offline_chat(live: LiveServer, question: str) -> str:
    return live.oracle.chat([{"role": "user", "content": question}], GREEDY)[0].text


def test_invoke_gives_the_offline_answer_with_its_usage(live: LiveServer, chat: ChatOpenAI) -> None:
    message = chat.invoke([SystemMessage("be brief"), HumanMessage("Where is the river?")])
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Where is the river?"},
    ]
    expected = live.oracle.chat(messages, GREEDY)[0]
    assert message.text == expected.text
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == len(expected.prompt_token_ids)
    assert message.usage_metadata["output_tokens"] == len(expected.token_ids)
    assert message.response_metadata["finish_reason"] == expected.outputs[0].finish_reason


def test_streamed_pieces_join_to_the_same_answer(live: LiveServer, chat: ChatOpenAI) -> None:
    whole: AIMessageChunk | None = None
    num_pieces = 0
    for piece in chat.stream("What is the time?", stream_usage=True):
        assert isinstance(piece, AIMessageChunk)
        whole = piece if whole is None else whole + piece
        num_pieces += bool(piece.text)
    assert whole is not None
    assert whole.text == offline_chat(live, "What is the time?")
    assert num_pieces > 1
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12


def test_a_batch_answers_every_question_on_its_own(live: LiveServer, chat: ChatOpenAI) -> None:
    messages = chat.batch(list(QUESTIONS))
    assert [message.text for message in messages] == [offline_chat(live, question) for question in QUESTIONS]


def test_logprobs_come_with_a_chat_answer(live: LiveServer, chat: ChatOpenAI) -> None:
    message = chat.bind(logprobs=True, top_logprobs=2).invoke("Who are you?")
    content = message.response_metadata["logprobs"]["content"]
    assert len(content) == 12
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)  # greedy


class Answer(BaseModel):
    """An answer that ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    depth: int = Field(ge=0, le=99)


@pytest.mark.filterwarnings("ignore::UserWarning:pydantic.*")
def test_structured_output_is_an_object_of_the_class(live: LiveServer) -> None:
    chat = ChatOpenAI(
        base_url=live.base_url, api_key=KEY, model=live.model, max_completion_tokens=120, max_retries=0
    )
    asked = chat.with_structured_output(Answer, method="json_schema")
    assert isinstance(asked.invoke("a river"), Answer)
    *_, last = asked.stream("a river")
    assert isinstance(last, Answer)
    schema = Answer.model_json_schema()
    plain = chat.with_structured_output(schema, method="json_schema", strict=False).invoke("a river")
    Answer.model_validate(plain)


def test_a_completion_model_continues_texts(live: LiveServer, completion: OpenAI) -> None:
    prompts = ["Once there was", "The capital of"]
    expected = [output.text for output in live.oracle.generate(prompts, GREEDY)]
    assert completion.invoke(prompts[0]) == expected[0]
    assert completion.batch(list(prompts)) == expected  # one request with two prompts
    assert "".join(completion.stream(prompts[1])) == expected[1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_that_does_not_fit_is_langchains_own_error(chat: ChatOpenAI, is_stream: bool) -> None:
    """Its middleware that summarizes long conversations waits for this class."""
    with pytest.raises(ContextOverflowError):
        list(chat.stream("river " * 3000)) if is_stream else chat.invoke("river " * 3000)


def test_embeddings_of_text_are_the_models_hidden_states(live: LiveServer, checkpoint: Path) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=live.base_url, api_key=KEY, model=live.model, check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["The sky is blue", "Water boils"])
    reference = hidden_states(checkpoint, live.oracle.encode("The sky is blue"))[-1]
    reference = reference / reference.norm()  # of the length 1, as OpenAI's are
    torch.testing.assert_close(torch.tensor(vectors[0]), reference, atol=1e-4, rtol=1e-4)
    assert len(vectors) == 2
    assert vectors[0] != vectors[1]


def test_embeddings_of_token_ids_embed_those_ids(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default LangChain sends the ids of an OpenAI vocabulary; here one whose tokens are bytes."""
    ranks = {bytes([value]): value for value in range(256)}
    vocabulary = tiktoken.Encoding("cl100k_base", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: vocabulary)
    embeddings = OpenAIEmbeddings(base_url=live.base_url, api_key=KEY, model=live.model)
    vector = embeddings.embed_query("river")

    body = {"model": live.model, "input": list(b"river"), "encoding_format": "float"}
    answer = httpx.post(f"{live.base_url}/embeddings", json=body).json()
    torch.testing.assert_close(torch.tensor(vector), torch.tensor(answer["data"][0]["embedding"]))
    assert answer["usage"]["prompt_tokens"] == 5


def hidden_states(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    """Of every token after the last norm, as transformers computes them."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return states
