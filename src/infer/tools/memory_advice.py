"""Advice for a model that does not fit into memory: the first change of knobs with which it does."""

from __future__ import annotations

from dataclasses import replace

import torch

from infer.cache.memory import kv_bytes_per_token
from infer.config.knobs import format_bytes
from infer.config.settings import EngineConfig
from infer.engine.cache_fit import for_each, kept_as
from infer.loader.load import LoadChoice
from infer.tools.memory_needs import DraftMemory, MachineMemory, MemoryNeeds, choose_load, find_needs

SMALL_STEP, SMALL_BATCH = 256, 8  # tokens and sequences of a step, tried if a larger one does not fit


def too_small(needs: MemoryNeeds) -> str:
    """Describe the parts that do not fit, besides the weights, and what would fit or what is missing."""
    machine, config = needs.machine, needs.resolved.settings
    return (
        (f", {format_bytes(needs.graphs)} of graphs and buffers" if needs.graphs else "")
        + (f", and {format_bytes(machine.runtime)} of the GPU's runtime" if machine.runtime else "")
        + f", but there are {format_bytes(needs.memory)}{for_each(needs.num_ranks)}"
        + (f" next to {format_bytes(machine.others)} of other processes" if machine.others else "")
        + f"; {what_fits(config, needs.choice, machine, needs.draft)}"
    )


def what_fits(config: EngineConfig, choice: LoadChoice, machine: MachineMemory, draft: DraftMemory) -> str:
    """Describe the first change of knobs that makes the model fit, all forms that do, or what is missing."""
    headers, device = choice.headers, machine.unloaded
    advice, forms = "give more memory", dict[str, list[str]]()
    for settings, changed in _smaller(config, choice, on_gpu=machine.kind == "gpu"):
        form = settings.load.quantization
        is_rounded = form != config.load.quantization
        if any(form in names for names in forms.values()) or (is_rounded and headers.family.load is not None):
            continue
        choice = choose_load(settings, headers, machine)
        needed = _least(find_needs(machine.resolve(settings, choice), choice, machine, draft))
        if needed <= machine.memory and not is_rounded:
            return f"what would fit: {changed}"
        if needed <= machine.memory:
            forms.setdefault(changed.removeprefix(f"quantization={form}"), []).append(form)
            continue
        missing = format_bytes(needed - machine.memory + max(-device.room, 0))
        held = "" if device.limit is None else f" next to {format_bytes(device.held)} of this process"
        advice = f"with {changed} it needs {format_bytes(needed)}{held}, {missing} more than there is"
    if forms:
        ways = [f"quantization={' or '.join(names)}{also}" for also, names in sorted(forms.items())]
        return f"what would fit: {'; or '.join(ways)}"
    return advice


def _least(needs: MemoryNeeds) -> int:
    """Return the memory that a model needs with a cache of two blocks."""
    cache, model, device = needs.resolved.settings.cache, needs.choice.config, needs.machine.unloaded
    kept = kept_as(cache, needs.choice.dtype).itemsize
    token = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, kept)
    token += needs.draft.beside.per_token
    beside = max(needs.step.total, needs.loading) + 2 * cache.block_size * token
    share = device.share if device.limit is None else 1.0
    return needs.weights + needs.draft.total + needs.adapters + int(beside / share) + needs.machine.runtime


def _smaller(config: EngineConfig, choice: LoadChoice, *, on_gpu: bool) -> list[tuple[EngineConfig, str]]:
    """Return forms of weights and steps that need less memory, largest first, with their knobs in words."""
    scheduler, dtype, kept = config.scheduler, choice.dtype, choice.plan.rule.label
    width = min(SMALL_BATCH, scheduler.max_batch_size or SMALL_BATCH)
    small = replace(
        config, scheduler=replace(scheduler, max_num_batched_tokens=SMALL_STEP, max_batch_size=width)
    )
    words = f"max_num_batched_tokens={SMALL_STEP}, max_batch_size={width}"
    # without chunked prefill a step must have room for a whole prompt, so it cannot shrink
    can_shrink = scheduler.use_chunked_prefill and config.cache.keeps_cache
    sizes, found = [(config, "")], list[tuple[EngineConfig, str]]()
    if can_shrink:
        sizes.append((small, f", {words}"))
        found.append((small, words))
    if dtype.itemsize > 2 and on_gpu:
        for settings, also in sizes:
            halved = replace(settings, load=replace(settings.load, dtype="bfloat16"))
            found.append((halved, f"dtype=bfloat16{also}"))
    form, forms = config.load.quantization, tuple[str, ...]()
    if on_gpu:
        forms = ("fp8", "int8", "int4") if form in ("auto", "none") else ()
    elif form in ("auto", "none", "fp32", "bf16"):  # int8 and int4 compute in float32
        forms = ("int8", "int4") if dtype is torch.float32 or config.load.dtype == "auto" else ()
    for name in forms[forms.index(kept) + 1 :] if kept in forms else forms:
        for settings, also in sizes:
            rounded = replace(settings, load=replace(settings.load, quantization=name))
            found.append((rounded, f"quantization={name}{also}"))
    return found
