"""lm-evaluation-harness: its loglikelihoods over HTTP are those transformers computes from the weights.

The harness sends token ids with `echo` and `logprobs`, and reads three things off the answer: the sum of
the continuation's logprobs, whether each was the largest (by equality of floats), and the order of the
choices. The first tests send what it sends and read as it reads; the last ones are the harness itself,
where it is installed (`pip install 'lm_eval[api]'`).

`python -m tests.integration.test_lm_eval` writes down what transformers says of the default model; it
needs accelerate, with which transformers reads GGUF files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from infer.loader.find import default_model
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model

BOUND = 2e-4  # of a sum of up to 12 float32 logprobs
VOCAB_SIZE = 512
CONTEXT_LEN = 256
DATA = Path(__file__).parents[1] / "data" / "smollm2_loglikelihoods.json"
CHOICES = {
    "The capital of France is": (" Paris.", " London.", " Berlin."),
    "Question: What is the capital of Japan?\nAnswer:": (" Beijing", " Tokyo", " Seoul"),
    "Question: What do bees make?\nAnswer:": (" milk", " wool", " honey"),
    "Question: What is two plus two?\nAnswer:": (" four", " five", " nine hundred"),
    "Question: Wie heißt der Fluß in Köln?\nAnswer:": (" Rhein", " Main", " 河"),
}

Task = tuple[list[int], list[int]]  # context, continuation
Score = tuple[float, bool]  # loglikelihood, is it what greedy decoding would say


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    return directory


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveServer]:
    with serve_model(checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def expected_score(reference: Any, task: Task) -> Score:
    """What the harness computes when it runs the model itself."""
    context, continuation = task
    with torch.inference_mode():
        logits = reference(torch.tensor([context + continuation])).logits[0]
    rows = logits[len(context) - 1 : -1].log_softmax(-1)
    chosen = torch.tensor(continuation)
    loglikelihood = float(rows.gather(1, chosen[:, None]).sum())
    return loglikelihood, bool((rows.argmax(-1) == chosen).all())


def ask(live: LiveServer, tasks: list[Task]) -> list[Score]:
    """One request for a batch of tasks, in the harness's shape, read with its arithmetic."""
    body = {
        "model": live.model,
        "prompt": [context + continuation for context, continuation in tasks],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{live.base_url}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(tasks)
    scores = []
    for choice, (context, _) in zip(choices, tasks, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        scores.append((sum(logprobs), is_greedy))
    return scores


def random_tasks(count: int, seed: int) -> list[Task]:
    """Random ids: byte tokens and special tokens included, so that several tokens share a spelling."""
    rng = random.Random(seed)
    return [
        (
            rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)),
            rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 12)),
        )
        for _ in range(count)
    ]


