"""A browser for tests: Chromium, driven through its DevTools protocol.

The protocol is JSON over one WebSocket: a command is answered under its number, and everything that
happens in between (console lines, requests, exceptions) arrives as events, which are kept.

    page.evaluate("1 + 1")            -> 2
    page.wait_for("document.title")   waits inside the page until the expression is true
    page.press("Enter"), page.type("text"), page.screenshot(path)
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = [
    "--headless",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--remote-debugging-port=0",
]
KEY_TEXT = {"Enter": "\r"}  # keys that also write something
PATIENCE_S = 20


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.command("Page.setLifecycleEventsEnabled", enabled=True)

    def command(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']['message']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=PATIENCE_S + 10))
        return message

    def open(
        self, url: str, *, width: int = 1200, height: int = 800, scheme: str = "light", is_calm: bool = False
    ) -> None:
        """Load an address in a window of this size, and forget what happened before."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        motion = "reduce" if is_calm else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        loader = self.command("Page.navigate", url=url)["loaderId"]
        while not any(is_loaded(event, loader) for event in self.events):
            self.events.append(self._receive())

    def forget(self, origin: str) -> None:
        """Leave the page and delete what it stored."""
        self.open("about:blank")
        self.command("Storage.clearDataForOrigin", origin=origin, storageTypes="local_storage")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]["exception"]["description"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return once the condition is true in the page."""
        is_true = self.evaluate(
            f"""new Promise((resolve) => {{
                const until = Date.now() + {PATIENCE_S * 1000};
                const look = () => {{
                    if ({condition}) resolve(true);
                    else if (Date.now() > until) resolve(false);
                    else setTimeout(look, 10);
                }};
                look();
            }})"""
        )
        assert is_true, f"not true within {PATIENCE_S} s: {condition}\n{self.text('body')}"

    def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return str(self.evaluate(f"document.querySelector({selector!r}).innerText"))

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in a field, as if typed."""
        self.evaluate(f"document.querySelector({selector!r}).focus(), document.activeElement.select()")
        self.command("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press and release a key."""
        fields = {"key": key, "code": key, "modifiers": 2 if ctrl else 0}
        code = {
            "Enter": 13,
            "Escape": 27,
            "Tab": 9,
            "ArrowRight": 39,
            "ArrowLeft": 37,
            "Home": 36,
            "End": 35,
        }[key]
        self.command(
            "Input.dispatchKeyEvent",
            type="keyDown",
            text=KEY_TEXT.get(key, ""),
            windowsVirtualKeyCode=code,
            **fields,
        )
        self.command("Input.dispatchKeyEvent", type="keyUp", windowsVirtualKeyCode=code, **fields)

    def click(self, selector: str) -> None:
        """Click an element in its middle, where a person would; a hidden one cannot be hit."""
        x, y = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({selector!r});
                element.scrollIntoView({{ block: "nearest" }});
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list[str]:
        """Everything the console shows in red: exceptions, errors, blocked or failed requests."""
        self.evaluate("0")  # so that every event before this has arrived
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
                found.append(json.dumps(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """Every address the page asked for."""
        self.evaluate("0")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))


def is_loaded(event: dict[str, Any], loader: str) -> bool:
    """Whether an event says that this load of a page, and not an earlier one, is complete."""
    params = event.get("params", {})
    return bool(params.get("name") == "load" and params.get("loaderId") == loader)


@contextmanager
def open_page(program: str, profile: Path) -> Iterator[Page]:
    """A fresh browser with one tab."""
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as browser:
        try:
            assert browser.stderr is not None
            line = next((line for line in browser.stderr if "DevTools listening on " in line), None)
            assert line is not None, f"{program} ended before it was ready"
            with connect(line.split()[-1], max_size=None) as socket:
                page = Page(socket)
                yield page
                page.command("Browser.close")
                browser.wait(10)
        finally:
            browser.kill()  # does nothing to a browser that has closed
