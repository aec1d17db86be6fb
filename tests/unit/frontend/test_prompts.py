"""The text side of a model: which template, and whether the model is likely to know it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.client.messages import Ready
from infer.config.settings import LoadConfig
from infer.engine.stats import EngineStats
from infer.errors import ContextOverflow, RequestError
from infer.frontend.open_model import find_source, make_encoder, make_served_encoder, open_text
from infer.frontend.prompts import PromptEncoder
from infer.loader.headers import read_headers
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as base models are published: with the tokens of a chat format, without a template."""
    path = tmp_path_factory.mktemp("base") / "tiny-gemma3"
    make_checkpoint("gemma3", path)
    return path


def encoder_of(folder: Path, **knobs: Any) -> PromptEncoder:
    config = LoadConfig(model=str(folder), **knobs)
    return make_encoder(config, read_headers(find_source(config, show_progress=False)))


def test_a_model_that_came_without_a_template_may_not_know_its_familys(folder: Path) -> None:
    encoder = encoder_of(folder)
    assert encoder.template_in_use == "gemma3"
    assert encoder.has_chat_template and not encoder.ships_chat_template
    warning = encoder.template_warning
    assert warning is not None
    assert "tiny-gemma3 came without a chat template, as base models do" in warning
    assert "'gemma3' template of its family" in warning
    assert "--chat-template family" in warning


def test_who_names_a_template_is_not_warned(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    named = encoder_of(folder, chat_template=str(tmp_path / "mine.jinja"))
    family = encoder_of(folder, chat_template="family")
    for encoder in (named, family):
        assert encoder.ships_chat_template and encoder.template_warning is None
    message = [{"role": "user", "content": "hi"}]
    assert (
        family.encode_chat(message) == encoder_of(folder).encode_chat(message) != named.encode_chat(message)
    )


EFFORTS = [  # fields of a request, and what a template is told
    ({}, "| |</think>"),
    ({"reasoning_effort": "minimal"}, "low|True|</think>"),
    ({"reasoning_effort": "high"}, "high|True|</think>"),
    ({"reasoning_effort": "none"}, "low|False|</think>"),
    ({"reasoning_effort": "medium", "template_options": {"enable_thinking": False}}, "medium|False|</think>"),
]


@pytest.mark.parametrize(("fields", "told"), EFFORTS)
def test_templates_are_told_how_much_to_reason(
    folder: Path, tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    (tmp_path / "mine.jinja").write_text("{{ reasoning_effort or ' ' }}|{{ enable_thinking }}|</think>")
    encoder = encoder_of(folder, chat_template=str(tmp_path / "mine.jinja"))
    assert encoder.think is not None, "tags of a template that is not ours need not be tokens"
    ids, _, _ = encoder.open_chat("hi", None, **fields)
    assert encoder.tokenizer.decode(ids).replace("||", "| |").strip() == told


def test_a_model_that_came_with_a_template_is_a_chat_model(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    try:
        encoder = encoder_of(folder)
    finally:
        template.unlink()
    assert encoder.ships_chat_template and encoder.template_warning is None


def test_a_model_of_no_family_is_talked_to_with_the_template_it_came_with(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path / "gpt2")
    (tmp_path / "gpt2" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    encoder = encoder_of(tmp_path / "gpt2")
    assert encoder.has_chat_template and encoder.ships_chat_template and encoder.template_warning is None
    assert encoder.template_in_use == '"checkpoint, as shipped with the model"'
    message = [{"role": "user", "content": "hi"}]
    asked = encoder_of(tmp_path / "gpt2", chat_template="checkpoint")
    assert encoder.encode_chat(message) == asked.encode_chat(message) == encoder.encode("<hi>")


def test_a_model_without_any_template_needs_no_warning(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path / "gpt2")
    encoder = encoder_of(tmp_path / "gpt2")
    assert not encoder.has_chat_template and not encoder.ships_chat_template
    assert encoder.template_warning is None and encoder.template_in_use == ""


def test_a_text_that_can_never_fit_is_told_which_limit_it_breaks(folder: Path) -> None:
    text, message = "word " * 10**6, [{"role": "user", "content": "word " * 10**6}]
    for encoder, limit in (
        (
            encoder_of(folder),
            "but this model's maximum context length is 256 tokens; shorten the prompt to at most 255 tokens",
        ),
        (
            encoder_of(folder, max_seq_len=64),
            "length is 64 tokens; shorten the prompt to at most 63 tokens (max_seq_len or the size",
        ),
    ):
        for encode in (partial(encoder.encode, text), partial(encoder.encode_chat, message)):
            with pytest.raises(ContextOverflow) as caught:
                encode()
            assert limit in str(caught.value)


KNOWN = (
    "allowed: request_id, priority, deadline, cache_salt, adapter, tools, tool_choice, max_reasoning_tokens, "
    "template_options"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioritty": 1}, "unknown option 'prioritty'; did you mean 'priority'?"),
        ({"urgency": 1}, "unknown option 'urgency'; " + KNOWN),
        ({"parallel_tool_calls": False}, "unknown option 'parallel_tool_calls'; " + KNOWN),
        ({"reasoning_effort": "low"}, "unknown option 'reasoning_effort'; " + KNOWN),
        ({"sampling_params": None}, "unknown option 'sampling_params'; did you mean 'params'?"),
        ({"use_tqdm": False}, "unknown option 'use_tqdm'; did you mean 'show_progress'?"),
        ({"tools": []}, "tools is an option of a chat: use chat or stream_chat"),
        ({"temperature": 0.5}, "temperature belongs to the params: SamplingParams(temperature=...)"),
        ({"n": 2}, "n belongs to the params: SamplingParams(n=...)"),
        ({"deadline": True}, "deadline must be a number of seconds, got True"),
    ],
)
def test_an_option_that_no_request_has_is_refused_with_the_one_that_was_meant(
    folder: Path, options: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        encoder_of(folder).make_request([1, 2], None, **options)
    assert str(caught.value) == message
    assert caught.value.param in options


def test_a_request_has_its_options(folder: Path) -> None:
    request = encoder_of(folder).make_request([1, 2], None, priority=-1, deadline=2.5, cache_salt="tenant")
    assert (request.priority, request.deadline, request.cache_salt) == (-1, 2.5, "tenant")


def test_who_gives_no_params_samples_as_the_authors_of_the_model_recommend(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "tiny")
    advice = json.loads((tmp_path / "tiny" / "generation_config.json").read_text())
    advice |= {"do_sample": True, "temperature": 0.25, "top_p": 0.9}
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(advice))
    encoder = encoder_of(tmp_path / "tiny")
    taken = encoder.make_request([5, 6, 7], None).params
    assert (taken.temperature, taken.top_p) == (0.25, 0.9)
    long = encoder.make_request([5] * (encoder.context_len - 2), None).params
    assert (long.temperature, long.max_tokens) == (0.25, None)
    assert encoder.make_request([5], SamplingParams()).params.temperature == 1.0  # given is given


def test_several_engines_serve_the_length_that_all_of_them_have(folder: Path) -> None:
    config = LoadConfig(model=str(folder))
    text = open_text(config, find_source(config, show_progress=False))
    ready = [Ready(EngineStats(), "gemma3", length, 256) for length in (100, 49, 256)]
    assert make_served_encoder(config, text, ready).context_len == 49
