"""Run untrusted chat templates: Jinja's sandbox, with limits on time and memory.

Jinja hides the interpreter, but a template can still use much time and memory: 'a'.ljust(10**9), x ~ x in a
loop, a loop in a loop that writes nothing. So each rendering has an `Allowance` of seconds and characters,
and every operation that makes text is charged to it first:

    {% for %}, {% macro %}     get a tick at the start of their bodies when a template is parsed
    a ~ b                      becomes a call of `concat_parts`
    {{ a }}                    is charged, because a block or a macro may collect it
    a + b, a * b, a % b        are intercepted by a hook of Jinja's sandbox
    methods and filters        must not get large numbers; functions that multiply sizes are checked before
                               they run, and every result is charged
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_SECONDS = 10.0
MAX_RANGE = 100_000  # total numbers that the range() calls of one rendering may yield
MAX_MADE = 2**28  # total characters that the expressions of one rendering may make
ITEM_SIZE = 8  # cost of a list item, in characters
MAX_NUMBER = 10_000  # largest number as an argument, such as a width or an indent
DROPPED_GLOBALS = ("lipsum", "cycler", "joiner")
DROPPED_FILTERS = (
    *("center", "filesizeformat", "pprint", "random", "sum", "truncate", "urlize", "wordwrap", "xmlattr"),
)
REFUSED_METHODS = {"encode", "expandtabs", "to_bytes", "translate"}
SHALLOW = {"count", "default", "first", "items", "last", "len", "list", "map", "reverse"}
SHALLOW |= {"reject", "rejectattr", "select", "selectattr"}  # filters that do not look inside items

_FORMAT_SIZES = re.compile(r"\{[^{}]*:|%[^a-zA-Z%]*[\d*]")  # "{:9}", "%9d", "%*d": a width is a size


class Allowance:
    """The resources that one rendering has left."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = {"expressions": MAX_MADE, "range()": MAX_RANGE}

    def spend(self, count: int, of: str = "expressions") -> None:
        """Charge `count`; raises an error if the budget or the time is used up."""
        self._left[of] -= count
        if self._left[of] < 0:
            raise jinja2.exceptions.SecurityError(f"{of} of this template exceed the limit of a rendering")
        if time.monotonic() > self._deadline:
            raise jinja2.exceptions.SecurityError(f"this template runs for more than {MAX_SECONDS:g} seconds")

    def range(self, *bounds: int) -> Iterable[int]:
        """Replace `range`: all loops of a rendering share one budget."""
        numbers = range(*bounds)
        self.spend(len(numbers), of="range()")
        return numbers


current: ContextVar[Allowance] = ContextVar("allowance")  # allowance of this context's rendering


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits on operations that make much output from little input."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalize, **options)
        for name in DROPPED_GLOBALS:
            del self.globals[name]
        for name in DROPPED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function as a filter, wrapped in limits."""
        self.filters[name] = _limited(function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Add values within the allowance; allow * and % for small integers only."""
        if operator == "+":
            current.get().spend(_size(left) + _size(right))
        elif operator == "**" or not all(
            isinstance(side, int) and abs(side) < 2**32 for side in (left, right)
        ):
            raise jinja2.exceptions.SecurityError(f"templates may use {operator!r} on small integers only")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method within limits."""
        bare = inspect.unwrap(function)
        name = getattr(bare, "__name__", "")
        if name == "join":
            args = tuple(list(map(_paid, arg)) if isinstance(arg, GeneratorType) else arg for arg in args)
        _check(name, [getattr(bare, "__self__", None), *args, *kwargs.values()])
        return _paid(super().call(context, function, *args, **kwargs))

    def tick(self, num_chars: int) -> str:
        """Charge a loop iteration or macro call; `num_chars` is the length of its literal text."""
        current.get().spend(1 + num_chars)
        return ""

    def concat_parts(self, *parts: Any) -> str:
        """Compute `a ~ b`."""
        texts = [part if isinstance(part, str) else str(self._finalize(part)) for part in parts]
        current.get().spend(sum(map(len, texts)))
        return "".join(texts)

    def _finalize(self, value: Any) -> Any:
        _pay_deeply(value)  # the value is about to become text
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _AddLimits().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


class _AddLimits(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template: adds ticks to bodies, turns `~` into a call."""

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _call("concat_parts", node.nodes, node.lineno)

    def _tick(self, node: Any) -> Any:
        self.generic_visit(node)
        num_chars = sum(len(text.data) for text in node.find_all(jinja2.nodes.TemplateData))
        args = [jinja2.nodes.Const(num_chars, lineno=node.lineno)]
        tick = jinja2.nodes.Output([_call("tick", args, node.lineno)], lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    visit_For = visit_Macro = visit_CallBlock = _tick


def _call(name: str, args: list[Any], lineno: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=lineno)
    return jinja2.nodes.Call(function, args, [], None, None, lineno=lineno)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also copies Jinja's marks on the function
    def limited(*args: Any, **kwargs: Any) -> Any:
        name = function.__name__.removeprefix("sync_").removeprefix("do_")
        given = [list(map(_paid, arg)) if isinstance(arg, GeneratorType) else arg for arg in args]
        if name not in SHALLOW:  # the function may turn its arguments into text
            for arg in given:
                _pay_deeply(arg)
        _check(name, [*given, *kwargs.values()])
        return _paid(function(*given, **kwargs))

    return limited


def _check(name: str, args: list[Any]) -> None:
    """Refuse arguments that would produce too much."""
    texts = [arg for arg in args if isinstance(arg, str)]
    if name in REFUSED_METHODS or ("format" in name and any(map(_FORMAT_SIZES.search, texts))):
        raise jinja2.exceptions.SecurityError(f"templates may not call {name}, or not with a width")
    if name not in ("range", "tick") and any(isinstance(arg, int) and abs(arg) > MAX_NUMBER for arg in args):
        raise jinja2.exceptions.SecurityError(f"{name} may not be given numbers above {MAX_NUMBER}")
    if name == "replace" and len(texts) >= 3:  # the text, what to replace, by what
        current.get().spend(texts[0].count(texts[1]) * len(texts[2]))
    elif name == "join":
        values = next((arg for arg in args if isinstance(arg, list | tuple | dict)), ())
        current.get().spend(sum(map(_size, values)) + len(values) * sum(map(len, texts)))
    elif name == "indent" and texts:
        width = sum(arg for arg in args[1:] if isinstance(arg, int)) + sum(map(len, texts[1:])) + 4
        current.get().spend(width * (texts[0].count("\n") + 1))


def _pay_deeply(value: Any) -> None:
    """Charge each nested value: a list that contains another twice, twenty levels deep, is long as text."""
    if isinstance(value, list | tuple | dict):
        current.get().spend(len(value))
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _pay_deeply(inner)
    elif isinstance(value, str):
        current.get().spend(len(value))


def _paid(value: Any) -> Any:
    current.get().spend(_size(value))
    return value


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return ITEM_SIZE * len(value) if isinstance(value, list | tuple | dict) else 1
