"""`infer chat`: a conversation in the terminal.

The model sees the whole conversation at each turn, written by its family's chat template. When that no longer
fits its context, the oldest turns are dropped, with a notice for each: a user who is not told that the model
forgot something thinks that it lies.

Ctrl-C stops the answer being written and keeps its beginning; at the prompt it clears the line. Ctrl-C twice,
or Ctrl-D, leaves. When standard input is a file or a pipe, each of its lines is one message.

    terminal or pipe ──► prompt.py ──┬── a message ──► conversation.py ──► answer.py, on the screen
                                     └── /a command ──► chat_commands.py

With `--tools FILE` the model may call functions (chat_tools.py): each call is shown and asked for, its result
goes back, and the model answers again, until an answer holds no call.

    you ──► answer ──┬── text ──► your next message
              ▲      └── calls ──► asked for, made ──┐
              └────────────── results ───────────────┘        at most MAX_ROUNDS times in a row

Each turn has its own seed, made from `--seed` (or a random number) and the number of turns before it: the
same question may get another answer, and a whole conversation can be repeated.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from infer.cli import asking, flags
from infer.cli.answer import Screen, ShownAnswer, notice, write_out
from infer.cli.chat_commands import RETRY, complete, run_command
from infer.cli.chat_tools import MAX_ROUNDS, ToolBox, read_tools
from infer.cli.conversation import ChatSession, check_template
from infer.cli.prompt import Said, line_reader, piped_messages, typed_messages
from infer.cli.remote import RemoteModel
from infer.cli.terminal import guarded, quiet
from infer.errors import ConfigError, DeviceLost, EngineError, EngineStopped, RequestError, closest

HELP = "hold a conversation in the terminal"
DESCRIPTION = "Hold a conversation with an instruct model in the terminal; /help lists its commands."
USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  infer chat
  infer chat path/to/model --system "You are a pirate." --temperature 1
  infer chat --url http://127.0.0.1:8000
  infer chat --tools functions.py
  infer chat --json-schema person.json
  printf 'My name is Ada.\\nWhat is my name?\\n' | infer chat --seed 1
"""


