"""A server whose every delay is known, on a clock that jumps: its latencies are exact, and cost no time.

The loop's clock stands still while anything can be done and leaps to the next timer when nothing can. Client
and server share the loop and talk over a unix socket, which delivers at once; so a benchmark of two minutes
is over in milliseconds, and no load on the machine can change a figure.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when it would wait."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = selectors.DefaultSelector()
        wait = selector.select

        def select(timeout: float | None = None) -> Any:
            ready = wait(0)
            if not ready and timeout is None:
                return wait(None)
            if not ready and timeout:
                self.now += timeout
            return ready

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def frame(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def piece(text: str = "x", finish_reason: str | None = None) -> bytes:
    return frame({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return frame({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}})


class Wire:
    """What a script may do with its connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(chunked(data))

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Wire, Mapping[str, Any]], Awaitable[None]]


def steady(ttft: float, itl: float, *, per_frame: int = 1, is_chat: bool = False) -> Script:
    """First token after `ttft` seconds, then one frame every `itl`."""

    async def script(wire: Wire, body: Mapping[str, Any]) -> None:
        count = body["max_tokens"]
        wire.raw(HEAD)
        if is_chat:
            wire.send(
                frame({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            )
        for number in range(0, count, per_frame):
            await asyncio.sleep(itl if number else ttft)
            reason = "length" if number + per_frame >= count else None
            if is_chat:
                delta = {"choices": [{"index": 0, "delta": {"content": "w "}, "finish_reason": reason}]}
                wire.send(frame(delta))
            else:
                wire.send(piece("w " * per_frame, reason))
        prompt = body.get("prompt") or json.dumps(body.get("messages")).split()
        if body.get("stream_options", {}).get("include_usage"):
            wire.send(usage(len(prompt), count))
        wire.send(b"data: [DONE]\n\n")
        wire.end()

    return script


class FakeServer:
    """Answers every POST with the script, and remembers what it was asked, and when."""

    def __init__(self, script: Script, socket: str) -> None:
        self.url = f"unix://{socket}"
        self.bodies: list[dict[str, Any]] = []
        self.asked_at: list[float] = []
        self.num_connections = 0
        self.num_running = self.peak_running = 0
        self._script = script

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.asked_at.append(asyncio.get_running_loop().time())
                self.num_running += 1
                self.peak_running = max(self.peak_running, self.num_running)
                try:
                    await self._script(Wire(writer), body)
                finally:
                    self.num_running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


def with_server(script: Script, work: Callable[[FakeServer], Coroutine[Any, Any, T]]) -> T:
    """Run `work` against a server that follows the script, in virtual time."""

    async def both() -> T:
        with tempfile.TemporaryDirectory() as directory:
            server = FakeServer(script, str(Path(directory) / "s"))
            listening = await asyncio.start_unix_server(server.serve, str(Path(directory) / "s"))
            try:
                return await work(server)
            finally:
                listening.close()
                for _ in range(5):  # for the transports that were closed to end
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(both())
