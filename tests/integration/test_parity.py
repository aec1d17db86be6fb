"""Our networks compute what the reference computes: same tiny random weights, same tokens, same numbers.

Errors are divided by the standard deviation of the reference's logits, so that one bound fits families
whose logits differ in size. `python -m tests.integration.test_parity` prints the table of
docs/features/models.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.models.model import Model
from infer.quant.residual import ResidualStream
from tests.support.checkpoints import (
    FAMILIES,
    HYBRID_FAMILIES,
    MOE_FAMILIES,
    VOCAB_SIZE,
    build_like,
    raw_config,
    reference_model,
)
from tests.support.step import ListCache, ListStep, generate_greedy, run_step

FLOAT32_BOUND = 1e-5

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
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
    "gemma3: local and global layers": ("gemma3", {}),
    "gemma3: untied head": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3: linear rope scaling of the global layers": ("gemma3", {"rope_parameters": GEMMA_LINEAR_ROPE}),
    "gemma3: one kv head": ("gemma3", {"num_key_value_heads": 1}),
    "qwen3_5: linear and full attention": ("qwen3_5", {}),
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
    "gpt2: tied head": ("gpt2", {}),
    "gpt2: untied head, own mlp size, exact gelu": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": 100, "activation_function": "gelu"},
    ),
    "gpt2: unscaled scores": ("gpt2", {"scale_attn_weights": False}),
}
all_cases = pytest.mark.parametrize("case", CASES)
all_families = pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES + HYBRID_FAMILIES)


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


@pytest.mark.parametrize("family", FAMILIES + HYBRID_FAMILIES)
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


@pytest.mark.parametrize("family", MOE_FAMILIES)
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
    for layer, (x_TD, expected_TD) in zip(ours.layers, seen, strict=True):
        step = ListStep([ListCache()], [len(tokens)])
        stream = ResidualStream(x_TD)
        layer(stream, step)
        y_TD = stream.settle()
        assert error(y_TD, expected_TD.reshape(y_TD.shape)) < FLOAT32_BOUND


@all_families
@pytest.mark.parametrize("prompt_len", [1, 4, 5, 11])
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
        assert error(torch.cat(pieces), whole) < FLOAT32_BOUND


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


def test_the_older_spelling_of_rope_gives_the_same_logits() -> None:
    ours, reference = make_pair("llama: llama3 rope scaling")
    raw = raw_config(reference)
    scaling = dict(raw.pop("rope_parameters"))
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}

    assert build_like(reference, raw).config == ours.config


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
