"""`infer run`: `infer chat` as Ollama spells it; with a prompt, or text piped in, one answer."""

from __future__ import annotations

import argparse
import sys

from infer.cli import asking, chat, flags
from infer.errors import ConfigError

HELP = "chat with a model, or answer one prompt and leave, as 'ollama run' does"
DESCRIPTION = "Hold a conversation, as 'infer chat' does; with PROMPT or with text piped in, answer once."
USAGE = "[MODEL] [PROMPT] [options]"
EXAMPLES = """\
examples:
  infer run path/to/model
  infer run path/to/model "Why is the sky blue?"
  cat letter.txt | infer run path/to/model "Summarise in one sentence:"
"""
FLAGS: flags.Rows = {"prompt [PROMPT]": (str, "answer this text, followed by piped input, and leave")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    chat.add_flags(parser)
    flags.add_rows(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    """Answer once if there is something to answer, else until the user leaves."""
    if args.prompt is None and sys.stdin.isatty():
        return chat.hold(args)
    piped = args.prompt is None
    text = asking.read_piped().removesuffix("\n") if piped else asking.join_piped(args.prompt)
    if not text.strip():
        raise ConfigError("no prompt: write one after the model, or pipe one in")
    return chat.hold(args, text)
