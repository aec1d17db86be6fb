"""What the browser keeps: conversations, settings, the theme; and what can be done with a conversation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.browser.chatting import IS_IDLE, IS_READY, LAST_ANSWER, answer, ask
from tests.browser.fake_api import FakeApi

if TYPE_CHECKING:
    from tests.browser.chromium import Page

TITLES = "[...document.querySelectorAll('#chats .chat')].map((each) => each.textContent)"
SHOWN = "[...document.querySelectorAll('#messages > li > .text')].map((each) => each.innerText.trim())"
NUM_STORED = "Object.keys(localStorage).filter((key) => key.startsWith('infer.chat.')).length"


def reload(page: Page, url: str) -> None:
    """Load the page again, with what it kept."""
    page.open(url + "/")
    page.wait_for(IS_READY)


def sent(body: dict[str, Any]) -> list[str]:
    """The words of each message that was sent."""
    return [message["content"].strip() for message in body["messages"]]


def start_two(page: Page) -> None:
    """Hold two conversations; the second is open."""
    ask(page, "say one")
    answer(page)
    page.click("#new")
    ask(page, "say two")
    answer(page)


def test_a_conversation_survives_a_reload(page: Page, api: FakeApi, server: tuple[FakeApi, str]) -> None:
    ask(page, "think hard")
    answer(page)
    stats = page.text(LAST_ANSWER + " .stats")
    reload(page, server[1])
    assert page.evaluate(SHOWN) == ["think hard", "so yes"]
    assert page.text(LAST_ANSWER + " .stats") == stats
    ask(page, "say on")
    assert answer(page) == "on"
    assert sent(api.bodies[1]) == ["think hard", "so yes", "say on"]
    assert "stats" not in api.bodies[1]["messages"][1], "what only the page knows is not sent"
    assert page.complaints() == []


def test_what_came_before_a_reload_is_kept(page: Page, server: tuple[FakeApi, str]) -> None:
    ask(page, "pause one two")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one'")
    reload(page, server[1])
    assert page.evaluate(SHOWN) == ["pause one two", "one"]
    assert page.text(LAST_ANSWER + " .stats").endswith("broken off")
    assert page.evaluate(NUM_STORED) == 1


def test_an_open_call_survives_a_reload(page: Page, api: FakeApi, server: tuple[FakeApi, str]) -> None:
    ask(page, "call now {}")
    page.wait_for("document.querySelector('.result')")
    page.wait_for(IS_IDLE)
    reload(page, server[1])
    page.type(".result", "noon")
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelectorAll('#messages > li').length === 3")
    assert answer(page) == "it gave noon"
    reload(page, server[1])
    assert page.evaluate(
        "[document.querySelector('.result').value, document.querySelector('.result').readOnly]"
    ) == [
        "noon",
        True,
    ]


def test_conversations_are_listed_and_switched(page: Page, api: FakeApi) -> None:
    start_two(page)
    assert page.evaluate(TITLES) == ["say two", "say one"]
    page.click("#chats li:nth-child(2) .chat")
    assert page.evaluate(SHOWN) == ["say one", "one"]
    assert page.text("#chats [aria-current]") == "say one"
    ask(page, "say more")
    answer(page)
    assert sent(api.bodies[2]) == ["say one", "one", "say more"]
    assert page.evaluate(TITLES) == ["say one", "say two"], "the latest is first"


def test_switching_while_an_answer_runs_keeps_what_it_said(page: Page, api: FakeApi) -> None:
    ask(page, "say one")
    answer(page)
    page.click("#new")
    ask(page, "pause two three")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'two'")
    page.click("#chats li:nth-child(2) .chat")
    page.wait_for("document.querySelector('.stop').hidden")
    assert page.evaluate(SHOWN) == ["say one", "one"]
    assert api.hung_up.wait(10)
    page.click("#chats li:has(.chat[title^=pause]) .chat")
    assert page.evaluate(SHOWN) == ["pause two three", "two"]


def test_a_deleted_conversation_can_be_taken_back(page: Page, server: tuple[FakeApi, str]) -> None:
    start_two(page)
    page.click("#chats li:first-child .delete")
    assert page.evaluate(TITLES) == ["say one"]
    assert page.evaluate(SHOWN) == [], "it was the open one"
    assert page.evaluate("document.activeElement.textContent") == "Undo"
    page.press("Enter")
    page.wait_for(f"{TITLES}.length === 2")
    page.click("#chats li:first-child .chat")
    assert page.evaluate(SHOWN) == ["say two", "two"]
    page.click("#chats li:first-child .delete")
    reload(page, server[1])
    assert page.evaluate(TITLES) == ["say one"]


def test_a_conversation_deleted_while_it_is_answered_stays_deleted(page: Page) -> None:
    ask(page, "pause one two")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one'")
    page.click("#chats .delete")
    page.wait_for("document.querySelector('.stop').hidden")
    assert page.evaluate(f"[{TITLES}.length, {NUM_STORED}]") == [0, 0]


def test_the_last_answer_is_made_anew(page: Page, api: FakeApi) -> None:
    ask(page, "say one")
    answer(page)
    ask(page, "say two")
    answer(page)
    shown = "[...document.querySelectorAll('.again')].map((each) => each.hidden)"
    assert page.evaluate(shown) == [True, True, True, False]
    page.click(LAST_ANSWER + " .again")
    page.wait_for(IS_IDLE)
    assert sent(api.bodies[2]) == sent(api.bodies[1]) == ["say one", "one", "say two"]
    assert page.evaluate(SHOWN) == ["say one", "one", "say two", "two"]


def test_a_message_is_edited_and_answered_from_there(page: Page, api: FakeApi) -> None:
    ask(page, "say one")
    answer(page)
    ask(page, "say two")
    answer(page)
    page.click("#messages > li:first-child .edit")
    assert page.evaluate("document.activeElement.value") == "say one"
    page.press("Escape")
    assert page.evaluate("document.querySelector('.editor')") is None
    page.click("#messages > li:first-child .edit")
    page.type(".editor textarea", "refuse this")
    page.press("Enter")
    page.wait_for("!document.querySelector('#error').hidden")
    assert len(page.evaluate(SHOWN)) == 4, "a refusal changes nothing"
    page.type(".editor textarea", "say three")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#messages > li').length === 2")
    assert answer(page) == "three"
    assert sent(api.bodies[-1]) == ["say three"]
    assert page.evaluate(SHOWN) == ["say three", "three"]


def test_a_conversation_is_exported(page: Page, tmp_path: Path) -> None:
    page.command("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    ask(page, "say **hello**")
    answer(page)
    for button in ("#export-json", "#export-markdown"):
        page.click(button)
    as_json, as_markdown = tmp_path / "say-hello-.json", tmp_path / "say-hello-.md"
    give_up_at = time.monotonic() + 10
    # A download has another name until it is whole, so the final names say that both are there.
    while not (as_json.exists() and as_markdown.exists()):
        assert time.monotonic() < give_up_at, list(tmp_path.iterdir())
        time.sleep(0.05)
    exported = json.loads(as_json.read_text("utf-8"))
    assert exported["messages"] == [
        {"role": "user", "content": "say **hello**"},
        {"role": "assistant", "content": "**hello** "},
    ]
    text = as_markdown.read_text("utf-8")
    assert text == "# say **hello**\n\n**user**\n\nsay **hello**\n\n**assistant**\n\n**hello**\n"
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("#copy-markdown")
    assert page.evaluate("window.copied") == text
    assert page.complaints() == []


def test_full_storage_is_told_and_the_page_goes_on(page: Page) -> None:
    page.evaluate(
        """(Storage.prototype.setItem = () => {
            throw new DOMException("full", "QuotaExceededError");
        }, 0)"""
    )
    ask(page, "say one")
    assert answer(page) == "one"
    assert page.text("#notice").startswith("not saved: the browser's storage is full")
    ask(page, "say two")
    assert answer(page) == "two"
    assert page.evaluate(SHOWN) == ["say one", "one", "say two", "two"]


def test_damaged_storage_is_told_and_the_page_goes_on(page: Page, server: tuple[FakeApi, str]) -> None:
    ask(page, "say one")
    answer(page)
    page.evaluate(
        """Object.assign(localStorage, {
            "infer.chat.a": "{", "infer.chat.b": '{"messages": [1]}', "infer.chat.c": '{"messages": "x"}',
            "infer.settings": '{"temperature": {}, "stop": 7, "model": [], "chats": "x"}',
            "infer.theme": "<b>",
        }) && 0"""
    )
    reload(page, server[1])
    assert page.text("#notice").startswith("3 stored conversations cannot be read")
    assert page.evaluate(SHOWN) == ["say one", "one"]
    for _ in range(3):
        page.click("#chats li:last-child .delete")
    assert page.evaluate(TITLES) == ["say one"]
    page.evaluate("localStorage['infer.settings'] = '[['")
    reload(page, server[1])
    assert page.text("#notice") == "the stored settings cannot be read; the page begins with new ones"
    ask(page, "say two")
    assert answer(page) == "two"
    assert page.complaints() == []


def test_tabs_do_not_overwrite_each_other(page: Page) -> None:
    ask(page, "say one")
    answer(page)
    page.evaluate(
        """(() => { // what another tab does that goes on with the same conversation
            const key = `infer.chat.${sessionStorage["infer.open"]}`;
            const chat = JSON.parse(localStorage[key]);
            chat.messages.push({ role: "user", content: "from elsewhere" });
            localStorage[key] = JSON.stringify({ ...chat, revision: "other" });
        })()"""
    )
    ask(page, "say two")
    answer(page)
    stored = page.evaluate(
        """Object.keys(localStorage).filter((key) => key.startsWith("infer.chat."))
            .map((key) => JSON.parse(localStorage[key]).messages.map(({ content }) => content.trim()))"""
    )
    assert sorted(stored) == [
        ["say one", "one", "from elsewhere"],
        ["say one", "one", "say two", "two"],
    ]


def test_a_change_of_another_tab_is_shown(page: Page) -> None:
    ask(page, "say one")
    answer(page)
    page.evaluate(
        """(() => {
            const key = `infer.chat.${sessionStorage["infer.open"]}`;
            const chat = JSON.parse(localStorage[key]);
            chat.messages.push({ role: "user", content: "from elsewhere" });
            localStorage[key] = JSON.stringify({ ...chat, revision: "other" });
            dispatchEvent(new StorageEvent("storage", { key }));
        })()"""
    )
    assert page.evaluate(SHOWN) == ["say one", "one", "from elsewhere"]
    assert page.text(LAST_ANSWER + " .again") == "Answer"


def test_settings_and_theme_survive_a_reload(page: Page, api: FakeApi, server: tuple[FakeApi, str]) -> None:
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(colour)
    page.type("[name=temperature]", "0.5")
    page.type("#system", "be brief")
    page.evaluate(
        """for (const [id, value] of [["theme", "dark"], ["model", "tiny-qwen3"]]) {
            document.getElementById(id).value = value;
            document.getElementById(id).dispatchEvent(new Event("change", { bubbles: true }));
        }"""
    )
    page.click("#chats-toggle")
    dark = page.evaluate(colour)
    assert dark != light
    reload(page, server[1])
    assert page.evaluate(colour) == dark
    assert page.evaluate("document.querySelector('#theme').value") == "dark"
    assert page.evaluate("document.querySelector('#chats-panel').hidden")
    ask(page, "say yes")
    answer(page)
    assert (api.bodies[0]["temperature"], api.bodies[0]["model"]) == (0.5, "tiny-qwen3")
    assert sent(api.bodies[0])[0] == "be brief"


def test_empty_fields_show_the_defaults_of_the_model(page: Page) -> None:
    shown = """["temperature", "top_p", "top_k", "max_tokens"]
        .map((name) => document.querySelector(`[name=${name}]`).placeholder)"""
    assert page.evaluate(shown) == ["0.7", "1", "20", "up to 4096"]
    page.evaluate(
        """document.querySelector("#model").value = "tiny-qwen3";
        document.querySelector("#model").dispatchEvent(new Event("change"))"""
    )
    assert page.evaluate(shown) == ["1", "1", "off", "up to 64"]


def test_the_context_that_is_used_is_shown(page: Page) -> None:
    assert page.evaluate("document.querySelector('#used').hidden")
    ask(page, "say one two three")
    answer(page)
    assert page.text("#used").strip() == "8 of 4,096 tokens"
    assert page.evaluate("document.querySelector('meter').value") == 8
    page.click("#new")
    assert page.evaluate("document.querySelector('#used').hidden")


def test_a_call_is_forced_once_per_question(page: Page, api: FakeApi) -> None:
    page.click("#structure summary")
    page.click("[data-for=tools]")
    page.evaluate("document.querySelector('#tool-choice').value = 'required'")
    ask(page, "call now {}")
    page.wait_for("document.querySelector('.result')")
    page.wait_for(IS_IDLE)
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelectorAll('#messages > li').length === 3")
    answer(page)
    ask(page, "say thanks")
    answer(page)
    assert [body["tool_choice"] for body in api.bodies] == ["required", "auto", "required"]


def test_a_stream_that_begins_early_is_waited_for(page: Page, api: FakeApi) -> None:
    ask(page, "wait one two")
    page.wait_for(
        f"document.querySelector('{LAST_ANSWER} .stats').innerText === 'waiting for the first token'"
    )
    api.open_gate()
    assert answer(page) == "one two"
    assert page.text(LAST_ANSWER + " .stats").endswith("stop")


def test_an_error_within_a_stream_is_shown_and_the_question_comes_back(page: Page, api: FakeApi) -> None:
    ask(page, "fail the engine is busy")
    api.open_gate()
    page.wait_for("!document.querySelector('#error').hidden")
    assert page.text("#error") == "the engine is busy"
    assert page.evaluate("document.querySelector('#question').value") == "fail the engine is busy"
    assert page.evaluate(f"[{SHOWN}.length, {TITLES}.length]") == [0, 0]
    assert page.complaints() == []


def test_a_key_that_is_wanted_later_is_asked_for(page: Page, api: FakeApi) -> None:
    api.wanted_key = "secret"
    ask(page, "say hello")
    page.wait_for("!document.querySelector('#key-error').hidden")
    assert page.evaluate("document.activeElement.id") == "key"
    assert page.evaluate("document.querySelector('#question').value") == "say hello"
