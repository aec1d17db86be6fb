r"""Compiles the text of a constraint to a grammar, within limits.

    Structured ──► llguidance ──► Grammar, or a RequestError that says what is wrong

An ordinary schema takes a millisecond, a schema of 13 KB about 13. Compiling releases the GIL, so other
requests are served meanwhile. Limits on items and states bound compiling and, later, every mask and token: a
constraint that exceeds them during generation ends only its own request.

Copies of a matcher share its lexer, which builds states when texts first reach them. Building them is half
the work of a request's first masks, so a lexer is kept for later requests with the same constraint. Requests
that run together have a lexer each, because only one thread at a time can use it. States are never dropped,
so a kept lexer may have only a fifth of a request's limit: 64 lexers have at most 640,000 states, 0.3 to
1.3 GB. A request that reaches this bound starts over with its own lexer and the whole limit, and from then on
no lexer of its constraint is kept.

Blanks between JSON tokens are bounded ([\x20\x0A\x0D\x09]{1,8}): models that may write any number of them
sometimes write nothing else.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, stack_size
from typing import TYPE_CHECKING
from weakref import WeakSet

from infer.constraints.ascii_classes import column_before, rewrite_grammar, rewrite_pattern
from infer.constraints.description import WHITESPACE, Structured
from infer.constraints.grammar_checks import is_ebnf
from infer.constraints.pattern_checks import constraint_error
from infer.constraints.token_bytes import TokenBytes
from infer.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMAR_SIZE = 250_000
MAX_LEXER_STATES = 50_000  # states of all sequences of a request, one or two kilobytes each
MAX_KEPT_STATES = 10_000  # states of a lexer that later requests may use
MAX_STEP_ITEMS = 50_000  # parser's work for one mask or token: about 2.5 ms
MAX_STEP_FUEL = 200_000  # lexer's work for one mask or token: about 14 ms
MAX_START_FUEL = 1_000_000  # lexer's work for compiling: about 20 ms
MAX_KEPT = 64  # lexers of all constraints, usually of a megabyte; beyond that, requests share lexers
NEWEST = 0.25  # weight of the newest time in the expected time of masks
STACK_BYTES = 256 << 20  # stack of a compiling thread: the library recurses into nested rules
_starting = Lock()  # held while the stack size of new threads is changed, which holds for the process


class MaskCost:
    """The expected seconds of a mask, or of the masks of a step; 0: unknown."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        """Average in the newest time."""
        self.seconds += (NEWEST if self.seconds else 1.0) * (seconds - self.seconds)


MaskCosts = tuple[MaskCost, MaskCost]  # costs of masks after a narrow one, and after a wide one


class Lexer:
    """A compiled constraint at its start, and the requests that use copies of it."""

    def __init__(self, matcher: LLMatcher, costs: MaskCosts, *, is_own: bool) -> None:
        self._matcher, self.costs = matcher, costs
        self.is_own = is_own  # True: it serves one request, with the whole limit of states
        self.users: WeakSet[Grammar] = WeakSet()  # requests that use it now
        self.is_full = False  # True: it reached a limit and is useless to other requests

    def matcher(self) -> LLMatcher:
        """Return a new matcher at the start of the grammar."""
        return self._matcher.deep_copy()


class Grammar:
    """The compiled constraint of one request."""

    __slots__ = ("__weakref__", "_structured", "digits", "lexer", "param", "probes", "tokenizer", "triggers")

    def __init__(self, lexer: Lexer, token_bytes: TokenBytes, structured: Structured) -> None:
        self.lexer, self._structured = lexer, structured
        self.tokenizer, self.probes = token_bytes.tokenizer(), token_bytes.probes
        self.triggers = tuple(text.encode() for text in structured.triggers)
        self.digits = token_bytes.digits if structured.ends_numbers else None  # JSON numbers must end
        self.param = structured.param
        lexer.users.add(self)

    def lexer_after(self, full: Lexer) -> Lexer | None:
        """Return the lexer to start over with after `full` has reached a limit.

        None: `full` was this request's own, or no lexer can be made. This never raises, because it is called
        in the middle of a step of many requests.
        """
        full.is_full = True
        if full is self.lexer:
            if full.is_own:
                return None
            thread = ThreadPoolExecutor(1, "infer-grammar")
            try:
                with deep_stacks():
                    made = thread.submit(_compile, self._structured, self.tokenizer, full.costs, is_own=True)
                self.lexer = made.result()
            except Exception as error:
                logger.warning("constraint could not be recompiled error=%r", error)
                return None
            finally:
                thread.shutdown(wait=False)
        return self.lexer


class Compiler:
    """Compiles constraints for one vocabulary. Safe to share between threads."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self._kept: OrderedDict[tuple[str, ...], list[Lexer]] = OrderedDict()  # most recently used last
        self._lock = Lock()

    def compile(self, structured: Structured) -> Grammar:
        """Return the grammar of a request; a `RequestError` names what cannot be compiled."""
        key = structured.kind, structured.text, structured.whitespace or WHITESPACE
        with self._lock:
            lexer, is_own = self._free_one(key), self._fills_lexers(key)
            costs = next((each.costs for each in self._kept.get(key, ())), (MaskCost(), MaskCost()))
        try:
            lexer = lexer or _compile(structured, self.token_bytes.tokenizer(), costs, is_own=is_own)
        except RequestError as error:
            raise constraint_error(str(error), structured.param) from None
        with self._lock:
            self._keep(key, lexer)
            return Grammar(lexer, self.token_bytes, structured)

    def _fills_lexers(self, key: tuple[str, ...]) -> bool:
        """Return True if a request with this constraint has needed more states than a kept lexer may have."""
        lexers = self._kept.get(key)
        return lexers is not None and (not lexers or any(each.is_full for each in lexers))

    def _free_one(self, key: tuple[str, ...]) -> Lexer | None:
        """Return the least used lexer of this constraint, the newest of several; None: compile one."""
        lexers = self._kept.get(key, [])
        best = min(reversed(lexers), key=lambda lexer: len(lexer.users), default=None)
        if best is None or self._fills_lexers(key):
            return None
        return None if best.users and len(lexers) < MAX_KEPT else best

    def _keep(self, key: tuple[str, ...], lexer: Lexer) -> None:
        """Keep a lexer for later requests, unless its constraint fills lexers: starting over takes time."""
        kept = self._kept.setdefault(key, [lexer])
        fills_them = lexer.is_own or self._fills_lexers(key)
        kept[:] = [] if fills_them else [*(each for each in kept if each is not lexer), lexer][-MAX_KEPT:]
        self._kept.move_to_end(key)
        while sum(len(each) or 1 for each in self._kept.values()) > MAX_KEPT:
            oldest, lexers = next(iter(self._kept.items()))
            del lexers[:1]
            if not lexers:
                del self._kept[oldest]


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Give threads that are started inside a stack that is large enough to compile."""
    with _starting:
        usual = stack_size(STACK_BYTES)
        try:
            yield
        finally:
            stack_size(usual)


def limits(*, is_own: bool) -> LLParserLimits:
    """The limits on compiling, on a mask and on a token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_lexer_states=MAX_LEXER_STATES if is_own else MAX_KEPT_STATES,
        step_max_items=MAX_STEP_ITEMS,
        step_lexer_fuel=MAX_STEP_FUEL,
        initial_lexer_fuel=MAX_START_FUEL,
        verbose_errors=False,
    )


