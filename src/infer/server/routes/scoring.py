"""`POST /v1/rerank` and `POST /v1/score`: how well documents answer a query.

The bodies have the formats of Jina, Cohere (v1 and v2) and vLLM, under each of their paths.
frontend/scoring.py decides how a model scores, and checks the texts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from infer.errors import RequestError
from infer.frontend.scoring import open_scores, rank
from infer.server.protocol.schemas import RerankRequest, ScoredText, ScoreRequest, ScoringBody, Text
from infer.server.protocol.translate import most_tokens
from infer.server.routes.embeddings import run_job
from infer.server.routes.json_route import json_response, make_router, server_state
from infer.server.state import mark

router = make_router()


@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
@router.post("/rerank", response_model=None)
async def rerank(body: RerankRequest, http: HttpRequest) -> Response:
    """Return the documents by score, best first."""
    documents = _texts(body.documents)
    scores, about = await _score(http, body, _texts([body.query]), documents)
    results = [
        {"index": found.index, "relevance_score": found.relevance_score}
        | ({} if body.return_documents is False else {"document": {"text": found.document}})
        for found in rank(documents, scores, body.top_n)
    ]
    made = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", **about, "results": results}
    return json_response(made, body)


@router.post("/v1/score", response_model=None)
@router.post("/score", response_model=None)
async def score(body: ScoreRequest, http: HttpRequest) -> Response:
    """Return the score of each pair of texts."""
    first = _one_of(body, "text_1", "queries")
    second = _one_of(body, "text_2", "documents")
    scores, about = await _score(http, body, first, second)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    made = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return json_response({**made, **about, "data": data}, body)


async def _score(
    http: HttpRequest, body: ScoringBody, queries: Sequence[str], documents: Sequence[str]
) -> tuple[list[float], dict[str, Any]]:
    """Return the scores of a body's pairs, and the fields that all answers have."""
    model = await server_state(http).use_model(body.model)
    mark("parse")
    job = await asyncio.to_thread(
        open_scores,
        model.encoder,
        queries,
        documents,
        instruction=body.instruction,
        most=most_tokens(body, model.encoder, 0),
        most_per_document=body.max_tokens_per_doc,
        use_activation=body.use_activation is not False,
    )
    kept = await run_job(http, body, model, job.job, lambda _, state: job.finish(state), "documents")
    num_tokens = sum(map(len, job.job.prompts))
    return job.scores(kept), {
        "model": body.model if body.model is not None else model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _one_of(body: ScoreRequest, *names: str) -> list[str]:
    """Return the texts of the one field that is given; reject none or both."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give {' or '.join(names)}, and not both", param=(given or names)[0])
    found = getattr(body, given[0])
    return _texts(found if isinstance(found, list) else [found])


def _texts(given: Sequence[Text]) -> list[str]:
    return [each.text if isinstance(each, ScoredText) else each for each in given]
