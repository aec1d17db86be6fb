"""Which notation a model speaks, and markers that are special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from infer.constraints.description import Structured
from infer.dialects.answer import Tool, find_format
from infer.dialects.events import CallDelta, CallStart
from infer.dialects.table import BY_NAME, THINK, THINKS, find_dialect, find_think
from infer.errors import ConfigError, RequestError
from infer.finish_reason import FinishReason
from infer.frontend.outputs import OutputBuilder
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.tokenizer.chat_families import templates_directory
from infer.tokenizer.chat_template import CHECKPOINT, ChatTemplate
from infer.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import gpt2_metadata, id_of

SPOKEN = {
    "llama3": "llama3_json",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "smollm2": "smollm2",
    "chatml": "hermes",
    "gemma3": "gemma3",
    "harmony": "harmony",
    "mistral": "mistral",
    "mistral_v1": None,
    "mistral_v7": "mistral",
    "mistral_v11": "mistral_v11",
    "llama2": None,
    "zephyr": None,
}
MARKERS = ("<s>", "[TOOL_CALLS]", "[ARGS]", "</s>")


def tokenizer(*specials: str, plain: tuple[str, ...] = (), published: str | None = None) -> Tokenizer:
    metadata = gpt2_metadata(specials or MARKERS, user_defined=plain)
    return Tokenizer.from_gguf(metadata | ({"tokenizer.chat_template": published} if published else {}))


def template(name: str, vocabulary: Tokenizer) -> ChatTemplate:
    source = (templates_directory() / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, vocabulary, name=name)


@pytest.mark.parametrize("file", sorted(path.name for path in templates_directory().iterdir()))
def test_every_template_asks_for_a_notation_or_shows_no_tools(file: str) -> None:
    name, vocabulary = file.removesuffix(".jinja"), tokenizer()
    found = find_dialect("auto", template(name, vocabulary), vocabulary)
    assert (found.name if found else None) == SPOKEN[name]
    assert template(name, vocabulary).reads_tools == (found is not None)


def test_a_notation_can_be_named() -> None:
    plain, v11 = tokenizer("<s>", "</s>"), tokenizer()
    llama = template("llama3", plain)
    assert find_dialect("pythonic", llama, plain) is BY_NAME["pythonic"]
    assert find_dialect("qwen3_xml", llama, plain) is BY_NAME["qwen3_coder"]
    assert find_dialect("mistral", llama, plain) is BY_NAME["mistral"]
    assert find_dialect("mistral", llama, v11) is BY_NAME["mistral_v11"]


def test_reasoning_is_known_from_the_model_s_own_template() -> None:
    tags = ("<think>", "</think>")
    thinks = tokenizer(plain=tags, published="… </think> …")
    instructs = tokenizer(plain=tags, published="no tags")
    without = tokenizer()
    assert find_think("auto", template("qwen3", thinks), thinks) is THINK
    assert find_think("auto", template("qwen3", instructs), instructs) is None
    assert find_think("auto", template("qwen3", without), without) is None, "no tokens for it"
    assert find_think("none", template("qwen3", thinks), thinks) is None
    assert find_think("deepseek_r1", template("qwen2", instructs), instructs) is THINK


@pytest.mark.parametrize(
    ("prompt", "thinks", "in_reasoning"),
    [("<|user|>", True, False), ("a<think>\n", True, True), ("a<think>\n\n</think>\n\n", False, False)],
)
def test_the_prompt_says_where_an_answer_begins(prompt: str, thinks: bool, in_reasoning: bool) -> None:
    vocabulary = tokenizer(plain=("<think>", "</think>"))
    form = find_format(vocabulary, vocabulary.encode(prompt), dialect=None, think=THINK)
    assert (form is not None) == thinks
    assert form is None or form.in_reasoning == in_reasoning


def test_a_marker_that_is_a_special_token_reaches_the_parser() -> None:
    vocabulary = tokenizer()
    form = find_format(vocabulary, [], dialect=BY_NAME["mistral_v11"], think=None, tools=(Tool(name="f"),))
    assert form is not None
    assert form.shown_ids == {id_of(vocabulary, "[TOOL_CALLS]"), id_of(vocabulary, "[ARGS]")}
    request = Request(request_id="r", prompt=(0,), params=SamplingParams())
    ids = vocabulary.encode('[TOOL_CALLS]f[ARGS]{"a": 1}</s>', parse_special=True, add_special=False)
    for each in (form, None):
        builder = OutputBuilder(request, vocabulary, None, is_chat=True, form=each)
        delta, _ = builder.take(StepOutput("r", 0, tuple(ids), finish_reason=FinishReason.STOP))
        assert delta is not None
        if each is None:
            assert delta.text == 'f{"a": 1}'
        else:
            assert {type(event) for event in delta.events} == {CallStart, CallDelta}
            output = builder.build()
            (call,) = output.tool_calls
            assert delta.finish_reason == output.finish_reason == "tool_calls", "as over HTTP"
            assert (output.reasoning, output.num_reasoning_tokens) == (None, 0)
            assert (call.name, call.arguments) == ("f", '{"a": 1}')
            assert delta.text == ""


def test_an_answer_without_a_format_has_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.frontend.outputs.AnswerParser", None)
    vocabulary = tokenizer()
    assert find_format(vocabulary, [1], dialect=BY_NAME["hermes"], think=None) is None
    request = Request(request_id="r", prompt=(0,), params=SamplingParams())
    OutputBuilder(request, vocabulary, None, is_chat=True)


def test_names_that_are_in_no_table_are_refused() -> None:
    from infer.dialects.table import check_parsers

    check_parsers("auto", "auto")
    with pytest.raises(ConfigError, match="tool_call_parser must be one of .*hermes.*, got 'xlam'"):
        check_parsers("xlam", "auto")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        check_parsers("auto", "glm45")


def test_a_switch_of_another_server_is_taken_where_it_changes_nothing() -> None:
    from infer.config.settings import EngineConfig

    config = EngineConfig.from_knobs(enable_auto_tool_choice=True, tool_call_parser="hermes")
    assert config.load.tool_call_parser == "hermes"
    with pytest.raises(ConfigError, match="tool calls are always parsed"):
        EngineConfig.from_knobs(enable_auto_tool_choice=False)


PUBLISHED = {  # what tells the notations of published templates apart, and their tags of reasoning
    "{{ tools }} with <|tool_call|> <think></think> <response></response>": ("granite", "granite"),
    "{{ '<|system|>' + message['tools'] + '<|/tool|>' }}": ("phi4_mini", None),
    "{{ tools }} # 可用工具 {{ '</think>' }}": ("glm4", "think"),
    "{{ tools }} <function_calls></function_calls>": ("olmo3", None),
    "Here is my thought process: ... Here is my response:": (None, "granite_3_2"),
    "{{ tools }} <|tool_call>call: <|channel>thought": ("gemma4", "gemma4"),
    "{{ tools }} <tool_call>\n<function=f> {{ '</think>' }}": ("qwen3_coder", "think"),
    "{{ tools }} <tool_call>f\n<arg_key>k</arg_key> {{ '</think>' }}": ("glm45", "think"),
    "{{ tools }} [TOOL_CALLS]f[ARGS] [THINK][/THINK]": ("mistral_v11", "mistral"),
    "{{ tools }} <|channel|>analysis<|message|>": ("harmony", "harmony"),
    "<|channel|>analysis<|message|>": ("harmony", "harmony"),
    "<|end|> <tool_call>": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("source", PUBLISHED)
def test_a_published_template_tells_its_notation(source: str) -> None:
    vocabulary = tokenizer("<s>", "<|end|>", published=source)
    shipped = ChatTemplate(source, vocabulary, name=CHECKPOINT)
    dialect, tags = PUBLISHED[source]
    assert find_dialect("auto", shipped, vocabulary) is (BY_NAME[dialect] if dialect else None)
    assert find_think("auto", shipped, vocabulary) == (THINKS[tags] if tags else None)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "<s>"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "R"},
]
ROLES = "{% for message in messages %}{{ message['role'] ~ ':' ~ message['content'] ~ ';' }}{% endfor %}"
SHOWN = {  # a template without words for calls, and what it shows of a history with two of them
    "<|tool_call|>" + ROLES + "{{ tools }}": (
        '<|tool_call|>user:Q;assistant:<|tool_call|>[{"name": "f", "arguments": {"a": "<s>"}}, '
        '{"name": "f", "arguments": {"a": "<s>"}}];tool:R;None'
    ),
    "# 可用工具" + ROLES + "{{ tools }}{# 'observation' #}": (
        '# 可用工具user:Q;assistant:f\n{"a": "<s>"}\nf\n{"a": "<s>"};observation:R;None'
    ),
    "# 可用工具{{ tools }}{% for message in messages %}"
    "{{ message.get(\"metadata\", '') ~ message.content ~ ';' }}{% endfor %}": (
        '# 可用工具NoneQ;f{"a": "<s>"};f{"a": "<s>"};R;'
    ),
    "{% for message in messages %}{{ message['tools'] ~ '<|/tool|>' ~ message['role'] }}{% endfor %}": (
        "<|/tool|>user<|/tool|>assistant<|/tool|>tool_response"
    ),
}


@pytest.mark.parametrize("source", SHOWN)
def test_calls_are_shown_by_templates_that_have_no_word_for_them(source: str) -> None:
    vocabulary = tokenizer("<s>", "<|tool_call|>")
    shipped = ChatTemplate(source, vocabulary, name=CHECKPOINT)
    dialect = find_dialect("auto", shipped, vocabulary)
    assert dialect is not None
    shipped.write_calls = dialect.write_calls
    ids = shipped.encode_chat(HISTORY)
    assert vocabulary.decode(ids, skip_special=False) == SHOWN[source]
    assert id_of(vocabulary, "<s>") not in ids, "what comes from outside is text"
    assert ids.count(id_of(vocabulary, "<|tool_call|>")) == SHOWN[source].count("<|tool_call|>")


def test_tools_stand_in_the_system_message_where_a_template_wants_them() -> None:
    source = "{% for message in messages %}{{ message['role'] ~ (message['tools'] or '') ~ ';' }}{% endfor %}"
    shipped = ChatTemplate(source, tokenizer(), name=CHECKPOINT)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shipped.render([{"role": "user", "content": "Q"}], tools=tools) == 'system[{"name": "f"}];user;'


def test_reasoning_of_a_mistral_history_is_shown_between_its_tokens() -> None:
    blocks = (
        "{% for message in messages %}{% set said = message['content'] %}"
        "{% if said is string %}{{ said }};{% else %}{% for block in said %}"
        "{{ block['type'] ~ ':' ~ (block['thinking'] or block['text']) }};{% endfor %}{% endif %}{% endfor %}"
    )
    history = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning": "R"}]
    shipped = ChatTemplate(blocks, tokenizer(), name=CHECKPOINT)
    assert shipped.render(history) == "Q;thinking:R;text:A;"
    for published, shown in (("[THINK]", "[THINK]R[/THINK]A"), ("none", "A")):
        vocabulary = tokenizer(published=published)
        assert template("mistral_v11", vocabulary).render(history) == f"[INST]Q[/INST]{shown}</s>"


def test_a_constraint_needs_a_token_behind_reasoning_that_the_prompt_opens() -> None:
    vocabulary = tokenizer()
    form = find_format(vocabulary, vocabulary.encode("<think>\n"), dialect=None, think=THINK)
    assert form is not None and form.in_reasoning
    with pytest.raises(RequestError, match="has no token </think> at which the constraint could begin"):
        form.bind(SamplingParams(structured=Structured.regex("a")), vocabulary)
