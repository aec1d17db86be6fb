"""An EAGLE-3 head in an engine: its drafts are those of the whole text, and change nothing of it.

Heads are random, so hardly a draft is right unless requests leave few tokens to choose from. What a head
drafts is compared with the same head over the whole text, computed at once: so it has seen every position
once and in its place, whatever became of the sequence in between.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine, resolve_for
from infer.engine.draft_head import DraftHead
from infer.engine.engine import Engine
from infer.engine.speculation_build import load_draft
from infer.errors import ConfigError
from infer.kernels.attention.reference import attend_naive
from infer.kernels.cpu.library import library
from infer.layers.attention import LayerInputs
from infer.layers.whole_sequence import WholeSequence
from infer.loader.eagle import head_bytes, load_eagle
from infer.loader.find.source import resolve_model
from infer.loader.formats.checkpoint import write_safetensors
from infer.loader.load import RankGroup, load_model
from infer.models.eagle3 import Eagle3
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.integration.test_speculation import (
    ALL_FAMILIES,
    COSTS,
    DEPENDENT,
    MIX,
    PRESSURE,
    ROOT,
    VOCAB_SIZE,
    assert_same,
    checkpoint,
    directory,
    engine_of,
    plain,
    requests_of,
    serve,
    target,
    totals,
)
from tests.support.failing_allocator import FailingAllocator, FailingEngine

__all__ = ["directory"]  # a fixture for all tests here

HEADS, KV_HEADS, HEAD = 6, 3, 16  # other than those of any model here
DRAFT_IDS = tuple(range(20, VOCAB_SIZE, 3))
BIASED = {DRAFT_IDS[place]: 100.0 for place in (3, 17, 40)}  # the model and the head choose among these


@functools.cache
def make_head(family: str, **fields: Any) -> Path:
    """The directory of a random head for a model."""
    model, path = target(family).config, ROOT[-1] / f"head of {family} {fields}"
    size, middle = model.hidden_size, 24
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD, 2 * size),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD, 2 * size),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, HEADS * HEAD),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (middle, size),
        "midlayer.mlp.up_proj.weight": (middle, size),
        "midlayer.mlp.down_proj.weight": (size, middle),
        "norm.weight": (size,),
        "lm_head.weight": (len(DRAFT_IDS), size),
        "embed_tokens.weight": (VOCAB_SIZE, size),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    tensors["d2t"] = torch.tensor(DRAFT_IDS) - torch.arange(len(DRAFT_IDS))
    last = model.num_layers - 1
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "target_hidden_size": size,
        "intermediate_size": middle,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": len(DRAFT_IDS),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "eagle_aux_hidden_state_layer_ids": [0, last // 2, last],
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | fields))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def head_knobs(family: str, count: int, **knobs: Any) -> dict[str, Any]:
    """The knobs with which a head drafts for a model, as many as it can."""
    own = {"draft_model": str(make_head(family)), "speculative_method": "eagle3"}
    return own | {"adaptive_speculation": False, "num_speculative_tokens": count} | knobs


class Drafted(NamedTuple):
    """Drafts, and the text that was known when they were made."""

    tokens: list[int]
    drafts: list[int]


def watch(engine: Engine) -> list[Drafted]:
    """What the head of an engine drafts from now on."""
    drafter: Any = engine.speculation and engine.speculation._drafter
    assert isinstance(drafter, DraftHead)
    found, collect = list[Drafted](), drafter.collect

    def collect_and_note() -> list[list[int]]:
        sequences = drafter._sequences
        drafts = collect()
        pairs = zip(sequences, drafts, strict=True)
        found.extend(Drafted(list(seq.tokens), list(made)) for seq, made in pairs)
        return drafts

    drafter.collect = collect_and_note  # type: ignore[method-assign]
    return found


@functools.cache
def loaded_head(family: str) -> Eagle3:
    return load_eagle(make_head(family), target(family), num_drafts=8)


@functools.cache  # most ways come to the same windows
def likeliest(family: str, tokens: tuple[int, ...], count: int) -> list[int]:
    """The likeliest drafts behind a text, from states of all of it at once; -1: too close to tell."""
    found = list[int]()
    loaded, head, cpu = target(family), loaded_head(family), torch.device("cpu")
    with torch.inference_mode():
        whole = WholeSequence(attend_naive, cpu)
        whole.advance(len(tokens) - 1)
        whole.layer_inputs = LayerInputs(head.config.captured_layers)
        loaded.model(torch.tensor(tokens[:-1]), whole)
        states, step = head.combine(whole.layer_inputs.states()), WholeSequence(attend_naive, cpu)
        step.advance(len(tokens) - 1)
        given = list(tokens[1:])
        for _ in range(count):
            guess = head(torch.tensor(given), states, step)
            logits = head.logits(guess.hidden_SD[-1])
            best, second = logits.topk(2).values.tolist()
            draft = int(head.token_ids_W[logits.argmax()])
            found.append(draft if best - second > 1e-3 else -1)
            states, given = guess.states_SD[-1:], [draft]
            step.advance(1)
    return found


def share_right(family: str, found: list[Drafted]) -> float:
    """The share of windows whose drafts are those of the whole text."""
    num_right = 0
    for tokens, drafts in found:
        expected = likeliest(family, tuple(tokens), len(drafts))
        end = expected.index(-1) if -1 in expected else len(expected)
        num_right += drafts[:end] == expected[:end]
    return num_right / len(found)


GREEDY: list[dict[str, Any]] = [
    {},
    {"max_tokens": 30},
    {"n": 3, "max_tokens": 11, "seed": 1},
    {"max_tokens": 2},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "max_tokens": 40},
    {"max_tokens": 25, "logprobs": 1},
    {"prompt_logprobs": 1},
]
COMPUTED: dict[str, dict[str, Any]] = {  # in many ways, none of which finds a prefix of another text
    "at once": {},
    "plain": {"attention_backend": "torch_ref", "record_cpu_step": False},
    "not recorded": {"record_cpu_step": False},
    **{name: knobs | {"use_prefix_caching": False} for name, knobs in PRESSURE.items()},
}


@pytest.mark.parametrize("way", COMPUTED)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_are_those_of_the_whole_text(family: str, way: str) -> None:
    knobs = {"use_prefix_caching": False} | COMPUTED[way]
    if family == "gemma3" and "num_blocks" in knobs:
        knobs |= {"num_blocks": 60}  # it has several tables
    requests = requests_of(GREEDY + GREEDY[:2], seed=3)
    engine = engine_of(family, **head_knobs(family, 4, **knobs))
    found = watch(engine)
    assert_same(serve(engine, requests, every=1), plain(requests, family))
    assert len(found) > 20
    assert share_right(family, found) == 1.0
    if way in ("recompute", "swap") and family == "llama":
        assert engine.scheduler.num_preemptions > 0


def test_after_a_prefix_hit_one_entry_is_of_another_text() -> None:
    """Of a text that goes on otherwise; one that is the same throughout finds its own."""
    prompt, params = tuple(range(30, 51)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine = engine_of("llama", **head_knobs("llama", 3))
    serve(engine, [Request(request_id="first", prompt=prompt, params=params)])
    found = watch(engine)
    serve(engine, [Request(request_id="again", prompt=prompt, params=params)])
    assert engine.scheduler.pool.usage().num_hit_tokens == 20
    assert share_right("llama", found) == 1.0
    serve(engine, [Request(request_id="other", prompt=(*prompt[:12], 9, 8, 7), params=params)])
    assert engine.scheduler.pool.usage().num_hit_tokens == 32
    assert len(found) > 12


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_text_is_the_same(family: str) -> None:
    """Greedy and drawn, alone and together, with drafts that are often right and that are wrong."""
    biased = [kind | {"logit_bias": BIASED} for kind in MIX[1:5]]
    requests = requests_of(MIX + biased + DEPENDENT[:4])
    expected = plain(requests, family)
    engine = engine_of(family, **head_knobs(family, 1 + ALL_FAMILIES.index(family) % 7))
    assert_same(serve(engine, requests), expected)
    assert_same(serve(engine, requests, every=3), expected)  # prompts that are cached, and come one by one
    num_drafts, num_accepted = totals(engine)
    assert num_drafts > num_accepted > 30
    assert engine.scheduler.pool.usage().num_hit_tokens > 0


def test_a_head_draws_with_the_noise_of_the_sequence() -> None:
    """Where both choose among few tokens, the same noise decides; the likeliest would be right less often."""
    kinds = [{"logit_bias": BIASED, "temperature": 4.0, "seed": seed, "max_tokens": 40} for seed in range(9)]
    engine = engine_of("llama", **head_knobs("llama", 4))
    serve(engine, requests_of(kinds))
    num_drafts, num_accepted = totals(engine)
    assert num_accepted > 0.45 * num_drafts > 40


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_constrained_sequences(is_adaptive: bool) -> None:
    pytest.importorskip("llguidance")
    kinds: list[dict[str, Any]] = [
        {"structured": {"regex": "[a-c]{3,30}"}, "logprobs": 0, "max_tokens": 20},
        {"structured": {"regex": "(ab|cd)+e"}, "temperature": 1.0, "seed": 5},
        {"structured": {"choice": ["engine", "river", "clock"]}},
        {},
    ]
    requests = requests_of(kinds)
    engine = engine_of("qwen3", **head_knobs("qwen3", 4, adaptive_speculation=is_adaptive))
    assert_same(serve(engine, requests), plain(requests))
    assert totals(engine)[0] > 0


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_deterministic_logprobs_are_the_same_bits() -> None:
    knobs: dict[str, Any] = {"attention_backend": "auto", "deterministic": True}
    requests = requests_of([kind | {"logprobs": 1} for kind in MIX])
    engine = engine_of("qwen3", **knobs, **head_knobs("qwen3", 5))
    assert serve(engine, requests) == serve(engine_of("qwen3", **knobs), requests)
    assert totals(engine)[0] > 0


def test_steps_that_find_no_memory_are_followed_in_halves() -> None:
    requests = requests_of([kind for kind in GREEDY if "n" not in kind], seed=7)
    expected = plain(requests, "llama")
    engine = engine_of("llama", **head_knobs("llama", 3, use_prefix_caching=False))
    allocator = FailingAllocator(lambda number: number % 151 == 90)
    FailingEngine(engine, allocator)
    found = watch(engine)
    assert_same(serve(engine, requests), expected)
    assert allocator.num_failed > 0
    assert share_right("llama", found) == 1.0


def test_a_head_whose_drafts_are_wrong_is_switched_off() -> None:
    requests = requests_of([{"max_tokens": 60}] * 2)
    always, adaptive = (
        engine_of("llama", **head_knobs("llama", 4, adaptive_speculation=value)) for value in (False, True)
    )
    for engine in (always, adaptive):
        serve(engine, requests)
    assert 0 < totals(adaptive)[0] < totals(always)[0] / 3


def test_steps_of_a_head_are_measured() -> None:
    settings = EngineConfig.from_knobs(num_blocks=32, block_size=4, **head_knobs("llama", 3))
    engine = build_engine(settings, target("llama"))
    assert engine.speculation is not None
    assert 0 < engine.speculation.costs.draft_s < 10
    assert totals(engine) == (0, 0)


def test_a_request_without_drafts_leaves_the_head_able_to_draft() -> None:
    """The head follows steps in which nobody has drafts."""
    engine = engine_of("llama", **head_knobs("llama", 3, use_prefix_caching=False))
    found = watch(engine)
    quiet = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, num_speculative_tokens=0)
    serve(engine, [Request(request_id="0", prompt=tuple(range(30, 44)), params=quiet)])
    assert not found
    loud = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    serve(engine, [Request(request_id="1", prompt=tuple(range(50, 61)), params=loud)])
    assert found and share_right("llama", found) == 1.0


def test_a_head_of_a_packed_model_is_kept_in_8_bits() -> None:
    source = resolve_model(checkpoint("llama"), show_progress=False)
    packed = load_model(source, dtype="float32", device="cpu", quantization="int8")
    head = load_eagle(make_head("llama"), packed)
    assert head.fc.stored.scheme == "int8"
    assert loaded_head("llama").fc.stored.scheme == "none"
    kept = sum(parameter.numel() * parameter.element_size() for parameter in head.parameters())
    assert head_bytes(head.config, torch.float32, packs=True) == kept
    requests = requests_of([*GREEDY[:2], {"temperature": 1.0, "seed": 3, "logit_bias": BIASED}])
    knobs = {"num_blocks": 64, "block_size": 4}
    plain, drafted = (
        build_engine(EngineConfig.from_knobs(**knobs, **more), packed, step_costs=COSTS)
        for more in ({}, head_knobs("llama", 4))
    )
    assert_same(serve(drafted, requests), serve(plain, requests))
    assert totals(drafted)[1] > 0


def test_a_head_is_refused_where_ranks_have_its_model_in_parts() -> None:
    loaded = target("llama")
    config = resolve_for(EngineConfig.from_knobs(**head_knobs("llama", 3)), loaded)
    ranks = cast("RankGroup", object())
    with pytest.raises(ConfigError, match="leave out tensor_parallel_size"):
        load_draft(config, replace(loaded, ranks=ranks))
