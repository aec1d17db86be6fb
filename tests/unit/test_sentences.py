"""The rules of our sentences that a program can check: how docstrings and comments begin, and a few words.
The words are also checked in the README and in the pages of docs.

A docstring begins with a verb or with the noun that it returns, a trailing comment contains its noun, and
some words are always a detour. Pages also name their nouns again instead of "those of", and keep sentences
short. `python -m tests.unit.test_sentences src/infer/cache docs/features/gpu.md` lists what breaks the rules.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.name for path in (ROOT / "src/infer").iterdir() if path.is_dir() and path.name[0] != "_"
)

# Pages that programs write, and pages that tell what happened in the words of the time.
OTHER_PAGES = {"docs/cli.md", "docs/knobs.md", "docs/toggle-matrix.md", "docs/log.md"}
PROSE = sorted(
    name
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if (name := path.relative_to(ROOT).as_posix()) not in OTHER_PAGES
    and not name.startswith("docs/decisions/")
)
FENCE = re.compile(r"^ *```.*?^ *```[^\n]*", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]+`")

NO_FIRST_WORDS = {"Of", "Whether", "What", "How", "Which", "Where", "Who", "Whose", "When"} | {
    *("As", "That", "Those", "May", "Is", "Are", "Does"),
}
PREPOSITION = re.compile(
    r"(of|in|on|at|by|for|from|to|with|without|between|among|behind|beside|under|over|until|as"
    r"|which|whose|where|that|who|and)\b"
)
DETOURS = {
    re.compile(r"\bso many\b"): "that many, n",
    re.compile(r"\bin the mean\b"): "on average",
    re.compile(r"\bbeside\b"): "next to, besides, with",
    re.compile(r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|one\b)"): "is not a",
    re.compile(r"(^|[.:] )Of (?!course)"): "a sentence that begins with its subject",
}
PAGE_DETOURS = DETOURS | {re.compile(r"\b([Tt]hose (that|of)|[Tt]hat of)\b"): "the noun again"}

# Pages with lists of figures, whose sentences are as long as the lists.
FIGURES = {"docs/unreported.md"}
LONGEST_SENTENCE = 45  # words, where code is one and what stands in parentheses does not count
NOT_PROSE = re.compile(r"^ *(\||#|<!--).*$|<!--.*?-->|\([^()]*\)|·.*", re.MULTILINE | re.DOTALL)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )")
SENTENCE = re.compile(r"(?<=[.?!:])\s+(?=[A-Z*\[(])")
GENERATED = re.compile(r"<!-- .*? -->\n.*?<!-- end -->", re.DOTALL)  # by scripts/docs.py


def broken_rules(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a module that break a rule, and what they should be."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node, clean=True)
            if text:
                line = node.body[0].lineno
                if text.split()[0] in NO_FIRST_WORDS:
                    yield line, f"a docstring begins with a verb or its noun: {text.splitlines()[0]}"
                yield from detours(text, line)
    if not any(map(may_break_a_rule, lines)):  # most files; reading one as tokens takes long
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment = token.string.lstrip("#: ").strip()
            is_trailing = bool(lines[token.start[0] - 1][: token.start[1]].strip())
            if is_trailing and PREPOSITION.match(comment):
                yield token.start[0], f"a trailing comment contains its noun: {comment}"
            yield from detours(comment, token.start[0])


def may_break_a_rule(line: str) -> bool:
    """True if a comment of this line would break a rule, wherever it begins."""
    _, *comments = line.split("#")
    return any(PREPOSITION.match(comment.lstrip(": ")) for comment in comments) or (
        bool(comments) and any(detours(line[line.index("#") :].lstrip("#: "), 1))
    )


def detours(
    text: str, first_line: int, patterns: Mapping[re.Pattern[str], str] = DETOURS
) -> Iterator[tuple[int, str]]:
    """The words of a text that are a detour, and what to write."""
    for number, line in enumerate(text.splitlines()):
        for pattern, better in patterns.items():
            if found := pattern.search(line):
                yield first_line + number, f"{found[0].strip()!r}; better {better}: {line.strip()}"


def broken_in_page(text: str) -> list[tuple[int, str]]:
    """The lines of a Markdown page that break a rule, outside its code."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    return list(detours(INLINE_CODE.sub("`code`", text), 1, PAGE_DETOURS))


def long_sentences(text: str) -> list[str]:
    """The sentences of a Markdown page with more than LONGEST_SENTENCE words, outside code and tables."""
    text = re.sub(r"\]\([^)]*\)", "]", INLINE_CODE.sub("Code", FENCE.sub("", GENERATED.sub("", text))))
    return [
        sentence
        for paragraph in PARAGRAPH.split(text)
        for sentence in SENTENCE.split(NOT_PROSE.sub("", paragraph))
        if len(sentence.split()) > LONGEST_SENTENCE
    ]


def broken_in(path: Path) -> list[str]:
    """Everything that breaks a rule in the modules under a path."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [f"{file}:{line}: {why}" for file in files for line, why in broken_rules(file.read_text("utf-8"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_comments_keep_the_rules(package: str) -> None:
    assert not broken_in(ROOT / "src/infer" / package)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_name_their_nouns_again(package: str) -> None:
    assert not [
        f"{path}:{line}: {why}"
        for path in sorted((ROOT / "src/infer" / package).rglob("*.py"))
        for line, why in detours(path.read_text(encoding="utf-8"), 1, PAGE_DETOURS)
        if "noun again" in why
    ]


def test_modules_beside_the_packages_keep_the_rules() -> None:
    assert not [why for path in (ROOT / "src/infer").glob("*.py") for why in broken_in(path)]


@pytest.mark.parametrize("page", PROSE)
def test_pages_keep_the_rules(page: str) -> None:
    assert not broken_in_page((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", sorted(set(PROSE) - FIGURES))
def test_pages_have_short_sentences(page: str) -> None:
    assert not long_sentences((ROOT / page).read_text(encoding="utf-8"))


def test_a_long_sentence_is_found_and_a_list_of_files_is_not() -> None:
    words = "word " * LONGEST_SENTENCE
    assert long_sentences(f"Short. Too {words}(in all {words}) end.") == [f"Too {words} end."]
    assert not long_sentences(f"| {words} {words} |\n\n`a.py` (one) · {words}\n\n{words}")


def test_code_in_a_page_is_not_a_sentence() -> None:
    page = "Two.\n```text\nit is no sentence\n```\nThe error is `no room beside it`.\nIt is no error.\n"
    assert [line for line, _ in broken_in_page(page + "Those of a page.")] == [6, 7]


def test_every_rule_finds_what_it_forbids() -> None:
    bad = '''def f(x):
    """Whether so many are there, in the mean."""
    y = 1  # of the block tables
    return y  # it is no tensor beside it
'''
    assert [line for line, _ in broken_rules(bad)] == [2, 2, 2, 3, 4, 4]
    good = '''def f(x):
    """Returns the number of blocks, on average; there is no other."""
    return 1  # rows of the block tables
'''
    assert not list(broken_rules(good))


if __name__ == "__main__":
    print("\n".join(line for name in sys.argv[1:] for line in broken_in(Path(name))))
