"""`infer step`: watch the engine work, one scheduler step per key press.

    infer step "Why is the sky blue?" "Why is the sky"

Each step is a frame (tools/step_frames.py). The command takes the knobs of `infer generate`, so that a few
flags show what is rare on a large server: `--max-num-batched-tokens 8` cuts prompts into chunks,
`--num-blocks 6 --block-size 4` makes sequences preempt each other, `--speculative-method ngram` makes them
verify drafts, and `-n 2` makes one fork. Steps do not overlap here: each is read before the next is planned.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from infer.cli import asking, flags, generate, stepping
from infer.cli.readers import positive
from infer.errors import ConfigError

HELP = "watch the engine answer prompts, one scheduler step per key press"
DESCRIPTION = (
    "Answer prompts together, one scheduler step per key press. Each step shows its plan, what was\n"
    "sampled and why, what waits and why, and who holds which block of the KV cache.\n"
    "Keys: " + stepping.KEYS + ".\n"
    "Without a terminal the steps are printed one after the other."
)
USAGE = "PROMPT [PROMPT ...] [options]"
EXAMPLES = """\
examples:
  infer step "Why is the sky blue?"
  infer step "Once upon a time" "Once upon a hill" --raw --block-size 4 --max-tokens 12
  infer step "Count to ten." --max-num-batched-tokens 8
  infer step "Tell a story." "Tell a joke." --block-size 4 --num-blocks 20
  infer step "Say it twice: a b c d a b c" --speculative-method ngram
  infer step "Invent a name." -n 3 --temperature 0.8 --watch 2
"""

FLAGS: flags.Rows = {
    "-n/--n N": (positive, "answers to each prompt; they share its blocks", 1),
    "--raw": (bool, "continue the texts as they are, without a chat template"),
    "--top N": (positive, "candidates shown for each token", 5),
    "--record FILE": (Path, "record the run for 'infer replay FILE --step'; the file holds the prompts"),
    "--overwrite": (bool, "let --record replace an existing file"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    group = parser.add_argument_group("prompts and steps")
    group.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to answer; all run together")
    flags.add_rows(group, FLAGS)
    stepping.add_watch(group)
    asking.add_asking_flags(parser, group)


def run(args: argparse.Namespace) -> int:
    """Load the model, submit all prompts, show step after step."""
    if args.url is not None:
        raise ConfigError(
            "--url leaves the engine to a server, and its steps cannot be watched; load a model"
        )
    params = generate.checked_params(args)
    prompts = [generate.Prompt(text, draw=number) for number, text in enumerate(args.prompts)]
    with generate.recording(args.record, may_replace=args.overwrite) as recorder:
        screen = stepping.StepScreen(num_shown=args.top, watch_s=args.watch)
        generate.step_prompts(prompts, dataclasses.replace(params, n=args.n), args, screen, recorder)
    return 0
