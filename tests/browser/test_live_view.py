"""The tab "Live" in a real browser: every state of an engine is drawn, said in words and reachable.

The events are the test's own, so nothing depends on when an engine does what; the last test has a tiny one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from scripts.make_checkpoint import make_checkpoint
from tests.browser.chatting import IS_READY
from tests.browser.fake_api import FakeApi
from tests.support.live_server import LiveServer, serve_model

if TYPE_CHECKING:
    from tests.browser.chromium import Page

ADMIN_KEY = "an-admin-key"
REQUESTS = [  # id, state, reason, sequences, prompt, output, computed, cached, blocks, host blocks
    ["req-a/cmpl-1", "decode", "", 1, 40, 12, 51, 16, 4, 0],
    ["req-b/cmpl-2", "decode", "", 3, 20, 9, 28, 0, 6, 0],
    ["req-c/cmpl-3", "prefill", "", 1, 900, 0, 256, 0, 8, 0],
    ["req-d/cmpl-4", "waiting", "blocks", 1, 30, 2, 0, 0, 0, 2],
    ["req-e/cmpl-5", "waiting", "turn", 1, 10, 0, 0, 0, 0, 0],
    ["req-f/cmpl-6", "waiting", "place", 1, 10, 0, 0, 0, 0, 0],
    ["req-g/cmpl-7", "waiting", "budget", 1, 10, 0, 0, 0, 0, 0],
    ["req-h/cmpl-8", "waiting", "compile", 1, 10, 0, 0, 0, 0, 0],
]
STEPS = [  # in the order of STEP_COLUMNS
    [1, 0, 1, 256, 0, 0, 0, 0, 0, 0, 21_000],
    [2, 2, 0, 0, 0, 0, 2, 0, 0, 1, 4_200],
    [3, 4, 0, 0, 8, 5, 0, 0, 0, 1, 5_100],
    [4, 4, 1, 252, 0, 0, 0, 1, 3, 0, 19_000],
]


def sight(**fields: Any) -> dict[str, Any]:
    """An event in which every state occurs; `fields` differ."""
    totals = {
        "steps": 4,
        "output_tokens": 20,
        "prompt_tokens": 990,
        "queried_tokens": 1000,
        "hit_tokens": 250,
    }
    plain = {
        "models": {"tiny": 1}, "model": "tiny", "replica": 0, "number": 1, "made_at": 1000.0,
        "interval_s": 0.1, "step": 4, "num_running": 5, "num_waiting": 5, "max_batch_size": 64,
        "token_budget": 2048, "block_size": 16, "num_blocks": 64, "blocks_per_cell": 1,
        "counts": [40, 6, 2, 16],
        "cells": [4, 4, 2, 2, 5, 4, 6, 7, 3, 1, 1, 6, 0, 40], "num_host_blocks": 8, "host_blocks_per_cell": 1,
        "host_cells": [7, 2, 0, 6], "requests": REQUESTS, "num_unlisted": 1,
        "branches": [[-1, 0, 4, 9, 2], [0, 4, 6, 3, 0], [-1, 0, 1, 1, 0]],
        "host_bytes": [64_000_000_000, 3_200_000_000, 40_000_000_000], "steps": STEPS,
        "totals": {**totals, "preemptions": 1},
    }  # fmt: skip
    return plain | fields


def model(page: Page, expression: str) -> Any:
    """The value of an expression over the tab's own model."""
    return page.evaluate(f"import('/ui/live.js').then(({{ model }}) => ({expression}))")


def show(page: Page) -> None:
    """Select the tab and wait until something is drawn."""
    page.click("#live-tab")
    page.wait_for("!document.querySelector('#live-body').hidden")


def pixels(page: Page, canvas: str) -> int:
    """How many colours a canvas has."""
    return int(
        page.evaluate(
            f"""(() => {{
                const canvas = document.querySelector({canvas!r});
                const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                return new Set(new Uint32Array(data.buffer)).size;
            }})()"""
        )
    )


