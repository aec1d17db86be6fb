"""What every test of the page does: ask, and read the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.browser.chromium import Page

LAST_ANSWER = "#messages > li:last-child"
IS_IDLE = "!document.querySelector('[aria-busy=true]')"
IS_READY = "!document.querySelector('#model').disabled"


def ask(page: Page, question: str) -> None:
    """Send a message."""
    page.type("#question", question)
    page.press("Enter")


def answer(page: Page) -> str:
    """The whole last answer, as it is shown."""
    page.wait_for(IS_IDLE)
    return page.text(LAST_ANSWER + " .text").strip()
