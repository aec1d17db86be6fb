"""`infer chat`: a conversation in the terminal.

The model sees the whole conversation at each turn, written by its family's chat template. When that
no longer fits its context, the oldest turns are dropped, one notice each: a model that forgets in
silence looks like a model that lies.

Ctrl-C stops the answer being written and keeps what there is of it; at the prompt, twice, or Ctrl-D,
it leaves. When standard input is a file or a pipe, each of its lines is one message.

Each turn is drawn with a seed of its own, made from `--seed`, or from a fresh number, and the count of the
turns before it: the same question may get another answer, and the same conversation can be held again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from infer.cli import flags
from infer.cli.answer import ShownAnswer, notice, open_llm, show_answer, write_out
from infer.cli.remote import RemoteModel, add_url_flags, is_remote, open_server
from infer.errors import (
    ConfigError,
    ContextOverflow,
    DeviceLost,
    EngineError,
    EngineStopped,
    RequestError,
    closest,
)

if TYPE_CHECKING:
    from infer.frontend.llm import LLM
    from infer.sampling.params import SamplingParams

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, keep the system message",
    "/system": "TEXT  set the system message; without TEXT, remove it",
    "/save": "FILE  write the conversation to a JSON file",
    "/exit": "leave (so does Ctrl-D)",
}
ALIASES = {"/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}  # what other programs call them

EXAMPLES = """\
examples:
  infer chat
  infer chat --url http://127.0.0.1:8000
  infer chat --model path/to/model --system "You are a pirate." --temperature 1
  printf 'My name is Ada.\\nWhat is my name?\\n' | infer chat --seed 1
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="hold a conversation in the terminal",
        description="Hold a conversation with an instruct model in the terminal; /help lists its commands.",
        usage="infer chat [options]",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument("--system", metavar="TEXT", help="the system message to begin with")
    add_url_flags(conversation)
    flags.add_thinking_flag(conversation)
    conversation.add_argument(
        "--stats", action="store_true", help="print times and speed of each answer to standard error"
    )
    flags.add_sampling_flags(parser)
    flags.add_knob_flags(parser, without=flags.SAMPLING_HELP)
    flags.add_common_flags(parser)


