"""`infer quantize`: a flag has an effect or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer.cli.main import build_parser
from infer.cli.quantize import SCHEMES, options_of
from infer.tools.quantize import ALL_NAMES, Recipe, _warn_of_groups


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("awq --bits 8", "--bits is for gptq and squeezellm; awq has --group-size"),
        (
            "fp8-block --group-size 32",
            "--group-size is for gptq and awq and ct-w4a16; fp8-block has no options",
        ),
        ("ct-w8a16 --bits 4", "--bits is for gptq and squeezellm; ct-w8a16 has no options"),
        ("awq --asymmetric", "awq always has a zero point for each group; leave --asymmetric out"),
        ("nf4 --asymmetric", "--asymmetric is for gptq and ct-w4a16; nf4 has no options"),
    ],
)
def test_a_flag_that_the_scheme_does_not_have_is_refused(
    infer: Callable[..., Any], flags: str, said: str
) -> None:
    outcome = infer("quantize", "no-model", "no-folder", "--scheme", *flags.split())
    assert outcome.code == 1 or outcome.code == 2
    assert said in outcome.err


def test_groups_that_no_form_of_4_bits_keeps_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for recipe in (Recipe(scheme="gptq", group_size=48), Recipe(scheme="awq", group_size=48)):
        caplog.clear()
        _warn_of_groups(recipe, {64, 96})
        assert "groups of 48 are not a multiple of 32" in caplog.text and len(caplog.records) == 1
    caplog.clear()
    _warn_of_groups(Recipe(scheme="gptq", group_size=128), {64, 256})
    assert caplog.messages == ["groups of 128 are larger than rows of 64: each of these rows is one group"]
    caplog.clear()
    _warn_of_groups(Recipe(scheme="gptq"), {128, 256})
    _warn_of_groups(Recipe(scheme="nf4"), {64})
    assert not caplog.messages


def test_flags_choose_of_a_recipe() -> None:
    def chosen(*flags: str) -> dict[str, Any]:
        return options_of(build_parser().parse_args(["quantize", "a", "b", "--scheme", *flags]))

    assert chosen("gptq") == chosen("nf4") == {}
    assert chosen("gptq", "--bits", "3", "--group-size", "-1") == {"bits": 3, "group_size": -1}
    assert chosen("ct-w4a16", "--asymmetric") == {"symmetric": False}


def test_the_command_has_the_schemes_of_the_writer() -> None:
    assert SCHEMES == ALL_NAMES
