"""Relevance scores: how well a document answers a query.

    query, documents ──► open_scores ──► ScoreJob ──► a request for each text or pair ──► scores

The model decides the method (loader/score_head.py). A classifier or a reranker reads both texts in one
prompt, and the score is the sigmoid of a product with the last hidden state: from 0 to 1. An embedding
model reads each text separately, and the score is the cosine of two vectors: from -1 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from infer.errors import RequestError
from infer.frontend.embeddings import EmbeddingJob, check_inputs, to_unit
from infer.frontend.prompts import PromptEncoder
from infer.loader.pooling import JUDGE, Scorer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    f"<|im_start|>system\n{JUDGE} based on the Query and the Instruct provided. Note that the answer can "
    'only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MAX_REPEATED = 1 << 25  # characters of queries and instructions, which every prompt repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredDocument:
    """A document of a ranking: its index among the given documents, its text and its score."""

    index: int
    document: str
    relevance_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """The prompts from whose hidden states the scores of pairs of texts are computed."""

    job: EmbeddingJob
    scorer: Scorer
    pairs: tuple[tuple[int, int], ...]  # indices of two prompts; the same prompt twice if it holds both texts
    use_activation: bool = True

    def finish(self, hidden: list[float]) -> list[float]:
        """The part of a hidden state that is kept: the vector, or only the score."""
        if not self.scorer.row:
            return to_unit(hidden)
        logit = _dot(self.scorer.row, hidden)
        return [_sigmoid(logit) if self.use_activation else logit]

    def scores(self, kept: Sequence[list[float]]) -> list[float]:
        """The score of each pair, given the results of `finish` for each prompt."""
        if self.scorer.row:
            return [kept[number][0] for number, _ in self.pairs]
        return [_dot(kept[first], kept[second]) for first, second in self.pairs]


def open_scores(
    encoder: PromptEncoder,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    instruction: str | None = None,
    most: int | None = None,
    most_per_document: int | None = None,
    use_activation: bool = True,
) -> ScoreJob:
    """Make the prompts for one query with all documents, or for each query with its own document.

    Only the first `most` tokens of a prompt are kept, and the first `most_per_document` of each document.
    """
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{len(queries)} queries and {len(documents)} documents do not form pairs; give one query, or "
            "as many as documents",
            param="documents",
        )
    scorer = encoder.scorer
    if instruction is not None and not scorer.is_judged:
        raise RequestError.about("instruction", "is only for rerankers with a prompt for it; leave it out")
    if most_per_document is not None:
        cut = encoder.encode_all(
            documents, "documents", add_special=False, most=most_per_document, keeps_end=False
        )
        documents = [encoder.tokenizer.decode(ids, skip_special=False) for ids in cut]
    count = len(documents)
    if not scorer.row:
        texts = encoder.encode_all([*queries, *documents], "documents", most=most, keeps_end=False)
        pairs = [(i % len(queries), len(queries) + i) for i in range(count)]
    else:
        num_chars = sum(map(len, queries)) * (count // len(queries)) + len(instruction or "") * count
        if num_chars > MAX_REPEATED:
            raise RequestError(
                f"the query and the instruction are repeated for each of {count} documents, {num_chars} "
                f"characters in all, and {MAX_REPEATED} are allowed; shorten them, or send fewer documents",
                param="documents",
            )
        queries = list(queries) * (count // len(queries))
        texts = _joined(encoder, queries, documents, instruction, most, is_judged=scorer.is_judged)
        pairs = [(i, i) for i in range(count)]
    check_inputs(encoder, texts, "documents")
    job = EmbeddingJob(
        prompts=tuple(map(tuple, texts)),
        pooling="last" if scorer.row else encoder.pooling.mode,
        normalize=False,
    )
    return ScoreJob(job=job, scorer=scorer, pairs=tuple(pairs), use_activation=use_activation)


def rank(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[ScoredDocument]:
    """The documents, the best first; at most `top_n` of them."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: top_n or len(scores)]
    return [ScoredDocument(index=i, document=documents[i], relevance_score=scores[i]) for i in order]


def _joined(
    encoder: PromptEncoder,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
    most: int | None,
    *,
    is_judged: bool,
) -> list[list[int]]:
    """The ids of prompts that hold both texts; special tokens in the texts stay text."""
    if not is_judged:
        first = encoder.encode_all(queries, "query")
        second = encoder.encode_all(documents, "documents")
        return [(query + document)[:most] for query, document in zip(first, second, strict=True)]
    before, after = (
        encoder.tokenizer.encode(text, add_special=False, parse_special=True) for text in (BEFORE, AFTER)
    )
    bodies = [
        f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        for query, document in zip(queries, documents, strict=True)
    ]
    room = None if most is None else max(1, most - len(before) - len(after))
    ids = encoder.encode_all(bodies, "documents", add_special=False, most=room, keeps_end=False)
    return [before + body + after for body in ids]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(mul, first, second))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
