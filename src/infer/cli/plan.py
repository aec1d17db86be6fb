"""`infer plan`: where a model's memory goes, before anything is loaded.

It reads the config and the headers of the weights, never the weights, so it answers in seconds for any size.
For a model that is not on this disk yet, its config.json is enough.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infer.cli import flags
from infer.cli.answer import write_out, write_rows
from infer.cli.interrupts import importing
from infer.config.knobs import format_bytes
from infer.config.settings import EngineConfig
from infer.errors import ConfigError, NoRoom

if TYPE_CHECKING:
    from infer.tools.memory_needs import DraftMemory, MemoryNeeds
    from infer.tools.memory_plan import MemoryPlan
    from infer.tools.scheme_plan import SchemePlan

HELP = "show where a model's memory would go, without loading it"
DESCRIPTION = (
    "Show the memory of weights, activations and KV cache, how many sequences of which length fit\n"
    "at once, and the flags to start with. Exit code 2 if it does not fit."
)
USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  infer plan
  infer plan path/to/model --gpu-memory 16GiB
  infer plan path/to/config.json --gpu-memory 24GiB --max-seq-len 32768 --dtype bfloat16
  infer plan model.gguf --max-batch-size 8 --json
"""

# Knobs that do not change memory: they have no flag here, but a --config file may set them.
NO_MEMORY = {
    "tokenizer", "chat_template", "tool_call_parser", "reasoning_parser", "num_threads", "node_rank",
    "master_addr", "master_port", "attention_backend",
    "decode_attention_backend", "mlp_backend", "use_prefix_caching", "batching_mode", "scheduler_policy",
    "prefill_chunk_size", "max_prefill_chunks_per_step", "preemption", "max_wait_steps", "max_decode_gap",
    "max_queue", "seed", "use_cuda_graphs", "use_overlap", "record_cpu_step", "cpu_products", "deterministic",
    "prompt_lookup_max", "prompt_lookup_min", "suffix_max_answers", "adaptive_speculation",
    "synthetic_acceptance",
}  # fmt: skip


