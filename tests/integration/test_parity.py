"""Our networks compute what the reference computes: same tiny random weights, same tokens, same numbers.

Errors are divided by the standard deviation of the reference's logits, so that one bound fits families
whose logits differ in size. `python -m tests.integration.test_parity` prints the table of
docs/features/models.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from infer.models.model import Model
from infer.models.registry import find_family
from tests.support.checkpoints import (
    FAMILIES,
    HYBRID_FAMILIES,
    MOE_FAMILIES,
    MORE_FAMILIES,
    MORE_MOE_FAMILIES,
    TINY,
    VOCAB_SIZE,
    build_like,
    copy_weights,
    named_tensors,
    raw_config,
    reference_model,
)
from tests.support.step import ListCache, ListStep, generate_greedy, run_step
from tests.support.thinned import thinned

FLOAT32_BOUND = 1e-5
ROTARY_FAMILIES = tuple(
    family
    for family in FAMILIES + MORE_FAMILIES + MOE_FAMILIES + MORE_MOE_FAMILIES
    if family not in ("gpt2", "gemma4")  # Gemma 4's scaling belongs to its global layers
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 20.0, 40.0],
    "original_max_position_embeddings": 8,
}
GEMMA_LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: grouped queries": ("llama", {}),
    "llama: one kv head per query head": ("llama", {"num_key_value_heads": 4}),
    "llama: one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama: tied head": ("llama", {"tie_word_embeddings": True}),
    "llama: llama3 rope scaling": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama: linear rope scaling": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama: yarn, three times the trained length": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama: longrope, three times the trained length": ("llama", {"rope_parameters": LONGROPE}),
    "llama: biases and a head size of its own": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
    ),
    "llama: gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral: sliding window": ("mistral", {}),
    "mistral: no window": ("mistral", {"sliding_window": None}),
    "qwen2: biases": ("qwen2", {}),
    "qwen2: tied head": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2: window in the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3: normalised heads": ("qwen3", {}),
    "qwen3: tied head and biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "mixtral: 2 of 5 experts": ("mixtral", {}),
    "mixtral: one expert, sliding window": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen3_moe: 3 of 7 experts, one plain layer": ("qwen3_moe", {}),
    "qwen3_moe: plain probabilities, every second layer, window": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "qwen2_moe: a shared expert, one plain layer": ("qwen2_moe", {}),
    "qwen2_moe: normalised weights, window in even layers": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "olmoe: norms of projections, clipped": ("olmoe", {}),
    "olmoe: no clip, normalised weights, biases": (
        "olmoe",
        {"clip_qkv": None, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "gpt_oss: sinks, window in even layers, yarn": ("gpt_oss", {}),
    "gpt_oss: one expert, no window, no biases of attention": (
        "gpt_oss",
        {"num_experts_per_tok": 1, "layer_types": ["full_attention"] * 4, "attention_bias": False},
    ),
    "gemma2: soft caps, window in even layers": ("gemma2", {}),
    "gemma2: no caps, one kv head, untied head": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3: local and global layers": ("gemma3", {}),
    "gemma3: untied head": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3: linear rope scaling of the global layers": ("gemma3", {"rope_parameters": GEMMA_LINEAR_ROPE}),
    "gemma3: one kv head": ("gemma3", {"num_key_value_heads": 1}),
    "gemma4: inputs of layers, shared keys, wide heads in global layers": ("gemma4", {}),
    "gemma4: experts, values from keys, no shared keys": (
        "gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 56,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4: plain rope, one kv head, biases, untied head": (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5: linear and full attention": ("qwen3_5", {}),
    "qwen3_5_moe: 2 of 6 experts and one for all": ("qwen3_5_moe", {}),
    "qwen3_next: rows by key head, one plain layer": ("qwen3_next", {}),
    "qwen3_5: linear attention in the last layer, tied head": (
        "qwen3_5",
        {"layer_types": ["full_attention"] * 3 + ["linear_attention"], "tie_word_embeddings": True},
    ),
    "qwen3_5: the whole head turns, one key head to a value head": (
        "qwen3_5",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            "linear_num_key_heads": 6,
        },
    ),
    "olmo2: norms of whole projections": ("olmo2", {}),
    "olmo2: biases, one kv head per query head": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 4},
    ),
    "olmo3: yarn in the layers without a window": ("olmo3", {}),
    "granite: four factors": ("granite", {}),
    "granite: tied head and biases": (
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3: every fourth layer does not rotate": ("smollm3", {}),
    "smollm3: a list of layers, and windows where they do not rotate": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "exaone4: layers without a window do not rotate": ("exaone4", {}),
    "exaone4: no window, every layer rotates": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "phi3: longrope beyond the trained length, three quarters of a head": (
        "phi3",
        {"original_max_position_embeddings": 8},
    ),
    "phi3: whole heads, tied head, sliding window": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
            "sliding_window": 5,
        },
    ),
    "glm4: neighbours of half a head turn": ("glm4", {}),
    "glm4: no biases, a quarter of a head": (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 0.25},
    ),
    "ministral3: yarn, queries that grow": ("ministral3", {}),
    "cohere2: parallel blocks, layers without a window do not rotate": ("cohere2", {}),
    "cohere2: biases, an untied head and a head size of its own": (
        "cohere2",
        {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 20},
    ),
    "gpt2: tied head": ("gpt2", {}),
    "gpt2: untied head, own mlp size, exact gelu": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": 100, "activation_function": "gelu"},
    ),
    "gpt2: unscaled scores": ("gpt2", {"scale_attn_weights": False}),
}
all_cases = pytest.mark.parametrize("case", CASES)
EVERY_FAMILY = FAMILIES + MORE_FAMILIES + MOE_FAMILIES + MORE_MOE_FAMILIES + HYBRID_FAMILIES
all_families = pytest.mark.parametrize("family", EVERY_FAMILY)


def random_tokens(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_pair(case: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Any]:
    family, changes = CASES[case]
    reference = reference_model(family, dtype=dtype, **changes)
    return build_like(reference), reference


def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(input_ids=torch.tensor([tokens])).logits[0]
    return logits.float()


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what was expected."""
    return float((ours.float() - expected).abs().max() / expected.std())


