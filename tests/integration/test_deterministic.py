"""`deterministic`: log-probabilities, to the last bit, whatever the engine does around a request."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.kernels.cpu.library import library
from infer.layers.bind import bind
from infer.layers.linear import Linear
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.support.checkpoints import FAMILIES, MOE_FAMILIES
from tests.support.thinned import thinned
from tests.support.tiny import drain, make_engine, random_prompts, tiny_model
from tests.support.toggles import engine_knobs, pairwise_rows

NUM_REQUESTS = 5
ALL_FAMILIES = FAMILIES + MOE_FAMILIES
PROMPTS = random_prompts(NUM_REQUESTS)
Numbers = list[tuple[int, float]]  # each token and its log-probability


def knobs_of(**knobs: Any) -> dict[str, Any]:
    return {"attention_backend": "auto", "deterministic": True} | knobs


def run(engine: Engine, numbers: range) -> list[Numbers]:
    for number in numbers:
        params = SamplingParams(
            temperature=0.0 if number % 3 else 0.9,
            seed=number,
            max_tokens=6 + number,
            ignore_eos=True,
            logprobs=1,
        )
        engine.add(Request(request_id=str(number), prompt=tuple(PROMPTS[number]), params=params))
    made: dict[str, Numbers] = {str(number): [] for number in numbers}
    for output in drain(engine):
        assert output.finish_reason != "error", output
        for token, chosen in zip(output.token_ids, output.logprobs or (), strict=True):
            made[output.request_id].append((token, chosen.logprob))
    return list(made.values())


@functools.cache
def alone(family: str) -> list[Numbers]:
    """Every request by itself in an engine that runs one sequence and shares nothing."""
    knobs = knobs_of(max_batch_size=1, use_prefix_caching=False)
    return [run(make_engine(family, **knobs), range(n, n + 1))[0] for n in range(NUM_REQUESTS)]


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("number", thinned(range(0, len(pairwise_rows()), 2), keep=2))
def test_no_toggle_changes_a_bit(number: int) -> None:
    family = ALL_FAMILIES[number // 2 % len(ALL_FAMILIES)]
    knobs = engine_knobs(pairwise_rows()[number]) | knobs_of()
    assert run(make_engine(family, **knobs), range(NUM_REQUESTS)) == alone(family)


def embed(engine: Engine, pooling: str, prompts: list[list[int]]) -> list[tuple[float, ...]]:
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), pooling=pooling))
    made = {output.request_id: output.embedding or () for output in drain(engine)}
    return [made[str(number)] for number in range(len(prompts))]


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("pooling", "knobs"),
    thinned(
        ("last", "mean"),
        ({"prefill_chunk_size": 5}, {"max_num_batched_tokens": 7}, {"prefill_chunk_size": 1}),
        keep=2,
    ),
)
def test_an_embedding_does_not_depend_on_how_its_prompt_is_cut(pooling: str, knobs: dict[str, int]) -> None:
    prompts = [*random_prompts(3, seed=5), list(range(10, 60))]
    whole = [embed(make_engine("qwen2", **knobs_of()), pooling, [prompt])[0] for prompt in prompts]
    assert embed(make_engine("qwen2", **knobs_of(**knobs)), pooling, prompts) == whole


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_a_model_may_be_used_with_and_without() -> None:
    layers = [m for m in tiny_model("llama").model.modules() if isinstance(m, Linear)]
    usual = run(make_engine("llama", attention_backend="auto"), range(2))
    assert not any(layer.projection.batch_invariant for layer in layers)
    run(make_engine("llama", **knobs_of()), range(1))
    assert all(layer.projection.batch_invariant for layer in layers)
    assert run(make_engine("llama", attention_backend="auto"), range(2)) == usual
    assert not any(layer.projection.batch_invariant for layer in layers)


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_it_holds_with_another_number_of_threads() -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(usual, 2))  # the other of one and two
        assert run(make_engine("llama", **knobs_of()), range(NUM_REQUESTS)) == [
            run(make_engine("llama", **knobs_of(max_batch_size=1)), range(n, n + 1))[0]
            for n in range(NUM_REQUESTS)
        ]
    finally:
        torch.set_num_threads(usual)


def test_a_library_that_does_not_keep_to_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.layers.bind.places_are_alike", lambda _: False)
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="adds up the rows of a batch in different orders"):
        bind(tiny_model("gpt2").model, cpu, deterministic=True)
    bind(tiny_model("gpt2").model, cpu, deterministic=False)


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_attention_in_pytorch_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match="deterministic needs attention_backend=auto or c, not "):
        make_engine(**knobs_of(attention_backend=backend))