class ChatSession:
    """The messages so far, and the model that answers the next."""

    def __init__(
        self, llm: LLM | RemoteModel, params: SamplingParams, system: str | None, options: dict[str, object]
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.options = options
        self.turns: list[dict[str, str]] = []  # user and assistant in turn, oldest first
        self.num_answers = 0  # forgotten ones included: each is drawn with a seed of its own

    def messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template takes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def say(self, text: str, show: Callable[[str], None], is_stopped: Callable[[], bool]) -> ShownAnswer:
        """Add the user's message and the model's answer; a message that cannot be answered is taken back."""
        self.turns.append({"role": "user", "content": text})
        try:
            answer = self._answer(show, is_stopped)
        except BaseException:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer.text})
        self.num_answers += 1
        return answer

    def _answer(self, show: Callable[[str], None], is_stopped: Callable[[], bool]) -> ShownAnswer:
        params = flags.nth_draw(self.params, self.num_answers)
        while True:
            try:
                deltas = self.llm.stream_chat(self.messages(), params, template_options=self.options)
                return show_answer(deltas, show, is_stopped)
            except ContextOverflow:  # raised before the first piece of text
                if len(self.turns) == 1:
                    raise
                forgotten, _ = self.turns[:2]
                del self.turns[:2]
                notice(
                    f"[the context of {self.llm.context_len} tokens is full: "
                    f"forgot your oldest message and its answer: {_shorten(forgotten['content'])!r}]"
                )


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the user leaves."""
    params = flags.sampling_from(args)
    llm = open_server(args) if is_remote(args) else open_llm(args)
    if not llm.has_chat_template:
        raise ConfigError(
            f"{llm.name} has no chat template, so it cannot hold a conversation; "
            "use 'infer generate --raw', or give a template with --chat-template FILE"
        )
    if not isinstance(llm, RemoteModel) and llm.encoder.template_warning is not None:
        notice(f"infer: warning: {llm.encoder.template_warning}")
    params = flags.fit_to_model(params, args, llm.context_len, llm.sampling_defaults)
    conversation = ChatSession(llm, params, args.system, flags.template_options(args))
    is_typed = sys.stdin.isatty()
    if is_typed:
        notice(f"{llm.name}, context of {llm.context_len} tokens; /help lists the commands, Ctrl-D leaves")
    for line in _typed_lines() if is_typed else _piped_lines():
        text = line.strip()
        if text.startswith("/"):
            if not run_command(conversation, text):
                break
        elif text:
            _answer_line(conversation, text, shows_stats=args.stats, is_typed=is_typed)
    return 0


def _answer_line(conversation: ChatSession, text: str, *, shows_stats: bool, is_typed: bool) -> None:
    """Show the answer to one message; a message without an answer is told, and the next one may have one.

    At a terminal the message can be sent again, or the conversation saved. In a script a failure is the end.
    """
    is_begun = False

    def show(piece: str) -> None:
        nonlocal is_begun
        is_begun = True
        write_out(piece)

    with _ctrl_c_stops() as is_stopped:
        try:
            answer = conversation.say(text, show, is_stopped)
        except (RequestError, EngineError) as error:
            if is_begun:
                write_out("\n")
            is_over = isinstance(error, DeviceLost | EngineStopped) or not is_typed
            if is_over and not isinstance(error, RequestError):
                raise
            notice(f"infer: error: {error}")
            return
    write_out("\n")
    if answer.finish_reason is None:
        notice("[stopped]")
    if answer.finish_reason == "length":
        num_tokens = len(answer.token_ids)
        is_asked = num_tokens == conversation.params.max_tokens
        reason = "--max-tokens allows more" if is_asked else "the context is full, /reset empties it"
        notice(f"[cut after {num_tokens} tokens; {reason}]")
    if shows_stats:
        notice(f"[{answer.stats()}]")


def run_command(conversation: ChatSession, line: str) -> bool:
    """Do what a line that starts with a slash says; returns whether the conversation goes on."""
    given, _, rest = line.partition(" ")
    name = ALIASES.get(given, given)
    argument = rest.strip()
    if name == "/exit":
        return False
    if name == "/help":
        notice("\n".join(f"  {command:<8} {does}" for command, does in COMMANDS.items()))
    elif name == "/reset":
        conversation.turns.clear()
        notice("[the conversation starts anew]")
    elif name == "/system":
        conversation.system = argument or None
        notice("[system message set]" if argument else "[system message removed]")
    elif name == "/save":
        _save(conversation, argument)
    else:
        notice(f"no command {name!r}{closest(name, COMMANDS, aliases=ALIASES) or '; /help lists them'}")
    return True


def _save(conversation: ChatSession, file_name: str) -> None:
    if not file_name:
        notice("/save needs a file name: /save conversation.json")
        return
    text = json.dumps(conversation.messages(), ensure_ascii=False, indent=2)
    try:
        Path(file_name).expanduser().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        notice(f"cannot write {file_name}: {error.strerror}")
        return
    notice(f"[{len(conversation.messages())} messages written to {file_name}]")


def _typed_lines() -> Iterator[str]:
    """Lines typed at the prompt, until Ctrl-D or the second Ctrl-C in a row."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() its arrow keys and history)
    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            notice("")
            return
        except KeyboardInterrupt:
            if was_interrupted:
                notice("")
                return
            was_interrupted = True
            notice("\n[Ctrl-C again, or Ctrl-D, leaves]")
            continue
        was_interrupted = False
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error}") from None


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """While the block runs, Ctrl-C makes the yielded question true; a second Ctrl-C interrupts at once.

    An interrupt raised in the middle of a step could leave the engine's books half written; a
    question asked between two tokens cannot.
    """
    was_pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
