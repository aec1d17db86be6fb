"""Answers as Markdown: what is shown, that nothing a model writes can run, and that no text takes long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.browser.chatting import LAST_ANSWER, answer, ask
from tests.browser.fake_api import FakeApi

if TYPE_CHECKING:
    from tests.browser.chromium import Page

SIZE = 100_000
HOSTILE = {
    "markup": "<img src=x onerror=alert(1)><script>alert(1)</script><svg/onload=alert(1)>\n<iframe srcdoc=x>",
    "script link": "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\tscript:a) <javascript:a>",
    "data link": "[a](data:text/html,<script>alert(1)</script>) ![b](data:image/svg+xml,x) [c](vbscript:x)",
    "other links": '[a](/v1/models) [b](//evil.example) [c](file:///etc/x) [d](http://x" onclick="a)',
    "nested fences": "````md\n```js\nalert(1)\n```\n````\n~~~\n```\n~~~\n" * 50,
    "wide table": "|a" * 1000 + "|\n" + "|-" * 1000 + "|\n" + "|\n" * 5000,
    "wider table": "|" * SIZE + "\n" + "|-" * (SIZE // 2),
    "deep list": "\n".join(" " * depth + "- a" for depth in range(400)),
    "heading": "# " + "#" * SIZE + "x",
    "rule": "---" + " " * SIZE + "x",
    "odd backticks": " ".join("`" * length for length in range(1, 440)),
    "emphasis in emphasis": "*a **b " * (SIZE // 7) + "** c* " * (SIZE // 7),
    "open and close": "*a _b " * (SIZE // 6) + "c_ d* " * (SIZE // 6),
    "spaced code": "` " + "a" * SIZE + "`",
} | {
    f"many {unit!r}": unit * (SIZE // len(unit))
    for unit in (
        *(
            "*",
            "_",
            "[",
            "]",
            "`",
            ">",
            "<",
            "#",
            "|",
            "-",
            "~",
            "\\",
            "\n",
            "> ",
            "- ",
            "1. ",
            "*a",
            "_a ",
            "`a",
        ),
        *(
            "[a](",
            "![",
            "http://",
            "<http://",
            "https://a.b) ",
            "[a](http://a) ",
            "```\n",
            "> - ",
            "- a\nb\n",
            "a|b\n",
        ),
    )
}

# Renders a text whole, and tells what is wrong with what came out.
CHECK = """(async (texts) => {
    const { MarkdownView } = await import("/ui/markdown.js");
    const place = document.querySelector("#messages").appendChild(document.createElement("li"));
    const allowed = {
        A: ["href", "title", "target", "rel"], OL: ["start"], DIV: ["class", "tabindex"], PRE: ["tabindex"],
        BUTTON: ["type", "class", "aria-label"], TH: ["class"], TD: ["class"],
    };
    const tags = "P H3 H4 H5 H6 BLOCKQUOTE HR UL LI TABLE THEAD TBODY TR EM STRONG DEL CODE SPAN".split(" ");
    return Object.entries(texts).map(([name, text]) => {
        place.replaceChildren();
        const start = performance.now();
        new MarkdownView(place).show(text);
        place.offsetHeight; // the layout is part of the price
        const took = performance.now() - start;
        const wrong = [...place.querySelectorAll("*")].filter((each) =>
            !(each.tagName in allowed || tags.includes(each.tagName)) ||
            [...each.attributes].some(({ name }) => !(allowed[each.tagName] ?? []).includes(name)) ||
            (each.tagName === "A" &&
                !(/^https?:$/.test(each.protocol) && each.rel === "noopener noreferrer")));
        place.replaceChildren();
        return [name, took, wrong.map((each) => each.outerHTML.slice(0, 200))];
    });
})"""

# Shows random texts at once and in pieces: both must come to the same.
GROW = """(async (alphabet, rounds) => {
    const { MarkdownView } = await import("/ui/markdown.js");
    let state = 12345;
    const random = (below) => ((state = (state * 1103515245 + 12345) % 2147483648) >> 8) % below;
    const differing = [];
    for (let round = 0; round < rounds; round += 1) {
        const text = Array.from({ length: 1 + random(60) }, () => alphabet[random(alphabet.length)]).join("");
        const whole = document.createElement("div");
        const grown = document.createElement("div");
        new MarkdownView(whole).show(text);
        const view = new MarkdownView(grown);
        for (let end = 0; end < text.length; end += 1 + random(6)) view.show(text.slice(0, end));
        view.show(text);
        whole.normalize();
        grown.normalize();
        if (!whole.isEqualNode(grown)) differing.push(text);
    }
    return differing;
})"""
ALPHABET = [
    *(
        "a",
        "b c",
        " ",
        "  ",
        "\n",
        "\n",
        "\n\n",
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "```",
        "~~~\n",
        "# ",
        "> ",
        "- ",
        "-",
    ),
    *(
        "1. ",
        "2) ",
        "|",
        "---",
        "|-|-|\n",
        "a|b\n",
        "[",
        "](https://a.b)",
        "](x)",
        "<br>",
        "\\",
        "~~",
        "https://c.d",
        "\t",
    ),
]


def test_an_answer_is_shown_as_it_is_meant(page: Page) -> None:
    ask(
        page,
        "say # Title\n\n**Bold** and *soft* `x < y` in [a page](https://example.org/a_(b)).\n"
        "second line\n\n2. two\n   - inner\n3. three\n\n> said\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```python\nif a:\n    b()\n```",
    )
    answer(page)
    text = f"document.querySelector('{LAST_ANSWER} .text')"
    tags = page.evaluate(f"[...{text}.children].map((each) => each.tagName)")
    assert tags == ["H3", "P", "OL", "BLOCKQUOTE", "DIV", "DIV"]
    shown = {
        selector: page.evaluate(f"{text}.querySelector('{selector}').textContent")
        for selector in ("strong", "em", "p code", "a", "ol ul li", "blockquote p", "td.right", "pre code")
    }
    assert shown == {
        "strong": "Bold",
        "em": "soft",
        "p code": "x < y",
        "a": "a page",
        "ol ul li": "inner",
        "blockquote p": "said",
        "td.right": "2",
        "pre code": "if a:\n    b()",
    }
    assert page.evaluate(f"{text}.querySelector('ol').start") == 2
    assert page.text(LAST_ANSWER + " .code-head span") == "python"
    link = f"{text}.querySelector('a')"
    assert page.evaluate(f"[{link}.href, {link}.target, {link}.rel]") == [
        "https://example.org/a_(b)",
        "_blank",
        "noopener noreferrer",
    ]
    assert page.complaints() == []


def test_code_and_answers_are_copied_as_they_were_written(page: Page) -> None:
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    ask(page, "say **x**\n\n```\na  b\n```")
    answer(page)
    page.click(LAST_ANSWER + " .copy-code")
    assert page.evaluate("window.copied") == "a  b"
    page.click(LAST_ANSWER + " .copy")
    assert page.evaluate("window.copied").strip() == "**x**\n\n```\na  b\n```"


def test_a_fence_that_is_still_open_is_code_and_finished_blocks_stay(page: Page, api: FakeApi) -> None:
    ask(page, "pause first\n\n```js\nlet\n a = 1;\n```\n\nlast")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} code')?.textContent.trim() === 'let'")
    page.evaluate("[window.before] = document.querySelectorAll('.assistant .text > *')")
    page.evaluate("window.block = document.querySelector('.assistant .code-block')")
    api.open_gate()
    answer(page)
    assert page.evaluate("window.before.isConnected && window.block.isConnected"), "neither was made anew"
    assert page.evaluate("window.block.querySelector('code').textContent") == "let\n a = 1;"
    assert page.text(LAST_ANSWER + " .text > p:last-child") == "last"


def test_no_text_becomes_markup_or_takes_long(page: Page) -> None:
    for name, took, wrong in page.evaluate(f"{CHECK}({json.dumps(HOSTILE)})"):
        assert not wrong, name
        assert took < 5_000, f"{name} took {took:.0f} ms"
    assert page.complaints() == []


def test_a_text_that_grows_ends_as_one_shown_at_once(page: Page) -> None:
    assert page.evaluate(f"{GROW}({json.dumps(ALPHABET)}, 1500)") == []


@pytest.mark.parametrize("unit", ["word *soft* ", "|a|b|\\n", "- item\\n", "`x` "])
def test_a_long_answer_is_not_drawn_for_every_token(page: Page, unit: str) -> None:
    ask(page, f"flood 4000 {unit}")
    answer(page)
    text = page.evaluate(f"document.querySelector('{LAST_ANSWER} .text').textContent")
    assert text.count(unit.strip("- `|")[:1]) >= 4000
    assert page.evaluate("performance.now()") < 20_000
