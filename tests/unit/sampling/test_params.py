"""Nothing outside its range becomes a SamplingParams; the error says what was given and what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from infer.constraints.description import Structured
from infer.errors import RequestError
from infer.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

NAN, INF = float("nan"), float("inf")
LONG = pytest.param(10**400, id="long")  # no float can hold it
HUGE = pytest.param(10**5000, id="huge")  # more digits than Python prints
FLOATS = {
    "temperature": "[0, 100]",
    "top_p": "(0, 1]",
    "min_p": "[0, 1]",
    "repetition_penalty": "[0.01, 100]",
    "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]",
}
INTS = {
    "top_k": "[-1, 2^63 - 1]",
    "seed": "[-2^63 + 1, 2^63 - 1]",
    "max_tokens": "[1, 2^63 - 1]",
    "min_tokens": "[0, 2^63 - 1]",
    "logprobs": "[0, 20]",
    "prompt_logprobs": "[0, 20]",
    "n": "[1, 128]",
    "best_of": "[1, 128]",
}


def refusal(param: str | None = None, /, **knobs: Any) -> str:
    """The message of the RequestError that blames `param`, or else the (last) given parameter."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**knobs)
    assert caught.value.param == (param or list(knobs)[-1])
    message = str(caught.value)
    assert message[0].islower() and not message.endswith(".") and len(message) < 300
    return message


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -3, 101, LONG, True, "0.5", None, [1.0], 1j, b"1"])
def test_a_number_must_be_a_number_in_its_range(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert f"{name} must be a number in {FLOATS[name]}, got " in message
    assert message.endswith("0000... (401 characters)" if value == 10**400 else f"got {value!r}")


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", [2**63, -(2**63), HUGE, True, False, 1.0, NAN, "3", [3], b"\x01"])
def test_an_integer_must_be_an_integer_in_its_range(name: str, value: object) -> None:
    shown = "a value of type int too long to print" if value == 10**5000 else repr(value)
    assert refusal(**{name: value}) == f"{name} must be an integer in {INTS[name]}, got {shown}"


def test_numbers_too_long_to_print_are_still_refused_politely() -> None:
    assert refusal(temperature=10**5000).endswith("got a value of type int too long to print")
    assert refusal(logit_bias=[10**5000]).endswith("got a value of type list too long to print")


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0), ("repetition_penalty", 0), ("top_k", -2), ("max_tokens", 0), ("n", 0)],
)
def test_open_ends_and_first_steps_beyond_are_refused(name: str, value: int) -> None:
    assert refusal(**{name: value}).endswith(f"got {value!r}")


def test_a_number_out_of_range_is_shown_as_json_may_have_had_it() -> None:
    assert refusal(top_p=0.0) == "top_p must be a number in (0, 1], got 0"
    assert refusal(temperature=200.0) == "temperature must be a number in [0, 100], got 200"
    assert refusal(temperature=1e300) == "temperature must be a number in [0, 100], got 1e+300"


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0}, {"temperature": 100.0}, {"top_p": 1}, {"top_p": 5e-324}, {"top_k": -1},
        {"top_k": 2**63 - 1}, {"min_p": 1.0}, {"repetition_penalty": 0.01}, {"presence_penalty": -2},
        {"frequency_penalty": 2.0}, {"seed": -(2**63) + 1}, {"seed": 2**63 - 1}, {"seed": None},
        {"max_tokens": None}, {"max_tokens": 1, "min_tokens": 1}, {"logprobs": 0}, {"n": 128},
        {"stop": "end"}, {"stop": ["a"] * MAX_STOP_STRINGS}, {"logit_bias": {0: -100, 9: 100.0}},
        {"stop_token_ids": [0, 5]}, {"n": 2, "best_of": 2},
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_allowed(knobs: dict[str, Any]) -> None:
    SamplingParams(**knobs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["x"] * (MAX_STOP_STRINGS + 1), f"stop has 17 strings, at most {MAX_STOP_STRINGS}"),
        ([""], "stop must hold strings of 1 to 1024 characters, got ''"),
        ("", "stop must hold strings of 1 to 1024 characters, got ''"),
        (["a", 5], "stop must hold strings of 1 to 1024 characters, got 5"),
        (["y" * 1025], "stop must hold strings of 1 to 1024 characters, got 'yyyy"),
        (5, "stop must be a string or a list of strings, got 5"),
        (None, "stop must be a string or a list of strings, got None"),
        (b"end", "stop must be a string or a list of strings, got b'end'"),
        ({"end": 1}, "stop must be a string or a list of strings, got {'end': 1}"),
    ],
)
def test_stop_must_be_a_few_short_strings(value: object, message: str) -> None:
    assert message in refusal(stop=value)


@pytest.mark.parametrize("value", [7, None, "7", {7: 1}])
def test_stop_token_ids_must_be_a_list(value: object) -> None:
    assert refusal(stop_token_ids=value) == f"stop_token_ids must be a list of token ids, got {value!r}"


@pytest.mark.parametrize("value", [-1, True, 1.5, 3.0, "7", 2**63])
def test_stop_token_ids_must_be_token_ids(value: object) -> None:
    message = refusal("stop_token_ids[1]", stop_token_ids=[5, value])
    assert message == f"stop_token_ids[1] must be an integer in [0, 2^63 - 1], got {value!r}"


