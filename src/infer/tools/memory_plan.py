"""Will it fit? The memory of a model on a machine, from its config and headers alone.

    memory = weights (+ a draft model's, + LoRA adapters') + activations of the largest step + graphs
             + KV cache (+ workspace) + runtime

Weights, activations and bytes per token are computed (memory_needs.py, cache/memory.py); the rest of
`device_memory` is the cache, and the cache divided by a context is the number of sequences of that length
that run at once. The result includes flags: an engine that is started with them has the planned cache.

If there are headers, every tensor in them is first matched with its place, as loading does. A model that does
not fit is refused with what would fit (memory_advice.py).

Every start first makes a quicker check (`check_settings`): can this model be served with these knobs at all?
If not, it is refused before minutes are spent on reading weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from infer.cache.layout import STATE, blocks_of_sequence, longest_sequence
from infer.cache.memory import CacheSize, DeviceMemory, check_host_blocks
from infer.config.knobs import format_bytes
from infer.config.settings import EngineConfig
from infer.engine.cache_fit import (
    KeptCache,
    fit_to_device,
    fit_to_memory,
    for_each,
    kept_cache,
    ranks_sharing,
    scratch_of,
)
from infer.engine.device_build import resolve_for
from infer.errors import ConfigError, NoRoom
from infer.layers.stages import stage_layers
from infer.loader.headers import ModelHeaders
from infer.loader.load import LoadChoice
from infer.loader.placement import plan_moves
from infer.loader.quantization import AS_STORED
from infer.loader.weight_plan import kept_bytes, num_weights
from infer.tools.memory_advice import too_small, what_fits
from infer.tools.memory_needs import (
    MachineMemory,
    MemoryNeeds,
    choose_load,
    find_headers,
    find_needs,
    machine_on,
    plan_adapters,
    plan_draft,
    plan_stage,
    weight_bytes,
)

SEE_PLAN = "'infer plan' shows what fits"
CONTEXTS = tuple(2**power for power in range(9, 21))
CONCURRENCIES = (1, 4, 16, 64, 256)


class StageBytes(NamedTuple):
    """One pipeline stage, and the weights of one of its ranks."""

    layers: range
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The use of the memory; all sizes in bytes."""

    needs: MemoryNeeds
    stages: tuple[StageBytes, ...]  # pipeline stages; this plan is for a rank of the last one
    kept: KeptCache
    cache: CacheSize

    @property
    def num_parameters(self) -> int:
        """The number of weights of the rank."""
        return num_weights(self.needs.choice.plan.skeleton)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the weights on disk; 0: not known."""
        return sum(tensor.num_bytes for tensor in self.needs.choice.headers.tensors.values())

    @property
    def workspace(self) -> int:
        """The bytes that attention needs to gather keys and values."""
        return int(self.cache.num_bytes * self.kept.workspace)

    @property
    def host_cache(self) -> int:
        """The room for preempted sequences and evicted prefixes."""
        return self.cache.num_host_blocks * self.cache.bytes_per_block

    @property
    def total(self) -> int:
        """The sum of all parts on the device."""
        needs = self.needs
        beside = needs.draft.total + needs.adapters + needs.step.total + needs.machine.runtime
        return needs.weights + beside + self.workspace + self.cache.num_bytes

    @property
    def longest_sequence(self) -> int:
        """The longest sequence that fits into this cache; its last token is never cached."""
        max_chunk = self.needs.resolved.scheduler.max_chunk
        size, num_blocks = self.cache.block_size, self.cache.num_blocks
        longest = longest_sequence(self.kept.layout.windows, num_blocks, size, max_chunk)
        return min(self.needs.choice.max_seq_len, longest + 1)

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of keys, values and states of one sequence of this length while it decodes."""
        windows = self.kept.layout.windows
        num_blocks = blocks_of_sequence(windows, context, self.cache.block_size, 1)
        if STATE in windows:  # a state takes a whole block from the first token on
            return num_blocks * self.cache.bytes_per_block
        return min(num_blocks * self.cache.bytes_per_block, context * self.cache.bytes_per_token)

    def at_once(self, context: int) -> int:
        """Return the number of sequences of this length that can run together."""
        size, scheduler = self.cache.block_size, self.needs.resolved.scheduler
        in_prompt = blocks_of_sequence(self.kept.layout.windows, context, size, scheduler.max_chunk)
        decoding = blocks_of_sequence(self.kept.layout.windows, context, size, 1)
        others = (self.cache.num_blocks - in_prompt) // decoding
        return min(max(others + 1, 0), scheduler.max_batch_size)

    def contexts(self) -> list[int]:
        """Return the lengths to show in a table."""
        longest = self.needs.choice.max_seq_len
        return [*[context for context in CONTEXTS if context < longest][-7:], longest]

    def knobs(self) -> dict[str, object]:
        """Return the knobs that give exactly this cache, without knobs at their default value."""
        config, default = self.needs.resolved.settings, EngineConfig().knobs()
        chosen: dict[str, object] = {
            name: value
            for name, value in config.knobs().items()
            if name not in ("model", "max_seq_len", "kv_cache_memory", "num_blocks")
            and value != default[name]
        }
        if self.longest_sequence < self.needs.choice.config.context_len:
            chosen["max_seq_len"] = self.longest_sequence
        # counted in blocks of block_size tokens for any layout
        chosen["num_blocks"] = -(-self.cache.num_tokens // config.cache.block_size)
        return chosen


def check_settings(config: EngineConfig, choice: LoadChoice) -> None:
    """Refuse knobs that no engine can be built with, by the engine's rules, before any weight is read."""
    resolved = resolve_for(config, choice)
    model, machine = choice.plan.skeleton, machine_on(choice.device, config.cache.device_memory)
    scratch, draft = scratch_of(model, resolved.scheduler), plan_draft(resolved, choice, machine)
    weights = (kept_bytes(model) + plan_adapters(config, choice)) * ranks_sharing(config, choice.device)
    weights += draft.weights
    try:
        fit_to_device(resolved, choice, weight_bytes=weights, scratch=scratch, draft=draft.beside)
    except NoRoom as error:
        advice = what_fits(config, choice, machine, draft)
        raise ConfigError(f"{str(error).removesuffix('; ' + SEE_PLAN)}; {advice}") from None


def plan_memory(
    config: EngineConfig,
    headers: ModelHeaders,
    machine: MachineMemory,
    *,
    choice: LoadChoice | None = None,
    advises: bool = True,
) -> MemoryPlan:
    """Divide the memory of a machine; errors say what would fit if `advises`. `choice`: if already made."""
    choice = choice or choose_load(config, headers, machine)
    if headers.tensors:
        plan_moves(choice.plan.skeleton, headers, choice.plan.slices)
    resolved = machine.resolve(config, choice)
    find = partial(find_headers, revision=None, show_progress=True)
    needs = find_needs(resolved, choice, machine, plan_draft(resolved, choice, machine, find))
    stages, kept = _stages(needs), kept_cache(resolved, choice)
    memory = _without_weights(needs, stages)
    left, step = memory.room // needs.num_ranks, needs.step
    room = left - max(step.total + needs.draft.beside.step, needs.loading)
    block = resolved.settings.cache.block_size * (kept.bytes_per_token + needs.draft.beside.per_token)
    if room / (1 + kept.workspace) < block:
        told = f"{in_form(choice.weights)} needs {needs.describe()}"
        raise NoRoom(f"{headers.source.name} {told}{too_small(needs)}" if advises else told)
    cache = fit_to_memory(resolved, choice, memory, step, needs.draft.beside)
    if machine.kind == "cpu":
        free = left - step.activations - cache.num_bytes
        check_host_blocks(resolved.settings.cache, cache, free, each=for_each(needs.num_ranks))
    plan = MemoryPlan(needs=needs, stages=stages, kept=kept, cache=cache)
    _check_longest(plan, room)
    return plan


def _stages(needs: MemoryNeeds) -> tuple[StageBytes, ...]:
    """Return the stages and the weights of a rank of each; `needs` has the last stage."""
    config, choice = needs.resolved.settings, needs.choice
    stages = stage_layers(choice.config.num_layers, config.load.pipeline_parallel_size)
    others = [plan_stage(config, choice.headers, needs.machine, stage) for stage in range(len(stages) - 1)]
    return tuple(map(StageBytes, stages, (*map(weight_bytes, others), needs.weights)))


def _without_weights(needs: MemoryNeeds, stages: tuple[StageBytes, ...]) -> DeviceMemory:
    """Return the device's memory after all weights that it must hold were loaded."""
    if needs.num_ranks > 1:
        all_stages = sum(stage.weights for stage in stages)
        ranks = all_stages * needs.resolved.settings.load.tensor_parallel_size
        taken = ranks + needs.adapters * needs.num_ranks
    else:  # the largest rank has its own GPU
        taken = max(stage.weights for stage in stages) + needs.adapters
    return needs.machine.unloaded.with_weights(taken + needs.draft.weights)


def _check_longest(plan: MemoryPlan, room: int) -> None:
    """Refuse a `max_seq_len` that the cache cannot hold; `room` is the memory that it could take."""
    needs, config, longest = plan.needs, plan.needs.resolved.settings, plan.longest_sequence
    max_seq_len = needs.choice.max_seq_len
    if config.load.max_seq_len is None or longest >= max_seq_len:
        return
    ways, needed = [f"max_seq_len={longest}"], plan.kv_bytes(max_seq_len)
    is_sized = config.cache.kv_cache_memory or config.cache.num_blocks or config.cache.kv_cache_share
    asked = (needed >> 20) + 1  # MiB
    if not is_sized and (asked << 20) * (1 + plan.kept.workspace) <= room:
        ways.append(f"kv_cache_memory={asked}MiB")
    raise ConfigError(
        f"one sequence of max_seq_len {max_seq_len} needs {format_bytes(needed)} "
        f"of KV cache, but next to {needs.describe()} the cache gets {format_bytes(plan.cache.num_bytes)} of "
        f"{format_bytes(needs.memory)}{for_each(needs.num_ranks)}; what would fit: {', or '.join(ways)}"
    )


def in_form(weight_format: str) -> str:
    """Return the form of weights as words that follow a name."""
    return weight_format if weight_format == AS_STORED else f"in {weight_format}"
