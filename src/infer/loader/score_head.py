"""The score head: one row of numbers, from the checkpoint, that turns a hidden state into a relevance score.

    ...ForSequenceClassification    its `score` head, one row
    a reranker that is a causal LM  the head's row for "yes" minus its row for "no": the score's logit
    an embedding model              no row: the score is the cosine of the two texts' vectors

In all three cases the engine returns the last token's hidden state, as for an embedding, so scores need no
special kind of step. A causal LM is a reranker if its files name a `LogitScore` step, if its chat template is
Qwen3-Reranker's, or if its name contains "rerank".
"""

from __future__ import annotations

from collections.abc import Callable
from operator import sub
from typing import TYPE_CHECKING

from infer.errors import CheckpointError, RequestError
from infer.loader.find.source import ModelSource
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_hf_config, read_json
from infer.loader.pooling import JUDGE, Pooling, Scorer
from infer.models.config import is_headless, read_architectures

if TYPE_CHECKING:
    from infer.loader.formats.checkpoint import StoredTensor

ROWS = 4096  # rows of a head that are read at a time


def read_scorer(
    source: ModelSource, pooling: Pooling, template: str | None, token_id: Callable[[str], int | None]
) -> Scorer:
    """Read how a model scores texts; refuses a model that is neither a reranker nor made for embeddings."""
    raw = {} if source.is_gguf else read_hf_config(source.path)
    is_judged = JUDGE in (template or "")
    is_classifier = any(name.endswith("ForSequenceClassification") for name in read_architectures(raw))
    if not (is_classifier or is_judged or "LogitScore" in pooling.mode or "rerank" in source.name.lower()):
        if pooling.is_published or is_headless(raw):
            return Scorer()
        raise RequestError(
            "this model cannot score texts: it is neither a reranker (a ...ForSequenceClassification, or a "
            "language model with 'rerank' in its name) nor an embedding model; load one of these"
        )
    from infer.loader.headers import read_headers  # needs PyTorch, which takes seconds to import

    if is_classifier:
        headers = read_headers(source)
        head, size = headers.tensors.get("score.weight"), headers.config.hidden_size
        if head is not None and (len(head.shape) != 2 or head.shape[1] != size):
            raise CheckpointError(f"score.weight has shape {list(head.shape)}; it must be [labels, {size}]")
        if head is None or head.shape[0] != 1:
            labels = "no `score` head" if head is None else f"{head.shape[0]} labels"
            raise RequestError(f"this classifier has {labels}; a relevance score needs one with 1 label")
        return Scorer(row=tuple(_read_row(head, 0)), is_judged=is_judged)
    yes, no = _answer_ids(source, token_id)
    headers = read_headers(source, "infer")
    module = "embedding" if headers.config.tie_embeddings else "head"
    found = [each.tensor for each in headers.sources if (each.module, each.leaf) == (module, "weight")]
    if not headers.config.has_head or not found:
        raise RequestError("this reranker's files have no language model head, which its score needs")
    row = map(sub, _read_row(found[0], yes), _read_row(found[0], no))
    return Scorer(row=tuple(row), is_judged=True)


def _answer_ids(source: ModelSource, token_id: Callable[[str], int | None]) -> tuple[int, int]:
    """Return the ids of the answers yes and no: those in the model's files, or the tokens "yes" and "no"."""
    path = source.path / "1_LogitScore" / "config.json"
    raw = read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}
    yes = raw.get("true_token_id", token_id("yes"))
    no = raw.get("false_token_id", token_id("no"))
    if not (type(yes) is int and type(no) is int and yes >= 0 and no >= 0):
        raise RequestError("this reranker's vocabulary has no single tokens for yes and no")
    return yes, no


def _read_row(matrix: StoredTensor, number: int) -> list[float]:
    import torch

    for part, rows in matrix.rows(ROWS, torch.device("cpu")):
        if part.start <= number < part.stop:
            numbers = rows if isinstance(rows, torch.Tensor) else rows.numbers()
            return [*numbers[number - part.start].double().tolist()]
    raise CheckpointError(f"the head has {matrix.shape[0]} rows, and row {number} is needed")
