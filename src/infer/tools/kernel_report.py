"""A report on the kernel that would run for each operation of a model, by the number of tokens, and why.

    config, headers ──► the model without memory ──► problems, by operation and size ──► the first kernel
                                                                                    that supports each

An engine makes the same choices from the same lists (kernels/runtime/choice.py). The GPU may be given by name
and need not be in this machine. Kernels in CUDA C++ count as compiled.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from infer.config.backends import AUTO, Chosen
from infer.config.machine_rules import Machine
from infer.config.profiles.find import Gpu
from infer.config.resolve import choose_backends
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.kernels.attention.choice import DECODE_WAYS, PROMPT_WAYS, DecodeProblem, PromptProblem
from infer.kernels.attention.decode_cuda import CachedHeads
from infer.kernels.linear.coded_linear import coded_ways
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.problems import LinearProblem
from infer.kernels.linear.small import dense_ways
from infer.kernels.moe.choice import EXPERT_WAYS, ExpertsProblem
from infer.kernels.runtime.choice import Explained, explain
from infer.kernels.runtime.profiles import gpu_of as gpu_of
from infer.layers.bind import ask_for_kernels
from infer.layers.linear import Linear
from infer.layers.moe import MixtureOfExperts
from infer.loader.headers import ModelHeaders
from infer.models.config import ModelConfig
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.projection import Neighbours
from infer.tools.memory_needs import choose_load, find_machine

# sizes that are tried; if the choices for two neighbours differ, the exact limit between them is searched
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COUNTS = (*ROWS, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


class Choice(NamedTuple):
    """The kernel for a range of sizes, and why the kernels before it in the list were not chosen."""

    first: int
    last: int
    kernel: str
    declined: tuple[tuple[str, str], ...]


class Operation(NamedTuple):
    """An operation of a model, and its kernels by size."""

    name: str
    what: str  # sizes and form of its weights, or its heads
    unit: str  # unit of the sizes: tokens, rows
    choices: tuple[Choice, ...]


def explain_kernels(config: EngineConfig, headers: ModelHeaders, gpu: Gpu) -> list[Operation]:
    """List a model's operations that have several kernels, in the order in which a step first runs them."""
    machine = find_machine("cuda", "1GiB")  # any size: no choice of kernel depends on it
    plan = choose_load(config, headers, machine).plan
    if plan.config.impl != "infer":
        raise ConfigError(
            f"{headers.source.name} runs with the code of {plan.config.impl}, which has one way"
        )
    model, compiled = plan.skeleton, CompiledLinears(plan.device, gpu=gpu)
    neighbours = ask_for_kernels(model, compiled, is_alone=config.load.tensor_parallel_size == 1)
    compiled.compiler()  # marks all requested kernels as ready; nothing is compiled
    backends = choose_backends(config, Machine(device="cuda", has_gpu_kernels=True))
    found: dict[tuple[str, str], Operation] = {}
    for name, module in model.named_modules():
        operation = None
        if isinstance(module, Linear):
            operation = _linear(name, module, neighbours[name], compiled)
        elif isinstance(module, MixtureOfExperts):
            operation = _experts(name, module)
        if operation is not None:
            found.setdefault((operation.name, operation.what), operation)
    return [*_attention(config, plan.config, plan.rule.dtype, backends, gpu), *found.values()]


def _linear(name: str, layer: Linear, around: Neighbours, compiled: CompiledLinears) -> Operation:
    projection, spec = layer.projection, layer.projection.spec
    gated = bool(around.activation) and projection.bias is None
    form = projection.weights.form if isinstance(projection, GPUWeights) else None
    N, adds = spec.num_rows // 2 if gated else spec.num_rows, around.writes_sum and projection.bias is None

    def ask(num_tokens: int) -> Explained:
        problem = LinearProblem(
            num_tokens, N, spec.size, gated, spec.dtype, compiled.gpu, form, adds, spec.int8_tokens
        )
        if form is None:
            return explain(dense_ways(compiled), problem)
        return explain(coded_ways(compiled), problem)

    kept = str(spec.dtype).removeprefix("torch.") if form is None else projection.scheme
    return Operation(
        _generic(name), f"{spec.size} -> {spec.num_rows}, {kept}", "tokens", _choices(ask, COUNTS)
    )


