"""One browser for all tests of a run, with nothing stored before each; without Chromium they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.chatting import IS_READY
from tests.browser.fake_api import FakeApi
from tests.support.live_server import serve

if TYPE_CHECKING:
    from tests.browser.chromium import Page


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A fresh browser with one tab."""
    pytest.importorskip("websockets", reason="the package websockets, which talks to the browser, is missing")
    from tests.browser.chromium import find_chromium, open_page

    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium; on Debian: apt-get install chromium")
    with open_page(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeApi, str]]:
    """The scripted routes, and their address."""
    api = FakeApi()
    with serve(api.app) as url:
        yield api, url


@pytest.fixture
def api(browser: Page, server: tuple[FakeApi, str]) -> FakeApi:
    """The scripted routes, asked nothing so far, and a browser that remembers nothing."""
    browser.forget(server[1])
    server[0].reset()
    return server[0]


@pytest.fixture
def page(browser: Page, api: FakeApi, server: tuple[FakeApi, str]) -> Page:
    """The page, ready to be asked."""
    browser.open(server[1] + "/")
    browser.wait_for(IS_READY)
    return browser
