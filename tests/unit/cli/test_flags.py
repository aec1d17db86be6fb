from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from infer.cli import flags
from infer.cli.main import build_parser
from infer.config.knobs import KnobRow
from infer.config.settings import LoadConfig, knob_table
from infer.sampling.params import SamplingParams


@lru_cache(maxsize=1)
def the_parser() -> argparse.ArgumentParser:
    return build_parser()  # once: to build it takes longer than to use it


def parse(*arguments: str) -> argparse.Namespace:
    return the_parser().parse_args(["generate", *arguments])


def test_every_knob_has_a_flag_that_reaches_it() -> None:
    shadowed = set(flags.SAMPLING_HELP)  # the subcommand's own flag has the name
    for row in (row for row in knob_table().values() if row.name not in shadowed):
        value: Any = row.choices[-1] if row.choices else {int: 7, float: 0.5, str: "text"}.get(row.kind)
        if row.name == "quantization":  # its values are checked early
            value = "int8"
        for name in (row.name, *row.aliases):
            flag = "--" + name.replace("_", "-")
            given = [flag] if row.kind is bool else [flag, str(value)]
            expected = True if row.kind is bool else (value,) if row.is_many else value
            assert flags.knobs_from(parse(*given)) == {row.name: expected}


def test_a_prompt_may_follow_the_adapter() -> None:
    args = parse("--lora", "a", "--lora", "b", "hello")
    assert args.prompt == "hello"
    assert flags.knobs_from(args) == {"lora_modules": ("a", "b")}
    assert flags.knobs_from(parse("--lora-modules", "a", "b")) == {"lora_modules": ("a", "b")}


def test_a_boolean_knob_can_be_switched_on_and_off() -> None:
    row = KnobRow(
        name="prefix_caching",
        section="cache",
        kind=bool,
        is_optional=False,
        default=True,
        help="100% reuse",
        choices=(),
        aliases=(),
    )
    parser = argparse.ArgumentParser()
    flags._add_knob(parser.add_argument_group("cache"), row)
    assert vars(parser.parse_args([])) == {}
    assert flags._given(parser.parse_args(["--prefix-caching"]), flags.KNOB) == {"prefix_caching": True}
    assert flags._given(parser.parse_args(["--no-prefix-caching"]), flags.KNOB) == {"prefix_caching": False}
    assert "100% reuse (default: True)" in " ".join(parser.format_help().split())


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_text("dtype: float32\nmax-seq-len: 64\n")
    knobs = flags.knobs_from(parse("--config", str(path), "--max-seq-len", "32"))
    assert knobs == {"dtype": "float32", "max_seq_len": 32}


def test_every_sampling_field_has_a_flag_except_those_the_command_line_cannot_show() -> None:
    assert {f.name for f in fields(SamplingParams)} == set(flags.CHAT_HELP) | flags.LIBRARY_ONLY


def test_without_flags_sampling_has_the_command_lines_defaults() -> None:
    params = flags.sampling_from(parse())
    assert params == SamplingParams.from_knobs(**flags.CLI_SAMPLING, seed=params.seed)


def test_each_run_draws_a_seed_that_can_be_typed_again() -> None:
    seeds = [flags.sampling_from(parse()).seed for _ in range(5)]
    assert len(set(seeds)) > 1
    assert flags.sampling_from(parse("--seed", str(seeds[0]))).seed == seeds[0]
    assert isinstance(flags.sampling_from(parse("--seed", "none")).seed, int)