@all_cases
def test_logits_match_transformers(case: str) -> None:
    ours, reference = make_pair(case)
    tokens = random_tokens(23)  # well beyond every window above

    assert error(run_step(ours, [tokens])[0], reference_logits(reference, tokens)) < FLOAT32_BOUND


@pytest.mark.parametrize("family", (*FAMILIES, *MORE_FAMILIES, "qwen3_5"))
def test_bfloat16_is_as_near_to_the_truth_as_transformers(family: str) -> None:
    """The truth is the reference in float32 on the same bfloat16 weights."""
    tokens = random_tokens(23)
    low = reference_model(family, dtype=torch.bfloat16)
    ours = run_step(build_like(low), [tokens])[0].float()
    theirs = reference_logits(low, tokens)
    truth = reference_logits(low.float(), tokens)

    our_error, their_error = (ours - truth).square().mean().sqrt(), (theirs - truth).square().mean().sqrt()
    assert our_error < 1.25 * their_error
    assert error(ours, truth) < 0.2


@pytest.mark.parametrize("family", MOE_FAMILIES + MORE_MOE_FAMILIES)
def test_bfloat16_of_experts_is_as_near_to_the_truth_as_transformers(family: str) -> None:
    """Of the typical token: rounding sends one here and there to another expert, in the reference as well."""
    tokens = random_tokens(23)
    low = reference_model(family, dtype=torch.bfloat16)
    ours = run_step(build_like(low), [tokens])[0].float()
    theirs = reference_logits(low, tokens)
    truth = reference_logits(low.float(), tokens)

    our_error, their_error = (
        (logits - truth).square().mean(dim=-1).sqrt().median() for logits in (ours, theirs)
    )
    assert our_error < 1.25 * their_error
    assert our_error < 0.05 * truth.std()


@all_families
def test_each_layer_alone_matches_transformers(family: str) -> None:
    """Feed every layer what the reference's layer got, so that no error can hide behind another."""
    reference = reference_model(family)
    ours = build_like(reference)
    stack = reference.transformer.h if family == "gpt2" else reference.model.layers
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in stack:
        layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0][0], output[0])))
    tokens = random_tokens(17)
    reference_logits(reference, tokens)

    assert len(seen) == len(ours.layers) == ours.config.num_layers
    step = ListStep([ListCache()], [len(tokens)])
    for layer, (x_TD, expected_TD) in zip(ours.layers, seen, strict=True):
        stream = ours.embed(torch.tensor(tokens), step)
        stream.residual_TD, stream.update = x_TD, None
        layer(stream, step)
        y_TD = stream.settle()
        assert error(y_TD, expected_TD.reshape(y_TD.shape)) < FLOAT32_BOUND


@pytest.mark.parametrize(("family", "prompt_len"), thinned(EVERY_FAMILY, (1, 4, 5, 11), keep=4))
def test_greedy_tokens_equal_transformers(family: str, prompt_len: int) -> None:
    """Prompts of one token, just under, at and past the sliding window of 5."""
    reference = reference_model(family)
    prompt = random_tokens(prompt_len, seed=prompt_len)
    with torch.no_grad():
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, prompt_len, dtype=torch.long),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            eos_token_id=None,
        )

    assert generate_greedy(build_like(reference), prompt, 16) == generated[0, prompt_len:].tolist()


