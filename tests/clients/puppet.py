"""A server whose model does what the user says, and a record of what clients asked of it.

    with serve_puppet(directory) as (url, asked): ...      in a test
    python -m tests.clients.puppet 8123 asked.jsonl        by hand

Which words in the user's message make it do what:

    CALL {"name": ..., "arguments": {...}} END    calls a tool; once there is a result, repeats it
    SAY text END                                  says the text
    anything else                                 "Rome is old."
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.actor import Actor, read_encoder, reasoned
from tests.support.app import Site
from tests.support.live_server import serve

ORDER = re.compile(r"(CALL|SAY) (.*?) END", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
CONTEXT_LEN = 1_000_000  # the tiny tokenizer knows few words, and agents send long instructions


def play(prompt: str) -> str:
    """What the last turn asks for: a result to repeat, an order, or a question."""
    said = [turn for turn in prompt.split("<|im_start|>") if turn.startswith("user\n")][-1:]
    for text in (text for turn in said for text in RESULT.findall(turn)[-1:]):
        return reasoned(prompt, "So.", f"The tool said: {text}")
    for verb, text in (order for turn in said for order in ORDER.findall(turn)[-1:]):
        text = text.replace('\\"', '"') if text.startswith('{\\"') else text  # opencode quotes its arguments
        called = f"<tool_call>\n{text}\n</tool_call>"
        return reasoned(prompt, "An order.", called if verb == "CALL" else text)
    return reasoned(prompt, "Easy.", "Rome is old.")


@dataclass
class Asked:
    """One request as it came, and how it was answered."""

    method: str
    path: str
    headers: dict[str, str]
    body: str = ""
    status: int = 0
    answer: str = ""
    ignored: list[str] = field(default_factory=list)


class Recorder:
    """An ASGI application around another that notes every request."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.asked: list[Asked] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["method"], scope["path"], headers)
        self.asked.append(asked)

        async def note_received() -> Any:
            message = await receive()
            asked.body += message.get("body", b"").decode(errors="replace")
            return message

        async def note_sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                asked.status = message["status"]
                ignored = dict(message["headers"]).get(b"x-infer-ignored", b"").decode()
                asked.ignored = [name for name in ignored.split(", ") if name]
            asked.answer += message.get("body", b"").decode(errors="replace")
            await send(message)

        await self.app(scope, note_received, note_sent)


@contextmanager
def serve_puppet(directory: Path) -> Iterator[tuple[str, list[Asked]]]:
    """Serve the puppet as "fake" on the loopback interface; yields its URL and the record."""
    encoder = read_encoder("qwen3", directory)
    encoder.context_len = encoder.model_len = CONTEXT_LEN
    recorder = Recorder(Site(Actor(encoder, play), encoder=encoder, access_log=False).app)
    with serve(recorder, port=int(sys.argv[1]) if __name__ == "__main__" else 0) as url:
        yield url, recorder.asked


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as made,
        serve_puppet(Path(made) / "qwen3") as (served_at, log),
        open(sys.argv[2], "a", encoding="utf-8") as file,
    ):
        print(served_at, flush=True)
        num_written = 0
        while True:
            time.sleep(0.3)
            while num_written < len(log) and log[num_written].answer:
                file.write(json.dumps(asdict(log[num_written])) + "\n")
                file.flush()
                num_written += 1
