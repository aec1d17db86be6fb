"""Scores and rankings: those of transformers and of the arithmetic on a model's published form."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from infer import LLM, AsyncLLM
from infer.errors import CheckpointError, RequestError
from infer.frontend.scoring import AFTER, BEFORE, INSTRUCTION
from infer.loader.find.source import resolve_model
from infer.loader.pooling import Pooling
from infer.loader.score_head import read_scorer
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.checkpoints import reference_model
from tests.unit.loader.test_pooling import NORMALIZE, POOLING, TRANSFORMER, write
from tests.unit.loader.tiny_files import write_gguf

QUERY = "Where is the river?"
DOCUMENTS = ["The river is behind the house.", "Water boils at one hundred degrees.", "the clock", "engine"]
KNOBS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MB"}


def classifier(family: str, out: Path, labels: int = 1) -> Path:
    """A tiny random classifier, saved by transformers."""
    make_checkpoint(family, out, sizes=Sizes(context_len=512))
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=labels, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    (out / "model.safetensors").unlink()
    model.save_pretrained(out)
    return out


def bare(out: Path, architecture: str) -> Path:
    """The form in which Qwen3-Embedding is published: no `model.` in front of a name, and no head."""
    make_checkpoint("qwen3", out, sizes=Sizes(context_len=512))
    weights = load_file(out / "model.safetensors")
    kept = {name.removeprefix("model."): t.clone() for name, t in weights.items() if "lm_head" not in name}
    save_file(kept, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config |= {"architectures": [architecture], "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "gemma3", "qwen3_5"])
def test_a_classifiers_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = classifier(family, tmp_path / "m")
    reference = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with LLM(str(path), max_num_batched_tokens=16, **KNOBS) as llm:
        logits = llm.score(QUERY, DOCUMENTS, use_activation=False)
        scores = llm.score([QUERY] * len(DOCUMENTS), DOCUMENTS)
        core = llm.tokenizer._core
        for document, logit, score in zip(DOCUMENTS, logits, scores, strict=True):
            ids = core.encode(QUERY, document).ids
            with torch.no_grad():
                wanted = reference(torch.tensor([ids])).logits[0, 0]
            assert logit == pytest.approx(wanted.item(), abs=1e-4)
            assert score == pytest.approx(wanted.sigmoid().item(), abs=1e-4)
        assert [found.index for found in llm.rerank(QUERY, DOCUMENTS, top_n=2)] == sorted(
            range(len(DOCUMENTS)), key=lambda i: -scores[i]
        )[:2]
        with pytest.raises(RequestError, match="no language model head"):
            llm.generate("x")


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    path = classifier("qwen3", tmp_path / "m", labels=3)
    with LLM(str(path), **KNOBS) as llm, pytest.raises(RequestError, match="3 labels"):
        llm.score(QUERY, DOCUMENTS)


@pytest.mark.parametrize("shape", [[], [1], [1, 7]])
def test_a_score_head_of_another_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = classifier("qwen3", tmp_path / "m")
    weights = load_file(path / "model.safetensors") | {"score.weight": torch.zeros(shape)}
    save_file(weights, path / "model.safetensors")
    with LLM(str(path), **KNOBS) as llm, pytest.raises(CheckpointError, match=r"score\.weight"):
        llm.score(QUERY, DOCUMENTS)


@pytest.mark.parametrize("ties", [True, False])
def test_a_reranker_gives_the_chance_of_yes_against_no(tmp_path: Path, ties: bool) -> None:
    path = tmp_path / "tiny-reranker"
    make_checkpoint("qwen3", path, sizes=Sizes(context_len=512))
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reference.eval()
    if reference.config.tie_word_embeddings != ties:
        reference.config.tie_word_embeddings = ties
        head = reference.model.embed_tokens.weight.detach().clone() * (1.0 if ties else 0.7)
        reference.lm_head.weight = reference.model.embed_tokens.weight if ties else torch.nn.Parameter(head)
        reference.save_pretrained(path)
    vocabulary = json.loads((path / "tokenizer.json").read_text())
    yes, no = len(vocabulary["model"]["vocab"]) // 2, len(vocabulary["model"]["vocab"]) // 3
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": yes, "false_token_id": no})
    )
    with LLM(str(path), **KNOBS) as llm:
        scores = llm.score(QUERY, DOCUMENTS)
        told = llm.score(QUERY, DOCUMENTS, instruction="Find clocks")
        for document, score in zip(DOCUMENTS, scores, strict=True):
            body = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
            before, after = (
                llm.tokenizer.encode(text, add_special=False, parse_special=True) for text in (BEFORE, AFTER)
            )
            ids = before + llm.tokenizer.encode(body, add_special=False) + after
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, -1, [no, yes]]
            assert score == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-4)
    assert told != scores


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_an_embedding_model_without_prefix_and_head_gives_cosines(tmp_path: Path, architecture: str) -> None:
    path = write(
        bare(tmp_path / "m", architecture), [TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "lasttoken"}
    )
    reference = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with LLM(str(path), **KNOBS) as llm:
        vectors = llm.embed([QUERY, *DOCUMENTS])
        with torch.no_grad():
            states = [
                reference(torch.tensor([llm.encode(text)])).last_hidden_state[0, -1]
                for text in [QUERY, *DOCUMENTS]
            ]
        wanted = torch.nn.functional.normalize(torch.stack(states), dim=-1)
        torch.testing.assert_close(torch.tensor(vectors), wanted, atol=1e-4, rtol=1e-4)
        scores = llm.score(QUERY, DOCUMENTS)
        assert scores == pytest.approx((wanted[1:] @ wanted[0]).tolist(), abs=1e-4)
        short = torch.tensor(llm.embed(QUERY, dimensions=8))
        torch.testing.assert_close(short[0], torch.nn.functional.normalize(wanted[0, :8], dim=-1))
        with pytest.raises(RequestError, match="no language model head"):
            llm.generate("x")


def test_a_loop_gets_the_same_scores_and_vectors(tmp_path: Path) -> None:
    path = bare(tmp_path / "m", "Qwen3Model")
    with LLM(str(path), **KNOBS) as alone:
        scores, pairs = alone.score(QUERY, DOCUMENTS), alone.score(DOCUMENTS, DOCUMENTS)
        best, vector = alone.rerank(QUERY, DOCUMENTS, top_n=2), alone.embed(QUERY, dimensions=8)[0]

    async def main() -> None:
        async with AsyncLLM(str(path), **KNOBS) as llm:
            found = await asyncio.gather(
                llm.score(QUERY, DOCUMENTS),
                llm.score(DOCUMENTS, DOCUMENTS),
                llm.embed(QUERY, dimensions=8),
                llm.rerank(QUERY, DOCUMENTS, top_n=2),
            )
            assert found[0] == pytest.approx(scores, abs=1e-4)
            assert found[1] == pytest.approx(pairs, abs=1e-4)
            assert found[2] == pytest.approx(vector, abs=1e-4)
            assert [each.document for each in found[3]] == [each.document for each in best]
            with pytest.raises(RequestError, match="2 queries and 1 documents do not form pairs"):
                await llm.score([QUERY, QUERY], ["x"])
            with pytest.raises(RequestError, match="no room for LoRA adapters"):
                await llm.embed(QUERY, adapter="none")

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("Q8_0", 1e-2), ("Q4_1", 0.1)])
def test_the_row_of_a_score_is_read_from_packed_heads(tmp_path: Path, kind: str, error: float) -> None:
    reference = reference_model("qwen3", hidden_size=128, head_dim=32, num_hidden_layers=1)
    path = write_gguf(tmp_path / "tiny-Reranker.gguf", reference, kind=kind)
    scorer = read_scorer(resolve_model(str(path)), Pooling(), None, {"yes": 5, "no": 9}.get)
    wanted = reference.lm_head.weight[5] - reference.lm_head.weight[9]
    assert scorer.is_judged
    assert scorer.row == pytest.approx(wanted.tolist(), abs=error)


LIGHT = """
import sys
from infer.errors import RequestError
from infer.loader.find.source import resolve_model
from infer.loader.pooling import Pooling
from infer.loader.score_head import read_scorer
source = resolve_model(sys.argv[1])
assert read_scorer(source, Pooling(is_published=True), None, lambda text: None).row == ()
try:
    read_scorer(source, Pooling(), None, lambda text: None)
except RequestError as error:
    assert "cannot score texts" in str(error)
else:
    raise AssertionError("a model that cannot score texts was accepted")
assert "torch" not in sys.modules
"""


def test_a_model_without_a_score_head_needs_no_pytorch_to_say_so(tmp_path: Path) -> None:
    """A server's own process would import it in the middle of other requests, which wait seconds."""
    make_checkpoint("qwen3", tmp_path / "m")
    subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path / "m")], check=True)
