"""The page in a real browser: what a person does, and what they see.

`fake_api` plays the server, so that a test can stop the stream in
the middle and look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.fake_api import FakeApi
from tests.support.live_server import serve

if TYPE_CHECKING:
    from tests.browser.chromium import Page

LAST_ANSWER = "#messages li:last-child"
IS_IDLE = "!document.querySelector('[aria-busy=true]')"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeApi, str]]:
    api = FakeApi()
    with serve(api.app) as url:
        yield api, url


@pytest.fixture
def api(server: tuple[FakeApi, str]) -> FakeApi:
    server[0].reset()
    return server[0]


@pytest.fixture
def page(browser: Page, api: FakeApi, server: tuple[FakeApi, str]) -> Page:
    browser.open(server[1] + "/")
    browser.wait_for("!document.querySelector('#model').disabled")
    return browser


def ask(page: Page, question: str) -> None:
    page.type("#question", question)
    page.press("Enter")


def answer(page: Page) -> str:
    page.wait_for(IS_IDLE)
    return page.text(LAST_ANSWER + " .text").strip()


def test_a_chat_of_two_turns_sends_the_whole_conversation(page: Page, api: FakeApi) -> None:
    ask(page, "say good morning")
    assert answer(page) == "good morning"
    ask(page, "say good night")
    assert answer(page) == "good night"

    said = [(message["role"], message["content"].strip()) for message in api.bodies[1]["messages"]]
    assert said == [("user", "say good morning"), ("assistant", "good morning"), ("user", "say good night")]
    assert api.bodies[1]["model"] == "tiny-llama"
    assert api.bodies[1]["stream_options"] == {"include_usage": True}
    assert page.complaints() == []


def test_tokens_are_shown_as_they_come(page: Page, api: FakeApi) -> None:
    ask(page, "pause one two three")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one '")
    assert page.evaluate("document.querySelector('.stop').hidden") is False  # it is still running
    api.open_gate()
    assert answer(page) == "one two three"
    assert page.complaints() == []


def test_the_figures_of_an_answer_are_shown(page: Page, api: FakeApi) -> None:
    ask(page, "pause one two three")
    api.open_gate()
    answer(page)
    stats = page.text(LAST_ANSWER + " .stats")
    assert stats.startswith("3 tokens · first after ")
    assert " tokens/s · " in stats
    assert stats.endswith("3 of 5 prompt tokens cached · stop")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_request_and_keeps_what_was_said(page: Page, api: FakeApi, how: str) -> None:
    ask(page, "pause one two three")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one '")
    if how == "button":
        page.click("#chat .stop")
    else:
        page.press("Escape")
    assert answer(page) == "one"
    assert page.text(LAST_ANSWER + " .stats").endswith("stopped")
    assert page.evaluate("document.querySelector('#error').hidden")
    assert api.hung_up.wait(10), "the server was not told"
    assert page.complaints() == []


def test_a_refusal_is_shown_in_words_and_the_question_comes_back(page: Page) -> None:
    ask(page, "refuse this")
    page.wait_for("!document.querySelector('#error').hidden")
    assert page.text("#error") == "temperature must be in 0..2, got 7"
    page.wait_for("document.querySelectorAll('#messages li').length === 0")
    assert page.evaluate("document.querySelector('#question').value") == "refuse this"

    ask(page, "say sorry")  # the next question works, and takes the error away
    assert answer(page) == "sorry"
    assert page.evaluate("document.querySelector('#error').hidden")


@pytest.mark.parametrize(
    ("question", "message"),
    [("break half", "the engine stopped"), ("cut half", "the connection ended before the answer did")],
)
def test_a_broken_stream_is_told_and_its_text_kept(page: Page, question: str, message: str) -> None:
    ask(page, question)
    page.wait_for("!document.querySelector('#error').hidden")
    assert page.text("#error") == message
    assert answer(page) == "half"
    assert page.text(LAST_ANSWER + " .stats").endswith("broken off")
    assert page.complaints() == []


def test_what_the_model_writes_stays_text(page: Page) -> None:
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    ask(page, f"say {markup}")
    assert answer(page) == markup
    assert page.evaluate("document.querySelectorAll('.text *').length") == 0
    assert page.complaints() == []


def test_parameters_are_sent_only_where_filled_in(page: Page, api: FakeApi) -> None:
    page.type("[name=temperature]", "0.5")
    page.type("[name=seed]", "7")
    page.type("[name=stop]", "END\n\\n\\n")
    page.type("#system", "be brief")
    ask(page, "say yes")
    answer(page)
    body = api.bodies[0]
    assert (body["temperature"], body["seed"], body["stop"]) == (0.5, 7, ["END", "\n\n"])
    assert body["max_tokens"] == 256
    assert not {"top_p", "top_k", "min_p"} & set(body)
    assert body["messages"][0] == {"role": "system", "content": "be brief"}


def test_a_value_out_of_range_is_pointed_out_and_not_sent(page: Page, api: FakeApi) -> None:
    page.type("[name=top_p]", "2")
    ask(page, "say yes")
    assert page.evaluate("document.activeElement.name") == "top_p"
    assert api.bodies == []


def test_a_completion_goes_on_from_the_prompt(page: Page, api: FakeApi) -> None:
    page.click("#completion-tab")
    page.type("#prompt", "say once upon a time")
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelector('#continuation .stats')?.innerText.endsWith('stop')")
    assert page.text("#continuation .text").strip() == "once upon a time"
    assert api.bodies[0]["prompt"] == "say once upon a time"
    assert "messages" not in api.bodies[0]
    assert page.complaints() == []


def test_the_tabs_follow_the_arrow_keys(page: Page) -> None:
    page.evaluate("document.querySelector('#chat-tab').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "completion-tab"
    assert page.evaluate("document.querySelector('#chat').hidden")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('#chat').hidden") is False


def test_a_new_chat_forgets_the_old_one_even_while_it_runs(page: Page, api: FakeApi) -> None:
    ask(page, "pause one two")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one '")
    page.click("#reset")
    page.wait_for("document.querySelectorAll('#messages li').length === 0")
    page.wait_for("document.querySelector('.stop').hidden")
    ask(page, "say hello")
    assert answer(page) == "hello"
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["say hello"]
    assert page.complaints() == []


def test_a_key_is_asked_for_sent_and_not_stored(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str]
) -> None:
    api.wanted_key = "secret"
    browser.open(server[1] + "/")
    browser.wait_for("!document.querySelector('#error').hidden")
    assert "API key" in browser.text("#error")
    browser.type("#key", "secret")
    browser.press("Enter")
    browser.wait_for("!document.querySelector('#model').disabled")
    assert browser.evaluate("document.querySelector('#error').hidden")
    assert api.keys[-1] == "Bearer secret"
    stored = "localStorage.length + sessionStorage.length + document.cookie.length"
    assert browser.evaluate(stored) == 0
    assert "secret" not in browser.evaluate("location.href")


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], width: int
) -> None:
    browser.open(server[1] + "/", width=width, height=700)
    browser.wait_for("!document.querySelector('#model').disabled")
    ask(browser, "say " + "long" * 100)
    answer(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.documentElement.scrollHeight") <= 700  # only the conversation scrolls


def test_every_field_and_button_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, textarea, select, button")]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("path", ["/", "/ui/"])
def test_the_page_asks_nobody_but_its_server(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], path: str
) -> None:
    browser.open(server[1] + path)
    browser.wait_for("!document.querySelector('#model').disabled")
    ask(browser, "say hello")
    answer(browser)
    asked = browser.requested()
    assert len(asked) >= 6  # the page, its style, two scripts, the models, the chat
    assert [url for url in asked if not url.startswith(server[1])] == []
    assert browser.complaints() == []