FLAGS: flags.Rows = {
    "model [MODEL]": (
        str,
        "directory, GGUF file, config.json or hub id, as for --model; if left out: the default model",
    ),
    "--gpu-memory SIZE": (
        str,
        "plan for a GPU with this memory, such as 16GiB; default: this machine's free memory",
    ),
    "--bandwidth GB/S": (
        float,
        "memory bandwidth in 10^9 bytes per second, such as 4800 for an H200, to estimate tokens per "
        "second; default: measured here, unknown with --gpu-memory",
    ),
    "--json": (bool, "print one JSON object, sizes in bytes"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    flags.add_rows(parser, FLAGS)
    flags.add_knob_flags(parser, without=NO_MEMORY)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Read the headers, divide the memory, print the plan."""
    if args.model is not None:
        flags.name_model(args, args.model)
    knobs = flags.knobs_from(args)
    if args.gpu_memory is not None and "device" in knobs:
        raise ConfigError("--gpu-memory always plans for a GPU; leave out --device")
    if args.bandwidth is not None and not 0 < args.bandwidth < 1e9:
        raise ConfigError(f"--bandwidth must be a number of GB per second above 0, got {args.bandwidth:g}")
    config = EngineConfig.from_knobs(**knobs)
    with importing():
        from infer.bench.roofline import copy_bandwidth
        from infer.tools.memory_needs import find_headers, find_machine
        from infer.tools.memory_plan import plan_memory
        from infer.tools.scheme_plan import compare_schemes

    load = config.load
    try:
        machine = find_machine(load.device, args.gpu_memory, config.cache.device_memory)
    except ConfigError as error:
        if "device" not in knobs:
            raise
        elsewhere = "plan for a GPU elsewhere with --gpu-memory 24GiB instead of --device"
        raise ConfigError(f"{error}, or {elsewhere}") from None
    headers = find_headers(load.model, revision=load.revision, show_progress=True, model_impl=load.model_impl)
    plan: MemoryPlan | NoRoom
    try:
        plan = plan_memory(config, headers, machine)
    except NoRoom as error:
        plan = error  # the sizes of every form are shown before the error
    bandwidth = None if args.bandwidth is None else args.bandwidth * 1e9
    is_measured = bandwidth is None and args.gpu_memory is None
    if is_measured:
        bandwidth = copy_bandwidth(machine.device, scale=0.5)
    if bandwidth is not None:  # stages run one after the other, and the ranks of a CPU share its memory
        bandwidth /= load.num_ranks if machine.kind == "cpu" else 1
    forms = Forms(compare_schemes(config, headers, machine), bandwidth, is_measured)
    if isinstance(plan, NoRoom):
        told = {"model": headers.source.name, "error": str(plan), **_forms_json(forms)}
        text = "\n".join(_scheme_table(forms)) + "\n"
    else:
        told, text = to_json(plan, forms), to_text(plan, load.model, forms)
    if args.json:
        write_out(json.dumps(told, indent=2) + "\n")
    else:
        write_rows(text)
    if isinstance(plan, NoRoom):
        raise plan
    return 0


class Forms(NamedTuple):
    """The quantizations that the weights could have, and the memory bandwidth for their speeds."""

    schemes: list[SchemePlan]
    bandwidth: float | None  # None: not known
    is_measured: bool  # True: the bandwidth was measured by this command

    def tokens_per_second(self, scheme: SchemePlan) -> float | None:
        """Return the highest decode speed of one sequence."""
        return None if self.bandwidth is None else scheme.tokens_per_second(self.bandwidth)


def to_json(plan: MemoryPlan, forms: Forms) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    needs, machine, scheduler = plan.needs, plan.needs.machine, plan.needs.resolved.scheduler
    return {
        "model": needs.choice.headers.source.name,
        "num_parameters": plan.num_parameters,
        "stored_bytes": plan.stored_bytes,
        "dtype": str(needs.choice.dtype).removeprefix("torch."),
        "weight_format": needs.choice.weights,
        "machine": machine.kind,
        "memory": needs.memory,
        "other_processes": machine.others,
        "runtime": machine.runtime,
        "weights": needs.weights,
        "stages": [stage.weights for stage in plan.stages],
        **_draft_json(needs.draft),
        **({"adapters": needs.adapters} if needs.adapters else {}),
        "activations": needs.step.activations,
        "graphs": needs.graphs,
        "workspace": plan.workspace,
        "kv_cache": plan.cache.num_bytes,
        "kv_bytes_per_token": plan.cache.bytes_per_token,
        "num_blocks": plan.cache.num_blocks,
        "block_size": plan.cache.block_size,
        "num_cache_tokens": plan.cache.num_tokens,
        "host_cache": plan.host_cache,
        "total": plan.total,
        "max_seq_len": plan.longest_sequence,
        "max_batch_size": scheduler.max_batch_size,
        "prefill_tokens_while_decoding": scheduler.prefill_tokens_while_decoding,
        "contexts": {str(context): plan.at_once(context) for context in plan.contexts()},
        **_forms_json(forms),
        "flags": flags.spell(plan.knobs()),
    }


def _forms_json(forms: Forms) -> dict[str, Any]:
    """Return the part of `--json` about the quantizations of the weights."""
    return {
        "bandwidth": forms.bandwidth,
        "schemes": [
            asdict(scheme) | {"tokens_per_second": forms.tokens_per_second(scheme)}
            for scheme in forms.schemes
        ],
    }


def to_text(plan: MemoryPlan, model: str | None, forms: Forms) -> str:
    """Return the plan as a table."""
    lines = [
        _title(plan.needs),
        "",
        *(f"  {name:12}{format_bytes(size):>11}   {note}" for name, size, note in _parts(plan)),
        "",
        *_context_table(plan),
        "",
        *_scheme_table(forms),
        "",
        *_limits(plan),
        _start(plan, model),
    ]
    return "\n".join(lines) + "\n"


def _title(needs: MemoryNeeds) -> str:
    """Return the model, and the memory that a rank of it has."""
    machine, num_ranks = needs.machine, needs.choice.plan.rank.num_ranks
    where = "a GPU" if machine.kind == "gpu" else "this machine's CPU"
    if num_ranks > 1:
        shares = machine.kind == "cpu" or needs.resolved.settings.load.names_gpu
        where = f"{where}, each of {num_ranks} ranks" if shares else f"each of {num_ranks} GPUs"
    held = f", other processes hold {format_bytes(machine.others)}" if machine.others else ""
    return f"{needs.choice.headers.source.name} on {where} with {format_bytes(needs.memory)} for it{held}"


def _parts(plan: MemoryPlan) -> Iterator[tuple[str, int, str]]:
    """Yield each part of the memory, its bytes, and a note."""
    from infer.tools.memory_plan import in_form

    needs, draft, number = plan.needs, plan.needs.draft, plan.num_parameters
    count = f"{number / 1e6:,.0f} M" if number >= 10**7 else f"{number:,}"
    yield "weights", needs.weights, f"{count} parameters {in_form(needs.choice.weights)}"
    for place, stage in enumerate(plan.stages[:-1]):
        layers = f"layers {stage.layers.start} to {stage.layers[-1]}"
        yield f"stage {place}", stage.weights, f"weights of {layers}"
    if draft.name:
        weights = format_bytes(draft.weights)
        yield "draft model", draft.total, f"{draft.name}: {weights} of weights, the rest for its steps"
    if needs.adapters:
        num_slots = needs.resolved.settings.adapters.num_slots
        yield "adapters", needs.adapters, f"room for {num_slots} LoRA adapters at a time"
    yield "activations", needs.step.activations, "of the largest step"
    if needs.graphs:
        yield "graphs", needs.graphs, "captured steps, and the buffers of all steps"
    yield "KV cache", plan.cache.num_bytes, _cache_note(plan)
    if plan.workspace:
        yield "workspace", plan.workspace, "of attention"
    if needs.machine.runtime:
        yield "runtime", needs.machine.runtime, "of the GPU"
    last = f", for a rank of stage {len(plan.stages) - 1}, the last" if len(plan.stages) > 1 else ""
    yield "in all", plan.total, f"of {format_bytes(needs.memory)}{last}"
    if plan.host_cache:
        yield "host memory", plan.host_cache, "for what is swapped or evicted"


def _cache_note(plan: MemoryPlan) -> str:
    """Return the blocks and tokens of the cache in words."""
    cache, num_planes, draft = plan.cache, plan.kept.layout.num_planes, plan.needs.draft
    layers = f" in {num_planes} layer{'s' * (num_planes != 1)}" if cache.num_tables > 1 else ""
    drafts = f", {format_bytes(draft.beside.per_token)} the draft's" if draft.name else ""
    return (
        f"{cache.num_blocks} blocks of {cache.block_size} tokens{layers}: {cache.num_tokens:,} tokens, "
        f"{format_bytes(cache.bytes_per_token)} each{drafts}"
    )


def _limits(plan: MemoryPlan) -> Iterator[str]:
    """Yield what keeps the cache from serving the model's whole context, if it is too small for that."""
    from infer.engine.cache_fit import cache_share

    max_seq_len = plan.needs.choice.max_seq_len
    if plan.longest_sequence >= max_seq_len:
        return
    yield (
        f"The model's context is {max_seq_len} tokens; this cache serves sequences of up to "
        f"{plan.longest_sequence}."
    )
    given, usual = plan.needs.resolved.settings.cache, cache_share(plan.needs.machine.device)
    if usual < 1 and not (given.kv_cache_memory or given.num_blocks):
        yield (
            f"It has {given.kv_cache_share or usual:.0%} of the memory that weights leave; --kv-cache-memory "
            "or --kv-cache-share gives it more."
        )


def _start(plan: MemoryPlan, model: str | None) -> str:
    """Return the command that starts a server with this cache."""
    is_shape_only = model is not None and plan.stored_bytes == 0 and Path(model).expanduser().exists()
    start = "Start with, once the weights are there:" if is_shape_only else "Start with:"
    path = Path(model or "")
    named = [] if model is None else ["--model", str(path.parent) if path.name == "config.json" else model]
    return f"{start} infer serve {shlex.join([*named, *flags.spell(plan.knobs())])}".rstrip()


def _draft_json(draft: DraftMemory) -> dict[str, Any]:
    """Return the part of `--json` about a model that drafts; empty if there is none."""
    if not draft.name:
        return {}
    return {"draft_model": draft.name, "draft_weights": draft.weights, "draft_steps": draft.beside.step}


def _scheme_table(forms: Forms) -> list[str]:
    """Return the lines that compare the quantizations of the weights."""
    head = f"  {'quantization':>12}{'weights':>12}{'per token':>12}{'KV tokens':>14}"
    lines = [head + (f"{'tokens/s':>11}" if forms.bandwidth else "") + "   kept in"]
    for scheme in forms.schemes:
        room = "does not fit" if scheme.num_cache_tokens is None else f"{scheme.num_cache_tokens:,}"
        speed = forms.tokens_per_second(scheme)
        shown = "" if speed is None else f"{speed:>11,.{int(speed < 10)}f}"
        lines.append(
            f"{'*' if scheme.is_chosen else ' '} {scheme.quantization:>12}{format_bytes(scheme.weights):>12}"
            f"{format_bytes(scheme.bytes_per_token):>12}{room:>14}{shown}"
            f"   {scheme.kept_as}"
        )
    lines.append("  (*: the form of this plan)")
    if forms.bandwidth is None:
        return [*lines, "  (--bandwidth GB/S of the GPU adds tokens per second)"]
    measured = ", measured just now: more on a less busy machine" if forms.is_measured else ""
    return [*lines, f"  (tokens/s: at most, of one sequence, at {forms.bandwidth / 1e9:,.0f} GB/s{measured})"]


def _context_table(plan: MemoryPlan) -> list[str]:
    """Return the table of the contexts that fit at each concurrency."""
    from infer.tools.memory_plan import CONCURRENCIES

    columns = [count for count in CONCURRENCIES if count <= plan.needs.resolved.scheduler.max_batch_size]
    head = f"  {'context':>9}{'KV each':>12}{'at once':>10}   " + "".join(f"{f'x{n}':>6}" for n in columns)
    lines = [head]
    for context in plan.contexts():
        at_once = plan.at_once(context)
        fits = "".join(f"{'yes' if at_once >= count else '-':>6}" for count in columns)
        each = format_bytes(plan.kv_bytes(context))
        lines.append(f"  {context:>9}{each:>12}{at_once:>10}   {fits}")
    return lines
