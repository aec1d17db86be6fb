"""`infer doctor`: what was found on this machine, what will be used, and what would make it faster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from infer.cli import flags
from infer.cli.answer import write_out, write_rows
from infer.cli.interrupts import importing
from infer.config.profiles.find import KNOWN_GPUS, Gpu, find_profile
from infer.config.settings import EngineConfig, knob_table
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.tools.kernel_report import Operation

HELP = "show what this machine has for running models, and what would make it faster"
DESCRIPTION = (
    "Print processor, compiler, kernels, GPU, memory and models, and what could be better; with\n"
    "--kernels, print which kernel runs each operation of a model, and why faster ones do not."
)
USAGE = "[options]"
EXAMPLES = """\
examples:
  infer doctor
  infer doctor --json
  infer doctor --kernels path/to/model --profile a100 --quantization fp8
"""

# Knobs that a choice of kernels depends on.
CHOOSING = {
    "dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype", "block_size",
    "attention_backend", "decode_attention_backend",
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument(
        "--kernels",
        metavar="MODEL",
        help="explain the kernels of this model instead: directory, GGUF file, config.json or hub id",
    )
    parser.add_argument(
        "--profile", choices=sorted(KNOWN_GPUS), help="with --kernels: for this GPU; default: the one here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    flags.add_knob_flags(parser, without=knob_table().keys() - CHOOSING)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Examine the machine, or the kernels of a model, and print the findings."""
    if args.kernels is not None:
        return _explain_kernels(args)
    if args.profile is not None or flags.knobs_from(args):
        raise ConfigError(
            "--profile and knobs choose among the kernels of a model; add --kernels MODEL, or leave them out"
        )
    with importing():
        from infer.tools.doctor import examine_machine

    report = examine_machine()
    if args.json:
        write_out(json.dumps({"machine": dict(report.rows), "advice": list(report.advice)}, indent=2) + "\n")
        return 0
    lines = [f"{name:<10} {value}" for name, value in report.rows]
    lines += ["", "faster:" if report.advice else "nothing to improve"]
    lines += [f"  - {sentence}" for sentence in report.advice]
    write_rows("\n".join(lines))
    return 0


def _explain_kernels(args: argparse.Namespace) -> int:
    """Print the kernel of each operation, by the number of tokens."""
    config = EngineConfig.from_knobs(**flags.knobs_from(args))
    with importing():
        import torch

        from infer.tools.kernel_report import explain_kernels, gpu_of
        from infer.tools.memory_needs import find_headers

    headers = find_headers(args.kernels, revision=None, show_progress=True)
    if args.profile is None and not torch.cuda.device_count():
        names = ", ".join(sorted(KNOWN_GPUS))
        raise ConfigError(
            f"--kernels explains the kernels of a GPU, but none is here; add --profile with one of {names}"
        )
    gpu = KNOWN_GPUS[args.profile] if args.profile else gpu_of(torch.device("cuda", 0))
    operations = explain_kernels(config, headers, gpu)
    if args.json:
        shown = {f"{each.name} ({each.what})": [one._asdict() for one in each.choices] for each in operations}
        said = {"gpu": gpu.name, "profile": gpu.profile.name, "kernels": shown}
        write_out(json.dumps(said, indent=2) + "\n")
    else:
        write_rows(to_text(operations, gpu))
    return 0


def to_text(operations: list[Operation], gpu: Gpu) -> str:
    """Return the kernels of a model as lines: one for each range, and why earlier ones do not run."""
    capability = "{}.{}".format(*gpu.capability)
    why = find_profile(gpu.name, gpu.capability).why
    lines = [
        f"{gpu.name}, compute capability {capability}, {gpu.num_sms} SMs; profile {gpu.profile.name}: {why}"
    ]
    for name, what, unit, choices in operations:
        lines += ["", f"{name}   {what}"]
        for first, last, kernel, declined in choices:
            sizes = f"{first}" if first == last else f"{first:,}-{last:,}"
            lines.append(f"  {sizes:>11} {unit:7} {kernel}")
            lines += [f"{'':24}not {other}: {reason}" for other, reason in declined]
    return "\n".join(lines) + "\n"
