from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest

from infer.errors import RequestError
from infer.frontend.functions import PythonTool, as_choice, as_schemas


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(TypedDict):
    city: str
    country: NotRequired[str]


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Line:
    points: list[Point]


@dataclasses.dataclass
class Chain:
    rest: Chain | None = None


def obj(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


POINT = obj({"x": {"type": "number"}, "y": {"type": "number"}}, "x")

# the annotation, the schema, JSON values that fit and what they become, JSON values that do not
CASES: list[tuple[Any, dict[str, Any], list[tuple[Any, Any]], list[Any]]] = [
    (str, {"type": "string"}, [("a", "a")], [1, None, ["a"]]),
    (int, {"type": "integer"}, [(3, 3), (3.0, 3)], [True, "3", 3.5]),
    (float, {"type": "number"}, [(3, 3.0), (0.5, 0.5)], [True, "3"]),
    (bool, {"type": "boolean"}, [(True, True)], [1, "true"]),
    (list, {"type": "array"}, [([1, "a"], [1, "a"])], [{}, "a"]),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [([1, 2], [1, 2])], [["a"], 1]),
    (dict, {"type": "object"}, [({"a": 1}, {"a": 1})], [[]]),
    (
        dict[str, float],
        {"type": "object", "additionalProperties": {"type": "number"}},
        [({"a": 1}, {"a": 1.0})],
        [{"a": "b"}, []],
    ),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, [("b", "b")], ["c", 1]),
    (Literal["a", 1], {"enum": ["a", 1]}, [(1, 1)], [True, 2]),
    (Unit, {"type": "string", "enum": ["celsius", "kelvin"]}, [("kelvin", Unit.KELVIN)], ["KELVIN"]),
    (
        str | None,
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        [("a", "a"), (None, None)],
        [1],
    ),
    (
        int | list[int],
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        [(1, 1), ([1], [1])],
        ["a"],
    ),
    (Annotated[str, "its name"], {"type": "string", "description": "its name"}, [("a", "a")], [1]),
    (
        Place,
        obj({"city": {"type": "string"}, "country": {"type": "string"}}, "city"),
        [({"city": "Bern"}, {"city": "Bern"})],
        [{}, {"city": "Bern", "zip": 1}, "Bern"],
    ),
    (Point, POINT, [({"x": 1}, Point(1.0)), ({"x": 1, "y": 2}, Point(1.0, 2.0))], [{"y": 1}]),
    (
        Line,
        obj({"points": {"type": "array", "items": POINT}}, "points"),
        [({"points": [{"x": 1}]}, Line([Point(1.0)]))],
        [{"points": [{"z": 1}]}],
    ),
]


def tool_of(hint: Any) -> PythonTool:
    def function(value: str) -> str:
        return "done"

    function.__annotations__["value"] = hint
    return PythonTool(function)


@pytest.mark.parametrize(("hint", "schema", "fits", "unfit"), CASES, ids=[str(case[0]) for case in CASES])
def test_an_annotation_is_a_schema_and_reads_what_the_schema_allows(
    hint: Any, schema: dict[str, Any], fits: list[tuple[Any, Any]], unfit: list[Any]
) -> None:
    tool = tool_of(hint)
    parameters: dict[str, Any] = tool.schema["function"]["parameters"]
    assert parameters == obj({"value": schema}, "value")
    for given, expected in fits:
        jsonschema.validate({"value": given}, parameters)
        read = tool.read(json.dumps({"value": given}))["value"]
        assert (read, type(read)) == (expected, type(expected))
    for given in unfit:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"value": given}, parameters)
        with pytest.raises(ValueError, match="value"):
            tool.read(json.dumps({"value": given}))


def get_weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS, at: str | None = None) -> dict[str, Any]:  # noqa: D417
    """Look up the weather
    of a city.

    Not for the model: it costs nothing.

    Args:
        city (str): its name,
            without the country
        days: how many; note: from today
        unit: of temperatures

    Returns:
        text: what it is like
    """
    return {"city": city, "days": days, "unit": unit, "at": at}


