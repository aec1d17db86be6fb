"""The knobs of speculative decoding: what they imply, what they refuse, and vLLM's JSON for them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from infer.cli.flags import knobs_from
from infer.cli.main import build_parser
from infer.config.knobs import read_config_file
from infer.config.settings import EngineConfig, knob_table
from infer.config.speculation import SpeculationConfig
from infer.errors import ConfigError


def speculation(**knobs: Any) -> SpeculationConfig:
    return EngineConfig.from_knobs(**knobs).speculation


@pytest.mark.parametrize(
    ("knobs", "method", "max_drafts"),
    [
        ({"speculative_decoding": True}, "ngram", 8),
        ({"num_speculative_tokens": 3}, "ngram", 3),
        ({"speculative_method": "suffix"}, "suffix", 8),
        ({"draft_model": "small"}, "draft_model", 5),
        ({"speculative_method": "eagle3", "draft_model": "head"}, "eagle3", 5),
        ({"speculative_method": "tree", "draft_model": "small"}, "tree", 8),
        (
            {"speculative_config": {"method": "tree", "model": "small", "num_speculative_tokens": 12}},
            "tree",
            12,
        ),
        ({"speculative_algorithm": "NGRAM"}, "ngram", 8),
        ({"speculative_algorithm": "STANDALONE", "draft_model": "small"}, "draft_model", 5),
        ({"speculative_config": {"method": "ngram_gpu"}}, "ngram", 8),
        ({"prompt_lookup_max": 4}, "ngram", 8),
        ({"prompt_lookup_min": 3}, "ngram", 8),
        ({"suffix_max_answers": 0}, "suffix", 8),
        ({"speculative_config": {"suffix_decoding_max_cached_requests": 9}}, "suffix", 8),
    ],
)
def test_what_is_named_turns_it_on(knobs: dict[str, Any], method: str, max_drafts: int) -> None:
    found = speculation(**knobs)
    assert (found.is_on, found.method, found.max_drafts) == (True, method, max_drafts)


def test_it_is_off_unless_something_is_named_and_can_be_turned_off_beside_a_file_that_names_it() -> None:
    assert not speculation().is_on
    off = speculation(speculative_decoding=False, speculative_config={"method": "suffix"})
    assert not off.is_on and off.max_drafts == 0
    assert not speculation(speculative_decoding=False, prompt_lookup_max=4, suffix_max_answers=3).is_on


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"speculative_decoding": True},
        {"speculative_method": "suffix", "synthetic_acceptance": 0.5},
        {"draft_model": "small", "adaptive_speculation": False},
        {"speculative_config": {"method": "ngram"}},
    ],
)
def test_no_tokens_turn_it_off_whatever_else_is_asked(asked: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_text("num-speculative-tokens: 0\n")
    for zero in (
        {"num_speculative_tokens": 0},
        read_config_file(path, knob_table()),
        knobs_from(build_parser().parse_args(["generate", "hi", "--num-speculative-tokens", "0"])),
    ):
        config = EngineConfig.from_knobs(**(asked | zero))
        assert (config.speculation.is_on, config.speculation.max_drafts) == (False, 0)
        assert EngineConfig.from_knobs(**config.knobs()) == config
    assert not speculation(speculative_config={"method": "ngram", "num_speculative_tokens": 0}).is_on


JSON = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 3,
    "draft_tensor_parallel_size": 1,
    "disable_by_batch_size": None,
}
MEANT = SpeculationConfig(
    speculative_decoding=True,
    speculative_method="ngram",
    num_speculative_tokens=5,
    prompt_lookup_max=4,
    prompt_lookup_min=3,
)


def test_the_json_of_vllm_is_taken_as_keyword_as_flag_and_in_a_file(tmp_path: Path) -> None:
    text = json.dumps(JSON)
    assert speculation(speculative_config=JSON) == speculation(speculative_config=text) == MEANT
    words = ["generate", "hi", "--speculative-config", text]
    assert speculation(**knobs_from(build_parser().parse_args(words))) == MEANT
    path = tmp_path / "knobs.yaml"
    for written in (f"speculative-config: {text}\n", f"speculative_config: '{text}'\n"):
        path.write_text(written)
        assert speculation(**read_config_file(path, knob_table())) == MEANT


def test_the_json_leaves_the_knobs_it_stands_for_and_no_place_of_this_machine() -> None:
    config = EngineConfig.from_knobs(speculative_config={"method": "draft_model", "model": "some/dir"})
    assert (config.speculation.draft_model, config.speculation.speculative_config) == ("some/dir", None)
    assert EngineConfig.from_knobs(**config.knobs()) == config


def test_a_method_in_place_of_a_model_is_a_method() -> None:
    assert speculation(speculative_config={"model": "[ngram]"}).method == "ngram"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"speculative_config": "[1]"}, "speculative_config must be a JSON object such as"),
        ({"speculative_config": "{"}, "speculative_config must be a JSON object, got '{'"),
        ({"speculative_config": {"methd": 1}}, r"unknown key 'methd' \(did you mean method\?\); it may have"),
        ({"speculative_config": {"x": 1}}, "unknown key 'x'; it may have method, model, num_speculative"),
        ({"speculative_config": {"num_speculative_tokens": "5"}}, "num_speculative_tokens must be int"),
        ({"speculative_config": {"num_speculative_tokens": 99}}, "must be at most 16, got 99"),
        (
            {"speculative_method": "foo"},
            "must be one of auto, ngram, suffix, draft_model, eagle3, tree .*, got 'foo'; "
            "other names of these: ngram_gpu, NGRAM, STANDALONE, EAGLE3$",
        ),
        ({"speculative_config": {"method": "medusa"}}, "must be one of auto, ngram, .* got 'medusa'"),
        ({"speculative_config": {"draft_tensor_parallel_size": 2}}, "asks for draft_tensor_parallel_size=2"),
        ({"speculative_config": {"disable_by_batch_size": 8}}, "use adaptive_speculation"),
        (
            {"speculative_config": {"method": "ngram"}, "speculative_method": "suffix"},
            "asks for speculative_method='ngram', and speculative_method is 'suffix'; leave one",
        ),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min is 5 and prompt_lookup_max is"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be a positive integer, got 0"),
        ({"suffix_max_answers": -1}, "suffix_max_answers must be an integer >= 0"),
        ({"synthetic_acceptance": 1.5}, "synthetic_acceptance must be at most 1, got 1.5"),
        (
            {"synthetic_acceptance": 0.5},
            r"synthetic_acceptance=0.5 \(--synthetic-acceptance\) needs drafts, and speculative decoding",
        ),
        (
            {"adaptive_speculation": False},
            r"adaptive_speculation=False \(--no-adaptive-speculation\) needs drafts, .*; turn it on with "
            "speculative_decoding, or leave adaptive_speculation out",
        ),
        ({"prompt_lookup_max": 4, "suffix_max_answers": 3}, "choose one with speculative_method"),
        ({"speculative_method": "draft_model"}, "name them with draft_model"),
        ({"speculative_method": "tree"}, "speculative_method=tree needs the files of a drafter"),
        ({"speculative_config": {"speculative_token_tree": "[(0,)]"}}, "the method tree makes its own"),
        ({"speculative_method": "ngram", "draft_model": "x"}, "leave one of the two out"),
        ({"speculative_decoding": True, "kv_cache_backend": "naive"}, "use kv_cache_backend=paged"),
    ],
)
def test_what_cannot_be_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_knobs(**knobs)


def test_every_knob_alone_has_an_effect_or_is_refused() -> None:
    """No flag is taken in silence: it turns speculation on, or says what it lacks."""
    alone = {
        "speculative_decoding": True,
        "speculative_method": "suffix",
        "num_speculative_tokens": 4,
        "draft_model": "small",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 3,
        "suffix_max_answers": 9,
        "adaptive_speculation": False,
        "synthetic_acceptance": 0.5,
        "speculative_config": "{}",
    }
    assert set(alone) == {field.name for field in fields(SpeculationConfig)}
    for name, value in alone.items():
        words = ["generate", "hi", "--no-adaptive-speculation"]
        if value is not False:
            flag = "--" + name.replace("_", "-")
            words = ["generate", "hi", flag] + ([] if value is True else [str(value)])
        knobs = knobs_from(build_parser().parse_args(words))
        if name in ("adaptive_speculation", "synthetic_acceptance"):
            with pytest.raises(ConfigError, match=f"leave {name} out"):
                speculation(**knobs)
        else:
            assert speculation(**knobs).is_on, name


def test_llama_cpps_flags_are_taken() -> None:
    words = ["generate", "hi", "-md", "small.gguf", "--draft-max", "4", "--draft-min", "0"]
    assert knobs_from(build_parser().parse_args(words)) == {
        "draft_model": "small.gguf",
        "num_speculative_tokens": 4,
    }


@pytest.mark.parametrize(
    "knobs",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"deterministic": True}],
    ids=lambda knobs: next(iter(knobs)),
)
def test_trees_are_refused_before_anything_is_loaded(knobs: dict[str, Any]) -> None:
    (name,) = knobs
    with pytest.raises(ConfigError, match=f"speculative_method=tree cannot be used with {name}"):
        EngineConfig.from_knobs(speculative_method="tree", draft_model="small", **knobs)
