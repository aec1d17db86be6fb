"""The page in a real browser: what a person does, and what they see.

`fake_api` plays the server, so that a test can stop the stream in
the middle and look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.chatting import IS_IDLE, IS_READY, LAST_ANSWER, answer, ask
from tests.browser.fake_api import FakeApi

if TYPE_CHECKING:
    from tests.browser.chromium import Page


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
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one'")
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
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one'")
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
    page.wait_for("document.querySelectorAll('#messages > li').length === 0")
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
    inside = "[...document.querySelectorAll('.text *')].map((each) => each.tagName)"
    assert page.evaluate(inside) == ["P"]
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
    assert not {"max_tokens", "top_p", "top_k", "min_p"} & set(body)
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
    assert api.bodies[0]["max_tokens"] == 4096 - 5  # the API's own default would be 16
    assert page.complaints() == []


def test_the_tabs_follow_the_arrow_keys(page: Page) -> None:
    page.evaluate("document.querySelector('#chat-tab').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "completion-tab"
    assert page.evaluate("document.querySelector('#chat').hidden")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('#chat').hidden") is False


def test_a_new_chat_leaves_the_old_one_even_while_it_runs(page: Page, api: FakeApi) -> None:
    ask(page, "pause one two")
    page.wait_for(f"document.querySelector('{LAST_ANSWER} .text').textContent === 'one'")
    page.click("#new")
    page.wait_for("document.querySelectorAll('#messages > li').length === 0")
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
    browser.wait_for("!document.querySelector('#key-error').hidden")
    assert browser.text("#key-error") == "This server asks for an API key. Enter it here."
    assert browser.evaluate("document.activeElement.id") == "key"
    assert browser.evaluate("document.querySelector('#error').hidden"), "one message is enough"
    browser.type("#key", "wrong")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#key-error').innerText.includes('does not accept')")
    browser.type("#key", "secret")
    browser.press("Enter")
    browser.wait_for(IS_READY)
    assert browser.evaluate("document.querySelector('#key-error').hidden")
    assert api.keys[-1] == "Bearer secret"
    ask(browser, "say hello")
    answer(browser)
    stored = "JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie"
    assert "hello" in browser.evaluate(stored)
    assert "secret" not in browser.evaluate(stored)
    assert "secret" not in browser.evaluate("location.href")


WEATHER = '[{"name": "get_weather", "parameters": {"type": "object"}}]'
ASK = 'call get_weather {"city":"Bern","days":[1,2]}; now {}'


def write_json(page: Page, field: str, text: str) -> None:
    page.evaluate(
        "document.querySelector('#settings').hidden = !(document.querySelector('#structure').open = true)"
    )
    page.type(field, text)


def test_calls_are_shown_and_their_results_typed_in(page: Page, api: FakeApi) -> None:
    write_json(page, "#tools", WEATHER)
    page.evaluate("document.querySelector('#tool-choice').value = 'required'")
    ask(page, ASK)
    page.wait_for("document.querySelectorAll('.result').length === 2")
    page.wait_for(IS_IDLE)
    body = api.bodies[0]
    assert body["tools"] == [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    ]
    assert body["tool_choice"] == "required"
    shown = page.text(".call")
    assert "get_weather" in shown
    assert '{\n  "city": "Bern",\n  "days": [\n    1,\n    2\n  ]\n}' in shown
    assert "Result of get_weather" in shown
    assert page.evaluate("document.activeElement.className") == "result code", "ready to be typed into"
    assert page.text(LAST_ANSWER + " .stats").endswith("tool_calls")

    page.command("Input.insertText", text="18 degrees")
    page.press("Enter", ctrl=True)
    page.wait_for("document.querySelectorAll('.assistant').length === 2")
    assert answer(page) == "it gave"
    asked, *results = api.bodies[1]["messages"][1:]
    assert asked["role"] == "assistant"
    assert [call["id"] for call in asked["tool_calls"]] == ["call_0", "call_1"]
    assert [call["function"]["name"] for call in asked["tool_calls"]] == ["get_weather", "now"]
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"city":"Bern","days":[1,2]}'
    assert results == [
        {"role": "tool", "tool_call_id": "call_0", "content": "18 degrees"},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    ]
    assert page.evaluate("document.querySelectorAll('.result:not([readonly])').length") == 0
    assert page.complaints() == []


def test_a_question_takes_open_results_along_and_a_refusal_gives_them_back(page: Page, api: FakeApi) -> None:
    write_json(page, "#tools", WEATHER)
    ask(page, "call now {}")
    page.wait_for("document.querySelector('.result')")
    page.wait_for(IS_IDLE)
    page.type(".result", "noon")
    ask(page, "refuse this")
    page.wait_for("!document.querySelector('#error').hidden")
    assert page.evaluate("document.querySelector('.result').readOnly") is False
    assert page.evaluate("document.querySelector('#question').value") == "refuse this"
    ask(page, "say thanks")
    assert answer(page) == "thanks"
    roles = [message["role"] for message in api.bodies[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]
    assert api.bodies[2]["messages"][2]["content"] == "noon"


def test_a_call_that_broke_off_is_shown_and_not_sent(page: Page, api: FakeApi) -> None:
    write_json(page, "#tools", WEATHER)
    ask(page, 'callcut now {}; get_weather {"city": "Bern"}')
    page.wait_for("document.querySelector('.result')")
    page.wait_for(IS_IDLE)
    assert page.evaluate("document.querySelectorAll('.call').length") == 2
    assert page.evaluate("document.querySelectorAll('.result').length") == 1
    ask(page, "say so")
    assert answer(page) == "so"
    assert [call["id"] for call in api.bodies[1]["messages"][1]["tool_calls"]] == ["call_0"]


def test_reasoning_is_folded_and_no_part_of_the_answer(page: Page, api: FakeApi) -> None:
    ask(page, "think let me see")
    assert answer(page) == "so yes"
    folded = "document.querySelector('#messages > li:last-child .reasoning')"
    assert page.evaluate(f"[{folded}.hidden, {folded}.open]") == [False, False]
    page.click(LAST_ANSWER + " summary")
    assert page.text(LAST_ANSWER + " .thought").strip() == "let me see"
    assert "4 of reasoning" in page.text(LAST_ANSWER + " .stats")
    ask(page, "say on")
    assert answer(page) == "on"
    assert page.evaluate(f"{folded}.hidden"), "an answer without any shows none"
    message = api.bodies[1]["messages"][1]
    assert (message["content"], message["reasoning_content"]) == ("so yes", "let me see ")
    assert page.complaints() == []


def test_a_schema_is_sent_and_the_words_of_a_refusal_shown(page: Page, api: FakeApi) -> None:
    write_json(page, "#schema", '{"type": "object"}')
    ask(page, "say {}")
    assert answer(page) == "{}"
    wanted = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert api.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": wanted}
    assert "tools" not in api.bodies[0]
    ask(page, "refuse this")
    page.wait_for("!document.querySelector('#error').hidden")
    assert page.text("#error") == (
        "response_format: the keyword 'contains' at /properties/a is not supported"
    )


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("#schema", '{"type": ', "JSON schema of the answer: this is no JSON: "),
        ("#schema", "[]", "JSON schema of the answer: a schema is a JSON object"),
        ("#tools", "{}", "Tools: tools are a JSON list"),
        ("#tools", '[{"name": "a"}, {"title": "b"}]', "Tools: tool 2 has no name"),
    ],
)
def test_json_that_cannot_be_sent_is_pointed_out(
    page: Page, api: FakeApi, field: str, text: str, message: str
) -> None:
    write_json(page, field, text)
    page.evaluate("document.querySelector('#structure').open = false")
    ask(page, "say yes")
    assert page.text("#error").startswith(message)
    assert page.evaluate("document.querySelector('#structure').open")
    assert page.evaluate("document.activeElement.id") == field[1:]
    assert api.bodies == []
    page.type(field, "")
    ask(page, "say yes")
    assert answer(page) == "yes"


def test_the_examples_can_be_sent(page: Page, api: FakeApi) -> None:
    write_json(page, "#schema", "{")
    for button in page.evaluate("[...document.querySelectorAll('.example')].map((each) => each.dataset.for)"):
        page.click(f"[data-for={button}]")
    ask(page, "say yes")
    assert answer(page) == "yes"
    assert api.bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    assert api.bodies[0]["response_format"]["json_schema"]["schema"]["type"] == "object"


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], width: int
) -> None:
    browser.open(server[1] + "/", width=width, height=700)
    browser.wait_for(IS_READY)
    browser.evaluate("document.querySelectorAll('.panel').forEach((panel) => (panel.hidden = true))")
    ask(browser, "say " + "long" * 100)
    answer(browser)
    ask(browser, "say |" + "a|" * 99 + "\n|" + "-|" * 99 + "\n\n    ~~~\n" + "code" * 99)
    answer(browser)
    ask(browser, 'call now {"x": "' + "long" * 100 + '"}')
    browser.wait_for("document.querySelector('.result')")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.documentElement.scrollHeight") <= 700  # only the conversation scrolls


def test_every_field_and_button_has_a_name(page: Page) -> None:
    ask(page, "call now {}")
    page.wait_for("document.querySelector('.result')")
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, textarea, select, button")]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("path", ["/", "/ui/"])
def test_the_page_asks_its_server_alone(
    browser: Page, api: FakeApi, server: tuple[FakeApi, str], path: str
) -> None:
    browser.open(server[1] + path)
    browser.wait_for(IS_READY)
    ask(browser, "say hello")
    answer(browser)
    asked = browser.requested()
    assert len(asked) >= 6  # the page, its style, two scripts, the models, the chat
    assert [url for url in asked if not url.startswith(server[1])] == []
    assert browser.complaints() == []
