"""The parts that `generate` and `chat` share before an answer: flags, sampling parameters and the model.

The model is loaded here, or runs on the server that `--url` names (remote.py). One of these flags may set the
form of the answer:

    --json-schema '{"type": "object", ...}'     or the name of a file that holds it
    --regex '[0-9]{4}'                          a pattern for the whole answer
    --choice yes --choice no
    --grammar FILE                              in Lark's notation, or in EBNF
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import stat
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import flags
from infer.cli.answer import notice
from infer.cli.interrupts import importing
from infer.cli.readers import natural
from infer.cli.remote import RemoteModel, is_remote, open_server
from infer.cli.terminal import working
from infer.config.settings import EngineConfig
from infer.constraints.description import Structured
from infer.errors import ConfigError, RequestError
from infer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from infer.engine.observer import EngineObserver
    from infer.frontend.llm import LLM
    from infer.frontend.prompts import ChatOptions

logger = logging.getLogger(__name__)

SILENCE_S = 3.0  # seconds until a wait for standard input is explained

CONVERSATION: flags.Rows = {
    "--system TEXT": (str, "the system message to begin with"),
    "--url URL": (
        str,
        "ask the server at this address, or at unix:///path/of/socket, with its defaults except "
        "--max-tokens; --model picks a model",
    ),
    "--api-key KEY": (str, "the key that the server of --url asks for"),
    "--thinking": (bool, "let the model think first, if it can; default: as its template does", None),
    "--max-reasoning-tokens N": (
        natural,
        "end the model's thinking after this many tokens; 0: do not think; default: no limit",
    ),
    "--show-reasoning": (bool, "print the reasoning before the answer; default: only at a terminal", None),
    "--stats": (bool, "print times and speed of each answer to standard error"),
}
FORMS: flags.Rows = {
    "--json-schema FILE|JSON": (str, "JSON that this schema allows"),
    "--regex PATTERN": (str, "text that this regular expression matches as a whole"),
    "--choice TEXT": (list, "this text, or the text of another --choice"),
    "--grammar FILE": (Path, "text of this grammar, in Lark's notation (start: ...) or EBNF (root ::= ...)"),
}


def add_asking_flags(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Give `parser` the flags of a question; flags of a conversation go to `group`."""
    flags.add_rows(group, CONVERSATION)
    one = parser.add_argument_group("form of the answer (at most one)").add_mutually_exclusive_group()
    flags.add_rows(one, FORMS)
    flags.add_sampling_flags(parser)
    flags.add_knob_flags(parser, without=flags.SAMPLING_HELP)
    flags.add_common_flags(parser)


def params_from(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that flags set, with the form of the answer."""
    return dataclasses.replace(flags.sampling_from(args), structured=form_from(args))


def chat_options(args: argparse.Namespace) -> ChatOptions:
    """The chat options that flags set."""
    template = {} if args.thinking is None else {"enable_thinking": args.thinking}
    return {"max_reasoning_tokens": args.max_reasoning_tokens, "template_options": template}


def shows_reasoning(args: argparse.Namespace) -> bool:
    """Return True if reasoning is shown: as the flag says, else where standard error is a terminal."""
    return sys.stderr.isatty() if args.show_reasoning is None else bool(args.show_reasoning)


def open_model(
    args: argparse.Namespace, observer: EngineObserver | None = None, **options: bool
) -> LLM | RemoteModel:
    """The model that flags name, loaded here or on a server; `options` as in `RemoteModel`."""
    return open_server(args, **options) if is_remote(args) else open_llm(args, observer)


def open_llm(args: argparse.Namespace, observer: EngineObserver | None = None) -> LLM:
    """Load the model that flags name; torch is imported here and not before."""
    knobs = flags.knobs_from(args)
    config = EngineConfig.from_knobs(**knobs)  # knobs that contradict each other are refused at once
    names = list(config.adapters.modules)
    if len(names) > 1:
        first, *_, last = config.adapters.lora_modules
        hint = (
            "" if "=" in last else f"; if {last!r} is the prompt, write --lora {shlex.quote(first)} before it"
        )
        raise ConfigError(f"{len(names)} LoRA adapters are named, but this command uses one; give one{hint}")
    with working(f"loading {knobs.get('model') or 'the default model'}: importing PyTorch"), importing():
        from infer.frontend.llm import LLM

    llm = LLM(**knobs, show_progress=True, observer=observer)
    llm.adapter = "".join(names)
    if llm.has_chat_template:
        logger.info("chat template model=%s template=%s", llm.name, llm.encoder.template_in_use)
    return llm


def form_from(args: argparse.Namespace) -> Structured | None:
    """The constraint that flags set, checked; None if they set none."""
    if args.json_schema is not None:
        given: str = args.json_schema
        text = given if given.lstrip().startswith("{") else read_text("--json-schema", Path(given))
        return Structured.json_schema(text, param="--json-schema")
    if args.regex is not None:
        return Structured.regex(args.regex, param="--regex")
    if args.choice is not None:
        return Structured.choice(args.choice, param="--choice")
    if args.grammar is not None:
        return Structured.grammar(read_text("--grammar", args.grammar), param="--grammar")
    return None


def read_text(flag: str, path: Path) -> str:
    """The text of the file that a flag names, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8: {error}") from None


def join_text(prompt: str, text: str) -> str:
    """Return a prompt, a blank line and the text that it is about; only the prompt if the text is empty."""
    return f"{prompt}\n\n{text.removesuffix(chr(10))}" if text.strip() else prompt


def join_piped(prompt: str) -> str:
    """Return the prompt with the whole content of the pipe or file on standard input.

    A terminal and `/dev/null` give nothing. Nor does a socket: some programs start others with a socket as
    standard input and never close it.
    """
    return join_text(prompt, read_piped()) if _is_piped() else prompt


def read_piped() -> str:
    """Return standard input to its end; if nothing comes for a while, a notice says what is awaited."""
    said = "[waiting for the end of standard input; '< /dev/null' gives it none]"
    telling = threading.Timer(SILENCE_S, notice, [said])
    telling.daemon = True
    telling.start()
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on standard input is not UTF-8: {error}", param="prompt") from None
    finally:
        telling.cancel()


def _is_piped() -> bool:
    if sys.stdin.isatty():
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # an object in place of a stream
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
