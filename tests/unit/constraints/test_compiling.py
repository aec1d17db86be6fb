"""Compiling aside: a constraint of the largest size, nested as deep as can be, does not end the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from infer.constraints import compiler as compiler_module
from infer.constraints.compiler import Compiler
from infer.constraints.compiling import CompilingRequests
from infer.constraints.description import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, Structured
from infer.constraints.token_bytes import TokenBytes


def references() -> Structured:
    """A chain of references, which a schema that a client sends may not have (`check_keywords`)."""
    parts: dict[str, Any] = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1_600)}
    text = json.dumps({"$ref": "#/$defs/0", "$defs": parts | {"1600": {}}}, separators=(",", ":"))
    assert MAX_SCHEMA_BYTES * 0.9 < len(text) <= MAX_SCHEMA_BYTES
    return Structured(kind="json_schema", text=text)


def rules() -> Structured:
    text = "start:a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(5_500)) + '\na5500:"x"'
    assert MAX_GRAMMAR_BYTES * 0.9 < len(text) <= MAX_GRAMMAR_BYTES
    return Structured(kind="grammar", text=text)


class PlainCompiler:
    """The library on a vocabulary of bytes."""

    token_bytes = TokenBytes(None, vocab_size=256)

    def compile(self, structured: Structured) -> LLMatcher:
        is_schema = structured.kind == "json_schema"
        make = LLMatcher.grammar_from_json_schema if is_schema else LLMatcher.grammar_from_lark
        return LLMatcher(LLTokenizer("byte"), make(structured.text), log_level=0)


def compile_aside(structured: Structured) -> None:
    """Compile in a thread of the engine's; a stack that overflows ends this process."""
    compiling = CompilingRequests[str](cast(Compiler, PlainCompiler()), lambda seconds: None)
    done = threading.Event()
    compiling.wake = done.set
    assert compiling.begin(structured, "a", "request") is None
    assert done.wait(60)
    ((_, matcher),) = compiling.take()
    assert not cast(LLMatcher, matcher).is_error()


@pytest.mark.parametrize("name", ["references", "rules"])
def test_the_deepest_constraint_does_not_overflow_the_stack(name: str) -> None:
    code = f"from tests.unit.constraints import test_compiling as t; t.compile_aside(t.{name}())"
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])


def test_other_threads_keep_their_stack() -> None:
    before = threading.stack_size()
    compile_aside(Structured(kind="grammar", text='start: "a"'))
    assert threading.stack_size() == before


def test_engines_of_one_process_change_the_stack_of_new_threads_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second sets a size only when the first has put back the usual one."""
    sizes, size, second = list[int](), threading.stack_size(), list[threading.Thread]()
    aside = Structured(kind="grammar", text='start: "a"')

    def change(new: int) -> int:
        nonlocal size
        sizes.append(new)
        if not second:  # another engine comes here now, if it may
            second.append(threading.Thread(target=compile_aside, args=(aside,)))
            second[0].start()
            second[0].join(0 if compiler_module._starting.locked() else 60)
        old, size = size, new
        return old

    usual = size
    monkeypatch.setattr(compiler_module, "stack_size", change)
    compile_aside(aside)
    second[0].join(60)
    assert sizes == [compiler_module.STACK_BYTES, usual] * 2 and size == usual