def greedy_tasks(live: LiveServer, tasks: list[Task]) -> list[Task]:
    """The same contexts with the model's own continuations, of which the harness must see that they are."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = live.oracle.generate([context for context, _ in tasks], params)
    return [(context, list(output.token_ids)) for (context, _), output in zip(tasks, outputs, strict=True)]


def check(scores: list[Score], expected: list[Score]) -> None:
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in expected]
    for (ours, _), (theirs, _) in zip(scores, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=BOUND)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_loglikelihoods_are_those_of_transformers(live: LiveServer, reference: Any, batch_size: int) -> None:
    tasks = random_tasks(16, seed=batch_size)
    tasks += greedy_tasks(live, tasks[:8])
    expected = [expected_score(reference, task) for task in tasks]
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    scores = [
        score
        for start in range(0, len(tasks), batch_size)
        for score in ask(live, tasks[start : start + batch_size])
    ]
    check(scores, expected)


def test_choices_of_one_question_share_its_context(live: LiveServer, reference: Any) -> None:
    """A multiple-choice task: the context is cached after the first, and the scores do not notice."""
    context = random.Random(5).choices(range(VOCAB_SIZE), k=100)
    tasks = [(context, [token, token + 1]) for token in range(20, 28)]
    expected = [expected_score(reference, task) for task in tasks]
    check(ask(live, tasks), expected)
    check(ask(live, tasks), expected)


def test_a_window_of_the_whole_context_is_scored(live: LiveServer, reference: Any) -> None:
    """Rolling perplexity: windows as long as the model allows, with one token left for the answer."""
    ids = random.Random(6).choices(range(VOCAB_SIZE), k=CONTEXT_LEN - 1)
    task = (ids[:1], ids[1:])
    ((loglikelihood, _),) = ask(live, [task])
    assert loglikelihood == pytest.approx(expected_score(reference, task)[0], rel=1e-5)


@pytest.mark.slow
def test_the_default_model_scores_as_transformers_does() -> None:
    path = default_model.models_dir() / default_model.FILE
    if not path.exists():
        pytest.skip("the default model is not here; `infer fetch` brings it")
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    expected = [(row["loglikelihood"], row["is_greedy"]) for row in recorded]
    with serve_model(path) as live:
        tasks = [encode_task(live, row["context"], row["continuation"]) for row in recorded]
        scores = [score for start in range(0, len(tasks), 3) for score in ask(live, tasks[start : start + 3])]
    check(scores, expected)


def encode_task(live: LiveServer, context: str, continuation: str) -> Task:
    """Split the ids of the whole text, as the harness does, with the server's own tokenizer."""
    whole, start = (
        httpx.post(f"{live.url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        for text in (context + continuation, context)
    )
    return whole[: len(start)], whole[len(start) :]


# -- the harness itself -------------------------------------------------------------------------------


@pytest.fixture
def harness(live: LiveServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    reason = "lm-evaluation-harness is not installed"
    models: Any = pytest.importorskip("lm_eval.models.openai_completions", reason=reason)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    return models.LocalCompletionsAPI(
        base_url=f"{live.base_url}/completions",
        model=live.model,
        tokenizer=str(checkpoint),
        tokenizer_backend="huggingface",
        batch_size=4,
        max_length=CONTEXT_LEN - 1,
        max_retries=1,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    api: Any = pytest.importorskip("lm_eval.api.instance")
    return [api.Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@pytest.mark.filterwarnings("ignore")
def test_the_harness_scores_as_transformers_does(harness: Any, reference: Any) -> None:
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " the river"),
        ("Water boils at", " one hundred degrees."),
        ("", "Once there was a small engine"),
        ("Ein Fluß, ein größerer", " Fluß: 河"),
    ]
    scores = harness.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    prefix = harness.prefix_token_id
    for (context, continuation), score in zip(pairs, scores, strict=True):
        if context:
            ids = harness._encode_pair(context, continuation)
        else:
            ids = ([prefix], harness.tok_encode(continuation, add_special_tokens=False))
        check([score], [expected_score(reference, ids)])


@pytest.mark.filterwarnings("ignore")
def test_the_harness_generates_until_a_stop(live: LiveServer, harness: Any) -> None:
    text = "Where is the river?"
    options = {"until": ["e"], "max_gen_toks": 16}
    (generated,) = harness.generate_until(instances("generate_until", [(text, options)]), disable_tqdm=True)
    prompt = harness.tok_encode(text, add_special_tokens=False)
    stops = ("e", harness.tokenizer.eos_token)
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=stops)
    assert generated == live.oracle.generate([prompt], params)[0].text


def record() -> None:
    """Score the choices with transformers and write the table the test above compares with."""
    from transformers import AutoModelForCausalLM

    directory = default_model.models_dir()
    reference = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=default_model.FILE, dtype=torch.float32
    )
    rows = []
    with serve_model(directory / default_model.FILE) as live:
        for context, answers in CHOICES.items():
            for answer in answers:
                score = expected_score(reference, encode_task(live, context, answer))
                rows.append(
                    {
                        "context": context,
                        "continuation": answer,
                        "loglikelihood": round(score[0], 6),
                        "is_greedy": score[1],
                    }
                )
    DATA.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
