"""`/v1/rerank` and `/v1/score`: the forms of Jina, Cohere and vLLM, and what is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.loader.pooling import Scorer
from infer.scheduling.request import Request, StepOutput
from tests.support.wire import ScriptedClient, Wire, make_state

TEXTS = ["a", "a long text about clocks", "a river"]


@pytest.fixture
def wire(oracle: LLM, monkeypatch: pytest.MonkeyPatch) -> Wire:
    """A model whose score is the sigmoid of a tenth of the prompt's length."""

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        assert request.pooling == "last"
        embedding = (float(len(request.prompt)), 1.0)
        yield StepOutput(request.request_id, 0, (), finish_reason=FinishReason.STOP, embedding=embedding)

    monkeypatch.setitem(oracle.encoder.__dict__, "scorer", Scorer(row=(0.1, 0.0)))
    return Wire(make_state(oracle.encoder, ScriptedClient(script)))


def lengths(oracle: LLM, query: str, documents: list[str]) -> list[int]:
    return [len(oracle.encode(query)) + len(oracle.encode(text)) for text in documents]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_ranking_has_the_best_first_in_the_form_of_jina_and_cohere(
    wire: Wire, oracle: LLM, path: str
) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = wire.ok(path, {"query": "q", "documents": documents, "model": "tiny"})
    sizes = lengths(oracle, "q", TEXTS)
    order = sorted(range(3), key=lambda i: -sizes[i])
    assert answer["results"] == [
        {
            "index": i,
            "relevance_score": pytest.approx(1 / (1 + math.exp(-sizes[i] / 10))),
            "document": {"text": TEXTS[i]},
        }
        for i in order
    ]
    assert answer["usage"] == {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}
    assert (answer["model"], answer["id"][:7]) == ("tiny", "rerank-")
    short = wire.ok(path, {"query": "q", "documents": TEXTS, "top_n": 1, "return_documents": False})
    assert [set(found) for found in short["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_stand_in_the_order_of_their_pairs(
    wire: Wire, oracle: LLM, path: str, names: tuple[str, str]
) -> None:
    first, second = names
    one = wire.ok(path, {first: "q", second: TEXTS, "use_activation": False})
    assert [(each["index"], each["object"]) for each in one["data"]] == [(i, "score") for i in range(3)]
    wanted = [size / 10 for size in lengths(oracle, "q", TEXTS)]
    assert [each["score"] for each in one["data"]] == pytest.approx(wanted)
    pairs = wire.ok(path, {first: ["q"] * 3, second: TEXTS, "use_activation": False})
    assert pairs["data"] == one["data"]
    assert len(wire.ok(path, {first: "q", second: "a"})["data"]) == 1


def test_documents_and_prompts_are_cut_at_their_ends(wire: Wire, oracle: LLM) -> None:
    query, document = "q", TEXTS[1]
    asked = {"query": query, "documents": [document], "use_activation": False}
    (cut,) = wire.ok("/v1/rerank", asked | {"max_tokens_per_doc": 2})["results"]
    begun = oracle.tokenizer.decode(oracle.tokenizer.encode(document, add_special=False)[:2])
    assert cut["relevance_score"] == pytest.approx(lengths(oracle, query, [begun])[0] / 10)
    (cut,) = wire.ok("/v1/rerank", asked | {"truncate_prompt_tokens": 4})["results"]
    assert cut["relevance_score"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [""] * 2049}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "x"}, "instruction"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"text_1": "q", "queries": "q", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["q", "q"], "text_2": ["a"] * 3}, "documents"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_field_to_blame(
    wire: Wire, path: str, body: dict[str, Any], param: str
) -> None:
    assert wire.refused(path, body, 400)["param"] == param


def test_a_document_longer_than_the_context_is_told_so(wire: Wire) -> None:
    body = {"query": "q", "documents": ["x " * 400]}
    assert wire.refused("/v1/rerank", body, 400, "context_length_exceeded")["param"] == "documents"


def test_a_model_that_is_no_reranker_says_so(wire: Wire, oracle: LLM) -> None:
    del oracle.encoder.__dict__["scorer"]
    error = wire.refused("/v1/rerank", {"query": "q", "documents": ["a"]}, 400)
    assert "neither a reranker" in error["message"]


def test_a_list_that_may_not_be_empty_says_so(wire: Wire) -> None:
    said = wire.refused("/v1/rerank", {"query": "q", "documents": []}, 400)["message"]
    assert said == "documents: input should be a list that is not empty, got []"


def test_a_long_query_is_not_repeated_for_many_documents(wire: Wire) -> None:
    answer = wire.post("/v1/score", {"text_1": "q" * 100_000, "text_2": ["a"] * 2000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    assert "200000000 characters" in answer.json()["error"]["message"]
