"""Models on demand: loaded for a request, shared by all who wait, unloaded for others or when idle."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import httpx
import pytest

from infer.client.client import EngineClient
from infer.client.planned import Planned
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import CheckpointError, ConfigError, EngineLost, EngineStopped, NameTaken, NoRoom
from infer.frontend.llm import LLM
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from infer.server.fleet import on_demand
from infer.server.fleet.engines import EngineStarter
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.processes.messages import GetUses, ModelUse, Question
from infer.server.protocol.stream import EventStream, FrameWriter
from infer.server.routes import json_route
from infer.server.routes.chat import ChatWriter
from infer.server.routes.ollama_models import read_keep_alive
from infer.server.state import RequestRecord, ServerState, recording
from tests.support.fake_client import FakeClient

ADMIN = {"authorization": "Bearer root"}


class Gated(FakeClient):
    """Answers when it is told to, and must not be closed before."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        await self.gate.wait()
        assert not self.is_closed, "the engine was stopped under a request"
        async for output in super().generate(request):
            yield output


class Stage:
    """A server whose engines are scripted; a model is its path, and loads when it is allowed to."""

    def __init__(self, client: httpx.AsyncClient, state: ServerState, fleet: Fleet) -> None:
        self.client, self.state, self.fleet = client, state, fleet
        self.starts: Counter[str] = Counter()
        self.may_load: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.failures: dict[str, Exception] = {}
        self.engines: dict[str, Gated] = {}  # the last of each model

    async def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "a", "max_tokens": 2} | fields
        return await self.client.post("/v1/completions", json=body)

    async def ok(self, model: str, **fields: Any) -> httpx.Response:
        answer = await self.ask(model, **fields)
        assert answer.status_code == 200, answer.text
        return answer

    @property
    def loaded(self) -> list[str]:
        return sorted(self.state.models)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def play(
    monkeypatch: pytest.MonkeyPatch,
    oracle: LLM,
    scene: Callable[[Stage], Awaitable[None]],
    *,
    closed: tuple[str, ...] = (),
    settle_s: float = 0.01,
    **knobs: Any,
) -> None:
    """Run a scene with the models a, b and c, which load at once but for those in `closed`.

    Where requests wait for a model while others wait for its room, `settle_s` is long for a busy machine.
    """
    monkeypatch.setattr(on_demand, "SWEEP_S", 0.01)
    monkeypatch.setattr(on_demand, "SETTLE_S", settle_s)

    @asynccontextmanager
    async def stage() -> AsyncIterator[Stage]:
        config = ServerConfig(in_process=True, on_demand=True, admin_key="root", **knobs)
        state = ServerState(config=config)
        fleet = Fleet(state, ServerMetrics("infer"))
        transport = httpx.ASGITransport(build_app(state, fleet))
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            made = Stage(client, state, fleet)

            async def start(fleet: Fleet, config: EngineConfig) -> tuple[PromptEncoder, list[EngineClient]]:
                path = str(config.load.model)
                made.starts[path] += 1
                await made.may_load[path].wait()
                if path in made.failures:
                    raise made.failures[path]
                made.engines[path] = Gated()
                return oracle.encoder, [made.engines[path]]

            monkeypatch.setattr(EngineStarter, "_start_threads", start)
            for name in "abc":
                if name not in closed:
                    made.may_load[name].set()
            await fleet.start({name: EngineConfig.from_knobs(model=name) for name in "abc"})
            try:
                yield made
            finally:
                await fleet.close()

    async def run() -> None:
        async with stage() as made:
            await scene(made)

    asyncio.run(run())


def test_names_are_known_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.client.get("/health")).status_code == 200
        cards = (await stage.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["loaded"]) for card in cards] == [("a", False), ("b", False), ("c", False)]
        assert (await stage.client.get("/v1/models/d")).status_code == 404
        assert not stage.starts, "to look at a list loads nothing"
        answer = await stage.ok("b")
        assert answer.headers["x-infer-model"] == "b" and stage.loaded == ["b"]
        cards = (await stage.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["loaded"]) for card in cards] == [("a", False), ("b", True), ("c", False)]
        assert (await stage.ask("d")).status_code == 422
        assert (await stage.client.post("/v1/completions", json={"prompt": "a"})).headers[
            "x-infer-model"
        ] == "a", "the first is the default"

    play(monkeypatch, oracle, scene)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 1}}),
        ("/api/embed", {"input": "a"}),
    ],
)
def test_the_wait_for_a_model_is_the_load_duration_of_ollamas_api(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, path: str, body: dict[str, Any]
) -> None:
    async def scene(stage: Stage) -> None:
        first = (await stage.client.post(path, json={"model": "b", **body})).json()
        assert 0 < first["load_duration"] < first["total_duration"]
        assert (await stage.client.post(path, json={"model": "b", **body})).json()["load_duration"] == 0

    play(monkeypatch, oracle, scene)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 1}}),
        ("/api/generate", {}),
        ("/api/embed", {"input": "a"}),
    ],
)
def test_every_route_loads_the_model_it_names(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, path: str, body: dict[str, Any]
) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.client.post(path, json={"model": "b", **body})
        assert answer.status_code == 200, answer.text
        assert stage.loaded == ["b"]

    play(monkeypatch, oracle, scene)


