"""The commands of `infer chat`: lines that start with a slash, and their completions by Tab."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infer.cli import asking, flags
from infer.cli.answer import notice
from infer.cli.conversation import ChatSession, check_template
from infer.cli.remote import RemoteModel, open_server
from infer.errors import InferError, closest
from infer.loader.find.source import check_model

RETRY = "/retry"  # run by chat.py, as a message that is sent again
EXIT = "/exit"
ALIASES = {"/clear": "/reset", "/quit": EXIT, "/bye": EXIT}  # names in other programs
ROLES = ("system", "user", "assistant", "tool")
KEYS = '''\
"""TEXT""" is one message of several lines; so is a pasted text. Alt-Enter begins a new line.
Ctrl-C stops an answer; at the prompt it clears the line. Ctrl-C twice, or Ctrl-D, leaves. Tab completes.'''


class Command(NamedTuple):
    """A command: its argument, its help, and the function that runs it."""

    takes: str = ""
    help: str = ""
    run: Callable[[ChatSession, str], None] | None = None  # None: run by chat.py


def run_command(conversation: ChatSession, line: str) -> bool:
    """Run the command of a line that starts with a slash; returns True if the conversation goes on."""
    name, argument = _full_name(line), line.partition(" ")[2].strip()
    if argument and name in COMMANDS and not COMMANDS[name].takes:
        notice(f'[{name} takes nothing after it; a text in """ is a message]')
    elif name == EXIT:
        return False
    elif (run := COMMANDS.get(name, Command()).run) is not None:
        run(conversation, argument)
    else:
        notice(f"no command {name!r}{closest(name, COMMANDS, aliases=ALIASES) or '; /help lists them'}")
    return True


def _full_name(line: str) -> str:
    """Return the command of a line, by its name here."""
    given = line.partition(" ")[0]
    return ALIASES.get(given, given)


def complete(conversation: ChatSession, text: str) -> Iterable[str]:
    """Return the completions of the last word of a line."""
    if not text.startswith("/") or "\n" in text:
        return []
    command, space, rest = text.partition(" ")
    if not space:
        names = [*COMMANDS, *ALIASES]
        takes = {name: COMMANDS[ALIASES.get(name, name)].takes for name in names}
        return [name + " " * bool(takes[name]) for name in names if name.startswith(command)]
    if command == "/set" and " " not in rest:
        return [f"{name} " for name in flags.CHAT_HELP if name.startswith(rest)]
    if command == "/model":
        return [name for name in _models(conversation) if name.startswith(rest)]
    return _paths(rest.rpartition(" ")[2]) if "FILE" in COMMANDS.get(command, Command()).takes else []


def _paths(begun: str) -> list[str]:
    folder, name = os.path.split(begun)
    try:
        found = sorted(os.listdir(os.path.expanduser(folder) or "."))
    except OSError:
        return []
    paths = [os.path.join(folder, each) for each in found if each.startswith(name)]
    visible = [path for path in paths if name.startswith(".") or not os.path.basename(path).startswith(".")]
    return [f"{path}/" if os.path.isdir(os.path.expanduser(path)) else path for path in visible]


def _help(conversation: ChatSession, argument: str) -> None:
    also = {
        ours: f" (also {', '.join(n for n in ALIASES if ALIASES[n] == ours)})" for ours in ALIASES.values()
    }
    for name, command in COMMANDS.items():
        notice(f"  {f'{name} {command.takes}':<18} {command.help}{also.get(name, '')}", indent=21)
    notice(KEYS)


def _reset(conversation: ChatSession, argument: str) -> None:
    conversation.forget()
    notice("[the conversation starts anew]")


def _system(conversation: ChatSession, argument: str) -> None:
    conversation.system = argument or None
    notice("[system message set]" if argument else "[system message removed]")


def _tools(conversation: ChatSession, argument: str) -> None:
    toolbox = conversation.toolbox
    notice("no tools; --tools FILE gives some" if toolbox is None else toolbox.describe())


def _set(conversation: ChatSession, argument: str) -> None:
    """Show the settings, or one, or change one."""
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if name and name not in flags.CHAT_HELP:
        notice(f"no setting {name!r}{closest(name, flags.CHAT_HELP) or '; /set lists them'}")
        return
    if not value.strip():
        for each in [name] if name else flags.CHAT_HELP:
            name_len = max(map(len, flags.CHAT_HELP))
            shown = f"  {each:<{name_len}} {_value(conversation, each):<13} "
            notice(shown + flags.CHAT_HELP[each], indent=len(shown))
        return
    args = conversation.args
    before = dict(vars(args))
    try:
        flags.set_sampling(args, name, value.strip())
        conversation.fit()
    except (ValueError, InferError) as error:
        _put_back(args, before)
        notice(f"[not set: {error}]")
        return
    if name == "seed":
        conversation.num_answers = 0  # restart: as if the conversation had begun with it
    notice(f"[{name} is {_value(conversation, name)}]")