def test_every_draw_has_a_seed_of_its_own_and_the_first_the_one_that_was_given() -> None:
    params = flags.sampling_from(parse("--seed", "7"))
    seeds = [flags.nth_draw(params, number).seed for number in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert seeds == [flags.nth_draw(params, number).seed for number in range(1000)]
    assert flags.nth_draw(params, 3) == flags.sampling_from(parse("--seed", str(seeds[3])))


def test_a_knob_and_a_sampling_field_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_text("seed: 5\n")
    args = parse("--seed", "6", "--config", str(path))
    assert flags.knobs_from(args) == {"seed": 5}
    assert flags.sampling_from(args).seed == 6


def test_sampling_flags_reach_their_fields() -> None:
    params = flags.sampling_from(
        parse(
            *("--temperature", "0", "--top-k", "40", "--min-p", "0.1", "--seed", "-3"),
            *("--stop", "END", "--stop", "\n\n", "--stop-token-ids", "2", "--stop-token-ids", "5"),
            *("--logit-bias", "7=-100", "--logit-bias", "8=2.5", "--max-tokens", "none", "--ignore-eos"),
        )
    )
    assert params == SamplingParams(
        temperature=0.0,
        top_p=flags.CLI_SAMPLING["top_p"],
        top_k=40,
        min_p=0.1,
        seed=-3,
        stop=("END", "\n\n"),
        stop_token_ids=(2, 5),
        logit_bias={7: -100.0, 8: 2.5},
        max_tokens=None,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "many"], "--top-k must be a whole number, for example 16, got 'many'"),
        (["--top-p", "x"], "--top-p must be a number, for example 0.9, got 'x'"),
        (
            ["--max-tokens", "all"],
            "--max-tokens must be a whole number or 'none', for example 512, got 'all'",
        ),
        (["--seed", "1.5"], "--seed must be a whole number or 'none', for example 16, got '1.5'"),
        (["--stop-token-ids", "</s>"], "--stop-token-ids must be a whole number, for example 16, got '</s>'"),
        (["--logit-bias", "7"], "--logit-bias must be ID=BIAS, for example 42=-100, got '7'"),
        (["--logit-bias", "x=1"], "--logit-bias must be ID=BIAS, for example 42=-100, got 'x=1'"),
        (["--max-seq-len", "4k"], "--max-seq-len must be a whole number, for example 16, got '4k'"),
        (["--max-model-len", "4k"], "--max-model-len must be a whole number"),
        (["--stop"], "error: --stop needs a value after it; 'infer generate --help' says which"),
        (["--max-seq-len"], "infer generate: error: --max-seq-len needs a value after it"),
        (["--thinking=3"], "infer generate: error: --thinking takes no value, got '3'"),
        (["--dtype", "int3"], "--dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        (["--temp", "1"], "unknown option --temp; did you mean --temperature?"),
        (["--temperature", "nan"], "temperature must be a number in [0, 100], got nan"),
        (["--min-tokens", "9", "--max-tokens", "3"], "lower min_tokens to at most 3 or raise max_tokens"),
        (["--config", "absent.yaml"], "cannot read config file absent.yaml"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_reason(
    infer: Callable[..., Any], arguments: list[str], message: str
) -> None:
    outcome = infer("generate", "hi", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert message in outcome.err


def subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and every one below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from subcommands(below)


def test_every_flag_that_takes_a_number_says_what_a_number_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "format_usage", lambda parser: "")  # most of the time
    checked = set[tuple[object, ...]]()  # most flags are those of many commands
    for parser in subcommands(the_parser()):
        for action in parser._actions:
            if action.type in (None, Path, str) or not action.option_strings:
                continue
            flag = action.option_strings[0]
            described = (flag, action.type, action.metavar, action.help)
            if described in checked:
                continue
            checked.add(described)
            with pytest.raises(SystemExit):
                parser.parse_args([flag, "x"])
            told = capsys.readouterr().err.splitlines()[-1]
            assert re.search(rf"error: {flag} must be .+, for example [\d=.,-]+, got 'x'$", told), told
    assert len(checked) > 80


def test_a_default_of_max_tokens_fits_a_short_context_but_a_wish_is_kept() -> None:
    args = parse()
    params = flags.sampling_from(args)
    assert flags.fit_to_model(params, args, 100, {}).max_tokens == 50
    assert flags.fit_to_model(params, args, 1, {}).max_tokens == 1
    assert flags.fit_to_model(params, args, 100_000, {}) == params
    args = parse("--max-tokens", "90")
    assert flags.fit_to_model(flags.sampling_from(args), args, 100, {}).max_tokens == 90


def test_the_models_advice_beats_our_default_and_a_wish_beats_both() -> None:
    advice = {"temperature": 0.2, "top_k": 40}
    args = parse()
    advised = flags.fit_to_model(flags.sampling_from(args), args, 100, advice)
    assert (advised.temperature, advised.top_k, advised.top_p) == (0.2, 40, 0.9)
    args = parse("--temperature", "1.5")
    assert flags.fit_to_model(flags.sampling_from(args), args, 100, advice).temperature == 1.5


def test_help_shows_the_default_of_each_knob_that_has_one() -> None:
    help_text = " ".join(build_subcommand_help("generate").split())
    for row in (row for row in knob_table().values() if row.name not in flags.SAMPLING_HELP):
        assert row.help in help_text
        if row.default not in (None, ()):
            assert f"{row.help} (default: {row.default})" in help_text
    for name, value in flags.CLI_SAMPLING.items():
        advised = "" if name == "max_tokens" else "the model's advice, else "
        assert f"{flags.SAMPLING_HELP[name]} (default: {advised}{value})" in help_text


def build_subcommand_help(name: str) -> str:
    parser = build_parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    help_text: str = actions[0].choices[name].format_help()
    return help_text


def test_groups_are_titled_as_their_sections_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadConfig, "__doc__", "Which model a GPU gets.")
    assert "\nload: which model a GPU gets:\n" in build_subcommand_help("generate")


def test_the_value_that_other_engines_write_for_no_top_k_is_named() -> None:
    assert "; 0 or -1: all" in build_subcommand_help("generate")
    assert flags.sampling_from(parse("--top-k", "-1")).top_k == -1


def test_a_seed_in_the_config_file_counts(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 17\n")
    args = parse("--config", str(tmp_path / "c.yaml"))
    assert flags.sampling_from(args).seed == 17
    args = parse("--config", str(tmp_path / "c.yaml"), "--seed", "4")
    assert flags.sampling_from(args).seed == 4