def test_every_state_is_drawn_and_said(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    assert model(page, "[...model.cells].length") == 64
    label = page.evaluate("document.querySelector('#live-blocks').ariaLabel")
    assert label.startswith(
        "Map of the KV cache. 64 blocks of 16 tokens: 16 held by one sequence, 2 shared, "
    )
    assert label.endswith("6 cached, 40 free. 8 blocks in host memory, 2 of them in use.")
    said = [model(page, f"model.describeCell({cell})") for cell in (0, 4, 6, 17, 18, 30)]
    assert said == [
        "Block 0: held by req-a/cmpl-1",
        "Block 4: shared by several sequences",
        "Block 6: held by req-b/cmpl-2",
        "Block 17: held by a request that is not listed",
        "Block 18: cached, in no request's use",
        "Block 30: free",
    ]
    assert model(page, "model.describeCell(1, true)") == "Host block 1: held by req-d/cmpl-4"
    assert model(page, "new Set(model.requests.map(({ id }) => model.hue(id))).size") == len(REQUESTS)
    assert pixels(page, "#live-blocks") >= 7 and pixels(page, "#live-steps") >= 7
    steps = page.evaluate("document.querySelector('#live-steps').ariaLabel")
    assert "The last 4 steps: 10 decode rows, 508 prompt tokens, 5 of 8 drafts accepted, 2 forks, " in steps
    assert "1 preemption, 2 in a graph; 12.32 ms on average, 21.00 at most." in steps
    assert page.complaints() == []
    assert all(url.startswith("http://127.0.0.1") for url in page.requested())


def test_requests_say_why_they_wait(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    rows = page.evaluate(
        """[...document.querySelectorAll('#live-requests tr')]
            .map((row) => [...row.cells].map((cell) => cell.innerText))"""
    )
    assert [row[:3] for row in rows] == [
        ["req-a", "decode", ""],
        ["req-b", "decode", ""],
        ["req-c", "prefill", ""],
        ["req-d", "waiting", "waits for blocks"],
        ["req-e", "waiting", "waits for its turn"],
        ["req-f", "waiting", "waits for a place in the batch"],
        ["req-g", "waiting", "waits for token budget"],
        ["req-h", "waiting", "waits for its constraint to be compiled"],
    ]
    assert rows[0][3:] == ["1", "40", "16", "51", "12", "4"] and rows[3][8] == "0 + 2 host"
    assert page.text("#live-queue").startswith(
        "5 of at most 64 sequences run, 5 wait: 1 for blocks, 1 for its "
    )
    assert page.text("#live-queue").endswith("1 sequence more is not listed.")


def test_the_hottest_branches_are_listed(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    items = page.evaluate(
        "[...document.querySelectorAll('#live-branches li')].map((li) => li.innerText.trim())"
    )
    assert items == [
        "9 hits on the first 64 tokens, then 2 ways on",
        "3 hits on tokens 65 to 96",
        "1 hit on the first 16 tokens",
    ]


def figures(page: Page) -> dict[str, str]:
    return dict(
        page.evaluate(
            """[...document.querySelectorAll('#live-figures > div')]
                .map((figure) => [...figure.children].map((child) => child.innerText))"""
        )
    )


def test_rates_come_from_what_was_counted_between_events(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    later = {**sight()["totals"], "output_tokens": 220, "steps": 24}
    api.sights.append(sight(number=2, made_at=1002.0, totals=later, steps=[]))
    show(page)
    page.wait_for("document.querySelector('#live-figures').innerText.includes('100/s')")
    told = figures(page)
    assert told["Steps"] == "10.0/s" and told["Prompts"] == "0/s"
    assert told["Cache hits"] == "25 %" and told["Host memory"] == "3.2 GB"
    assert told["First token"] == "–"


def test_latencies_and_the_gpu_come_from_the_metrics(page: Page, api: FakeApi) -> None:
    labels = 'engine="0",model_name="tiny"'
    lines = [
        f'infer_time_to_first_token_seconds_bucket{{{labels},le="{le}"}} {count}'
        for le, count in (("0.1", 10.0), ("0.2", 19.0), ("+Inf", 20.0))
    ]
    lines += [f'infer_gpu_memory_used_bytes{{{labels},gpu="GPU-1"}} 7e+10']
    lines += [f'infer_gpu_memory_total_bytes{{{labels},gpu="GPU-1"}} 1.4e+11']
    lines += ['infer_gpu_memory_used_bytes{engine="1",model_name="tiny",gpu="GPU-2"} 1.0']
    read = page.evaluate(
        f"""import('/ui/live_model.js').then(({{ readMetrics, quantilesSince }}) => {{
            const found = readMetrics({json.dumps(chr(10).join(lines))}, "tiny", 0);
            const later = new Map([[0.1, 10], [0.2, 29], [Infinity, 30]]);
            return [found.gpuUsed, found.gpuTotal, quantilesSince(found.ttft),
                quantilesSince(later, found.ttft), quantilesSince(found.ttft, found.ttft),
                quantilesSince(found.itl)];
        }})"""
    )
    assert read[:2] == [7e10, 1.4e11]
    assert [pytest.approx(pair) for pair in read[2:5]] == [[0.1, 0.2], [0.15, 0.195], [0.1, 0.2]]
    assert read[5] is None


def test_a_block_leads_to_the_story_of_its_request(page: Page, api: FakeApi) -> None:
    api.stories["req-a"] = "req-a came in at step 1\nand found 16 tokens"
    api.sights.append(sight())
    show(page)
    page.evaluate("document.querySelector('#live-blocks').focus()")
    page.press("ArrowRight")
    assert page.text("#live-blocks-text") == "Block 0: held by req-a/cmpl-1"
    page.press("Enter")
    page.wait_for("document.querySelector('#live-story-text').innerText.includes('found 16 tokens')")
    assert page.text("#live-story-title") == "Request req-a"
    assert page.evaluate("document.activeElement.id") == "live-story-title"
    page.press("Escape")
    assert page.evaluate("document.querySelector('#live-story').hidden") is True
    assert page.evaluate("document.activeElement.innerText") == "req-a"
    assert page.complaints() == []


def test_a_request_without_a_story_says_so(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    page.click("#live-requests tr:nth-child(2) button")
    page.wait_for("document.querySelector('#live-story-text').innerText === 'no story kept'")


def test_pointing_says_what_is_there(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    for selector, said in (
        ("#live-blocks", "Block "),
        ("#live-steps", "Step 4: 4 decode rows, 252 prompt tokens"),
    ):
        x, y = page.evaluate(
            f"""(() => {{
                document.querySelector({selector!r}).scrollIntoView({{ block: "center" }});
                const box = document.querySelector({selector!r}).getBoundingClientRect();
                return [{selector!r} === "#live-steps" ? box.right - 3 : box.x + 3, box.y + box.height / 2];
            }})()"""
        )
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait_for(f"document.querySelector('{selector}-text').innerText.startsWith({said!r})")


def test_keys_walk_through_the_steps(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    page.evaluate("document.querySelector('#live-steps').focus()")
    said = []
    for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowLeft", "End"):
        page.press(key)
        said.append(page.text("#live-steps-text").partition(":")[0])
    assert said == ["Step 4", "Step 3", "Step 1", "Step 1", "Step 4"]
    assert "5 of 8 drafts accepted, 3 refused, in a graph, 5.10 ms" in model(
        page, "model.describeStep(model.steps[2])"
    )


def test_a_pause_ends_the_stream_and_the_tab_too(page: Page, api: FakeApi) -> None:
    api.sights.append(sight())
    show(page)
    assert api.num_looking == 1
    page.click("#live-pause")
    wait_until_gone(page, api)
    assert page.text("#live-status") == "Paused"
    assert page.evaluate("document.querySelector('#live-pause').ariaPressed") == "true"
    page.click("#live-pause")
    page.wait_for("document.querySelector('#live-status').innerText === 'Step 4'")
    page.click("#chat-tab")
    wait_until_gone(page, api)
    assert page.evaluate("document.querySelector('#live').hidden") is True
    assert page.complaints() == []


def wait_until_gone(page: Page, api: FakeApi) -> None:
    """Let the page run until the server has seen that it left."""
    for _ in range(2000):
        if api.num_looking == 0:
            return
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 10))")
    raise AssertionError("the page still looks")


def test_an_engine_is_chosen(page: Page, api: FakeApi) -> None:
    api.sights.append(sight(models={"tiny": 2, "large": 1}))
    show(page)
    options = "[...document.querySelector('#live-engine').options].map(({ text }) => text)"
    assert page.evaluate(options) == ["tiny, replica 0", "tiny, replica 1", "large"]
    page.evaluate(
        """(() => {
            const select = document.querySelector('#live-engine');
            select.selectedIndex = 1;
            select.dispatchEvent(new Event('change'));
        })()"""
    )
    for _ in range(2000):
        if len(api.looks) > 1:
            break
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 10))")
    assert api.looks[1] == "model=tiny&replica=1"


def test_another_engine_s_steps_do_not_follow_the_first_one_s(page: Page, api: FakeApi) -> None:
    api.sights += [sight(), sight(replica=1, number=2, models={"tiny": 2}, steps=STEPS[:1])]
    show(page)
    page.wait_for("document.querySelector('#live-engine').value === '[\"tiny\",1]'")
    assert model(page, "model.steps.length") == 1


def test_the_admin_key_is_asked_for(page: Page, api: FakeApi) -> None:
    api.admin_key = ADMIN_KEY
    api.sights.append(sight())
    page.click("#live-tab")
    page.wait_for("!document.querySelector('#live-key-form').hidden")
    assert page.text("#live-error") == "This server wants its admin key."
    page.type("#live-key", "wrong")
    page.press("Enter")
    page.wait_for("document.querySelector('#live-error').innerText.includes('does not know this key')")
    page.type("#live-key", ADMIN_KEY)
    page.press("Enter")
    page.wait_for("!document.querySelector('#live-body').hidden")
    assert page.evaluate("document.querySelector('#live-key-form').hidden") is True
    stored = page.evaluate("JSON.stringify({ ...localStorage, ...sessionStorage })")
    assert ADMIN_KEY not in stored


def test_many_blocks_share_cells(page: Page, api: FakeApi) -> None:
    cells = [4, 1000, 1, 1000, 0, 2000]
    api.sights.append(
        sight(num_blocks=100_000, blocks_per_cell=25, cells=cells, counts=[50_000, 25_000, 0, 25_000])
    )
    show(page)
    assert page.text("#live-scale") == "Each cell stands for 25 blocks, and shows what most of them are."
    assert model(page, "model.describeCell(999)") == "Blocks 24975 to 24999, mostly held by req-a/cmpl-1"
    assert page.evaluate("document.querySelector('#live-blocks').clientHeight") < 400


def test_the_tabs_are_walked_with_arrow_keys(page: Page, api: FakeApi) -> None:
    page.evaluate("document.querySelector('#chat-tab').focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.press(key)
        seen.append(page.evaluate("document.activeElement.id"))
    assert seen == ["completion-tab", "live-tab", "chat-tab", "live-tab"]


def test_an_address_leads_to_the_tab(browser: Page, api: FakeApi, server: tuple[FakeApi, str]) -> None:
    api.sights.append(sight())
    browser.open(server[1] + "/#live", width=390, height=844, scheme="dark", is_calm=True)
    browser.wait_for("!document.querySelector('#live-body').hidden")
    width = "document.querySelector('#live').scrollWidth - document.querySelector('#live').clientWidth"
    assert browser.evaluate(width) == 0, "nothing is cut off on a phone"
    assert browser.complaints() == []


def test_less_motion_means_fewer_drawings(browser: Page, api: FakeApi, server: tuple[FakeApi, str]) -> None:
    api.sights.append(sight())
    browser.open(server[1] + "/#live", is_calm=True)
    browser.wait_for("!document.querySelector('#live-body').hidden")
    api.sights.append(sight(number=2, step=5, steps=[]))
    browser.wait_for("import('/ui/live.js') && true")
    assert browser.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches") is True
    browser.wait_for("document.querySelector('#live-status').innerText === 'Step 5'")


# -- a real engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    with serve_model(directory, admin_key=ADMIN_KEY) as served:
        yield served


def test_a_real_engine_is_shown_at_work(browser: Page, live: LiveServer) -> None:
    browser.forget(live.url)
    browser.open(f"{live.url}/#live")
    browser.wait_for(IS_READY)
    browser.wait_for("!document.querySelector('#live-key-form').hidden")
    browser.events.clear()
    browser.type("#live-key", ADMIN_KEY)
    browser.press("Enter")
    browser.wait_for("!document.querySelector('#live-body').hidden")
    assert model(browser, "[...model.event.counts].reduce((a, b) => a + b)") == 256
    body = {"prompt": "Where is the river? " * 6, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    for _ in range(2):
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    browser.wait_for("document.querySelector('#live-steps').ariaLabel.includes(' decode rows')")
    browser.wait_for("document.querySelectorAll('#live-branches li').length > 0")
    assert model(browser, "model.event.counts[1]") > 0  # what they left in the prefix tree
    assert model(browser, "model.steps.length > 50 && model.steps.every(({ inGraph }) => !inGraph)")
    assert browser.complaints() == []
    browser.open("about:blank")  # ends the stream, so that the server can end
