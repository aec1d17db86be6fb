"""Which files of the package one streamed chat request runs through, in the order it enters them.

`files_of_one_chat_request` serves a tiny checkpoint as `create_app` does, with the engine in a thread, sends
one request to warm everything up, and a second one while every call in every thread is watched
(sys.setprofile). A file counts if the body of one of its functions ran.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import httpx

import infer
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.server.app import create_app

PREFIX = f"{Path(infer.__file__).parent}/"
BODY: Mapping[str, object] = {
    "messages": [{"role": "user", "content": "Say something short."}],
    "max_tokens": 8,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
    "stream": True,
}
KNOBS: Mapping[str, object] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 256}
NOTHING: Mapping[str, object] = {}


class CallWatch:
    """Notes the files whose functions start, in every thread that starts after it."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # in the order of their first call
        self.is_on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and all that are started inside."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_body = event == "call" and code.co_name != "<module>"
        if self.is_on and is_body and code.co_filename.startswith(PREFIX):
            self.files.setdefault(code.co_filename.removeprefix(PREFIX))


def files_of_one_chat_request(
    checkpoint: str, fields: Mapping[str, object] = NOTHING, knobs: Mapping[str, object] = NOTHING
) -> list[str]:
    """Every file that a streamed chat request runs through, relative to the package.

    `fields` are added to its body, and `knobs` to those of the engine.
    """
    body = {**BODY, **fields}
    config = EngineConfig.from_knobs(model=checkpoint, **{**KNOBS, **knobs})
    app = create_app(config, ServerConfig(in_process=True, served_model_name="tiny"))

    watch = CallWatch()

    async def until_idle() -> None:
        engine = app.state.server.get_model(None).clients[0]
        while (stats := engine.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.001)

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://site") as client,
        ):
            await client.post("/v1/chat/completions", json=body)
            await until_idle()
            watch.is_on = True
            answer = await client.post("/v1/chat/completions", json=body)
            await until_idle()
            watch.is_on = False
            assert answer.status_code == 200, answer.text
            assert answer.text.rstrip().endswith("[DONE]")

    with (
        watch.installed(),
        patch("infer.server.fleet.fleet.WATCH_INTERVAL_S", 3600.0),
        patch("infer.client.rank_group.is_stopped", lambda _: False),
    ):  # watchers are not part of a request
        asyncio.run(go())
    return list(watch.files)


if __name__ == "__main__":
    names = files_of_one_chat_request(sys.argv[1])
    print("\n".join(names), len(names), sep="\n")