def _compile(structured: Structured, tokenizer: LLTokenizer, costs: MaskCosts, *, is_own: bool) -> Lexer:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, _to_grammar(structured), log_level=0, limits=limits(is_own=is_own))
    except ValueError as error:
        raise RequestError(_explain(structured, str(error))) from None
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()  # the first mask takes longest, and fails if the constraint is too large
        if first.is_error():
            matcher = first
    if not is_own and "too many states" in matcher.get_error():
        return _compile(structured, tokenizer, costs, is_own=True)
    if matcher.is_error():
        raise RequestError(_explain(structured, matcher.get_error()))
    return Lexer(matcher, costs, is_own=is_own)


def _to_grammar(structured: Structured) -> str:
    from llguidance import LLMatcher

    if structured.kind == "grammar":
        return LLMatcher.grammar_from_lark(rewrite_grammar(_to_lark(structured.text)))
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(rewrite_pattern(structured.text))
    if structured.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_escape, structured.choices)))
    schema = structured.text if structured.kind == "json_schema" else '{"type":"object"}'
    if schema.strip() == "true":  # options need an object
        schema = "{}"
    options = {  # every option: a schema could set any missing one under "x-guidance"
        "whitespace_flexible": True,
        "whitespace_pattern": structured.whitespace or WHITESPACE,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
    }
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _to_lark(grammar: str) -> str:
    """Return the grammar in Lark's notation, translated if it is in EBNF."""
    if not is_ebnf(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # a missing rule raises a bare Exception
        said = str(error) or type(error).__name__
        raise RequestError(f"the grammar cannot be compiled: {said}") from None


def _escape(text: str) -> str:
    """Return an expression that matches only this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


# messages of the library, and what we say instead
_MESSAGES = {
    "NoExtensionBias": "no text matches it: a reference or rule leads back to itself before any text",
    "Expecting object schema to apply options": "false allows no value",
}
# `1(3): Expected token ':', found '\n' (at "\n" ('\n'))`; a final newline is added where there is none
_LARK_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*?)(?:, found .*?)?(?: \(at (\".*\") \(.*\)\))?")
_LINE_END = r'"\n"'
_LARK_FORM = 'rules look like start: "yes" | "no" (Lark\'s notation)'


def _explain(structured: Structured, message: str) -> str:
    """Explain the library's message in one line; unknown keywords never get here (schema_checks.py)."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it is not valid"]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = reasons[-1] if reasons else lines[0]
    said = _MESSAGES.get(said, said)
    if structured.kind == "grammar" and not is_ebnf(structured.text):
        if match := _LARK_ERROR.fullmatch(lines[0][:300]):
            line, column, wrong, found = match.groups()
            wrong = said if reasons else wrong[:1].lower() + wrong[1:]
            found = "the end of the line" if found == _LINE_END else found
            written = structured.text.split("\n")[int(line) - 1 : int(line)]
            column = column_before("".join(written), int(column))
            said = f"line {line}, column {column}: {wrong}" + (f", found {found}" if found else "")
        said += f"; {_LARK_FORM}"
    if structured.kind != "json_schema":
        return f"the {structured.kind} cannot be compiled: {said}"
    places: list[str] = []
    if message.startswith("oneOf constraints"):
        said = "oneOf is not supported where its branches may overlap; use anyOf"
        places = [place for place, _ in _places(json.loads(structured.text), "oneOf", "#")]
    elif message.startswith("regex parse error") and len(lines) > 1:
        schema, pattern = json.loads(structured.text), lines[1].replace("\\/", "/")  # the given spelling
        places = [place for place, given in _places(schema, "pattern", "#") if given == pattern]
        places += [place for place, _ in _places(schema, pattern, "#") if "/patternProperties/" in place]
    where = f" at {' or '.join(places[:3])}" if places else ""
    return f"the schema cannot be compiled{where}: {said}"


def _places(value: object, keyword: str, pointer: str) -> Iterator[tuple[str, object]]:
    """Yield the JSON pointers to a keyword, at any depth, with its values."""
    inner = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for name, each in inner:
        place = f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"
        if name == keyword:
            yield place, each
        yield from _places(each, keyword, place)