def _value(conversation: ChatSession, name: str) -> str:
    is_sent = not isinstance(conversation.llm, RemoteModel) or name in conversation.llm.sampling
    if not is_sent and name != "max_tokens":  # max_tokens is always sent
        return "the server's"
    value = getattr(conversation.params, name)
    shown = "none" if value is None or value == () or value == {} else value
    if isinstance(shown, tuple):
        return " ".join(shlex.quote(str(each)) for each in shown)
    return {"True": "on", "False": "off"}.get(str(shown), str(shown))


def _put_back(args: Any, before: Mapping[str, Any]) -> None:
    vars(args).clear()
    vars(args).update(before)


def _model(conversation: ChatSession, name: str) -> None:
    """Go on with another model of the same server, or load one here in place of the current model."""
    if not name:
        others = [each for each in _models(conversation) if each != conversation.llm.name]
        notice(f"  {conversation.llm.name}; others: {', '.join(others) or 'none'}")
        return
    args, old = conversation.args, conversation.llm
    before, is_closed = dict(vars(args)), False
    flags.name_model(args, name, may_replace=True)
    vars(args).pop(flags.KNOB + "revision", None)  # it belonged to the other model
    try:
        if isinstance(old, RemoteModel):
            conversation.llm = open_server(args)
        else:
            check_model(name)  # refuses a missing model while the old one is still there
            old.close()  # memory may not hold both
            is_closed = True
            conversation.llm = asking.open_llm(args)
        check_template(conversation.llm)
    except InferError as error:
        notice(f"infer: error: {error}")
        _put_back(args, before)
        conversation.llm = asking.open_llm(args) if is_closed else old
    conversation.fit()
    notice(f"[{conversation.llm.name}, context of {conversation.llm.context_len} tokens]")


def _models(conversation: ChatSession) -> list[str]:
    if isinstance(conversation.llm, RemoteModel):
        return conversation.llm.served
    from infer.loader.find.cached import cached_models

    return sorted({model.name for model in cached_models()})


def _read(conversation: ChatSession, file_name: str) -> None:
    text = _text_of(file_name, "/read letter.txt")
    if text is not None:
        conversation.attached = (
            asking.join_text(conversation.attached, text) if conversation.attached else text
        )
        notice(f"[{len(text)} characters of {file_name} go with the next message]")


def _load(conversation: ChatSession, file_name: str) -> None:
    text = _text_of(file_name, "/load conversation.json")
    if text is None:
        return
    try:
        messages = json.loads(text)
        is_ours = all(each["role"] in ROLES and isinstance(each["content"], str) for each in messages)
        is_ours &= isinstance(messages, list)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours or any(each["role"] == "system" for each in messages[1:]):
        notice(f"{file_name} is not a conversation that /save wrote; /read takes any text")
        return
    conversation.forget()
    has_system = [each["role"] for each in messages[:1]] == ["system"]
    conversation.system = messages[0]["content"] if has_system else None
    conversation.turns += messages[has_system:]
    notice(f"[{len(messages)} messages read from {file_name}]")


def _text_of(file_name: str, example: str) -> str | None:
    if not file_name:
        notice(f"{example.partition(' ')[0]} needs a file name: {example}")
        return None
    path = Path(file_name).expanduser()
    try:
        if path.exists() and not path.is_file():  # a device may have no end
            notice(f"{file_name} is a folder or a device; give the name of a file")
            return None
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        notice(f"cannot read {file_name}: {error.strerror}")
    except UnicodeDecodeError as error:
        notice(f"{file_name} is not UTF-8: {error}")
    return None


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


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "list these commands", _help),
    RETRY: Command("", "answer the last message again"),
    "/set": Command("NAME VALUE", "set a sampling parameter; without NAME, show them", _set),
    "/model": Command("NAME", "go on with another model; without NAME, list them", _model),
    "/system": Command("TEXT", "set the system message; without TEXT, remove it", _system),
    "/read": Command("FILE", "add a file's text to the next message", _read),
    "/reset": Command("", "forget the conversation, keep the system message", _reset),
    "/save": Command("FILE", "write the conversation to a JSON file", _save),
    "/load": Command("FILE", "go on with a conversation that /save wrote", _load),
    "/tools": Command("", "list the functions that the model may call", _tools),
    EXIT: Command("", "leave (so does Ctrl-D)"),
}
