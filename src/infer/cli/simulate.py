"""`infer simulate`: compare policies and cache sizes under a load, without a model.

The real scheduler and the real bookkeeping of the cache run on a virtual clock (bench/simulated.py), so the
results depend only on the trace, the knobs and the cost, not on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import flags
from infer.cli.answer import write_out
from infer.cli.readers import gigabytes_per_s, microseconds, numbers, positive
from infer.cli.terminal import columns_of
from infer.config.own_code import names_code
from infer.config.settings import EngineConfig, knob_table
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.bench.workloads import Workload
    from infer.tools.step_cost import Ranks

HELP = "compare scheduling policies and cache sizes under a load, without a model"
DESCRIPTION = (
    "Run the real scheduler and cache bookkeeping under a load, on a virtual clock, for every policy\n"
    "and every number of blocks, and compare: throughput, times to first token (TTFT) and between\n"
    "tokens (ITL), the longest wait and the longest gap, preemptions, cache hits and cache use.\n"
    "A step has up to 2048 tokens, any number of them of prompts: give the limits of your server."
)
USAGE = "(--trace FILE | --workload NAME) [options]"
EXAMPLES = """\
a trace has one request per line; only the first three keys are needed:
  {"arrival": 0.5, "prompt_len": 900, "output_len": 40, "prefix_id": "tools", "prefix_len": 800,
   "priority": 0, "deadline": 12.0}

examples:
  infer simulate --workload mixed
  infer simulate --workload bursty --policy fcfs,priority,deadline --num-blocks 256,1024
  infer simulate --trace day.jsonl --policy all --max-batch-size 32 --json
  infer simulate --workload shared_prefix --no-use-prefix-caching --cost run.jsonl
  infer simulate --workload mixed --policy fcfs --num-blocks 1024 --cost run.jsonl --model path/to/model \\
      --tensor-parallel-size 1,2,4 --link-bandwidth 450 --link-latency 6
"""

# A simulation has no weights, no attention and no sampling; policies and numbers of blocks are lists here.
OWN_FLAGS = {"num_blocks", "kv_cache_memory", "scheduler_policy", "seed"}
OWN_FLAGS |= {"attention_backend", "decode_attention_backend", "mlp_backend"}
OWN_FLAGS |= {"device_memory", "kv_cache_share", "itl_target_ms"}
DEFAULT_BLOCKS = (256, 1024)
ROW_NUMBER_BYTES = 2  # bytes of a number between two layers: bfloat16
RANK_COLUMNS = ("num_ranks", "compute_seconds", "communication_seconds")

# columns of a result: (title, format)
COLUMNS = {
    "policy": ("policy", ""),
    "num_blocks": ("blocks", "d"),
    "num_ranks": ("ranks", "d"),
    "compute_seconds": ("compute\ns", ".1f"),
    "communication_seconds": ("links\ns", ".1f"),
    "output_tokens_per_second": ("tokens/s", ".1f"),
    "ttft_p50": ("TTFT\np50", ".3f"),
    "ttft_p99": ("TTFT\np99", ".3f"),
    "itl_p50": ("ITL\np50", ".3f"),
    "itl_p99": ("ITL\np99", ".3f"),
    "longest_gap": ("longest\ngap", ".2f"),
    "longest_queue_wait": ("longest\nwait", ".2f"),
    "num_preemptions": ("preempt", "d"),
    "cache_hit_rate": ("hits", ".0%"),
    "kv_use_mean": ("KV use\nmean", ".0%"),
    "kv_use_peak": ("KV use\npeak", ".0%"),
    "num_refused": ("refused", "d"),
    "num_late": ("late", "d"),
    "steps_per_real_second": ("steps/s", ".0f"),
}


FLAGS: flags.Rows = {
    "--trace FILE": (Path, "requests to simulate, as JSON lines, or a record of 'infer serve --record'"),
    "--workload NAME": (str, "built-in load: mixed, shared_prefix, long_prompts, bursty or newcomers"),
    "--num-requests N": (positive, "requests of a built-in load (default: 300)"),
    "--seed N": (int, "seed of a built-in load (default: 0)"),
    "--policy NAMES": (
        str,
        "comma-separated policies to compare, or 'all'; default: all, or the policy in --config",
    ),
    "--num-blocks NUMBERS": (
        numbers,
        "comma-separated cache sizes to compare; default: 256,1024, or the size in --config",
    ),
    "--cost COST": (
        str,
        "seconds of a step: JSON with any of base, per_token, per_kv_token, per_block; a file with such "
        "JSON; or a record to fit them to; default: SmolLM2-135M in int4 on two CPU cores",
    ),
    "-tp/--tensor-parallel-size NUMBERS": (
        numbers,
        "comma-separated numbers of ranks to compare; --cost is for one rank (default: 1)",
    ),
    "-pp/--pipeline-parallel-size N": (positive, "stages of a pipeline are not simulated: 1", 1),
    "--link-bandwidth GB/S": (
        gigabytes_per_s,
        "speed of reads from other ranks, in 10^9 bytes per second: about 450 over NVLink, 50 over PCIe 5",
    ),
    "--link-latency US": (
        microseconds,
        "latency of reads from other ranks, in microseconds: about 6 over NVLink, 15 over PCIe",
    ),
    "--model MODEL": (str, "model whose layers the ranks share: a folder, a config.json or a hub id"),
    "--json": (bool, "print one JSON object instead of a table"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    load = parser.add_argument_group("load and output")
    flags.add_rows(load, FLAGS)
    without = {row.name for row in knob_table().values() if row.section == "load"} - {"max_seq_len"}
    flags.add_knob_flags(parser, without=without | OWN_FLAGS)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Read the load, simulate every combination, print the comparison."""
    if args.trace is not None and args.workload is not None:
        raise ConfigError("--trace and --workload both name a load; leave one of them out")
    if args.trace is None and args.workload is None:
        from infer.bench.traces import LOADS

        raise ConfigError(
            f"give a load: --trace FILE, or --workload with one of {', '.join(LOADS)}; --policy compares all "
            f"policies unless it names some of {', '.join(knob_table()['scheduler_policy'].choices)}"
        )
    from msgspec import structs

    from infer.bench.simulated import compare
    from infer.tools.step_cost import StepCost, read_cost

    load = read_load(args)
    cost = StepCost() if args.cost is None else read_cost(args.cost)
    knobs = flags.knobs_from(args)
    policies = read_policies(args.policy or knobs.get("scheduler_policy") or "all")
    in_file = knobs.pop("num_blocks", None)
    num_blocks = args.num_blocks or (DEFAULT_BLOCKS if in_file is None else [in_file])
    knobs.pop("kv_cache_memory", None)  # set in a config file: the cache is sized in blocks here
    if knobs.get("swap_space") is not None:
        raise ConfigError("a simulated cache has no bytes; use swap_blocks in place of swap_space")
    config = EngineConfig.from_knobs(**knobs)
    groups = read_ranks(args)
    results = compare(load, config, cost, policies=policies, num_blocks=num_blocks, ranks=groups)
    if args.json:
        told = {"load": load.name, "num_requests": load.num_requests, "cost": structs.asdict(cost)}
        write_out(json.dumps(told | {"results": results}, indent=2) + "\n")
    else:
        write_out(to_table(load, results, has_ranks=groups != [None], width=columns_of(sys.stdout)))
    return 0


