"""What axe-core says about the page, in its states and themes, and what only a keyboard can show.

axe-core is not part of this repository. Put `axe.min.js` somewhere and name it: AXE_CORE=/path/axe.min.js.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chatting import IS_IDLE, IS_READY, answer, ask
from tests.browser.fake_api import FakeApi
from tests.browser.test_live_view import ADMIN_KEY, sight

if TYPE_CHECKING:
    from tests.browser.chromium import Page

AXE = os.environ.get("AXE_CORE", "")
RICH = (
    "say # Title\n\nA **bold** `word` and [a link](https://example.org/).\n\n- one\n  1. two\n\n> quoted\n\n"
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('" + "long" * 60 + "')\n```"
)


def run_axe(page: Page) -> list[str]:
    """The serious and critical findings, each with the elements it is about."""
    page.evaluate(Path(AXE).read_text(encoding="utf-8") + "; 0")
    result = page.evaluate(
        """axe.run().then(({ violations }) => violations
            .filter(({ impact }) => impact === "serious" || impact === "critical")
            .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(", ")}`))"""
    )
    return list(result)


@pytest.mark.skipif(not AXE, reason="AXE_CORE does not name an axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_nothing_serious(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], scheme: str, width: int
) -> None:
    browser.open(server[1] + "/", width=width, height=850, scheme=scheme)
    browser.wait_for(IS_READY)
    found = {"empty": run_axe(browser)}
    ask(browser, "think of it")
    answer(browser)
    ask(browser, RICH)
    answer(browser)
    found["conversation"] = run_axe(browser)
    browser.evaluate("document.querySelectorAll('.edit')[0].click()")
    found["editing"] = run_axe(browser)
    browser.evaluate("document.querySelector('.cancel').click()")
    ask(browser, "pause now {}")
    browser.wait_for("document.querySelector('[aria-busy=true]')")
    found["streaming"] = run_axe(browser)
    api.open_gate()
    answer(browser)
    ask(browser, "refuse this")
    browser.wait_for("!document.querySelector('#error').hidden")
    found["refused"] = run_axe(browser)
    ask(browser, "call now {}")
    browser.wait_for("document.querySelector('.result')")
    browser.wait_for(IS_IDLE)
    found["call"] = run_axe(browser)
    for panel in ("settings", "chats-panel"):
        browser.evaluate(
            f"""document.querySelectorAll('details').forEach((details) => (details.open = true));
            if (document.querySelector('#{panel}').hidden)
                document.querySelector('[aria-controls={panel}]').click()"""
        )
        found[panel] = run_axe(browser)
    browser.evaluate("document.querySelector('.delete').click()")
    found["deleted"] = run_axe(browser)
    browser.evaluate("document.querySelector('#completion-tab').click()")
    found["completion"] = run_axe(browser)
    assert {state: findings for state, findings in found.items() if findings} == {}


@pytest.mark.skipif(not AXE, reason="AXE_CORE does not name an axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_nothing_serious_in_the_live_view(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], scheme: str, width: int
) -> None:
    api.admin_key = ADMIN_KEY
    api.stories["req-a"] = "req-a came in at step 1"
    api.sights.append(sight(models={"tiny": 2, "large": 1}))
    browser.open(server[1] + "/", width=width, height=850, scheme=scheme)
    browser.wait_for(IS_READY)
    browser.click("#live-tab")
    browser.wait_for("!document.querySelector('#live-key-form').hidden")
    found = {"key": run_axe(browser)}
    browser.type("#live-key", ADMIN_KEY)
    browser.press("Enter")
    browser.wait_for("!document.querySelector('#live-body').hidden")
    found["drawn"] = run_axe(browser)
    browser.evaluate("document.querySelector('#live-requests button').click()")
    browser.wait_for("document.querySelector('#live-story-text').innerText.includes('step 1')")
    found["story"] = run_axe(browser)
    browser.evaluate("document.querySelector('#live-pause').click()")
    found["paused"] = run_axe(browser)
    assert {state: findings for state, findings in found.items() if findings} == {}


def test_a_panel_on_a_phone_hides_the_page_and_escape_closes_it(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str]
) -> None:
    browser.open(server[1] + "/", width=390, height=844)
    browser.wait_for(IS_READY)
    browser.click("#settings-toggle")
    visibility = "getComputedStyle(document.querySelector('main')).visibility"
    assert browser.evaluate(visibility) == "hidden"
    browser.evaluate("document.querySelector('#system').focus()")
    browser.press("Escape")
    assert browser.evaluate(visibility) == "visible"
    assert browser.evaluate("document.activeElement.id") == "settings-toggle"


def test_every_stop_of_the_tab_key_shows_where_it_is(page: Page) -> None:
    ask(page, RICH)
    answer(page)
    page.evaluate("document.querySelector('#question').blur()")
    seen: list[list[str]] = []
    for _ in range(60):
        page.press("Tab")
        place = page.evaluate(
            """(() => {
                const element = document.activeElement;
                const hull = element.matches("textarea") && element.closest(".composer") || element;
                return [element.id || element.className || element.name, getComputedStyle(hull).outlineStyle];
            })()"""
        )
        if place in seen and place[0] == seen[0][0]:
            break
        seen.append(place)
    names = [name for name, _ in seen]
    assert {"question", "model", "new", "settings-toggle", "chat", "icon delete", "copy-code"} <= set(names)
    assert [name for name, style in seen if style == "none" and name] == []
