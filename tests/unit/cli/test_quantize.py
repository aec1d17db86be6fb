"""`infer quantize`: a flag has an effect or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer.cli.main import build_parser
from infer.cli.quantize import SCHEMES, options_of
from infer.tools.quantize import SCHEME_NAMES


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("awq --bits 8", "--bits is of gptq; awq has --group-size"),
        ("fp8-block --group-size 32", "--group-size is of gptq and awq and ct-w4a16; fp8-block has nothing"),
        ("ct-w8a16 --bits 4", "--bits is of gptq; ct-w8a16 has nothing to choose"),
        ("nf4 --asymmetric", "--asymmetric is of gptq and ct-w4a16; nf4 has nothing to choose"),
    ],
)
def test_a_flag_that_the_scheme_does_not_have_is_refused(
    infer: Callable[..., Any], flags: str, said: str
) -> None:
    outcome = infer("quantize", "no-model", "no-folder", "--scheme", *flags.split())
    assert outcome.code == 1 or outcome.code == 2
    assert said in outcome.err


def test_flags_choose_of_a_recipe() -> None:
    def chosen(*flags: str) -> dict[str, Any]:
        return options_of(build_parser().parse_args(["quantize", "a", "b", "--scheme", *flags]))

    assert chosen("gptq") == chosen("nf4") == {}
    assert chosen("gptq", "--bits", "3", "--group-size", "-1") == {"bits": 3, "group_size": -1}
    assert chosen("ct-w4a16", "--asymmetric") == {"symmetric": False}


def test_the_command_has_the_schemes_of_the_writer() -> None:
    assert SCHEMES == SCHEME_NAMES
