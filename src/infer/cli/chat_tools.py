"""The tools of `infer chat`: functions of a file, called when the model asks for it and the user agrees.

    answer with calls ──► each call is shown ──► yes, no, always? ──► the function ──► a `tool` message

Every call gets a message, whatever its outcome, because chat templates expect one for each call. If a call
has wrong arguments, is declined or fails, its message says so, and the model may try again. What functions
print goes to standard error, because standard output belongs to the conversation.

A call is shown in full and with every unprintable character escaped, so that the user knows what to agree to.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from infer.cli.answer import notice
from infer.cli.terminal import drop_typed
from infer.dialects.events import ToolCall
from infer.errors import ConfigError, shorten
from infer.frontend.functions import PythonTool

MAX_ROUNDS = 8  # answers in a row that may call tools before the user's next message
MAX_RESULT_LEN = 8000  # characters of a result that the model sees
MAX_SHOWN_LEN = 400  # characters of a result that the terminal shows
MODULE = "infer_chat_tools"  # the name of a tools file as a module

NOT_CALLED = "it was not called"
DECLINED = "the user declined this call"


def read_tools(path: Path) -> list[PythonTool]:
    """Run a Python file and return its public functions as tools; only `__all__`, if it has one."""
    module = _run_file(path)
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == MODULE and not name.startswith("_")
    ]
    names: Sequence[str] = getattr(module, "__all__", own)
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(f"--tools {path}: __all__ names {missing[0]!r}, which is not a function in it")
    if not names:
        raise ConfigError(f"--tools {path} holds no public function; write one: def name(city: str) -> str")
    return [PythonTool(getattr(module, name)) for name in names]


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"--tools {path}: there is no such file; give a Python file of functions")
    loader = SourceFileLoader(MODULE, str(path.resolve()))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and type hints look here for the names of the file
    sys.path.insert(0, str(path.resolve().parent))  # the file can import its neighbours, as a script can
    try:
        with redirect_stdout(sys.stderr):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == loader.path
        ]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        where = "" if line is None else f"line {line}: "
        raise ConfigError(f"--tools {path}: {where}{type(error).__name__}: {error}") from error
    return module


class ToolBox:
    """The functions that a conversation may call, and the ones that may be called without asking."""

    def __init__(self, tools: Sequence[PythonTool], *, asks: bool) -> None:
        """Ask before each call, unless not `asks`."""
        self.tools = {tool.name: tool for tool in tools}
        self._is_allowed = dict.fromkeys(self.tools, not asks)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The tools in the form that the model sees."""
        return [tool.schema for tool in self.tools.values()]

    def describe(self) -> str:
        """A line for each tool: its signature, its description, and whether it is called without asking."""
        lines = []
        for name, tool in self.tools.items():
            signature = str(inspect.signature(tool.function)).replace("'", "")
            asked = ", called without asking" if self._is_allowed[name] else ""
            lines.append(f"  {name}{signature}  {tool.description}{asked}")
        return "\n".join(lines)

    def call_all(
        self, calls: Sequence[ToolCall], *, goes_on: bool = True
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a `tool` message for each call, and whether the model goes on; without `goes_on`, call none.

        Ctrl-C or Ctrl-D at a question skips this call and the remaining ones, and ends the turn.
        """
        messages: list[dict[str, Any]] = []
        for call in calls:
            try:
                result = self._answer(call) if goes_on else _error(NOT_CALLED)
            except (EOFError, KeyboardInterrupt):
                notice("\n[not called]")
                goes_on, result = False, _error(NOT_CALLED)
            messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result})
        return messages, goes_on

    def _answer(self, call: ToolCall) -> str:
        """Return the text that the model reads as the result of its call."""
        tool = self.tools.get(call.name)
        try:
            if tool is None:
                raise ValueError(f"there is no such tool; the tools are {', '.join(self.tools)}")
            keywords = tool.read(call.arguments)
        except ValueError as error:
            notice(
                f"[the model calls {escape(call.name)} with {escape(call.arguments)}: {escape(str(error))}]"
            )
            return _error(str(error))
        given = json.loads(call.arguments)
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        notice(f"[the model calls {call.name}({shown})]")
        if not self._may_call(call.name):
            return _error(DECLINED)
        return _run(tool, keywords)

    def _may_call(self, name: str) -> bool:
        while not self._is_allowed[name]:
            drop_typed()  # keys pressed before the call was shown are not consent
            said = input(f"call it? [y]es, [n]o, [a]lways call {name}, then Enter: ").strip().lower()
            if said in ("y", "yes", "n", "no"):
                return said.startswith("y")
            self._is_allowed[name] = said in ("a", "always")
        return True


def _run(tool: PythonTool, keywords: Mapping[str, Any]) -> str:
    """Call a function; Ctrl-C ends only this call."""
    try:
        with redirect_stdout(sys.stderr):
            result = tool.call(keywords)
    except KeyboardInterrupt:
        notice(f"\n[{tool.name} was stopped]")
        return _error("the user stopped this call")
    except (Exception, SystemExit) as error:
        result = _error(f"{type(error).__name__}: {error}")
    if len(result) > MAX_RESULT_LEN:
        cut = f"[cut: {MAX_RESULT_LEN} of {len(result)} characters]"
        result = f"{result[:MAX_RESULT_LEN]}\n{cut}"
        notice(f"[{tool.name} returned more than the model is shown; {cut[1:]}")
    notice(f"[{tool.name}: {escape(shorten(result, MAX_SHOWN_LEN))}]")
    return result


def _error(what: str) -> str:
    return json.dumps({"error": what}, ensure_ascii=False)


def escape(text: str) -> str:
    """Return untrusted text with control characters and invisible characters escaped."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