@all_families
def test_chunks_of_any_size_equal_the_whole(family: str) -> None:
    ours = build_like(reference_model(family))
    tokens = random_tokens(19)
    whole = run_step(ours, [tokens])[0]

    for sizes in ([1] * 19, [7, 7, 5], [18, 1], [1, 2, 3, 13]):
        cache, start, pieces = ListCache(), 0, []
        for size in sizes:
            pieces += run_step(ours, [tokens[start : start + size]], [cache])
            start += size
        # of a state, one token is computed in another way than several
        assert error(torch.cat(pieces), whole) < FLOAT32_BOUND * (3 if family in HYBRID_FAMILIES else 1)


@all_families
def test_a_ragged_batch_equals_each_sequence_alone(family: str) -> None:
    ours = build_like(reference_model(family))
    prompts = [random_tokens(length, seed=length) for length in (9, 1, 16, 4)]
    caches = [ListCache() for _ in prompts]
    run_step(
        ours, [prompt[: len(prompt) // 2] for prompt in prompts if len(prompt) > 1], caches[:1] + caches[2:]
    )

    rest = [prompt[len(prompt) // 2 :] for prompt in prompts]  # a mix of decode, chunk and whole prompt
    together = run_step(ours, rest, caches)

    for prompt, chunk, logits in zip(prompts, rest, together, strict=True):
        assert error(logits, run_step(ours, [prompt])[0][-len(chunk) :]) < FLOAT32_BOUND


def test_the_text_part_of_a_multimodal_gemma_matches_transformers() -> None:
    import transformers

    text = reference_model("gemma3", vocab_size=256)
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=255,
        boi_token_index=254,
        eoi_token_index=253,
    )
    reference: Any = transformers.Gemma3ForConditionalGeneration(config)
    reference.eval()
    reference.model.language_model.load_state_dict(text.model.state_dict())
    reference.tie_weights()
    ours = build_like(reference)
    tokens = random_tokens(23)

    assert any("vision" in name for name in reference.state_dict())
    assert error(run_step(ours, [tokens])[0], reference_logits(reference, tokens)) < FLOAT32_BOUND


def test_the_text_part_of_a_multimodal_gemma4_matches_transformers() -> None:
    import transformers

    text = reference_model("gemma4", vocab_size=256, vocab_size_per_layer_input=256)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text.config.to_dict(), vision_config=vision, audio_config=None
    )
    reference: Any = transformers.Gemma4ForConditionalGeneration(config)
    reference.eval()
    reference.model.language_model.load_state_dict(text.model.state_dict())
    reference.tie_weights()
    ours = build_like(reference)
    tokens = random_tokens(23)

    assert any("vision" in name for name in reference.state_dict())
    assert error(run_step(ours, [tokens])[0], reference_logits(text, tokens)) < FLOAT32_BOUND


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
@pytest.mark.parametrize("has_older_names", [False, True])
def test_the_text_part_of_a_multimodal_mistral_matches_transformers(kind: str, has_older_names: bool) -> None:
    import transformers

    changes: dict[str, Any] = {"sliding_window": None} if kind == "mistral" else {}
    text = reference_model(kind, vocab_size=256, **changes)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14, "head_dim": 8,
    }  # fmt: skip
    config = transformers.Mistral3Config(
        text_config=text.config.to_dict(), vision_config=vision | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    )  # fmt: skip
    reference: Any = transformers.Mistral3ForConditionalGeneration(config)
    reference.eval()
    reference.model.language_model.load_state_dict(text.model.state_dict())
    reference.lm_head.load_state_dict(text.lm_head.state_dict())
    raw, tensors = raw_config(reference), reference.state_dict()
    if has_older_names:
        raw["text_config"].pop("tie_word_embeddings", None)
        tensors = {
            "language_model." + name.replace("model.language_model.", "model.")
            if "language_model" in name or name == "lm_head.weight"
            else name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
        }
    family = find_family(raw)
    ours = family.build(family.read_config(raw))
    copy_weights(ours, tensors, family.weight_map)
    tokens = random_tokens(23)

    assert any("vision" in name for name in tensors)
    assert error(run_step(ours, [tokens])[0], reference_logits(reference, tokens)) < FLOAT32_BOUND


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("llama") and "rope" in case])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_the_older_spelling_of_rope_gives_the_same_logits(case: str, name: str) -> None:
    ours, reference = make_pair(case)
    raw = raw_config(reference)
    scaling = dict(raw.pop("rope_parameters"))
    scaling[name] = scaling.pop("rope_type")
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}

    assert build_like(reference, raw).config == ours.config


