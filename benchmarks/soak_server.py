"""A server under a mixed load for a long time: nothing wrong, nothing lost, nothing leaked.

    python -m benchmarks.soak_server --minutes 60                        # `make soak`: a tiny random model
    python -m benchmarks.soak_server --minutes 5 --model DIR --device cuda --out FILE
    python -m benchmarks.soak_server --minutes 5 --device cuda --neighbour-gib 150

64 streams ask without a pause, each request of another kind and length: completions with salts, seeds,
logprobs and several answers, regular expressions, JSON schemas, tools, `/v1/messages`, stored and continued
`/v1/responses`, `/api/chat`, embeddings. A quarter of the clients hang up on the way. The time is cut into
cycles:

    | 64 streams ... load a second model, ask it, unload it ... memory is compared | SIGKILL to the engine
    0                0.25                           0.6         0.75               1

With `--neighbour-gib` another process takes and frees that much of the device's memory while the load is
on, on a GPU at most all that is free there. While a model is loaded or an engine starts, it leaves them
ROOM.

A *session* (one or a few requests that belong together) is made by a kind and a number, and nothing else.
Logits do not depend on the batch (`--deterministic`, float32), so the same session alone must get the same
answers: at the end some sessions of each kind are repeated one at a time on an emptied prefix cache.
The verdict:

    answers     every repeated session gets the same texts; numbers of embeddings and logprobs may differ by
                TOLERANCE, since sums of floats are made in the order that the step's size asks for
    errors      none, except for requests that meet a killed engine or a model that is being unloaded
    memory      the last quarter of the last cycle against that of the second: at most 2 % more
    files       as many open files at the end as before the load, an empty temporary directory
    books       no request running or waiting, no block in use, no traceback logged, a restart for each kill

The report is FILE.json (every reading) and FILE.txt (one page). Exit code 1: a verdict failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.memory_taker import GIB, Neighbour
from infer.bench.report import commit, machine, versions
from infer.bench.sse_client import BrokenAnswer, Client, Connection, Endpoint, error_message
from infer.cache.host_bytes import resident_bytes
from infer.config.server import ServerConfig
from infer.tools.nvml import held_by

Answer = Mapping[str, str | list[float]]  # every text and every list of numbers of an answer, by its place

NAME, SECOND = "main", "second"
KEY, ADMIN_KEY = "soak", "soak-admin"
MAX_PROMPT, MAX_OUTPUT = 300, 96  # words and tokens
HANG_UP_SHARE = 0.25
NUM_KEPT = 25  # sessions of each kind that are repeated at the end
START_S, BACK_S, STOP_S, ASK_S = 300.0, 120.0, 60.0, 300.0
DRAIN_S = ServerConfig().drain_timeout  # what requests of a model that is unloaded have left
GRACE_S = 2.0  # after an engine is back, a request may still learn of its end
MAX_DRIFT = 0.02
TOLERANCE = 1e-5  # difference of two numbers, as a share of the embedding's largest, or of a logprob (of 1)
NUM_READINGS = 240
ROOM = 12 * GIB  # what a neighbour leaves to an engine that starts
SECOND_FROM, SECOND_TO, JUDGED_FROM = 0.25, 0.6, 0.75  # shares of a cycle

WORDS = (
    "the",
    "engine",
    "counts",
    "stars",
    "and",
    "stones",
    "while",
    "a",
    "river",
    "runs",
    "behind",
    "houses",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
REGEXES = ("[a-f]{4,20}", "(yes|no|maybe)( and (yes|no))?", "[0-9]{1,3}-[A-Z]{2,8}")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "count_stars", "parameters": SCHEMA, "description": "Counts the stars."},
}
UNSTABLE = {  # fields whose texts differ from answer to answer
    "id", "object", "created", "created_at", "completed_at", "model", "system_fingerprint", "item_id",
    "call_id", "response_id", "previous_response_id", "type", "signature",
}  # fmt: skip


# -- answers --------------------------------------------------------------------------------------------


def read_answer(path: str, raw: bytes, *, is_stream: bool) -> Answer:
    """The texts and numbers of an answer, pieces of a stream joined; BrokenAnswer for an error or no end."""
    texts: dict[str, str] = defaultdict(str)
    numbers: dict[str, list[float]] = defaultdict(list)
    for event in _events(path, raw) if is_stream else [orjson.loads(raw)]:
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise BrokenAnswer(f"error event: {error_message(event.get('response') or event)}")
        for place, value in _values(event, ""):
            if isinstance(value, str):
                texts[place] += value
            else:
                numbers[place].append(value)
    return {**texts, **numbers}


def _events(path: str, raw: bytes) -> list[Any]:
    """The events of a stream that has come to its end."""
    if path.startswith("/api/"):
        events = [orjson.loads(line) for line in raw.splitlines() if line]
        has_ended = bool(events) and (events[-1].get("done") or "error" in events[-1])
    else:
        lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
        events = [orjson.loads(line) for line in lines if line != b"[DONE]"]
        last = str(events[-1].get("type")) if events else ""
        ends = ("message_stop", "response.completed", "response.incomplete", "response.failed", "error")
        has_ended = last in ends or lines[-1:] == [b"[DONE]"] or (bool(events) and "error" in events[-1])
        if path == "/v1/responses" and last.startswith("response."):
            events = [events[-1] | events[-1].pop("response", {})]  # which repeats all that came before it
    if not has_ended:
        raise BrokenAnswer(f"the stream ended early, after {len(events)} events")
    return events


def _values(value: Any, place: str) -> Iterator[tuple[str, str | float]]:
    """Every text in a JSON value and every number of an embedding or a logprob, with its place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in UNSTABLE:
                yield from _values(inner, f"{place}.{name}")
    elif isinstance(value, list):
        is_vector = place.endswith(".embedding")  # its numbers have one place
        for number, inner in enumerate(value):
            number = inner.get("index", number) if isinstance(inner, dict) else number
            yield from _values(inner, place if is_vector else f"{place}[{number}]")
    elif isinstance(value, str) or (
        isinstance(value, float) and ("embedding" in place or "logprob" in place)
    ):
        yield place, value


