"""Quantized weights on a GPU: codes of files stay codes there, any checkpoint is rounded while it is loaded.

What a projection multiplies with is compared with the numbers of the CPU. Greedy tokens go through the
engine, with and without graphs. bfloat16 takes the kernels of the package, float32 those that run anywhere.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.layers.linear import ExpertLinear, Projected
from infer.loader import code_cache
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.random_weights import load_random
from infer.loader.weight_plan import kept_bytes
from infer.tools.quantize import SCHEME_NAMES, Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES
from tests.kernels.coded_moe_contract import CodedMoeContract

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9], [7], list(range(20, 60))]
FULL_STEP = [[3, 1, 4, 1, 5, 9], list(range(100, 118)), list(range(20, 60))]
"""64 tokens, which is the size of a captured step: a padded one may have another kernel, with other sums."""
MADE = ("fp8", "int8", "int4")
RECIPES = {
    **{scheme: Recipe(scheme=scheme, group_size=32) for scheme in SCHEME_NAMES},
    "gptq-3": Recipe(scheme="gptq", bits=3, group_size=64, symmetric=False),
    "gptq-8-asym": Recipe(scheme="gptq", bits=8, group_size=32, symmetric=False),
    "gptq-actorder": Recipe(scheme="gptq", group_size=32, act_order=True),
    "ct-w4a16-asym": Recipe(scheme="ct-w4a16", group_size=64, symmetric=False),
}
GENERATED = (
    "gptq",
    "gptq-actorder",
    "awq",
    "ct-int8",
    "fp8-block",
    "nf4",
    "squeezellm",
)  # with engines, one for each kind of codes


class TestCodedExperts(CodedMoeContract):
    device = "cuda"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@functools.cache
def dense(root: Path, family: str) -> Path:
    make_checkpoint(family, root / family, sizes=Sizes(hidden_size=192, num_heads=6), dtype="bfloat16")
    return root / family


@functools.cache
def quantized(root: Path, family: str, recipe: str) -> Path:
    source = resolve_model(str(dense(root, family)), show_progress=False)
    quantize_checkpoint(source, root / f"{family}-{recipe}", RECIPES[recipe])
    return root / f"{family}-{recipe}"


def load(path: Path, quantization: str, device: str, dtype: str = "float32") -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device=device, dtype=dtype, quantization=quantization, home="cuda")


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in loaded.model.named_modules():
        if isinstance(layer, ExpertLinear):
            for number in range(layer.num_experts):
                found[f"{name}.{number}"] = layer.stored.expert(number).dequantized().float().cpu()
        elif isinstance(layer, Projected):
            found[name] = layer.stored.dequantized().float().cpu()
    return found


def answers(path: Path, prompts: list[list[int]] = PROMPTS, **knobs: Any) -> list[list[int]]:
    with LLM(path, **FEW_SIZES, **knobs) as llm:
        return [list(answer.token_ids) for answer in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_unpacks_the_numbers_of_the_cpu(recipe: str, root: Path) -> None:
    path = quantized(root, "mixtral", recipe)
    for name, stored in read_headers(resolve_model(str(path), show_progress=False)).tensors.items():
        there = torch.empty(stored.shape, dtype=torch.bfloat16, device="cuda")
        here = torch.empty(stored.shape, dtype=torch.bfloat16)
        stored.copy_to(there)
        stored.copy_to(here)
        assert torch.equal(there.cpu(), here), name


@pytest.mark.parametrize(
    ("recipe", "family"),
    [*((recipe, "llama") for recipe in RECIPES), ("gptq", "mixtral"), ("fp8-block", "mixtral")],
)
def test_codes_of_a_file_stay_packed(recipe: str, family: str, root: Path) -> None:
    path = quantized(root, family, recipe)
    there, here = weights(load(path, "auto", "cuda")), weights(load(path, "none", "cpu"))
    for name, weight in there.items():
        torch.testing.assert_close(weight, here[name], rtol=2e-6, atol=1e-6, msg=name)
    if recipe in GENERATED:
        expected = answers(path, device="cpu", dtype="float32", quantization="none")
        assert answers(path, device="cuda", dtype="float32") == expected
    said = load(path, "auto", "cuda", "bfloat16").kept_as
    assert said.startswith("kept as ")


@pytest.mark.parametrize("recipe", ["awq", "gptq-8-asym", "gptq-actorder", "fp8-block"])
def test_codes_of_a_file_in_the_kernels_of_an_engine(recipe: str, root: Path) -> None:
    path = quantized(root, "llama", recipe)
    launched = answers(path, FULL_STEP, device="cuda", use_cuda_graphs=False)
    assert answers(path, FULL_STEP, device="cuda") == launched


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gemma3"])
@pytest.mark.parametrize("scheme", MADE)
def test_any_checkpoint_is_rounded_while_it_is_loaded(scheme: str, family: str, root: Path) -> None:
    path = dense(root, family)
    there, here = (load(path, scheme, device) for device in ("cuda", "cpu"))
    found, expected = weights(there), weights(here)
    for name, weight in found.items():  # a weight between two codes may go to either
        error = (weight - expected[name]).norm() / expected[name].norm()
        assert error < 0.01, (name, float(error))


@pytest.mark.parametrize(
    ("scheme", "family", "dtype"),
    [
        *((scheme, "llama", "bfloat16") for scheme in MADE),
        ("int8", "llama", "float32"),
        ("fp8", "mixtral", "bfloat16"),
        ("int4", "mixtral", "bfloat16"),
        ("int8", "gemma3", "bfloat16"),
    ],
)
def test_graphs_change_no_token(scheme: str, family: str, dtype: str, root: Path) -> None:
    knobs: dict[str, Any] = {"device": "cuda", "dtype": dtype, "quantization": scheme}
    path = dense(root, family)
    with_graphs = answers(path, FULL_STEP, **knobs)
    assert answers(path, FULL_STEP, **knobs, use_cuda_graphs=False) == with_graphs
    assert all(len(tokens) == 16 for tokens in with_graphs)


@pytest.mark.parametrize("scheme", MADE)
def test_deterministic_gives_the_tokens_of_a_prompt_alone(scheme: str, root: Path) -> None:
    knobs: dict[str, Any] = {"device": "cuda", "quantization": scheme, "deterministic": True}
    with LLM(dense(root, "llama"), **FEW_SIZES, **knobs) as llm:
        together = [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]
        alone = [list(llm.generate([prompt], GREEDY)[0].token_ids) for prompt in PROMPTS]
    assert together == alone


@pytest.mark.parametrize("scheme", MADE)
def test_the_logits_are_those_of_the_numbers_in_float32(scheme: str, root: Path) -> None:
    """bfloat16 and its kernels against float32 and the reference, over prompts and decode steps.

    Of two tokens that are as likely the one may choose either: what follows is then another text.
    """
    path = dense(root, "llama")
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

    def answered(**knobs: Any) -> list[list[tuple[int, float]]]:
        with LLM(path, quantization=scheme, **FEW_SIZES, **knobs) as llm:
            outputs = [answer.outputs[0] for answer in llm.generate(PROMPTS, scored)]
        assert all(output.logprobs is not None and len(output.logprobs) == 8 for output in outputs)
        return [
            [(token, row.logprob) for token, row in zip(output.token_ids, output.logprobs or (), strict=True)]
            for output in outputs
        ]

    num_compared = 0
    for rows in zip(answered(device="cuda"), answered(device="cuda", dtype="float32"), strict=True):
        for (token, logprob), (other, expected) in zip(*rows, strict=True):
            assert logprob == pytest.approx(expected, abs=0.1)
            num_compared += 1
            if token != other:
                break
    assert num_compared > len(PROMPTS), "no decode step was compared"


@pytest.mark.parametrize("scheme", MADE)
def test_loading_needs_no_second_copy(scheme: str, tmp_path: Path) -> None:
    """The peak is the weights and one matrix being rounded; what that took is given back."""
    sizes = Sizes(hidden_size=512, num_layers=24, num_heads=8)
    make_checkpoint("llama", tmp_path / "m", sizes=sizes, dtype="bfloat16")
    file_bytes = (tmp_path / "m" / "model.safetensors").stat().st_size
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load(tmp_path / "m", scheme, "cuda", "bfloat16")
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 1.1 * kept_bytes(loaded.model) + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before <= kept + file_bytes // 2


@pytest.mark.parametrize("scheme", MADE)
def test_random_weights_of_any_shape(scheme: str, root: Path) -> None:
    loaded = load_random(dense(root, "llama"), device="cuda", quantization=scheme)
    assert loaded.weights == scheme and loaded.kept_as.startswith("rounded to ")


@pytest.mark.parametrize("quantization", MADE)
def test_codes_that_were_kept_are_the_ones_that_were_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """A second start reads from disk what the first one rounded on the GPU."""
    monkeypatch.setattr(code_cache, "codes_dir", lambda: tmp_path / "codes")
    monkeypatch.setattr(code_cache, "SLOW_SECONDS", -1.0)
    first, second = (load(dense(root, "qwen3_moe"), quantization, "cuda", "bfloat16") for _ in range(2))
    assert second.kept_as == f"{first.kept_as}, read from the cache"
    found, expected = weights(second), weights(first)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
