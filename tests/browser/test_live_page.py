"""The page and the server together, with a tiny model in between: what is shown is what the engine said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.browser.chatting import IS_IDLE, IS_READY, LAST_ANSWER, ask
from tests.support.actor import Actor, read_encoder, serve_actor
from tests.support.live_server import LiveServer, serve_model

if TYPE_CHECKING:
    from tests.browser.chromium import Page

KEY = "a-key"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    with serve_model(directory, api_key=(KEY,)) as server:
        yield server


@pytest.fixture
def page(browser: Page, live: LiveServer) -> Page:
    browser.forget(live.url)
    browser.open(f"{live.url}/ui")
    browser.wait_for("!document.querySelector('#key-error').hidden")  # the page needs none, the models do
    browser.events.clear()
    browser.type("#key", KEY)
    browser.press("Enter")
    browser.wait_for(IS_READY)
    browser.type("[name=temperature]", "0")
    return browser


def num_running(live: LiveServer) -> float:
    answer = httpx.get(f"{live.url}/metrics", headers={"authorization": f"Bearer {KEY}"})
    values = [line.split()[-1] for line in answer.text.splitlines() if "num_requests_running{" in line]
    assert values, answer.text[:2000]
    return sum(map(float, values))


def test_a_conversation_is_answered_as_offline(page: Page, live: LiveServer) -> None:
    page.type("[name=max_tokens]", "10")
    params = SamplingParams(temperature=0.0, max_tokens=10)
    conversation: list[dict[str, str]] = []
    for question in ("Where is the river?", "Who are you?"):
        conversation.append({"role": "user", "content": question})
        expected = live.oracle.chat(conversation, params)[0].text
        conversation.append({"role": "assistant", "content": expected})
        ask(page, question)
        page.wait_for(IS_IDLE)
        stored = "JSON.parse(localStorage['infer.chat.' + sessionStorage['infer.open']]).messages.at(-1)"
        assert page.evaluate(stored)["content"] == expected
    assert page.text(LAST_ANSWER + " .stats").startswith("10 tokens · first after ")
    assert page.complaints() == []
    assert [url for url in page.requested() if not url.startswith(live.url)] == []


def test_the_model_s_context_is_the_limit_and_shown(page: Page, live: LiveServer) -> None:
    assert page.evaluate("document.querySelector('[name=max_tokens]').placeholder") == "up to 256"
    page.type("[name=stop]", " ")
    ask(page, "Where is the river?")
    page.wait_for(IS_IDLE)
    assert page.text("#used").strip().endswith(" of 256 tokens")
    page.evaluate("document.querySelector('#completion-tab').click()")
    page.type("#prompt", "Once there was")
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelector('#continuation .stats')?.innerText.match(/(stop|length)$/)")
    assert page.complaints() == []


def test_stop_frees_the_engine(page: Page, live: LiveServer) -> None:
    page.type("[name=max_tokens]", "200")
    page.evaluate("document.querySelector('#completion-tab').click()")
    page.type("#prompt", "Once there was")
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelector('#continuation .text')?.textContent")
    page.press("Escape")
    page.wait_for(IS_IDLE)
    assert page.text("#continuation .stats").endswith("stopped")
    give_up_at = time.monotonic() + 10
    while num_running(live):
        assert time.monotonic() < give_up_at, "the request still runs"
        time.sleep(0.02)
    assert page.complaints() == []


def test_what_the_server_refuses_is_shown_in_its_words(page: Page) -> None:
    page.type("[name=max_tokens]", "100000")
    ask(page, "Where is the river?")
    page.wait_for("!document.querySelector('#error').hidden")
    assert "this model's maximum context length is 256 tokens" in page.text("#error")


def play(prompt: str) -> str:
    """Look at the weather, then say what it was."""
    if "<tool_response>" in prompt:
        return "It is warm." if "18 degrees" in prompt else "Nobody knows."
    return (
        "<think>\nA tool knows.\n</think>\n\nLet me look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )


def test_a_call_of_a_model_is_answered_by_hand(browser: Page, tmp_path: Path) -> None:
    encoder = read_encoder("qwen3", tmp_path / "qwen3")
    with serve_actor(Actor(encoder, play), encoder) as url:
        browser.open(f"{url}/")
        browser.wait_for(IS_READY)
        browser.evaluate("document.querySelector('[data-for=tools]').click()")
        ask(browser, "How is Rome?")
        browser.wait_for("document.querySelector('.result')")
        browser.wait_for(IS_IDLE)
        assert browser.text(LAST_ANSWER + " .text").strip() == "Let me look."
        assert browser.text(".call .name") == "get_weather"
        assert browser.text(".call .arguments") == '{\n  "city": "Rome"\n}'
        thought = browser.evaluate("document.querySelector('.assistant .thought').textContent")
        assert thought.strip() == "A tool knows."
        assert browser.text(LAST_ANSWER + " .stats").endswith("tool_calls")
        browser.type(".result", "18 degrees")
        browser.press("Enter", ctrl=True)
        browser.wait_for("document.querySelectorAll('.assistant').length === 2")
        browser.wait_for(IS_IDLE)
        assert browser.text(LAST_ANSWER + " .text").strip() == "It is warm."
        assert browser.complaints() == []
