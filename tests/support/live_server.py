"""A real server on the loopback interface, in a thread of the test's process, and its offline oracle.

    with serve(app) as url: ...               any ASGI application
    with serve_model(directory) as live: ...  the whole server around a checkpoint

The oracle is an `LLM` of the same checkpoint: whatever a client receives must be what it says.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.frontend.llm import LLM
from infer.server.app import create_app

KNOBS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 256}
START_S = 60


@dataclass
class LiveServer:
    """Where the server is, what its model is called, and an engine that answers the same offline."""

    url: str
    model: str
    directory: Path

    @functools.cached_property
    def oracle(self) -> LLM:
        """The same checkpoint, offline."""
        return LLM(str(self.directory), **KNOBS)

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls its base URL."""
        return f"{self.url}/v1"


@contextmanager
def serve(app: Any, port: int = 0) -> Iterator[str]:
    """Run an ASGI application on a port, by default a free one; yields its URL once it answers."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    sockets = [config.bind_socket()]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="test-server")
    thread.start()
    try:
        give_up_at = time.monotonic() + START_S
        while not server.started:
            assert thread.is_alive(), "the server ended while it started"
            assert time.monotonic() < give_up_at, f"the server did not start within {START_S} s"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        for socket in sockets:
            socket.close()


@contextmanager
def serve_model(directory: Path, **server_knobs: Any) -> Iterator[LiveServer]:
    """Serve a checkpoint under the name "tiny", its engine in this process."""
    config = EngineConfig.from_knobs(model=str(directory), **KNOBS)
    server = ServerConfig(in_process=True, access_log=False, served_model_name="tiny", **server_knobs)
    with serve(create_app(config, server)) as url:
        yield LiveServer(url=url, model="tiny", directory=directory)