def test_there_are_limits_to_what_one_request_may_list() -> None:
    assert f"at most {MAX_STOP_TOKEN_IDS}" in refusal(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1))
    assert f"at most {MAX_LOGIT_BIAS}" in refusal(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0))


@pytest.mark.parametrize("value", [None, [1], "5"])
def test_logit_bias_must_be_a_mapping(value: object) -> None:
    assert refusal(logit_bias=value) == f"logit_bias must map token ids to numbers, got {value!r}"


@pytest.mark.parametrize("token_id", ["5", -1, True, 5.0])
def test_logit_bias_must_have_token_ids(token_id: object) -> None:
    message = refusal(logit_bias={token_id: 1.0})
    assert message == f"logit_bias must be an integer in [0, 2^63 - 1], got {token_id!r}"


@pytest.mark.parametrize("bias", [NAN, INF, 101, None, True])
def test_logit_bias_must_have_small_numbers(bias: object) -> None:
    message = refusal("logit_bias.5", logit_bias={3: 1.0, 5: bias})
    assert message == f"logit_bias.5 must be a number in [-100, 100], got {bias!r}"


@pytest.mark.parametrize("name", ["ignore_eos", "use_beam_search"])
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_a_flag_must_be_true_or_false(name: str, value: object) -> None:
    assert refusal(**{name: value}) == f"{name} must be true or false, got {value!r}"


def test_parameters_must_not_contradict_each_other() -> None:
    assert "lower min_tokens to at most 4 or raise max_tokens" in refusal(max_tokens=4, min_tokens=5)
    assert "best_of must be at least n" in refusal(n=3, best_of=2)
    for knobs in ({}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.5}, {"presence_penalty": 1.0}):
        assert "set temperature=0" in refusal(**knobs, use_beam_search=True)


def test_what_the_caller_changes_later_changes_nothing() -> None:
    bias, stop, ids = {1: 2.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)  # type: ignore[arg-type]
    bias[1], stop[0], ids[0] = NAN, "", -1
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 2.0}, ("a",), (3,))
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]


def test_a_single_stop_string_is_one_string_not_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "is_greedy", "has_filters", "has_penalties"),
    [
        (SamplingParams(), False, False, False),
        (SamplingParams(temperature=0), True, False, False),
        (SamplingParams(top_k=1), True, True, False),
        (SamplingParams(top_k=-1), False, False, False),
        (SamplingParams(top_k=2), False, True, False),
        (SamplingParams(top_p=0.99), False, True, False),
        (SamplingParams(min_p=0.01), False, True, False),
        (SamplingParams(repetition_penalty=0.9), False, False, True),
        (SamplingParams(presence_penalty=-0.1), False, False, True),
        (SamplingParams(frequency_penalty=0.1), False, False, True),
    ],
)
def test_the_sampler_is_told_what_there_is_to_do(
    params: SamplingParams, is_greedy: bool, has_filters: bool, has_penalties: bool
) -> None:
    assert (params.is_greedy, params.has_filters, params.has_penalties) == (
        is_greedy,
        has_filters,
        has_penalties,
    )


def test_num_sequences_is_what_must_be_generated() -> None:
    assert [SamplingParams(n=2).num_sequences, SamplingParams(n=2, best_of=5).num_sequences] == [2, 5]


def test_from_knobs_builds_what_the_constructor_builds() -> None:
    assert SamplingParams.from_knobs(temperature=0.5, stop="x") == SamplingParams(
        temperature=0.5,
        stop="x",  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_new_tokens", "max_tokens"), ("stops", "stop")],
)
@pytest.mark.parametrize(
    "make", [SamplingParams, SamplingParams.from_knobs, partial(replace, SamplingParams())]
)
def test_an_unknown_parameter_is_told_the_closest_one(
    make: Callable[..., SamplingParams], given_name: str, meant: str
) -> None:
    with pytest.raises(RequestError, match=f"unknown sampling parameter '{given_name}'") as caught:
        make(**{given_name: 1})
    assert f"did you mean {meant!r}?" in str(caught.value)
    assert caught.value.param == given_name


def test_values_without_names_are_refused_with_an_example() -> None:
    unnamed: Any = SamplingParams
    with pytest.raises(RequestError, match=r"by name, such as SamplingParams\(temperature=0.5\)"):
        unnamed(0.5)


def test_the_signature_still_names_every_parameter() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in fields(SamplingParams)]


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats()), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), st.floats() | st.none(), max_size=3),
)  # fmt: skip
NAMES = [*FLOATS, *INTS, "stop", "stop_token_ids", "logit_bias", "ignore_eos", "use_beam_search"]


@given(knobs=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4))
def test_whatever_is_given_is_accepted_or_refused_never_crashes(knobs: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_knobs(**knobs)
    except RequestError as error:
        assert error.param is not None
        assert error.param.partition("[")[0].partition(".")[0] in knobs  # an entry of a list or a mapping too
    else:
        assert 0 <= params.temperature <= 100 and 0 < params.top_p <= 1 and params.n >= 1


def test_a_class_of_pydantic_is_a_constraint() -> None:
    class Person(BaseModel):
        name: str

    given: Any = Person
    assert SamplingParams(structured=given).structured == Structured.json_schema(Person)