def test_looking_at_a_model_loads_nothing_and_is_no_use(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        async def look() -> tuple[Any, Any, Any]:
            shown = await stage.client.post("/api/show", json={"model": "b"})
            props = await stage.client.get("/props", params={"model": "b"})
            slots = await stage.client.get("/slots", params={"model": "b"})
            assert [each.status_code for each in (shown, props, slots)] == [200, 200, 200]
            return shown.json(), props.json(), slots.json()

        shown, props, slots = await look()
        assert shown["model_info"] == {"general.basename": "b"} and shown["capabilities"] == ["completion"]
        assert (props["model_alias"], props["total_slots"], slots) == ("b", 0, [])
        assert (await stage.client.get("/props", params={"model": "d"})).status_code == 404
        assert not stage.starts
        await stage.ok("b")
        used_at = stage.state.models["b"].used_at
        known, known_props, _ = await look()
        assert known.keys() == shown.keys() and known_props.keys() == props.keys()
        assert known["model_info"]["general.architecture"] == oracle.encoder.family
        assert stage.state.models["b"].used_at == used_at

    play(monkeypatch, oracle, scene)


def test_all_who_wait_share_one_load(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        asks = [asyncio.create_task(stage.ok("a", stream=number % 2 == 0)) for number in range(6)]
        await until(lambda: stage.starts["a"])
        asks[0].cancel()  # its client leaves, and ends nothing for the others
        stage.may_load["a"].set()
        await asyncio.gather(*asks[1:])
        assert stage.starts == {"a": 1}

    play(monkeypatch, oracle, scene, closed=("a",))


@pytest.mark.parametrize("error", [CheckpointError("/secret/place is broken"), RuntimeError("a bug")])
def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, error: Exception
) -> None:
    async def scene(stage: Stage) -> None:
        stage.failures["a"] = error
        asks = [asyncio.create_task(stage.ask("a")) for _ in range(3)]
        await until(lambda: stage.starts["a"])
        await stage.client.get("/v1/models")
        stage.may_load["a"].set()
        for answer in await asyncio.gather(*asks):
            assert answer.status_code == 500
            message = answer.json()["error"]["message"]
            assert message == "model 'a' could not be loaded; the log of the server says why"
        assert (await stage.client.get("/health")).status_code == 200
        await stage.ok("b")
        del stage.failures["a"]
        await stage.ok("a")
        assert stage.starts["a"] == 2

    play(monkeypatch, oracle, scene, closed=("a",))


def test_the_model_used_least_recently_makes_room(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        for name in "aba":
            await stage.ok(name)
        first = stage.engines["b"]
        await stage.ok("c")
        assert stage.loaded == ["a", "c"] and first.is_closed
        await stage.ok("b")
        assert stage.loaded == ["b", "c"] and stage.starts == {"a": 1, "b": 2, "c": 1}

    play(monkeypatch, oracle, scene, max_loaded_models=2)


def test_a_model_with_requests_is_not_cut_off_and_newcomers_wait_for_its_next_load(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        engine = stage.engines["a"]
        engine.gate.clear()
        open_one = asyncio.create_task(stage.ok("a"))
        await until(lambda: stage.state.models["a"].num_held)
        other = asyncio.create_task(stage.ok("b"))
        await until(lambda: not stage.state.models)
        late = asyncio.create_task(stage.ok("a"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not engine.is_closed and stage.starts == {"a": 1}, "b is not loaded beside it"
        engine.gate.set()
        await asyncio.gather(open_one, other, late)
        assert engine.is_closed and stage.starts == {"a": 2, "b": 1}
        assert stage.loaded == ["a"]

    play(monkeypatch, oracle, scene, settle_s=2.0)


def test_a_request_does_not_wait_for_a_model_that_it_holds(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        with recording(RequestRecord("req-1", 0.0)):
            held = await stage.state.use_model("a")
            other = asyncio.create_task(stage.ok("b"))
            await until(lambda: not stage.state.models)  # a makes room when its request has ended
            async with asyncio.timeout(30):
                assert await stage.state.use_model("a") is held
            assert stage.state.get_model("a") is held
        await other
        assert stage.starts == {"a": 1, "b": 1} and held.num_held == 0

    play(monkeypatch, oracle, scene)


def test_an_operator_who_hangs_up_cuts_off_no_request(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        engine = stage.engines["a"]
        engine.gate.clear()
        open_one = asyncio.create_task(stage.ok("a"))
        await until(lambda: stage.state.models["a"].num_held)
        load = stage.client.post("/admin/models/load", json={"name": "d", "model": "d"})
        operator = asyncio.create_task(load)
        await until(lambda: not stage.state.models)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        assert not engine.is_closed
        engine.gate.set()
        await open_one
        await until(lambda: engine.is_closed)

    play(monkeypatch, oracle, scene, settle_s=2.0)


@pytest.mark.parametrize("what", ["unload", "replace"])
def test_a_model_that_leaves_takes_its_place_until_its_engines_end(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, what: str
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        engine = stage.engines["a"]
        engine.gate.clear()
        open_one = asyncio.create_task(stage.ok("a"))
        await until(lambda: stage.state.models["a"].num_held)
        path, body = "/admin/models/unload", dict[str, Any](name="a")
        if what == "replace":
            stage.may_load["a2"].set()
            path, body = "/admin/models/load", {"name": "a", "model": "a2", "replace": True}
        operator = asyncio.create_task(stage.client.post(path, json=body))
        await until(lambda: "a2" in stage.engines if what == "replace" else not stage.state.models)
        other = asyncio.create_task(stage.ok("b"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not engine.is_closed and stage.starts["b"] == 0
        engine.gate.set()
        await asyncio.gather(open_one, other)
        assert (await operator).status_code == 200
        assert engine.is_closed and stage.loaded == ["b"]

    play(monkeypatch, oracle, scene)


def test_a_model_whose_engine_is_lost_is_loaded_again(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        engine = stage.engines["a"]
        engine.failure = EngineLost("five times")
        stage.fleet._check_all_lost()
        await until(lambda: engine.is_closed)
        await stage.ok("a")
        assert stage.starts == {"a": 2} and not stage.fleet._workers.lost.done()

    play(monkeypatch, oracle, scene)


def test_models_that_are_asked_for_at_once_are_all_served(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        await asyncio.gather(*(stage.ok(name) for name in "abcabcabc"))
        assert stage.starts == {"a": 1, "b": 1, "c": 1}

    play(monkeypatch, oracle, scene, settle_s=2.0)


def test_an_idle_model_is_unloaded_and_keeps_its_name(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        engine = stage.engines["a"]
        await until(lambda: engine.is_closed)
        assert not stage.state.models and stage.state.default_model == "a"
        assert (await stage.client.get("/health")).status_code == 200
        stage.engines.clear()
        slow = asyncio.create_task(stage.ok("a"))
        await until(lambda: "a" in stage.engines)
        await slow

    play(monkeypatch, oracle, scene, idle_unload=0.02)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[EventStream]:
    """Streams that begin as soon as their model has to be waited for."""
    found: list[EventStream] = []

    class Noted(EventStream):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(json_route, "BEGIN_S", 0.0)
    monkeypatch.setattr(json_route, "EventStream", Noted)
    return found


def test_a_stream_begins_while_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, begun: list[EventStream]
) -> None:
    async def scene(stage: Stage) -> None:
        asked = asyncio.create_task(stage.ok("a", stream=True))
        await until(lambda: begun)
        stage.may_load["a"].set()
        text = (await asked).text
        assert text.startswith(": ping\n\n") and text.endswith("data: [DONE]\n\n")
        assert stage.state.models["a"].num_held == 0
        body = {"model": "b", "prompt": "a", "options": {"num_predict": 2}}
        lines = asyncio.create_task(stage.client.post("/api/generate", json=body))
        await until(lambda: len(begun) == 2)
        stage.may_load["b"].set()
        assert (await lines).text.startswith('{"model"'), "a line is never a ping"

    play(monkeypatch, oracle, scene, closed=("a", "b"))


def test_a_stream_that_has_begun_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, begun: list[EventStream]
) -> None:
    async def scene(stage: Stage) -> None:
        stage.failures = {name: CheckpointError("broken") for name in "ab"}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"model": "a", "stream": True}),
            ("/api/generate", {"model": "b"}),
            ("/v1/responses", {"model": "a", "stream": True, "input": "a", "prompt": None}),
            ("/v1/completions", {"model": "c", "stream": True, "temperature": -1}),
        ]
        texts: list[str] = []
        for path, body in bodies:
            stage.may_load[body["model"]].clear()
            asked = asyncio.create_task(stage.client.post(path, json={"prompt": "a", **body}))
            await until(lambda: len(begun) == len(texts) + 1)  # noqa: B023
            stage.may_load[body["model"]].set()
            answer = await asked
            assert answer.status_code == 200
            texts.append(answer.text)
        assert "could not be loaded" in texts[0] and texts[0].endswith("data: [DONE]\n\n")
        assert list(json.loads(texts[1])) == ["error"]
        told = json.loads(texts[2].rpartition("data: ")[2])
        assert (told["type"], told["sequence_number"]) == ("error", 0), "an event of a response has a type"
        assert "could not be loaded" in told["message"]
        assert "temperature" in texts[3] and stage.state.models["c"].num_held == 0

    play(monkeypatch, oracle, scene, closed=("a", "b", "c"))


def test_a_stream_that_has_begun_names_fields_as_they_were_sent(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, begun: list[EventStream]
) -> None:
    async def scene(stage: Stage) -> None:
        body = {"model": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
        wrong = body | {"max_completion_tokens": 0}
        asked = asyncio.create_task(stage.client.post("/v1/chat/completions", json=wrong))
        await until(lambda: begun)
        stage.may_load["a"].set()
        assert '"param":"max_completion_tokens"' in (await asked).text

    play(monkeypatch, oracle, scene, closed=("a",))


def test_a_connection_that_closes_before_the_model_is_loaded_is_no_error() -> None:
    async def live() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise ConnectionResetError

        async def receive() -> Any:
            await asyncio.Event().wait()

        opening: asyncio.Future[FrameWriter] = asyncio.get_running_loop().create_future()
        with recording(record := RequestRecord("req-1", 0.0)):
            await EventStream(ChatWriter, opening, {})({"type": "http"}, receive, send)
        assert record.is_gone and opening.cancelled()

    asyncio.run(live())


def test_a_wait_for_a_model_has_an_end(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask("a")
        assert answer.status_code == 504 and "was not loaded after 0.05 s" in answer.text

    play(monkeypatch, oracle, scene, closed=("a",), request_timeout=0.05)


def test_an_alias_of_several_models_loads_the_one_it_chooses(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        found = {(await stage.ok("both", user=str(user))).headers["x-infer-model"] for user in range(8)}
        assert found == {"a", "b"} == set(stage.starts)

    play(monkeypatch, oracle, scene, model_alias=("both=a:1,b:1",), max_loaded_models=2)


def test_a_request_keeps_the_model_of_an_alias_when_its_engine_goes_down(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        with recording(RequestRecord("req-1", 0.0)):
            held = await stage.state.use_model("both")
            stage.engines[held.name].failure = EngineStopped("it is being restarted")
            assert not held.is_up
            async with asyncio.timeout(30):
                assert await stage.state.use_model("both") is held, "the other one would wait for its room"
        assert stage.starts == {held.name: 1}

    play(monkeypatch, oracle, scene, model_alias=("both=a:1,b:1",))


def test_the_operator_adds_replaces_and_removes_models(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        async def admin(what: str, **body: Any) -> httpx.Response:
            return await stage.client.post(f"/admin/models/{what}", json=body)

        for path in ("d", "a2"):
            stage.may_load[path].set()
        await stage.ok("a")
        assert (await admin("load", name="d", model="d")).status_code == 200
        assert stage.loaded == ["d"], "it has made room"
        await stage.ok("b")
        await stage.ok("d")
        assert stage.starts["d"] == 2, "it is on demand as well"
        taken = await admin("load", name="a", model="a2")
        assert taken.status_code == 409 and "loaded on demand" in taken.text
        assert (await admin("load", name="a", model="a2", replace=True)).status_code == 200
        assert stage.loaded == ["a"] and stage.starts["a2"] == 1
        assert (await admin("unload", name="b")).status_code == 200, "also one that is not loaded"
        assert (await stage.ask("b")).status_code == 422
        assert (await admin("unload", name="a")).json() == {
            "name": "a", "default_model": "c", "cut_off_requests": 0
        }  # fmt: skip
        assert [card["id"] for card in (await stage.client.get("/v1/models")).json()["data"]] == ["c", "d"]

    play(monkeypatch, oracle, scene)


def test_a_load_under_a_taken_name_unloads_no_other_model(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        stage.may_load["d"].set()
        await stage.ok("a")
        stage.fleet.names.set_alias("x", {"b": 1.0})
        taken = await stage.client.post("/admin/models/load", json={"name": "x", "model": "d"})
        assert taken.status_code == 409 and "is an alias" in taken.text
        assert stage.loaded == ["a"] and not stage.starts["d"]

    play(monkeypatch, oracle, scene)


def test_of_two_loads_under_one_name_the_second_is_refused(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        async def load(path: str) -> httpx.Response:
            return await stage.client.post("/admin/models/load", json={"name": "new", "model": path})

        stage.may_load["e"].set()
        asked = []
        for work in (load("d"), stage.ask("b"), load("e")):
            asked.append(asyncio.create_task(work))
            await asyncio.sleep(0.05)  # they wait for their turn, in this order
        stage.may_load["d"].set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200, 409]
        await stage.ok("new")
        assert stage.starts == {"d": 2, "b": 1}

    play(monkeypatch, oracle, scene)


@pytest.mark.parametrize("end", ["leave", "unload", "shutdown"])
def test_a_load_that_waits_for_its_turn_can_be_ended(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, end: str
) -> None:
    async def scene(stage: Stage) -> None:
        asked = asyncio.create_task(stage.ask("a"))
        await until(lambda: stage.starts["a"])
        body = {"name": "new", "model": "d"}
        loading = asyncio.create_task(stage.client.post("/admin/models/load", json=body))
        await until(lambda: stage.fleet._waiting)
        again = await stage.client.post("/admin/models/load", json=body)
        assert again.status_code == 409 and "being loaded" in again.text
        if end == "leave":
            loading.cancel()
        elif end == "unload":
            answer = await stage.client.post("/admin/models/unload", json={"name": "new"})
            assert answer.status_code == 200, answer.text
            ended = await loading
            assert ended.status_code == 503 and "the load of 'new' was ended" in ended.text
        else:
            await stage.fleet.end_loads()
            assert (await loading).status_code == 503
        await until(lambda: not stage.fleet._waiting)
        if end != "shutdown":
            stage.may_load["a"].set()
            assert (await asked).status_code == 200 and not stage.starts["d"]
            stage.may_load["d"].set()
            assert (await stage.client.post("/admin/models/load", json=body)).status_code == 200
            await stage.ok("new")

    play(monkeypatch, oracle, scene, closed=("a",))


@pytest.mark.parametrize("end", ["leave", "unload", "shutdown"])
def test_a_load_of_an_adapter_that_waits_for_its_turn_can_be_ended(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, end: str
) -> None:
    async def scene(stage: Stage) -> None:
        may_read, set_adapter = asyncio.Event(), Gated.set_adapter

        async def read(self: Gated, name: str, path: str | None, *, replaces: bool = False) -> None:
            await may_read.wait()
            await set_adapter(self, name, path, replaces=replaces)

        monkeypatch.setattr(Gated, "set_adapter", read)
        await stage.ok("b")

        async def load(name: str) -> httpx.Response:
            body = {"name": name, "path": "/x", "model": "b"}
            return await stage.client.post("/admin/adapters/load", json=body)

        first = asyncio.create_task(load("law"))
        await until(stage.fleet.adapters._turn.locked)
        second = asyncio.create_task(load("sql"))
        await until(lambda: stage.fleet.adapters.waiting)
        ending = None
        if end == "leave":
            second.cancel()
        elif end == "unload":
            unload = stage.client.post("/admin/adapters/unload", json={"name": "sql"})
            ending = asyncio.create_task(unload)
        else:
            await stage.fleet.end_loads()
        await until(lambda: not stage.fleet.adapters.waiting)
        if end != "leave":
            answer = await second
            assert answer.status_code == 503, answer.text
        may_read.set()
        assert (await first).status_code == 200
        assert ending is None or (await ending).status_code == 200
        assert stage.engines["b"].adapters == {"law": "/x"} and stage.state.adapters == {"law": "b"}
        assert end == "shutdown" or (await load("sql")).status_code == 200

    play(monkeypatch, oracle, scene)


def test_an_unload_ends_no_waiting_load_of_another_kind(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        asked = asyncio.create_task(stage.ask("a"))
        await until(lambda: stage.starts["a"])
        body = {"name": "new", "model": "d"}
        loading = asyncio.create_task(stage.client.post("/admin/models/load", json=body))
        await until(lambda: stage.fleet._waiting)
        answer = await stage.client.post("/admin/adapters/unload", json={"name": "new"})
        assert answer.status_code == 404 and "no adapter is served" in answer.text, answer.text
        for name in "ad":
            stage.may_load[name].set()
        assert (await loading).status_code == 200 and (await asked).status_code == 200

    play(monkeypatch, oracle, scene, closed=("a",))


def test_a_name_that_is_gone_is_not_loaded(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    """Another API process may ask for a model before it hears that the model was unloaded."""

    async def scene(stage: Stage) -> None:
        assert stage.state.demand is not None
        await stage.fleet.unload("b")
        await stage.state.demand("b")
        assert stage.loaded == [] and not stage.starts

    play(monkeypatch, oracle, scene)


def test_a_model_that_is_used_while_another_idle_one_ends_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        is_ending, may_end = asyncio.Event(), asyncio.Event()

        async def close(reason: str = "") -> None:
            is_ending.set()
            await may_end.wait()

        for name in "ab":
            await stage.ok(name)
        stage.fleet.metrics.meters[0].close = close
        for model in stage.state.models.values():
            model.used_at -= 1000
        await is_ending.wait()
        stage.engines["b"].gate.clear()
        asked = asyncio.create_task(stage.ok("b"))
        await until(lambda: stage.state.models["b"].num_held)
        may_end.set()
        await until(lambda: not stage.fleet._leaving)
        await stage.client.get("/v1/models")
        assert stage.loaded == ["b"]
        stage.engines["b"].gate.set()
        await asked

    play(monkeypatch, oracle, scene, max_loaded_models=2, idle_unload=100.0)


def test_an_unload_ends_a_load_that_requests_wait_for(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        asked = asyncio.create_task(stage.ask("a"))
        await until(lambda: stage.starts["a"])
        answer = await stage.client.post("/admin/models/unload", json={"name": "a"})
        assert answer.json() == {
            "name": "a", "default_model": "b", "cut_off_requests": 0
        }  # fmt: skip
        assert (await asked).status_code == 503
        assert (await stage.ask("a")).status_code == 422

    play(monkeypatch, oracle, scene, closed=("a",))


def test_a_model_that_another_process_does_not_know_to_be_gone_is_not_served(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    """Its demand ends, and the names that it was sent before say the rest."""

    async def scene(stage: Stage) -> None:
        assert (await stage.client.post("/admin/models/unload", json={"name": "a"})).status_code == 200
        assert stage.state.demand is not None
        await stage.state.demand("a")
        assert not stage.starts["a"]

    play(monkeypatch, oracle, scene)


def test_shutting_down_ends_loads_and_those_who_wait_hear_of_it(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        asks = [asyncio.create_task(stage.ask(name)) for name in "ab"]
        await until(lambda: stage.starts["a"])
        await stage.fleet.close()
        assert [(await asked).status_code for asked in asks] == [503, 503]

    play(monkeypatch, oracle, scene, closed=("a", "b"))


def test_a_server_that_drains_answers_at_once_who_waits_for_another_model(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    """Its model is never loaded, so there is nothing to wait for; running requests finish."""

    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        stage.engines["a"].gate.clear()
        running = asyncio.create_task(stage.ask("a"))
        await until(lambda: stage.state.models["a"].num_held)
        waiting = asyncio.create_task(stage.ask("b"))
        await until(lambda: stage.fleet._leaving)  # a ends for b once its request has finished
        await stage.fleet.end_loads()  # as the server does before it drains
        for asked in waiting, asyncio.create_task(stage.ask("c")):
            async with asyncio.timeout(30):
                answer = await asked
            assert answer.status_code == 503 and "the server is shutting down" in answer.text
        assert not running.done()
        stage.engines["a"].gate.set()
        assert (await running).status_code == 200

    play(monkeypatch, oracle, scene)


def test_keep_alive_says_how_long_a_model_stays(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stage: Stage) -> None:
        body: dict[str, Any] = {
            "model": "a",
            "prompt": "a",
            "options": {"num_predict": 1},
            "keep_alive": "5m",
        }
        answer = await stage.client.post("/api/generate", json=body)
        assert answer.status_code == 200 and "x-infer-ignored" not in answer.headers
        assert stage.state.models["a"].keep_s == 300
        (running,) = (await stage.client.get("/api/ps")).json()["models"]
        assert not running["expires_at"].startswith("9999")
        tags = (await stage.client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["a:latest", "b:latest", "c:latest"]
        unload = {"model": "a", "keep_alive": 0}
        assert (await stage.client.post("/api/generate", json=unload)).json()["done_reason"] == "unload"
        await until(lambda: stage.engines["a"].is_closed)
        assert (await stage.client.post("/api/generate", json=unload)).json()["done_reason"] == "unload"
        assert stage.starts == {"a": 1}, "what is not loaded is not loaded to be unloaded"
        bad = await stage.client.post("/api/generate", json=body | {"keep_alive": "soon"})
        assert bad.status_code == 400 and "keep_alive must be" in bad.text

    play(monkeypatch, oracle, scene)


def test_a_model_that_is_kept_beyond_the_calendar_never_expires(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        (running,) = (await stage.client.get("/api/ps")).json()["models"]
        assert running["expires_at"].startswith("9999")

    play(monkeypatch, oracle, scene, idle_unload=1e12)


def test_keep_alive_counts_in_whichever_process_it_was_said(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        looks: list[Question[Any]] = []

        async def call(question: Question[Any]) -> list[Any]:
            looks.append(question)
            if looks == [GetUses()]:
                raise RuntimeError("a look that fails is not the last one")
            return [{"a": ModelUse(0, 1.0, 0.0, monotonic())}] if question == GetUses() else []

        monkeypatch.setattr(stage.fleet._workers, "call", call)
        await until(lambda: stage.engines["a"].is_closed)
        assert stage.starts == {"a": 1}

    play(monkeypatch, oracle, scene)


def test_a_use_without_keep_alive_does_not_take_back_an_earlier_one() -> None:
    said, silent = ModelUse(1, 5.0, 300.0, 4.0), ModelUse(2, 9.0, None, 0.0)
    assert said.plus(silent) == silent.plus(said) == ModelUse(3, 9.0, 300.0, 4.0)
    later = ModelUse(0, 7.0, 60.0, 6.0)
    assert said.plus(later) == later.plus(said) == ModelUse(1, 7.0, 60.0, 6.0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("99999999h", float("inf")),
        (1e300, float("inf")),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (10, 10),
        ("10", 10),
        (0, 0),
        (-1, float("inf")),
        ("-1m", float("inf")),
    ],
)
def test_durations_are_read_as_ollama_reads_them(given: str | float, seconds: float) -> None:
    assert read_keep_alive(given) == seconds


def test_settings_that_make_no_sense_are_refused() -> None:
    for knobs in ({"max_loaded_models": 2}, {"idle_unload": 5.0}, {"loaded_memory": "1GiB"}):
        with pytest.raises(
            ConfigError, match="has no effect without on_demand; leave out .*, or give on_demand"
        ):
            ServerConfig(**knobs)
    with pytest.raises(ConfigError, match="loaded_memory must be a size"):
        ServerConfig(on_demand=True, loaded_memory="much")
    with pytest.raises(ConfigError, match="loaded_memory must be at least 1MiB, got 1KiB"):
        ServerConfig(on_demand=True, loaded_memory="1KiB")
    with pytest.raises(ConfigError, match="max_loaded_models"):
        ServerConfig(on_demand=True, max_loaded_models=0)
    fleet = Fleet(ServerState(config=ServerConfig(on_demand=True)), ServerMetrics("infer"))
    with pytest.raises(ConfigError, match="on_demand needs a name"):
        asyncio.run(fleet.start({"": EngineConfig()}))


def test_a_budget_that_no_machine_here_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(
        ServerState(config=ServerConfig(on_demand=True, loaded_memory="999GiB")), ServerMetrics("infer")
    )
    monkeypatch.setattr("infer.tools.host_memory.free_host_bytes", lambda: 20 << 30)
    monkeypatch.setattr("infer.tools.nvml.total_memory", lambda: 80 << 30)
    here, gpu = (EngineConfig.from_knobs(model="m", device=device) for device in ("cpu", "cuda"))
    for models, there in (
        ({"a": here}, "models: 20.0 GiB of free host memory; set it to less, such as 15360MiB"),
        ({"a": gpu}, "models: 80.0 GiB of GPUs; set"),
        ({"a": gpu, "b": here}, "models: 80.0 GiB of GPUs and 20.0 GiB of free host memory; set"),
    ):
        with pytest.raises(ConfigError, match=f"loaded_memory=999GiB is more than there is for {there}"):
            fleet.check(models)
    monkeypatch.setattr("infer.tools.nvml.total_memory", lambda: None)
    fleet.check({"a": gpu})  # it does not say


def test_adapters_shadow_no_model_and_come_back_with_theirs(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        async def load(name: str, path: str, *, model: str = "b", replace: bool = False) -> int:
            body = {"name": name, "path": path, "model": model, "replace": replace}
            return (await stage.client.post("/admin/adapters/load", json=body)).status_code

        await stage.ok("b")
        assert await load("a", "/sql") == 409, "the name of a model that is not loaded"
        assert await load("sql", "/sql") == 200
        await stage.fleet._retire(stage.state.models["b"])
        assert stage.loaded == []
        await stage.ok("sql")
        assert (stage.loaded, stage.engines["b"].adapters) == (["b"], {"sql": "/sql"})
        assert await load("sql", "/new", replace=True) == 200
        stage.engines["b"].adapters = {"sql": "/sql"}  # as a restarted engine
        await stage.fleet.adapters.restore("b", stage.engines["b"])
        assert stage.engines["b"].adapters == {"sql": "/new"}
        await stage.fleet.unload("b")
        assert stage.fleet.adapters._paths == {} == stage.state.adapters

    play(monkeypatch, oracle, scene)


def test_a_model_unloaded_while_its_adapters_come_back_is_not_served(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ok("b")
        await stage.fleet.adapters.load("sql", "/sql", "b")
        await stage.fleet._retire(stage.state.models["b"])
        may_restore, is_restoring = asyncio.Event(), asyncio.Event()

        async def set_adapter(self: Gated, name: str, path: str, *, replaces: bool = False) -> None:
            is_restoring.set()
            await may_restore.wait()

        monkeypatch.setattr(Gated, "set_adapter", set_adapter)
        answer = asyncio.create_task(stage.ask("b"))
        await is_restoring.wait()
        await stage.fleet.unload("b")
        may_restore.set()
        assert (await answer).status_code == 503
        assert stage.loaded == [] and stage.engines["b"].is_closed

    play(monkeypatch, oracle, scene)


def test_adapters_given_to_several_models_are_refused_with_the_way(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        stage.fleet.adapters.note("a", ["sql"])
        with pytest.raises(NameTaken, match="'sql' is taken; .* /admin/adapters/load is for one"):
            stage.fleet.names.check_adapters(
                "b", EngineConfig.from_knobs(model="x", lora_modules=("sql=/sql",))
            )

    play(monkeypatch, oracle, scene)


def test_one_name_is_not_given_to_two_adapters_at_a_time(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        for model in "bc":
            await stage.ok(model)
        loads = [stage.fleet.adapters.load("sql", f"/{model}", model) for model in "bc"]
        done = await asyncio.gather(*loads, return_exceptions=True)
        assert done[0] == "b" and isinstance(done[1], NameTaken)
        assert stage.engines["b"].adapters == {"sql": "/b"} and not stage.engines["c"].adapters
        load = asyncio.ensure_future(stage.fleet.adapters.load("law", "/law", "b"))
        await asyncio.sleep(0)
        stage.fleet.names.set_alias("law", {"c": 1.0})
        with pytest.raises(NameTaken):
            await load
        assert stage.engines["b"].adapters == {"sql": "/b"} == {"sql": "/" + stage.state.adapters["sql"]}
        load = asyncio.ensure_future(stage.fleet.adapters.load("tax", "/tax", "b"))
        await asyncio.sleep(0)
        stage.fleet.adapters.note(
            "c", ["tax"]
        )  # the model was loaded meanwhile, with an adapter of this name
        with pytest.raises(NameTaken):
            await load
        assert stage.state.adapters["tax"] == "c" and "tax" not in stage.engines["b"].adapters

    play(monkeypatch, oracle, scene, max_loaded_models=2)


def measure(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    """Let plans say that models take these sizes, in MiB."""

    def plan(config: EngineConfig) -> Planned:
        return Planned(sizes[str(config.load.model)] << 20)

    monkeypatch.setattr("infer.server.fleet.on_demand.plan_model", plan)


def test_bytes_are_a_budget_in_which_the_least_recently_used_makes_room(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    measure(monkeypatch, {"a": 40, "b": 60, "c": 50})

    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        await stage.ok("b")
        assert stage.loaded == ["a", "b"]
        await stage.ok("a")
        await stage.ok("c")  # 50 fit next to the 40 of a, which was used last
        assert stage.loaded == ["a", "c"]
        await stage.ok("b")  # 60 fit next to none of them but a, which was used before c
        assert stage.loaded == ["b"]
        assert stage.starts == {"a": 1, "b": 2, "c": 1}

    play(monkeypatch, oracle, scene, loaded_memory="100MiB")


def test_a_number_of_models_holds_within_a_budget_of_bytes(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    measure(monkeypatch, dict.fromkeys("abc", 10))

    async def scene(stage: Stage) -> None:
        for name in "abc":
            await stage.ok(name)
        assert stage.loaded == ["b", "c"]

    play(monkeypatch, oracle, scene, loaded_memory="100MiB", max_loaded_models=2)


def test_a_model_larger_than_the_budget_is_refused_and_no_other_leaves(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    measure(monkeypatch, {"a": 1, "b": 3, "c": 1})

    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        assert (await stage.ask("b")).status_code == 500
        assert "model 'b' takes 3.0MiB with its KV cache, and loaded_memory is 2MiB" in caplog.text
        assert stage.loaded == ["a"] and stage.starts == {"a": 1}
        knobs = {"name": "d", "model": "b"}
        answer = await stage.client.post("/admin/models/load", json=knobs)
        assert answer.status_code == 400 and "loaded_memory is 2MiB" in answer.text, answer.text

    play(monkeypatch, oracle, scene, loaded_memory="2MiB")


def test_a_plan_that_finds_no_room_is_made_again_when_others_have_left(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stage: Stage) -> None:
        def plan(config: EngineConfig) -> Planned:
            if stage.state.models or stage.fleet._leaving:
                raise NoRoom("the others have it")
            return Planned(1)

        monkeypatch.setattr("infer.server.fleet.on_demand.plan_model", plan)
        await stage.ok("a")
        await stage.ok("b")
        assert stage.loaded == ["b"]

    play(monkeypatch, oracle, scene, loaded_memory="100MiB")


def test_a_model_is_loaded_with_the_cache_that_was_counted_until_a_load_fails(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    """What is free at the load decides nothing: it was counted when the plan was made."""
    free = [7]
    monkeypatch.setattr("infer.server.fleet.on_demand.plan_model", lambda config: Planned(60 << 20, free[-1]))

    async def scene(stage: Stage) -> None:
        def loaded(name: str) -> int | None:
            config = stage.state.models[name].config
            return None if config is None else config.cache.num_blocks

        await stage.ok("a")
        assert loaded("a") == 7
        free.append(9)
        await stage.ok("b")
        await stage.ok("a")
        assert loaded("a") == 7 and stage.starts["a"] == 2
        await stage.ok("b")
        stage.failures["a"] = ConfigError("7 blocks are more than there is")
        assert (await stage.ask("a")).status_code == 500
        del stage.failures["a"]
        await stage.ok("a")
        assert loaded("a") == 9

    play(monkeypatch, oracle, scene, loaded_memory="100MiB")


def test_a_cache_that_was_counted_beside_others_grows_when_they_have_left(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    """A plan of 20 + 2 for each block; a quarter of what others leave free of 80 blocks."""

    async def scene(stage: Stage) -> None:
        def plan(config: EngineConfig) -> Planned:
            others = (*stage.state.models.values(), *stage.fleet._leaving.values())
            num_blocks = (100 - 20 - (sum(model.planned_bytes for model in others) >> 20)) // 4
            return Planned((20 + 2 * num_blocks) << 20, num_blocks)

        def blocks() -> dict[str, int | None]:
            configs = {name: model.config for name, model in stage.state.models.items()}
            return {name: each.cache.num_blocks for name, each in configs.items() if each is not None}

        monkeypatch.setattr("infer.server.fleet.on_demand.plan_model", plan)
        await stage.ok("a")
        assert blocks() == {"a": 20}  # 60MiB
        await stage.ok("b")  # 5 blocks next to a: 30MiB
        assert blocks() == {"a": 20, "b": 5}
        await stage.ok("a")
        await stage.ok("c")  # 20 next to both, 30 next to a
        assert blocks() == {"a": 20, "c": 5}
        await stage.ok("b")  # its 30 fit when a has left, and more do
        assert blocks() == {"c": 5, "b": 12}
        await stage.ok("b")
        assert stage.starts == {"a": 1, "b": 2, "c": 1}

    play(monkeypatch, oracle, scene, loaded_memory="100MiB")


def test_a_model_that_replaces_another_is_counted_next_to_it(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    measure(monkeypatch, {"a": 30, "b": 60, "new": 20})

    async def scene(stage: Stage) -> None:
        await stage.ok("a")
        await stage.ok("b")
        stage.may_load["new"].set()
        knobs = {"name": "b", "model": "new", "replace": True}
        answer = await stage.client.post("/admin/models/load", json=knobs)  # 30 + 60 + 20 are too many
        assert answer.status_code == 200, answer.text
        assert stage.loaded == ["b"] and [m.planned_bytes for m in stage.state.models.values()] == [20 << 20]

    play(monkeypatch, oracle, scene, loaded_memory="100MiB")