def test_a_function_is_told_with_what_its_docstring_says() -> None:
    assert PythonTool(get_weather).schema == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Look up the weather of a city.",
            "parameters": obj(
                {
                    "city": {"type": "string", "description": "its name, without the country"},
                    "days": {"type": "integer", "description": "how many; note: from today", "default": 1},
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "kelvin"],
                        "description": "of temperatures",
                        "default": "celsius",
                    },
                    "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "city",
            ),
        },
    }
    plain = {"type": "function"}
    assert as_schemas([get_weather, plain]) == [PythonTool(get_weather).schema, plain]
    assert as_schemas(None) is None


def test_a_call_gives_json_or_text() -> None:
    tool = PythonTool(get_weather)
    assert tool.call(tool.read('{"city": "Zürich", "unit": "kelvin"}')) == (
        '{"city": "Zürich", "days": 1, "unit": "kelvin", "at": null}'
    )

    async def later() -> str:
        return "a text"

    def odd() -> Any:
        return {(1, 2): Point(1)}

    def records() -> list[Point]:
        return [Point(1)]

    assert PythonTool(later).call({}) == "a text"
    assert PythonTool(odd).call({}) == "{(1, 2): Point(x=1, y=0.0)}"
    assert PythonTool(records).call({}) == '[{"x": 1, "y": 0.0}]'


def test_no_argument_is_read_from_nothing_and_from_an_empty_object() -> None:
    def now() -> str:
        return "noon"

    tool = PythonTool(now)
    assert tool.schema["function"] == {"name": "now", "parameters": obj({})}
    assert tool.read("") == tool.read("{}") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "the arguments are not JSON"),
        ("[" * 100_000, "the arguments are not JSON"),
        ("[1]", "the arguments must be an object, got [1]"),
        ("{}", "city is missing; the names are city, days, unit, at"),
        ('{"city": "a", "town": 1}', "town is not known; the names are city, days, unit, at"),
        ('{"city": 7}', "city must be a text, got 7"),
        ('{"city": "a", "unit": "x"}', 'unit must be one of ["celsius", "kelvin"], got "x"'),
        ('{"city": "a", "at": 1}', "at must be a text, got 1; or at must be null, got 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words_for_the_model(arguments: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        PythonTool(get_weather).read(arguments)
    assert str(caught.value).startswith(message)


def untyped(x) -> None:  # type: ignore[no-untyped-def]
    pass


def of_sets(x: set[int]) -> None:
    pass


def of_numbered(x: dict[int, str]) -> None:
    pass


def of_unknown(x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def starred(*words: str) -> None:
    pass


def positional(x: int, /) -> None:
    pass


def recursive(chain: Chain) -> None:
    pass


def größe(x: int) -> None:
    pass


def of_floats(x: Literal[b"a"]) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "parameter 'x' has no type; allowed are str, int"),
        (of_sets, "parameter 'x': type set[int] is not known; allowed are str, int"),
        (of_numbered, "parameter 'x': type dict[int, str] is not known; allowed are str, int"),
        (of_unknown, "a type cannot be read: name 'Missing' is not defined"),
        (starred, "parameter '*words' cannot be passed by name; use plain parameters"),
        (positional, "parameter 'x' cannot be passed by name; use plain parameters"),
        (recursive, "parameter 'chain': Chain contains itself; recursive types are not allowed"),
        (größe, "its name 'größe' must be 1 to 64 of"),
        (of_floats, "parameter 'x': the values of a Literal or an Enum must be strings"),
    ],
)
def test_a_function_that_cannot_be_told_is_refused_with_its_name_and_line(
    function: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        PythonTool(function)
    line = function.__code__.co_firstlineno
    assert str(caught.value).startswith(
        f"test_functions.py, line {line}: {function.__name__} cannot be a tool: {message}"
    )
    assert caught.value.param == "tools"


@pytest.mark.parametrize("given", [get_weather, {"type": "function"}, "get_weather"])
def test_tools_that_are_no_list_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="tools must be a list of functions or schemas, got"):
        as_schemas(given)


def test_a_tool_may_be_chosen_by_its_name() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert as_choice("get_weather") == as_choice(named) == named
    assert [as_choice(each) for each in (None, "auto", "none", "required")] == [
        None,
        "auto",
        "none",
        "required",
    ]
