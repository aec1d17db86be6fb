"""Strict tools with `auto`, as an engine follows them: free text, an enforced call, free text again."""

from __future__ import annotations

import pytest

from infer.constraints.compiler import Compiler
from infer.constraints.guide import CONSTRAINED, FREE, Guide
from infer.constraints.token_bytes import TokenBytes
from infer.dialects.answer import AnswerFormat, Tool
from infer.dialects.grammar import constraint
from infer.dialects.table import BY_NAME, Dialect
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.tokenizer import Tokenizer
from tests.support.walks import num_valid
from tests.unit.tokenizer.vocabularies import gpt2_metadata

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
TOOL = Tool(
    name="f",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    is_strict=True,
)
WRITTEN = {  # text, what an engine may write of a call, and what it may not write there
    "hermes": ("Hi 2 < 3. <tool_call>", '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '"x"'),
    "smollm2": ("<tool_call>", '[{"name": "f", "arguments": {"a": 1}}]</tool_call>', '"x"'),
    "qwen3_coder": (
        "Hi.\n<tool_call>\n<function=",
        "f>\n<parameter=a>\n1\n</parameter>\n</function>",
        "x",
    ),
    "glm45": (
        "Hi.\n<tool_call>",
        "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        '"x"',
    ),
    "llama3_json": ('{"name": "', 'f", "parameters": {"a": 1}}', '"x"'),
    "mistral": ("[TOOL_CALLS]", '[{"name": "f", "arguments": {"a": 1}}]', '"x"'),
    "mistral_v11": ("Hi.[TOOL_CALLS]", 'f[ARGS]{"a": 1}', '"x"'),
    "gemma3": ("```tool_code", "\n[f(a=1)]\n```", '"x"'),
}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("dialect", [BY_NAME[name] for name in WRITTEN], ids=WRITTEN)
def test_a_strict_call_is_enforced_from_its_marker_to_its_end(dialect: Dialect, has_tokens: bool) -> None:
    metadata = gpt2_metadata(("<|endoftext|>", *(MARKERS if has_tokens else ()), "<|im_end|>"))
    tokenizer = Tokenizer.from_gguf(metadata)
    structured = constraint(AnswerFormat(dialect=dialect, tools=(TOOL,)), tokenizer)
    assert structured is not None
    core = read_gguf_vocabulary(metadata).core
    token_bytes = TokenBytes(
        core.to_str, vocab_size=tokenizer.vocab_size, eos_ids=tuple(sorted(tokenizer.eos_ids))
    )
    guide = Guide(Compiler(token_bytes).compile(structured))
    before, call, wrong = (
        tokenizer.encode(text, add_special=False, parse_special=True) for text in WRITTEN[dialect.name]
    )
    for token_id in before:
        assert guide.state == FREE
        guide.consume([token_id])
    assert guide.state == CONSTRAINED
    assert num_valid(guide, call) == len(call)
    texts = [tokenizer.decode(call[: i + 1], skip_special=False) for i in range(len(call))]
    value = next(i for i, text in enumerate(texts) if text.endswith("1"))
    assert num_valid(guide, [*call[:value], *wrong]) < value + len(wrong)
    guide.consume(call)
    assert guide.error is None
    assert guide.state == FREE, "what follows is free again"