def rope_cases() -> dict[str, dict[str, Any]]:
    """Rope sections for heads of 12 or 16 channels, with a trained context of 32 tokens."""
    trained = {"original_max_position_embeddings": 32}
    yarn = {"rope_type": "yarn", "factor": 4.0} | trained
    return {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | trained,
        "yarn": yarn,
        "yarn, unrounded bounds": yarn | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
        "yarn, two mscales": yarn | {"mscale": 0.7, "mscale_all_dim": 1.3},
        "yarn, own attention factor": yarn | {"attention_factor": 1.7},
        "yarn, factor by lengths": yarn | {"factor": None},
        "dynamic": {"rope_type": "dynamic", "factor": 3.0},
        "longrope": {"rope_type": "longrope", "short_factor": [], "long_factor": []} | trained,
    }


def with_rope(family: str, section: dict[str, Any], context_len: int) -> tuple[Model, Any]:
    """A pair of models whose layers turn as `section` says, ours made to serve `context_len` tokens."""
    pairs_of = {"glm4": 4}  # which turns half of each head
    section, num_pairs = dict(section), pairs_of.get(family, 8 if "head_dim" in TINY[family] else 6)
    if "short_factor" in section:
        section["short_factor"] = [1.0 + 0.1 * pair for pair in range(num_pairs)]
        section["long_factor"] = [1.0 + 3.0 * pair for pair in range(num_pairs)]
    rope: dict[str, Any] = {"rope_theta": 10_000.0} | section
    if family in ("gemma3", "olmo3"):
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0}}
    length = 32 if section["rope_type"] == "dynamic" else 128
    changes: dict[str, Any] = (
        {"head_dim": 12} if family == "mixtral" else {}
    )  # its reference cannot derive it
    reference = reference_model(family, rope_parameters=rope, max_position_embeddings=length, **changes)
    found = find_family(raw_config(reference))
    config = replace(found.read_config(raw_config(reference)), context_len=context_len)
    ours = found.build(config)
    copy_weights(ours, named_tensors(reference), found.weight_map)
    return ours, reference


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        case
        for case in thinned(ROTARY_FAMILIES, rope_cases(), keep=8)
        if case.values[0] not in ("phi3", "ministral3")  # which have one kind alone: cases of their own
        and not (case.values[0] in ("gemma3", "olmo3") and "truncate" in rope_cases()[case.values[1]])
    ],  # the reference of these two looks for it in another place
)
def test_scaled_positions_match_transformers_on_both_sides_of_the_trained_length(
    family: str, kind: str
) -> None:
    """Long texts, and short ones where the served length says which of two tables is right."""
    for num_tokens in (75, 32):
        ours, reference = with_rope(family, rope_cases()[kind], num_tokens)
        tokens = random_tokens(num_tokens)
        assert error(run_step(ours, [tokens])[0], reference_logits(reference, tokens)) < FLOAT32_BOUND


def test_phi3_has_the_short_factors_where_no_longer_text_is_served() -> None:
    changes = CASES["phi3: longrope beyond the trained length, three quarters of a head"][1]
    reference = reference_model("phi3", **changes)
    found, raw = find_family(raw_config(reference)), raw_config(reference)
    ours = found.build(replace(found.read_config(raw), context_len=8))
    copy_weights(ours, reference.state_dict(), found.weight_map)
    tokens = random_tokens(8)

    assert error(run_step(ours, [tokens])[0], reference_logits(reference, tokens)) < FLOAT32_BOUND
    assert error(run_step(build_like(reference), [tokens])[0], reference_logits(reference, tokens)) > 0.01


def test_short_texts_of_a_long_server_keep_the_long_tables() -> None:
    """Cached keys cannot be turned again: the served length decides, not the text at hand."""
    ours, reference = with_rope("llama", rope_cases()["longrope"], 75)
    prompt, rest = random_tokens(75)[:20], random_tokens(75)[20:]
    cache = ListCache()
    parts = [run_step(ours, [part], [cache])[0] for part in (prompt, rest)]

    assert error(torch.cat(parts), reference_logits(reference, prompt + rest)) < FLOAT32_BOUND


def print_error_table() -> None:
    """The largest error of each case in float32 and bfloat16, and the reference's own in bfloat16."""
    print("| case | float32 | bfloat16 | reference in bfloat16 |\n|---|---|---|---|")
    tokens = random_tokens(23)
    for case in CASES:
        ours, reference = make_pair(case)
        in_float32 = error(run_step(ours, [tokens])[0], reference_logits(reference, tokens))
        ours, reference = make_pair(case, torch.bfloat16)
        low, low_reference = run_step(ours, [tokens])[0], reference_logits(reference, tokens)
        truth = reference_logits(reference.float(), tokens)
        print(f"| {case} | {in_float32:.1e} | {error(low, truth):.3f} | {error(low_reference, truth):.3f} |")


if __name__ == "__main__":
    print_error_table()