def _experts(name: str, mixture: MixtureOfExperts) -> Operation:
    gate_up, down = mixture.gate_up.projection, mixture.down.projection
    coded = [each for each in (gate_up, down) if isinstance(each, GPUWeights)]
    grouped = (coded[0].grouped, coded[1].grouped) if len(coded) == 2 else (None, None)
    has_bands = all(each.spec.num_rows % 32 == 0 for each in coded)

    def ask(num_tokens: int) -> Explained:
        problem = ExpertsProblem(
            num_tokens, mixture.num_choices, mixture.gate_up.num_experts, len(coded) == 2,
            gate_up.bias is not None, False, has_bands, mixture.few, grouped,
            (gate_up.many, down.many),
        )  # fmt: skip
        return explain(EXPERT_WAYS, problem)

    what = f"{mixture.num_choices} of {mixture.gate_up.num_experts} experts, {gate_up.scheme}"
    return Operation(_generic(name), what, "tokens", _choices(ask, COUNTS))


def _attention(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, backends: Chosen, gpu: Gpu
) -> Iterator[Operation]:
    """Yield attention for decoding rows alone, rows with prompts, and fresh prompts, for each head size."""
    windows = {model.window(layer) for layer in range(model.num_layers) if not model.has_state(layer)}
    unlike = "" if model.has_plain_scores else "scores have a soft cap or sinks"
    if model.layer_specs:
        unlike = "layers have heads of several sizes"
    no_cudnn = unlike or ("" if windows == {None} else "only for models without sliding windows")
    no_cudnn = "only for models without states" if model.delta is not None else no_cudnn
    for num_kv_heads, head_dim in dict.fromkeys(model.kv_heads) or [(model.num_kv_heads, model.head_dim)]:
        kind = replace(model, num_kv_heads=num_kv_heads, head_dim=head_dim)
        yield from _attention_of(config, kind, dtype, backends, gpu, unlike, no_cudnn)


def _attention_of(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    backends: Chosen,
    gpu: Gpu,
    no_cuda: str,
    no_cudnn: str,
) -> Iterator[Operation]:
    """Yield the kernels for one head size; `no_cuda`, `no_cudnn`: why they do not suit the model, or ""."""
    profile, cache = gpu.profile.attention, config.cache
    has_codes = cache.kv_cache_dtype not in (AUTO, "none")
    kept_as = None if not has_codes else torch.int8 if cache.kv_cache_dtype == "int8" else torch.float8_e4m3fn
    heads = CachedHeads(dtype, model.num_heads, model.num_kv_heads, model.head_dim, cache.block_size, kept_as)
    backend = backends.decode_attention
    if backend == AUTO:
        try:
            heads.check(gpu)
        except ConfigError as error:
            no_cuda = str(error).partition(" needs ")[2].partition(";")[0]
        backend = "triton" if no_cuda else backend
    what = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} of keys"
    for name, alone in (("attention, rows that decode alone", True), ("attention, rows with prompts", False)):
        problem = DecodeProblem(
            1, model.num_kv_heads, model.head_dim, backend, profile, has_codes, alone, no_cuda
        )
        ask = lambda rows, problem=problem: explain(DECODE_WAYS, problem._replace(num_rows=rows))  # noqa: E731
        yield Operation(name, what, "rows", _choices(ask, ROWS))

    def ask_prompt(num_tokens: int) -> Explained:
        problem = PromptProblem(
            num_tokens, model.num_heads, model.head_dim, dtype, backends.attention, profile, True, no_cudnn
        )
        return explain(PROMPT_WAYS, problem)

    yield Operation("attention, fresh prompts", what, "tokens", _choices(ask_prompt, COUNTS))


def _choices(ask: Callable[[int], Explained], counts: tuple[int, ...]) -> tuple[Choice, ...]:
    """Return the ranges of sizes that have the same kernel for the same reasons."""
    ask = functools.cache(ask)
    choices: list[Choice] = []
    first = counts[0]
    for count in counts[1:]:
        while ask(count) != ask(first):
            last = bisect.bisect_left(range(first, count), True, key=lambda size: ask(size) != ask(first))
            choices.append(Choice(first, first + last - 1, *ask(first)))
            first += last
    return (*choices, Choice(first, counts[-1], *ask(first)))


def _generic(name: str) -> str:
    """Return the name of a module, without the number of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
