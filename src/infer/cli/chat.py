"""`infer chat`: a conversation in the terminal.

The model sees the whole conversation at each turn, written by its family's chat template. When that
no longer fits its context, the oldest turns are dropped, one notice each: a model that forgets in
silence looks like a model that lies.

Ctrl-C stops the answer being written and keeps what there is of it; at the prompt, twice, or Ctrl-D,
it leaves. When standard input is a file or a pipe, each of its lines is one message.

With `--tools FILE` the model may call functions (chat_tools.py): each call is shown and asked for, its result
goes back, and the model answers again, until an answer holds no call.

    you ──► answer ──┬── text ──► your next message
              ▲      └── calls ──► asked for, made ──┐
              └────────────── results ───────────────┘        at most MAX_ROUNDS times in a row

Each turn is drawn with a seed of its own, made from `--seed`, or from a fresh number, and the count of the
turns before it: the same question may get another answer, and the same conversation can be held again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from infer.cli import asking, flags
from infer.cli.answer import Screen, ShownAnswer, notice, show_answer, write_out
from infer.cli.chat_tools import MAX_ROUNDS, ToolBox, escape, read_tools
from infer.cli.remote import RemoteModel
from infer.dialects.events import ToolCall, read_arguments
from infer.errors import (
    ConfigError,
    ContextOverflow,
    DeviceLost,
    EngineError,
    EngineStopped,
    RequestError,
    closest,
    shorten,
)

if TYPE_CHECKING:
    from infer.frontend.llm import LLM
    from infer.frontend.prompts import ChatOptions
    from infer.sampling.params import SamplingParams

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, keep the system message",
    "/system": "TEXT  set the system message; without TEXT, remove it",
    "/tools": "list the functions that the model may call",
    "/save": "FILE  write the conversation to a JSON file",
    "/exit": "leave (so does Ctrl-D)",
}
ALIASES = {"/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}  # what other programs call them

HELP = "hold a conversation in the terminal"
DESCRIPTION = "Hold a conversation with an instruct model in the terminal; /help lists its commands."
USAGE = "[options]"
EXAMPLES = """\
examples:
  infer chat
  infer chat --url http://127.0.0.1:8000
  infer chat --model path/to/model --system "You are a pirate." --temperature 1
  infer chat --tools functions.py
  infer chat --json-schema person.json
  printf 'My name is Ada.\\nWhat is my name?\\n' | infer chat --seed 1
"""


TOOLS: Mapping[str, flags.Row] = {
    "--tools FILE": (Path, "let the model call the functions of this Python file; asks before each call"),
    "--tool-choice auto|required|NAME": (
        str,
        "whether the first answer to a message must call a tool, or this one (default: auto)",
    ),
    "--yes-to-tools": (bool, "call tools without asking; needed where input is no terminal"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    conversation = parser.add_argument_group("conversation")
    flags.add_rows(conversation, TOOLS)
    asking.add_asking_flags(parser, conversation)


@dataclasses.dataclass(slots=True, eq=False)
class ChatSession:
    """The messages so far, and the model that answers the next."""

    llm: LLM | RemoteModel
    params: SamplingParams
    system: str | None
    options: ChatOptions
    toolbox: ToolBox | None = None
    tool_choice: str | dict[str, Any] | None = None  # of the first answer to a message
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # a user's message, what follows it
    num_answers: int = 0  # forgotten ones included: each is drawn with a seed of its own

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the chat template takes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def say(self, text: str, screen: Screen, is_stopped: Callable[[], bool]) -> ShownAnswer:
        """Add the user's message and the model's answer; a message that cannot be answered is taken back."""
        self.turns.append({"role": "user", "content": text})
        try:
            return self.go_on(screen, is_stopped, self.tool_choice)
        except BaseException:
            self.turns.pop()
            raise

    def go_on(
        self,
        screen: Screen,
        is_stopped: Callable[[], bool],
        tool_choice: str | dict[str, Any] | None = None,
    ) -> ShownAnswer:
        """Add the model's answer to the messages so far."""
        answer = self._answer(screen, is_stopped, tool_choice)
        calls = () if self.toolbox is None else tuple(_whole_calls(answer))
        answer = dataclasses.replace(answer, calls=calls)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [call.to_wire() for call in calls]
        self.turns.append(message)
        self.num_answers += 1
        return answer

    def call_tools(self, answer: ShownAnswer, *, is_last: bool) -> bool:
        """Add the results of an answer's calls, and return whether the model goes on from them."""
        if self.toolbox is None or not answer.calls:
            return False
        results, goes_on = self.toolbox.call_all(answer.calls, goes_on=not is_last)
        self.turns += results
        return goes_on

    def _answer(
        self, screen: Screen, is_stopped: Callable[[], bool], tool_choice: str | dict[str, Any] | None
    ) -> ShownAnswer:
        params = flags.nth_draw(self.params, self.num_answers)
        options: ChatOptions = {**self.options, "tool_choice": tool_choice}
        if self.toolbox is not None:
            options["tools"] = self.toolbox.schemas
        while True:
            try:
                deltas = self.llm.stream_chat(self.messages(), params, **options)
                return show_answer(deltas, screen, is_stopped)
            except ContextOverflow:  # raised before the first piece of text
                later = [index for index, turn in enumerate(self.turns) if turn["role"] == "user"][1:]
                if not later:
                    raise
                forgotten = self.turns[0]
                del self.turns[: later[0]]
                notice(
                    f"[the context of {self.llm.context_len} tokens is full: "
                    f"forgot your oldest message and its answer: {shorten(forgotten['content'], 40)!r}]"
                )


