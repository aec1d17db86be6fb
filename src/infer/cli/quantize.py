"""`infer quantize`: write a checkpoint in a published quantized format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from infer.cli import flags
from infer.cli.answer import write_out
from infer.cli.interrupts import sweeping
from infer.errors import ConfigError

HELP = "write a checkpoint in GPTQ, AWQ, compressed-tensors, FP8, NF4, SqueezeLLM or GGUF"
DESCRIPTION = (
    "Write a checkpoint in a published quantized format: each weight of the layers is rounded to\n"
    "the nearest step, which needs no data and no GPU. Embeddings, norms, routers and the head stay\n"
    "as they are, or have 8 bits in a GGUF file. Next to nothing is lost at 8 bits; at 4 bits smaller\n"
    "groups lose less."
)
USAGE = "MODEL OUT --scheme NAME [options]"
EXAMPLES = """\
examples:
  infer quantize ./model ./model-fp8 --scheme fp8-block
  infer quantize org/name ./name-w4 --scheme gptq --bits 4 --group-size 128
  infer quantize ./model ./model.gguf --scheme gguf-q4_k
  infer serve --model ./model-fp8
"""
SCHEMES = (
    "gptq", "awq", "ct-w4a16", "ct-w8a16", "ct-int8", "fp8-channel", "fp8-block", "fp8-tensor", "nf4",
    "squeezellm", "gguf-q8_0", "gguf-q4_0", "gguf-q4_1", "gguf-q4_k",
)  # fmt: skip
OPTIONS = {  # options, and the schemes that have them
    "bits": ("gptq", "squeezellm"),
    "group_size": ("gptq", "awq", "ct-w4a16"),
    "asymmetric": ("gptq", "ct-w4a16"),
    "act_order": ("gptq",),
    "outliers": ("squeezellm",),
}
FILES: flags.Rows = {
    "model MODEL": (str, "model directory or hub id of plain safetensors"),
    "out OUT": (Path, "directory to write, new or empty; for gguf-... a new file, NAME.gguf"),
}
FLAGS: flags.Rows = {
    "--bits N": (int, "2, 3, 4 or 8 for gptq; 3 or 4 for squeezellm; default: 4"),
    "--group-size N": (int, "columns that share a scale, for gptq, awq and ct-w4a16; -1: all; default: 128"),
    "--asymmetric": (bool, "a zero point for each group, for gptq and ct-w4a16; awq always has them"),
    "--act-order": (bool, "sort the columns by their size before they are grouped, for gptq"),
    "--outliers PERCENT": (float, "largest weights, stored apart, for squeezellm; default: 0.45; 0: none"),
    "--revision TEXT": (str, "branch, tag or commit of a hub id"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    flags.add_rows(parser, FILES)
    parser.add_argument("--scheme", required=True, choices=SCHEMES, metavar="NAME", help=", ".join(SCHEMES))
    flags.add_rows(parser, FLAGS)
    flags.add_common_flags(parser)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the recipe that flags set; a flag that the scheme does not have is refused."""
    values = {name: getattr(args, name) for name in OPTIONS}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    for name in given:
        if args.scheme not in OPTIONS[name]:
            if (args.scheme, name) == ("awq", "asymmetric"):
                raise ConfigError("awq always has a zero point for each group; leave --asymmetric out")
            has = " and ".join(flags.flag(each) for each in OPTIONS if args.scheme in OPTIONS[each])
            schemes = " and ".join(OPTIONS[name])
            raise ConfigError(f"{flags.flag(name)} is for {schemes}; {args.scheme} has {has or 'no options'}")
    if given.pop("asymmetric", False):
        given["symmetric"] = False
    return given


def run(args: argparse.Namespace) -> int:
    """Quantize the model and print its path."""
    chosen = options_of(args)
    from infer.loader.find.source import resolve_model
    from infer.tools.quantize import Recipe, quantize_checkpoint

    recipe = Recipe(scheme=args.scheme, **chosen)
    source = resolve_model(args.model, revision=args.revision, show_progress=True)
    try:
        with sweeping():
            quantize_checkpoint(source, args.out, recipe, show_progress=True)
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error.strerror}") from error
    write_out(f"{args.out}\n")
    return 0
