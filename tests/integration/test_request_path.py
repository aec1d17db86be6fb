"""The tables of docs/architecture.md that follow a chat request, held against the code and real runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.request_path import files_of_one_chat_request
from tests.unit.test_layering import PACKAGE, imported_files

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
FILE = re.compile(r"`([\w/]+\.py)`")
HANDED_OVER = "handed over"
MAX_FILES = 46


def section(heading: str) -> str:
    """The text below a heading of the page, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None, f"docs/architecture.md has no section {heading!r}"
    return found[1]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its two head lines."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def way() -> list[str]:
    return [FILE.findall(row[1])[0] for row in rows("One request's way in")]


def helpers() -> list[str]:
    """Files, and folders of files, that a request runs through and that are no rows."""
    named = re.compile(r"`([\w/]+(?:\.py|/))`")
    return [name for row in rows("Files off the main path") for name in named.findall(row[0])]


def test_the_way_is_short() -> None:
    assert len(way()) == len(set(way())) <= MAX_FILES


@pytest.mark.parametrize("row", rows("One request's way in"), ids=lambda row: row[1])
def test_every_file_is_reached_as_the_table_says(row: list[str]) -> None:
    """The file that calls it imports it, or the row says that it is handed over."""
    (name,), callers = FILE.findall(row[1]), FILE.findall(row[3])
    assert len(callers) == 1, "one caller per row"
    assert (PACKAGE / name).exists() and (PACKAGE / callers[0]).exists()
    assert (name in imported_files(PACKAGE / callers[0])) != (HANDED_OVER in row[3])


def test_a_caller_is_on_the_way_itself() -> None:
    callers = {FILE.findall(row[3])[0] for row in rows("One request's way in")}
    assert callers <= {*way(), "server/app.py"}


def test_the_way_back_is_the_way_in() -> None:
    back = [name for row in rows("And back") for name in FILE.findall(row[1])]
    assert set(back) <= set(way())


def test_an_engine_in_a_process_has_these_files_in_between() -> None:
    for row in rows("With the engine in its own process"):
        (name,), caller = FILE.findall(row[0]), FILE.findall(row[2])[0]
        assert (name in imported_files(PACKAGE / caller)) != (HANDED_OVER in row[2])


def test_a_real_request_runs_through_these_files_and_no_others(checkpoint: str) -> None:
    ran = set(files_of_one_chat_request(checkpoint))
    assert not set(way()) & set(helpers())
    folders = tuple(name for name in helpers() if name.endswith("/"))
    ran_in_folders = {name for name in ran if name.startswith(folders)}
    assert all(any(name.startswith(folder) for name in ran_in_folders) for folder in folders)
    written = {*way(), *helpers()} - set(folders) | ran_in_folders
    assert ran == written, (
        f"docs/architecture.md: add a row (or a helper, with its reason) for {sorted(ran - written)}; "
        f"remove {sorted(written - ran)}"
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA | {"additionalProperties": False}},
}
OTHER_REQUESTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {  # fields of the body, knobs
    "constrained": ({"response_format": FORMAT, "ignore_eos": False, "max_tokens": 40}, {}),
    "speculated": (
        {"temperature": 0, "max_tokens": 32},
        {"speculative_method": "ngram", "adaptive_speculation": False},
    ),
    "over two ranks": ({}, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("request_kind", OTHER_REQUESTS)
def test_other_requests_add_the_files_of_their_table(checkpoint: str, request_kind: str) -> None:
    fields, knobs = OTHER_REQUESTS[request_kind]
    ran = files_of_one_chat_request(checkpoint, fields, knobs)
    plain = {*way(), *helpers()}
    folders = tuple(name for name in plain if name.endswith("/"))
    table = rows("What three other requests add")
    written = {FILE.findall(row[1])[0] for row in table if row[0] == request_kind}
    assert {row[0] for row in table} == set(OTHER_REQUESTS)
    assert {name for name in ran if not name.startswith(folders)} - plain == written
    assert not set(way()) - set(ran)


def test_the_reading_order_is_complete_and_true() -> None:
    """Every file it names exists, and it names every file on the way."""
    named = set(re.findall(r"`([\w/]+\.(?:py|cu))`", (PAGE.parent / "reading-order.md").read_text("utf-8")))
    named = {name for name in named if not name.startswith("tests/")}
    assert not [name for name in sorted(named) if not (PACKAGE / name).exists()]
    added = {FILE.findall(row[1])[0] for row in rows("What three other requests add")}
    assert not ({*way()} | added) - named
