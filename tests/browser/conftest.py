"""One browser for all tests of a run; without Chromium they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

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