# -- sessions -------------------------------------------------------------------------------------------


class Talk:
    """One client's way to the server: a connection that is kept while both sides want it."""

    def __init__(self, endpoint: Endpoint, model: str = NAME) -> None:
        self.endpoint, self.model = endpoint, model
        self._client = Client(endpoint)
        self._connection: Connection | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[Answer, bytes]:
        """Ask; returns the texts of the answer and its bytes."""
        body = {"model": self.model} | dict(body)
        raw = await self.send("POST", path, body)
        return read_answer(path, raw, is_stream=bool(body.get("stream"))), raw

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """One request; an idle connection that the server has just closed is replaced."""
        message = self.endpoint.message(method, path, body)
        while True:
            is_reused = self._connection is not None and self._connection.is_open
            if not is_reused:
                self._connection = await self._client.connect()
            assert self._connection is not None
            try:
                async with asyncio.timeout(ASK_S):
                    return await self._connection.ask(message)
            except BrokenAnswer as error:
                if error.status is not None or self._connection.has_answered or not is_reused:
                    raise

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()


Session = Callable[[Talk, random.Random], Awaitable[list[Answer]]]


def _prompt(rng: random.Random, longest: int = MAX_PROMPT) -> str:
    count = rng.choice((rng.randint(1, 20), rng.randint(1, longest)))
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _turn(rng: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _prompt(rng, MAX_PROMPT // 2)}]}


def _sampling(rng: random.Random) -> dict[str, Any]:
    greedy = {"temperature": 0}
    return rng.choice((greedy, {"temperature": 0.9, "top_p": 0.9, "seed": rng.randrange(2**31)}))


def _common(rng: random.Random) -> dict[str, Any]:
    stream = rng.random() < 0.6
    return {"max_tokens": rng.randint(1, MAX_OUTPUT), "stream": stream, **_sampling(rng)}


async def _completion(talk: Talk, rng: random.Random) -> list[Answer]:
    body: dict[str, Any] = {"prompt": _prompt(rng), "ignore_eos": rng.random() < 0.7, **_common(rng)}
    if rng.random() < 0.5:
        body["cache_salt"] = rng.choice("abc")
    body |= rng.choice(({}, {}, {"n": 2}, {"logprobs": 3}))
    return [(await talk.post("/v1/completions", body))[0]]


async def _regex(talk: Talk, rng: random.Random) -> list[Answer]:
    body = {"prompt": _prompt(rng), "regex": rng.choice(REGEXES), **_common(rng)}
    return [(await talk.post("/v1/completions", body))[0]]


async def _schema(talk: Talk, rng: random.Random) -> list[Answer]:
    shape = {"type": "json_schema", "json_schema": {"name": "stars", "schema": SCHEMA, "strict": True}}
    body = {**_turn(rng), "response_format": shape, **_common(rng)}
    return [(await talk.post("/v1/chat/completions", body))[0]]


async def _tools(talk: Talk, rng: random.Random) -> list[Answer]:
    choice = rng.choice(("auto", "required"))
    body = {**_turn(rng), "tools": [TOOL], "tool_choice": choice, **_common(rng)}
    return [(await talk.post("/v1/chat/completions", body))[0]]


async def _messages(talk: Talk, rng: random.Random) -> list[Answer]:
    body = {**_turn(rng), **_common(rng), "temperature": 0, "top_p": 1}
    body.pop("seed", None)
    return [(await talk.post("/v1/messages", body))[0]]


async def _responses(talk: Talk, rng: random.Random) -> list[Answer]:
    """A response, one that continues it, the stored one read back, and often its end."""
    limits: dict[str, Any] = {"max_output_tokens": rng.randint(1, MAX_OUTPUT), "temperature": 0}
    body = {"input": _prompt(rng, 100), **limits}
    first, raw = await talk.post("/v1/responses", body)
    made = orjson.loads(raw)["id"]
    more = {"previous_response_id": made, "stream": rng.random() < 0.5}
    second, _ = await talk.post("/v1/responses", body | more)
    stored = read_answer("/v1/responses", await talk.send("GET", f"/v1/responses/{made}"), is_stream=False)
    if stored != first:
        raise BrokenAnswer("the stored response is not the one that was sent")
    if rng.random() < 0.7:
        await talk.send("DELETE", f"/v1/responses/{made}")
    return [first, second]


async def _ollama(talk: Talk, rng: random.Random) -> list[Answer]:
    options = {"num_predict": rng.randint(1, MAX_OUTPUT), **_sampling(rng)}
    body = {**_turn(rng), "options": options, "stream": rng.random() < 0.6}
    return [(await talk.post("/api/chat", body))[0]]


async def _embeddings(talk: Talk, rng: random.Random) -> list[Answer]:
    body = {"input": [_prompt(rng) for _ in range(rng.randint(1, 4))]}
    return [(await talk.post("/v1/embeddings", body))[0]]


KINDS: dict[str, Session] = {
    "completion": _completion,
    "regex": _regex,
    "schema": _schema,
    "tools": _tools,
    "messages": _messages,
    "responses": _responses,
    "ollama": _ollama,
    "embeddings": _embeddings,
    SECOND: _completion,  # of the second model; the same checkpoint, so the first one's answers are the same
}


# -- what is seen ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reading:
    """Memory and open files at one moment."""

    second: float  # since the start
    api_bytes: int
    engine_bytes: int
    gpu_bytes: int
    api_files: int
    engine_files: int
    num_engines: int
    cycle: int = -1  # the cycle whose last part this is: no second model is there or on its way


@dataclass(slots=True)
class Window:
    """Seconds in which some requests must fail, and why."""

    why: str
    start: float
    stop: float = float("inf")

    def meets(self, asked: float, ended: float) -> bool:
        """True for a request whose time overlaps the window."""
        return asked <= self.stop and ended >= self.start


@dataclass(slots=True)
class Seen:
    """Everything that a soak has counted and kept."""

    answered: Counter[str] = field(default_factory=Counter)  # sessions by kind
    hung_up: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)  # errors by reason
    unexpected: Counter[str] = field(default_factory=Counter)
    kept: dict[str, list[tuple[int, list[Answer]]]] = field(default_factory=lambda: defaultdict(list))
    windows: list[Window] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_repeated: int = 0
    num_close: int = 0  # repeated sessions with numbers that are not the same, but within TOLERANCE
    num_kills: int = 0
    num_loads: int = 0
    longest_down_s: float = 0.0

    def fail(self, kind: str, error: BaseException, asked: float, ended: float) -> None:
        """Count an error, as expected if the request met a window in which it may happen."""
        status = getattr(error, "status", None)
        text = re.sub(r"\d+", "N", str(error) or type(error).__name__)[:160]
        for window in self.windows:
            late_s = ended - window.start
            if window.meets(asked, ended) and _may_happen(window.why, kind, status, str(error), late_s):
                self.expected[f"{window.why}: {text}"] += 1
                return
        self.unexpected[f"{kind}: {text}"] += 1


def _may_happen(why: str, kind: str, status: int | None, message: str, late_s: float) -> bool:
    if why == "kill":  # 503, or in a stream whose 200 was sent already: an error that names the engine
        return status == 503 or (status is None and "engine" in message)
    is_over = late_s >= DRAIN_S and "the engine was closed" in message  # 503, or an error in a stream
    return kind == SECOND and (status == 404 or (is_over and status in (None, 503)))


def drift_of_cycles(readings: Sequence[Reading]) -> tuple[float, list[float]]:
    """The growth from the second cycle to the last, and each cycle's median in bytes.

    Only the last part of a cycle is looked at, where one engine runs: its age is about the same in each.
    """
    by_cycle: dict[int, list[int]] = defaultdict(list)
    for reading in readings:
        if reading.cycle >= 0:
            by_cycle[reading.cycle].append(reading.api_bytes + reading.engine_bytes)
    medians = [statistics.median(by_cycle[number]) for number in sorted(by_cycle)]
    if len(medians) < 3:
        return 0.0, medians
    return medians[-1] / medians[1] - 1, medians


# -- the server -----------------------------------------------------------------------------------------


class Server:
    """`python -m infer.server` with a temporary directory of its own, and what the kernel says of it."""

    def __init__(self, arguments: Sequence[str], scratch: Path) -> None:
        self.log, self.temporary = scratch / "server.log", scratch / "t"
        self.temporary.mkdir()
        command = [sys.executable, "-m", "infer.server", *arguments]
        environment = os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready: "):
            self.process.kill()
            raise SystemExit(f"the server did not start:\n{self.log.read_text()[-2000:]}")
        self.url = line.removeprefix("ready: ").strip()

    def engines(self) -> list[int]:
        """The ids of the engine processes, oldest first."""
        return sorted(pid for pid in _children(self.process.pid) if "client.process" in _cmdline(pid))

    def api_processes(self) -> list[int]:
        """The ids of the API processes."""
        workers = [pid for pid in _children(self.process.pid) if "processes.worker" in _cmdline(pid)]
        return [self.process.pid, *workers]

    def read(self, second: float) -> Reading:
        """Look at memory and open files now."""
        api, engines = self.api_processes(), self.engines()
        return Reading(
            second=round(second, 2),
            api_bytes=sum(map(resident_bytes, api)),
            engine_bytes=sum(map(resident_bytes, engines)),
            gpu_bytes=int(held_by(engines) or 0),
            api_files=sum(map(_num_files, api)),
            engine_files=sum(map(_num_files, engines)),
            num_engines=len(engines),
        )

    def stop(self) -> int:
        """End it as a service manager does; returns the exit code."""
        self.process.terminate()
        with self.process:  # closes its pipe
            try:
                return self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                return self.process.wait()


def _children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _num_files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


# -- the soak -------------------------------------------------------------------------------------------


class Soak:
    """The load, the operator who loads, unloads and kills, and the reader of memory."""

    def __init__(
        self, server: Server, neighbour: Neighbour, *, minutes: float, streams: int, seed: int, model: str,
        knobs: dict[str, Any],
    ) -> None:  # fmt: skip
        self.server, self.neighbour, self.streams, self.seed = server, neighbour, streams, seed
        self.duration_s = minutes * 60
        self.num_cycles = max(5, int(minutes) // 10)
        self.cycle_s = self.duration_s / self.num_cycles
        self.endpoint = Endpoint(url=server.url, api_key=KEY, timeout_s=ASK_S)
        self.operator = Talk(Endpoint(url=server.url, api_key=ADMIN_KEY, timeout_s=START_S))
        self.seen = Seen()
        self.quiet: list[Reading] = []  # before and after the load
        self.metrics: dict[str, float] = {}
        self._second = {"name": SECOND, "model": model, "knobs": knobs}
        self._has_second = False
        self._cycle = -1
        self._started = 0.0

    async def run(self, tell: Callable[[str], None]) -> None:
        """Warm up, put the load on, repeat some sessions alone."""
        await self._visit_everything()
        self.quiet.append(await self._read_quiet())
        self.neighbour.start()
        self._started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.streams):
                tasks.create_task(self._ask_until_end(number))
            tasks.create_task(self._operate(tell))
            tasks.create_task(self._read_memory())
        tell(f"load ended after {self._now():.0f} s: {sum(self.seen.answered.values())} sessions")
        await self._repeat_alone()
        self.quiet.append(await self._read_quiet())
        self.metrics = await self._scrape()
        self.operator.close()

    def _now(self) -> float:
        return time.monotonic() - self._started

    async def _visit_everything(self) -> None:
        """Use every route once, the second model included: what is opened on first use is open."""
        await self._load_second()
        for kind, session in KINDS.items():
            talk = Talk(self.endpoint)
            try:
                await session(talk, random.Random(f"{self.seed} first {kind}"))
            finally:
                talk.close()
        await self._unload_second()

    async def _ask_until_end(self, number: int) -> None:
        """One client; the next session begins when the last one has ended."""
        rng = random.Random(f"{self.seed} client {number}")
        talk = Talk(self.endpoint)
        try:
            while self._now() < self.duration_s:
                kinds = [kind for kind in KINDS if kind != SECOND or self._has_second]
                kind, session = rng.choice(kinds), rng.randrange(2**40)
                talk.model = SECOND if kind == SECOND else NAME
                leaves_after = rng.random() if rng.random() < HANG_UP_SHARE else None
                if not await self._ask(talk, kind, session, leaves_after):
                    await asyncio.sleep(0.5 * rng.random())  # as a client does that was refused
                if rng.random() < 0.2:
                    talk.close()
        finally:
            talk.close()

    async def _ask(self, talk: Talk, kind: str, number: int, leaves_after: float | None) -> bool:
        """One session; False: it failed."""
        asked = self._now()
        asking = asyncio.ensure_future(KINDS[kind](talk, _rng_of(kind, number)))
        done, _ = await asyncio.wait([asking], timeout=leaves_after)
        if not done:
            talk.close()
            with contextlib.suppress(BrokenAnswer, OSError):
                await asking
            self.seen.hung_up[kind] += 1
            return True
        try:
            answers = asking.result()
        except (BrokenAnswer, OSError, ValueError, LookupError) as error:
            self.seen.fail(kind, error, asked, self._now())
            return False
        self.seen.answered[kind] += 1
        self._keep(kind, number, answers)
        return True

    def _keep(self, kind: str, number: int, answers: list[Answer]) -> None:
        """Keep a random choice of all sessions so far, the same number of each kind."""
        kept, count = self.seen.kept[kind], self.seen.answered[kind]
        if len(kept) < NUM_KEPT:
            kept.append((number, answers))
        elif (place := random.Random(number).randrange(count)) < NUM_KEPT:
            kept[place] = (number, answers)

    async def _repeat_alone(self) -> None:
        talk = Talk(self.endpoint)
        for kind, kept in self.seen.kept.items():
            for number, answers in kept:
                await self.operator.send("POST", "/admin/reset_prefix_cache", {})
                again = await KINDS[kind](talk, _rng_of(kind, number))
                self.seen.num_repeated += 1
                if difference := find_difference(answers, again):
                    self.seen.wrong.append(f"{kind} {number}: {difference}")
                elif again != answers:
                    self.seen.num_close += 1
        talk.close()

    # -- the operator ---------------------------------------------------------------------------------

    async def _operate(self, tell: Callable[[str], None]) -> None:
        for cycle in range(self.num_cycles):
            await self._sleep_until(cycle + SECOND_FROM)
            await self._load_second()
            await self._sleep_until(cycle + SECOND_TO)
            await self._unload_second()
            await self._sleep_until(cycle + JUDGED_FROM)
            self._cycle = cycle
            late = self._now() / self.cycle_s - cycle - JUDGED_FROM  # where the machine has other work
            await self._sleep_until(cycle + 1 + max(0.0, late))
            self._cycle = -1
            if cycle < self.num_cycles - 1:
                await self._kill_engine()
            seen = self.seen
            tell(
                f"cycle {cycle + 1} of {self.num_cycles}: {sum(seen.answered.values())} sessions, "
                f"{sum(seen.hung_up.values())} hung up, {sum(seen.expected.values())} expected and "
                f"{sum(seen.unexpected.values())} unexpected errors, {seen.readings[-1].api_bytes >> 20} + "
                f"{seen.readings[-1].engine_bytes >> 20} MiB"
            )

    async def _sleep_until(self, cycles: float) -> None:
        await asyncio.sleep(max(0.0, cycles * self.cycle_s - self._now()))

    async def _load_second(self) -> None:
        async with self._room():
            await self.operator.send("POST", "/admin/models/load", self._second)
        self._has_second = True
        self.seen.num_loads += 1

    async def _unload_second(self) -> None:
        self._has_second = False
        window = Window("unload", self._now())
        self.seen.windows.append(window)
        await self.operator.send("POST", "/admin/models/unload", {"name": SECOND})
        window.stop = self._now() + GRACE_S

    async def _kill_engine(self) -> None:
        """SIGKILL, as the kernel sends it when memory runs out; wait until another engine serves."""
        (victim,) = self.server.engines()
        window = Window("kill", self._now())
        self.seen.windows.append(window)
        async with self._room():
            os.kill(victim, signal.SIGKILL)
            self.seen.num_kills += 1
            give_up_at = time.monotonic() + BACK_S
            while True:
                await asyncio.sleep(0.1)
                with contextlib.suppress(BrokenAnswer, OSError):
                    if self.server.engines() not in ([], [victim]):  # else the end may not be known yet
                        await self.operator.send("GET", "/health")
                        break
                if time.monotonic() > give_up_at:
                    raise SystemExit(f"no engine is back {BACK_S:g} s after a kill; see {self.server.log}")
        down = self._now() - window.start
        self.seen.longest_down_s = max(self.seen.longest_down_s, down)
        window.stop = self._now() + GRACE_S

    @contextlib.asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        """Have the neighbour leave room for an engine that starts."""
        await asyncio.to_thread(self.neighbour.leave, ROOM)
        yield
        await asyncio.to_thread(self.neighbour.leave, 0)

    # -- memory and files -----------------------------------------------------------------------------

    async def _read_memory(self) -> None:
        while (now := self._now()) < self.duration_s:
            self.seen.readings.append(replace(self.server.read(now), cycle=self._cycle))
            await asyncio.sleep(min(self.duration_s / NUM_READINGS, 15.0))

    async def _read_quiet(self) -> Reading:
        """The reading with the fewest open files of the next seconds: connections take a moment to close."""
        self.operator.close()
        readings = []
        for _ in range(30):
            await asyncio.sleep(0.1)
            readings.append(self.server.read(self._now()))
        return min(readings, key=lambda reading: reading.api_files + reading.engine_files)

    async def _scrape(self) -> dict[str, float]:
        talk = Talk(self.endpoint)
        page = (await talk.send("GET", "/metrics")).decode()
        talk.close()
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return {name.split("{")[0]: float(value) for name, value in rows}


def _rng_of(kind: str, number: int) -> random.Random:
    return random.Random(f"{kind} {number}")


def find_difference(answers: Sequence[Answer], again: Sequence[Answer]) -> str:
    """The first text that is not the same, or number beyond the tolerance; "": there is none."""
    if len(answers) != len(again):
        return f"{len(answers)} answers, alone {len(again)}"
    for before, after in zip(answers, again, strict=True):
        for place in sorted({*before, *after}):
            old, new = before.get(place), after.get(place)
            if old == new or (isinstance(old, list) and isinstance(new, list) and _is_close(place, old, new)):
                continue
            return f"{place} was {old!r:.200}, alone {new!r:.200}"
    return ""


def _is_close(place: str, numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two embeddings, or the logprobs at one place, differ by the tolerance at most."""
    if len(numbers) != len(others):
        return False
    sizes = [max(1.0, abs(other)) for other in others]
    if place.endswith(".embedding"):
        sizes = [max(map(abs, others))] * len(others)
    return all(
        abs(number - other) <= TOLERANCE * size
        for number, other, size in zip(numbers, others, sizes, strict=True)
    )


# -- the verdict ----------------------------------------------------------------------------------------


def judge(soak: Soak, exit_code: int) -> dict[str, str]:
    """What is wrong, by verdict; nothing: the server has passed."""
    seen, faults = soak.seen, {}
    if seen.wrong or not seen.num_repeated:
        faults["answers"] = f"{len(seen.wrong)} of {seen.num_repeated} repeated sessions differ"
    if seen.unexpected:
        faults["errors"] = f"{sum(seen.unexpected.values())} unexpected"
    drift, _ = drift_of_cycles(seen.readings)
    if drift > MAX_DRIFT:
        faults["memory"] = f"grew by {drift:.1%}, at most {MAX_DRIFT:.0%} is allowed"
    before, after = soak.quiet
    if after.api_files > before.api_files or after.engine_files > before.engine_files:
        faults["files"] = (
            f"{before.api_files} + {before.engine_files} open files became "
            f"{after.api_files} + {after.engine_files}"
        )
    left = [path.name for path in soak.server.temporary.iterdir()]
    if left:
        faults["files"] = f"left in the temporary directory: {' '.join(left)}"
    figures = {name: soak.metrics.get(f"infer_{name}", 0.0) for name in BOOKS}
    if any(figures.values()):
        faults["books"] = f"not zero in the end: {figures}"
    if (restarts := soak.metrics.get("infer_engine_restarts_total", 0.0)) != seen.num_kills:
        faults["restarts"] = f"{restarts:g} restarts for {seen.num_kills} kills"
    with soak.server.log.open() as lines:
        if tracebacks := sum("Traceback" in line for line in lines):
            faults["log"] = f"{tracebacks} tracebacks in {soak.server.log}"
    if "died" in soak.neighbour.summary:
        faults["neighbour"] = soak.neighbour.summary
    if exit_code:
        faults["exit code"] = str(exit_code)
    return faults


BOOKS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def make_report(soak: Soak, faults: Mapping[str, str], command: str) -> dict[str, Any]:
    """Every figure, as JSON."""
    seen = soak.seen
    drift, medians = drift_of_cycles(seen.readings)
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "minutes": soak.duration_s / 60,
        "streams": soak.streams,
        "seed": soak.seed,
        "cycle_s": soak.cycle_s,
        "faults": dict(faults),
        "answered": dict(seen.answered),
        "hung_up": dict(seen.hung_up),
        "expected_errors": dict(seen.expected),
        "unexpected_errors": dict(seen.unexpected),
        "repeated_alone": seen.num_repeated,
        "wrong_answers": seen.wrong,
        "close_answers": seen.num_close,
        "tolerance": TOLERANCE,
        "kills": seen.num_kills,
        "loads": seen.num_loads,
        "longest_down_s": round(seen.longest_down_s, 2),
        "neighbour": soak.neighbour.summary,
        "host_drift": round(drift, 5),
        "host_bytes_of_cycles": medians,
        "before": asdict(soak.quiet[0]),
        "after": asdict(soak.quiet[1]),
        "preemptions": soak.metrics.get("infer_num_preemptions_total", 0.0),
        "readings": [asdict(reading) for reading in seen.readings],
    }


def one_page(report: Mapping[str, Any]) -> str:
    """The report for people."""
    verdict = "; ".join(f"{name}: {why}" for name, why in report["faults"].items())
    answered, hung_up, readings = report["answered"], report["hung_up"], report["readings"]
    lines = [
        f"soak of {report['minutes']:g} minutes, {report['streams']} streams, seed {report['seed']}: "
        + (f"FAILED: {verdict}" if verdict else "passed"),
        "",
        "kind            answered   hung up",
        *(f"{kind:14} {answered.get(kind, 0):9} {hung_up.get(kind, 0):9}" for kind in KINDS),
        "",
        f"repeated alone: {report['repeated_alone']} sessions, {len(report['wrong_answers'])} wrong, "
        f"{report['close_answers']} whose numbers differ by at most {report['tolerance']:g}",
        *(f"  {line}" for line in report["wrong_answers"][:5]),
        f"engine kills: {report['kills']}, longest time without an engine {report['longest_down_s']:g} s; "
        f"loads of the second model: {report['loads']}; preemptions: {report['preemptions']:g}",
        f"neighbour that takes and frees memory: {report['neighbour']}",
        f"expected errors: {sum(report['expected_errors'].values())}",
        *(f"  {count:6} {text}" for text, count in report["expected_errors"].items()),
        f"unexpected errors: {sum(report['unexpected_errors'].values())}",
        *(f"  {count:6} {text}" for text, count in report["unexpected_errors"].items()),
        "",
        "host MiB in the last quarter of each cycle: "
        + " ".join(f"{value / 2**20:.1f}" for value in report["host_bytes_of_cycles"]),
        f"drift from the second cycle to the last: {report['host_drift']:+.2%}",
        *(
            f"quiet, {name} the load: API {each['api_bytes'] >> 20} MiB, {each['api_files']} files; "
            f"engine {each['engine_bytes'] >> 20} MiB, {each['engine_files']} files; "
            f"GPU {each['gpu_bytes'] >> 20} MiB"
            for name, each in (("before", report["before"]), ("after", report["after"]))
        ),
        "",
        "     s   API MiB  engine MiB  GPU MiB  files (API, engine)  engines",
        *(
            f"{each['second']:6.0f} {each['api_bytes'] / 2**20:9.1f} {each['engine_bytes'] / 2**20:11.1f} "
            f"{each['gpu_bytes'] >> 20:8} {each['api_files']:12} {each['engine_files']:7} "
            f"{each['num_engines']:8}"
            for each in readings[:: max(1, len(readings) // 24)]
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server, soak it, judge it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", metavar="DIR", help="a checkpoint (default: a tiny random one)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--num-blocks", type=int, default=512, help="of the cache, 16 tokens each")
    parser.add_argument(
        "--neighbour-gib", type=float, default=0.0, metavar="GIB",
        help="what a process beside the server takes and frees of the device's memory, at most",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak"), metavar="FILE", help="FILE.json, FILE.txt")
    parser.add_argument("flags", nargs="*", help="after --: further flags of infer serve")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.streams < 1:
        parser.error("--minutes and --streams must be above 0")

    def tell(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        model = args.model or _tiny_model(Path(scratch) / "tiny")
        knobs: dict[str, Any] = {
            "device": args.device, "dtype": "float32", "deterministic": True, "num_blocks": args.num_blocks,
            "block_size": 16, "max_seq_len": 1024,
        } | ({"num_threads": 1} if args.device == "cpu" else {})  # fmt: skip
        shown = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in knobs.items()
        ]
        keys = (f"--api-key={KEY}", f"--admin-key={ADMIN_KEY}", "--response-store=200")
        server = Server([f"{NAME}={model}", "--port=0", *shown, *keys, *args.flags], Path(scratch))
        neighbour = Neighbour(args.device, args.neighbour_gib, args.seed)
        try:
            soak = Soak(
                server, neighbour, minutes=args.minutes, streams=args.streams, seed=args.seed, model=model,
                knobs=knobs,
            )  # fmt: skip
            with neighbour:
                asyncio.run(soak.run(tell))
        except BaseException:
            tell(f"the end of the server's log:\n{server.log.read_text()[-3000:]}")
            raise
        finally:
            exit_code = server.stop()
        faults = judge(soak, exit_code)
        if faults:
            args.out.with_suffix(".log").write_bytes(server.log.read_bytes())
    report = make_report(soak, faults, "python -m benchmarks.soak_server " + " ".join(argv or sys.argv[1:]))
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".txt").write_text(one_page(report), encoding="utf-8")
    print(one_page(report))
    return 1 if faults else 0


def _tiny_model(directory: Path) -> str:
    from scripts.make_checkpoint import Sizes, make_checkpoint  # here: it needs packages that tests have

    make_checkpoint("qwen2", directory, sizes=Sizes(context_len=1024))
    return str(directory)


if __name__ == "__main__":
    sys.exit(main())