def _whole_calls(answer: ShownAnswer) -> Iterator[ToolCall]:
    """Yield the calls that can be made: none of an answer that the user stopped, none that was cut."""
    for call in answer.calls:
        given = read_arguments(call.arguments.strip() or "{}")
        if given is not None and answer.finish_reason is not None:
            yield dataclasses.replace(call, arguments=json.dumps(given, ensure_ascii=False))
        else:
            notice(f"[left out a call of {escape(call.name)}: its arguments broke off]")


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the user leaves; exit code 1 if a line of a pipe has no answer."""
    params = asking.params_from(args)
    is_typed = sys.stdin.isatty()
    toolbox, tool_choice = open_tools(args, is_typed=is_typed)
    llm = asking.open_model(args)
    if not llm.has_chat_template:
        raise ConfigError(
            f"{llm.name} has no chat template, so it cannot hold a conversation; "
            "use 'infer generate --raw', or give a template with --chat-template FILE"
        )
    if not isinstance(llm, RemoteModel) and llm.encoder.template_warning is not None:
        notice(f"infer: warning: {llm.encoder.template_warning}")
    params = flags.fit_to_model(params, args, llm.context_len, llm.sampling_defaults)
    conversation = ChatSession(llm, params, args.system, asking.chat_options(args), toolbox, tool_choice)
    if is_typed:
        notice(f"{llm.name}, context of {llm.context_len} tokens; /help lists the commands, Ctrl-D leaves")
    num_failed = 0
    for line in _typed_lines() if is_typed else _piped_lines():
        text = line.strip()
        if text.startswith("/"):
            if not run_command(conversation, text):
                break
        elif text:
            num_failed += not _answer_line(conversation, text, args, is_typed=is_typed)
    return 1 if num_failed and not is_typed else 0


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
    for flag in ("regex", "choice", "grammar"):  # of a schema's JSON calls can be told apart
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"--{flag} says what the whole answer is, which leaves --tools no room for a call; "
                "give one of them, or --json-schema"
            )
    if not is_typed and not args.yes_to_tools:
        raise ConfigError(
            "--tools asks before each call, and standard input is no terminal; "
            "--yes-to-tools calls without asking"
        )
    toolbox = ToolBox(read_tools(args.tools), asks=not args.yes_to_tools)
    if choice in (None, "auto", "required"):
        return toolbox, choice
    if choice not in toolbox.tools:
        hint = closest(choice, ["auto", "required", *toolbox.tools])
        raise ConfigError(f"--tool-choice must be auto, required or a tool's name, got {choice!r}{hint}")
    return toolbox, {"type": "function", "function": {"name": choice}}


def _answer_line(conversation: ChatSession, text: str, args: argparse.Namespace, *, is_typed: bool) -> bool:
    """Show the answer to one message; returns whether there is one: the next message may have one.

    At a terminal the message can be sent again, or the conversation saved. In a script a failure is the end.
    """
    for number in range(MAX_ROUNDS + 1):
        screen = Screen(shows_reasoning=asking.shows_reasoning(args))
        try:
            with _ctrl_c_stops() as is_stopped:
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
        notice(f"[the model called tools {MAX_ROUNDS} times in a row; say something to go on]")
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
    elif name == "/tools":
        toolbox = conversation.toolbox
        notice("no tools; --tools FILE gives some" if toolbox is None else toolbox.describe())
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