FLAGS: flags.Rows = {
    "positional_model [MODEL]": (str, "the model, as for --model; if left out: the default model"),
    "--tools FILE": (Path, "let the model call the functions of this Python file; asks before each call"),
    "--tool-choice auto|required|NAME": (
        str,
        "the tool that the first answer to a message must call; required: any tool (default: auto)",
    ),
    "--yes-to-tools": (bool, "call tools without asking; needed if standard input is not a terminal"),
    "--history": (bool, "keep typed messages for the arrow keys of the next conversation (default)", True),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    conversation = parser.add_argument_group("conversation")
    flags.add_rows(conversation, FLAGS)
    asking.add_asking_flags(parser, conversation)


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the user leaves; exit code 1 if a piped line has no answer."""
    return hold(args)


def hold(args: argparse.Namespace, message: str | None = None) -> int:
    """Hold a conversation, or answer only `message`."""
    if args.positional_model is not None:
        flags.name_model(args, args.positional_model)
    params = asking.params_from(args)
    is_typed = sys.stdin.isatty()
    toolbox, tool_choice = open_tools(args, is_typed=is_typed)
    llm = asking.open_model(args)
    check_template(llm)
    conversation = ChatSession(
        args, llm, params, args.system, asking.chat_options(args), toolbox, tool_choice
    )
    conversation.fit()
    if message is not None:
        with guarded():
            return 0 if _answer_line(conversation, message, is_typed=False) else 1
    if is_typed:
        notice(f"{llm.name}, context of {llm.context_len} tokens; /help lists the commands, Ctrl-D leaves")
    with guarded():
        num_failed = _answer_all(conversation, is_typed=is_typed)
    return 1 if num_failed and not is_typed else 0


def _answer_all(conversation: ChatSession, *, is_typed: bool) -> int:
    """Answer what is typed or piped in; returns the number of messages without an answer."""
    num_failed = 0
    for said in _messages(conversation, is_typed=is_typed):
        if said.is_command and said.text == RETRY:
            num_failed += not _retry(conversation, is_typed=is_typed)
        elif said.is_command:
            if not run_command(conversation, said.text):
                break
        elif said.text or conversation.attached:
            num_failed += not _answer_line(conversation, said.text, is_typed=is_typed)
    return num_failed


def _messages(conversation: ChatSession, *, is_typed: bool) -> Iterable[Said]:
    if not is_typed:
        return piped_messages()
    keeps_history = conversation.args.history
    return typed_messages(line_reader(lambda text: complete(conversation, text), keeps_history=keeps_history))


def _retry(conversation: ChatSession, *, is_typed: bool) -> bool:
    """Answer the last message again; where that fails, its first answer stays."""
    taken = conversation.take_back()
    if not taken:
        notice("[nothing to answer again: there is no message yet]")
        return True
    if conversation.params.temperature == 0:
        notice("[temperature is 0, so the answer may be the same; /set temperature 0.7 draws another]")
    attached, conversation.attached = conversation.attached, ""  # it is for the next message
    is_answered = _answer_line(conversation, taken[0]["content"], is_typed=is_typed)
    conversation.attached = attached
    if not is_answered:
        conversation.turns += taken
    return is_answered


def open_tools(
    args: argparse.Namespace, *, is_typed: bool
) -> tuple[ToolBox | None, str | dict[str, Any] | None]:
    """Return the tools that flags ask for, and the choice among them in the words of the wire."""
    choice = args.tool_choice
    if args.tools is None:
        if choice is not None or args.yes_to_tools:
            name = "--tool-choice" if choice is not None else "--yes-to-tools"
            raise ConfigError(f"{name} is for the functions of --tools FILE; give both or neither")
        return None, None
    for flag in ("regex", "choice", "grammar"):  # calls can be told apart from a schema's JSON
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"--{flag} fixes the form of the whole answer, so it could not call one of --tools; "
                "give one of them, or --json-schema"
            )
    if not is_typed and not args.yes_to_tools:
        raise ConfigError(
            "--tools asks before each call, but standard input is not a terminal; "
            "--yes-to-tools calls without asking"
        )
    toolbox = ToolBox(read_tools(args.tools), asks=not args.yes_to_tools)
    if choice in (None, "auto", "required"):
        return toolbox, choice
    if choice not in toolbox.tools:
        hint = closest(choice, ["auto", "required", *toolbox.tools])
        raise ConfigError(f"--tool-choice must be auto, required or a tool's name, got {choice!r}{hint}")
    return toolbox, {"type": "function", "function": {"name": choice}}


def _answer_line(conversation: ChatSession, text: str, *, is_typed: bool) -> bool:
    """Show the answer to one message; returns True if there is one.

    After a failure at a terminal the user can go on or save the conversation; a script ends.
    """
    args = conversation.args
    for number in range(MAX_ROUNDS + 1):
        screen = Screen(shows_reasoning=asking.shows_reasoning(args))
        try:
            with quiet(), _ctrl_c_stops() as is_stopped:
                if number == 0:
                    answer = conversation.say(text, screen, is_stopped)
                else:
                    answer = conversation.go_on(screen, is_stopped)
        except (RequestError, EngineError) as error:
            is_over = isinstance(error, DeviceLost | EngineStopped) or not is_typed
            if is_over and not isinstance(error, RequestError):
                raise
            notice(f"infer: error: {error}")
            return False
        if not answer.text and not answer.calls:
            write_out("\n")  # an answer is a line, even an empty one
        _explain_end(conversation, answer)
        if args.stats:
            notice(f"[{answer.stats()}]")
        if not conversation.call_tools(answer, is_last=number == MAX_ROUNDS):
            break
    if number == MAX_ROUNDS and answer.calls:
        notice(f"[the model called tools {MAX_ROUNDS} times in a row; send a message to go on]")
    return True


def _explain_end(conversation: ChatSession, answer: ShownAnswer) -> None:
    if answer.finish_reason is None:
        notice("[stopped]")
    if answer.finish_reason == "length" and isinstance(conversation.llm, RemoteModel):
        notice("[cut: --max-tokens or the context allows no more]")  # a chunk may hold several tokens
    elif answer.finish_reason == "length":
        num_tokens = len(answer.token_ids)
        is_asked = num_tokens == conversation.params.max_tokens
        reason = "--max-tokens allows more" if is_asked else "the context is full, /reset empties it"
        notice(f"[cut after {num_tokens} tokens; {reason}]")


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """While the block runs, Ctrl-C makes the yielded function return True; a second one interrupts at once.

    An interrupt in the middle of a step could leave the engine's state half updated; a check between two
    tokens cannot.
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