def read_load(args: argparse.Namespace) -> Workload:
    """Return the requests of the trace, or of the built-in load."""
    from infer.bench.traces import draw_trace, read_trace, to_workload

    if args.trace is not None:
        for name in ("num_requests", "seed"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{flags.flag(name)} is for --workload; a trace has its own requests")
        return to_workload(args.trace.name, read_trace(args.trace))
    requests = draw_trace(args.workload, num_requests=args.num_requests or 300, seed=args.seed or 0)
    return to_workload(args.workload, requests)


def read_ranks(args: argparse.Namespace) -> list[Ranks | None]:
    """Return the groups of ranks to compare; None: one rank, which needs no links."""
    if args.pipeline_parallel_size != 1:
        raise ConfigError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size}: stages of a pipeline are not "
            "simulated; leave it out, or compare ranks with --tensor-parallel-size"
        )
    sizes = args.tensor_parallel_size or [1]
    needed = ("link_bandwidth", "link_latency", "model")
    given = [name for name in needed if getattr(args, name) is not None]
    if max(sizes) == 1:
        if given:
            raise ConfigError(f"{flags.flag(given[0])} is for several ranks; add --tensor-parallel-size 2")
        return [None]
    if missing := [flags.flag(name) for name in needed if name not in given]:
        raise ConfigError(
            f"--tensor-parallel-size {max(sizes)} needs {', '.join(missing)}; 'infer simulate --help' has "
            "the numbers of some links"
        )
    from infer.loader.slices import rank_counts
    from infer.tools.memory_needs import find_headers
    from infer.tools.step_cost import Ranks

    shape = find_headers(args.model, revision=None, show_progress=True).config
    possible = rank_counts(shape)
    for size in sizes:
        if size not in possible:
            raise ConfigError(
                f"--tensor-parallel-size {size}: the heads and sizes of {args.model} can be shared by "
                f"{', '.join(map(str, possible))} ranks"
            )
    return [
        Ranks(
            size=size,
            bandwidth=args.link_bandwidth * 1e9,
            latency=args.link_latency * 1e-6,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            row_bytes=shape.hidden_size * ROW_NUMBER_BYTES,
        )
        for size in sizes
    ]


def read_policies(text: str) -> list[str]:
    """Return the policies of a comma-separated list."""
    known = knob_table()["scheduler_policy"].choices
    policies = list(known) if text == "all" else text.split(",")
    for policy in policies:
        if policy not in known and not names_code(policy):
            raise ConfigError(
                f"--policy must be all, or some of {', '.join(known)} (or your own as module:Name or "
                f"file.py:Name), got {policy!r}"
            )
    return policies


def to_table(
    load: Workload, results: Sequence[Mapping[str, Any]], *, has_ranks: bool = False, width: int | None = None
) -> str:
    """Return a table with a row per policy, cache size and, if there are several, number of ranks.

    A table that is wider than `width` is cut into several, each with the columns that name its rows.
    """
    from infer.bench.render import align, cut_columns

    has_deadlines = any(session.deadline is not None for session in load.sessions)
    hidden = () if has_ranks else RANK_COLUMNS
    hidden = hidden if has_deadlines else (*hidden, "num_late")
    columns = {name: how for name, how in COLUMNS.items() if name not in hidden}
    heads = [("\n" + title).split("\n")[-2:] for title, _ in columns.values()]
    rows = [[f"{result[name]:{spec}}" for name, (_, spec) in columns.items()] for result in results]
    parts = cut_columns([*zip(*heads, strict=True), *rows], num_names=3 if has_ranks else 2, width=width)
    lines = [
        f"{load.name}: {load.num_requests} requests, {load.num_output_tokens} output tokens",
        "",
        *(line for part in parts for line in (*align(part), "")),
        "times in seconds of the simulated machine; the last column is this machine's",
    ]
    return "\n".join(lines) + "\n"
