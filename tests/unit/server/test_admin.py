from __future__ import annotations

import asyncio
import functools
import gc
import logging
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from infer.client.client import EngineClient
from infer.config.defaults import SERVER_MAX_QUEUE
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import (
    AdapterFailed,
    CheckpointError,
    ConfigError,
    EngineError,
    EngineLost,
    EngineStopped,
    NameTaken,
    RequestError,
    UnknownModel,
)
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app, create_app
from infer.server.fleet import fleet
from infer.server.fleet.engines import EngineStarter
from infer.server.fleet.fleet import Fleet, with_server_defaults
from infer.server.metrics import ServerMetrics
from infer.server.processes.messages import Question
from infer.server.processes.workers import Workers
from infer.server.state import ServedModel, ServerState
from tests.support.app import Site
from tests.support.fake_client import FakeClient

MESSAGES = [{"role": "user", "content": "a"}]
ADMIN = {"authorization": "Bearer root"}


def post(site: Site, path: str, body: Any) -> httpx.Response:
    return site.request("POST", path, json=body, headers=ADMIN)


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_an_engine_without_an_adapter_that_is_served_asks_to_try_again(
    oracle: LLM, path: str, field: str
) -> None:
    """It was restarted, and gets its adapters within a second; or the adapter was unloaded meanwhile."""
    engine = FakeClient()
    engine.failure = UnknownModel("no adapter 'sql' is loaded; loaded: none", param="adapter")  # type: ignore[assignment]
    place = Site(engine, encoder=oracle.encoder)
    place.state.adapters["sql"] = "fake"
    answer = place.request("POST", path, json={"model": "sql", field: "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), answer.text
    assert "adapter 'sql' was unloaded, or its engine was just restarted" in answer.json()["error"]["message"]


def test_an_adapter_that_its_engine_cannot_reload_is_a_fault_with_its_reason(oracle: LLM) -> None:
    engine = FakeClient()
    engine.failure = AdapterFailed("adapter 'sql' could not be loaded: no file /x/config.json")  # type: ignore[assignment]
    place = Site(engine, encoder=oracle.encoder)
    place.state.adapters["sql"] = "fake"
    answer = place.request("POST", "/v1/chat/completions", json={"model": "sql", "messages": MESSAGES})
    assert answer.status_code == 500 and "retry-after" not in answer.headers
    said = answer.json()["error"]["message"]
    assert said.startswith("adapter 'sql' could not be loaded: no file [path]; the operator can"), said


@pytest.mark.parametrize(
    ("route", "field"), [("/admin/adapters/load", "model"), ("/v1/load_lora_adapter", None)]
)
def test_a_model_without_room_for_adapters_is_the_field_to_blame(route: str, field: str | None) -> None:
    engine = FakeClient()
    engine.failure = RequestError("this engine has no room for LoRA adapters", param="adapter")  # type: ignore[assignment]
    body = {"name": "sql", "path": "/x"} if field else {"lora_name": "sql", "lora_path": "/x"}
    answer = post(Site(engine, admin_key="root"), route, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_an_engine_that_is_down_gets_its_adapters_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "WATCH_INTERVAL_S", 0.001)
    up, down = FakeClient(), FakeClient()
    place = Site(down, up, admin_key="root")
    load, sql = "/admin/adapters/load", {"name": "sql", "path": "/1"}
    assert post(place, load, sql).status_code == 200
    down.failure = EngineStopped("it is being restarted")
    assert post(place, load, sql | {"path": "/2", "replace": True}).status_code == 200
    assert up.adapters == {"sql": "/2"} and place.state.adapters == {"sql": "fake"}

    async def come_back() -> None:
        down.failure, down.adapters = None, {}
        watching = asyncio.create_task(place.app.state.fleet._watch())
        while down.adapters != up.adapters:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(asyncio.wait_for(come_back(), 30))
    up.failure = down.failure = EngineStopped("they are being restarted")
    answer = post(place, load, sql | {"path": "/3", "replace": True})
    assert answer.status_code == 503 and place.state.adapters == {"sql": "fake"}
    up.failure = None
    assert post(place, "/admin/adapters/unload", {"name": "sql"}).status_code == 200
    assert up.adapters == {}


def test_an_engine_that_restarts_while_another_loads_an_adapter_gets_it_too() -> None:
    is_reading, may_end = asyncio.Event(), asyncio.Event()

    class Slow(FakeClient):
        async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
            is_reading.set()
            await may_end.wait()

    first = FakeClient()
    adapters = Site(first, Slow(), admin_key="root").app.state.fleet.adapters

    async def scene() -> None:
        loading = asyncio.create_task(adapters.load("sql", "/1"))
        await is_reading.wait()
        first.adapters = {}  # as a restarted engine
        restoring = asyncio.create_task(adapters.restore("fake", first))
        for _ in range(5):
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(loading, restoring)

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert first.adapters == {"sql": "/1"}


def test_an_adapter_that_cannot_be_reloaded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeClient()
    place = Site(engine, admin_key="root")
    assert post(place, "/admin/adapters/load", {"name": "sql", "path": "/1"}).status_code == 200
    for failure, is_told in ((EngineStopped("down again"), False), (CheckpointError("no file /1"), True)):
        engine.failure = failure  # type: ignore[assignment]
        asyncio.run(place.app.state.fleet.adapters.restore("fake", engine))
        told = "adapter not reloaded model=fake adapter=sql reason='no file /1'"
        assert (told in caplog.text) == is_told


@pytest.mark.parametrize(
    ("route", "hint"),
    [
        ("models/load", "did you mean 'model'?"),
        ("models/unload", "allowed: name"),
        ("models/alias", "allowed: alias, name, models"),
        ("reset_prefix_cache", "did you mean 'model'?"),
        ("drain", "allowed: drain"),
    ],
)
def test_a_misspelt_field_hears_of_the_near_one_or_of_all(route: str, hint: str) -> None:
    answer = post(Site(admin_key="root"), f"/admin/{route}", {"modle": "b"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"unknown field 'modle'; {hint}"


@functools.cache
def admin_paths() -> list[str]:
    """The paths of the operator's routes; to describe an application takes longer than to ask it."""
    paths = Site(admin_key="root").app.openapi()["paths"]
    return [path for path in paths if path.startswith("/admin/") or "lora" in path]


@pytest.mark.parametrize(
    "body",
    ['{"name": ["\\ud800"]}', '{"model": {"\\udfff": 1}}', '{"name": NaN}', "[" * 3000, '{"a": 1e999}'],
)
def test_bodies_of_the_operator_are_strict_json(body: str) -> None:
    site = Site(admin_key="root")
    paths = admin_paths()
    assert len(paths) >= 9
    for path in paths:
        answer = site.request(
            "POST", path, content=body, headers=ADMIN | {"content-type": "application/json"}
        )
        assert answer.status_code in (400, 405), (path, answer.text)


def test_an_alias_can_be_made_and_pointed_elsewhere_but_not_onto_a_model() -> None:
    site = Site(admin_key="root")
    assert post(site, "/admin/models/alias", {"alias": "gpt-4", "name": "fake"}).status_code == 200
    assert site.state.get_model("gpt-4") is site.state.models["fake"]
    assert post(site, "/admin/models/alias", {"alias": "fake", "name": "fake"}).status_code == 409
    forged = post(site, "/admin/models/alias", {"alias": "x\ry", "name": "fake"})
    assert forged.status_code == 400 and forged.json()["error"]["param"] == "alias"
    unknown = post(site, "/admin/models/alias", {"alias": "x", "name": "nobody"})
    assert unknown.status_code == 404 and "nobody" in unknown.json()["error"]["message"]


def test_unloading_stops_the_engines_and_forgets_aliases_and_meters() -> None:
    site = Site(FakeClient(), FakeClient(), admin_key="root")
    post(site, "/admin/models/alias", {"alias": "other", "name": "fake"})
    assert post(site, "/admin/models/unload", {"name": "fake"}).status_code == 200
    assert all(client.is_closed for client in site.clients)
    assert not site.state.models and not site.state.aliases and site.state.default_model is None
    assert not site.app.state.metrics.meters
    assert post(site, "/admin/models/unload", {"name": "fake"}).status_code == 404


def test_resetting_empties_every_engine_of_one_model_or_of_all() -> None:
    site = Site(FakeClient(), FakeClient(), admin_key="root")
    assert post(site, "/admin/reset_prefix_cache", {}).json() == {"num_blocks": 6}
    assert post(site, "/admin/reset_prefix_cache", {"model": "fake"}).json() == {"num_blocks": 6}
    assert post(site, "/admin/reset_prefix_cache", {"model": "fak"}).status_code == 404
    assert [client.num_resets for client in site.clients] == [2, 2]


def test_an_adapter_is_unloaded_from_every_engine_that_lives() -> None:
    class Down(FakeClient):
        async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
            if path is None:
                raise EngineStopped("the engine process has ended; it is being restarted")

    site = Site(Down(), FakeClient(), admin_key="root")
    body = {"name": "sql", "path": "/sql"}
    assert post(site, "/admin/adapters/load", body).status_code == 200
    assert site.clients[1].adapters == {"sql": "/sql"}
    answer = post(site, "/admin/adapters/unload", {"name": "sql"})
    assert answer.status_code == 200, answer.text
    assert site.clients[1].adapters == site.state.adapters == {}


def hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another API process answer nothing."""

    async def call(self: Workers, question: Question[Any]) -> list[Any]:
        raise EngineStopped("API process 1 (pid 7) has not answered for 10 s")

    monkeypatch.setattr(Workers, "call", call)


def test_an_adapter_leaves_the_engines_though_an_api_process_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(FakeClient(), admin_key="root")
    assert post(site, "/admin/adapters/load", {"name": "sql", "path": "/sql"}).status_code == 200
    hang(monkeypatch)
    answer = post(site, "/admin/adapters/unload", {"name": "sql"})
    assert answer.status_code == 503 and "API process 1 (pid 7)" in answer.json()["error"]["message"]
    assert site.clients[0].adapters == site.state.adapters == {}


def test_draining_sends_newcomers_away_until_it_is_taken_back() -> None:
    site = Site(admin_key="root")
    assert post(site, "/admin/drain", {}).json() == {"is_draining": True, "num_active": 0}
    assert site.request("GET", "/v1/models").status_code == 503
    assert site.request("GET", "/health").status_code == 503
    assert post(site, "/admin/drain", {"drain": False}).json()["is_draining"] is False
    assert site.request("GET", "/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"name": "b"}, 400, "model"),
        ({"name": "b", "model": 3}, 400, "model"),
        ({"name": "b", "model": "x", "nome": 1}, 400, "nome"),
        ({"name": "fake", "model": "x"}, 409, "already"),
        ({"name": "b\n12:00 INFO", "model": "x"}, 400, "name must not have control characters"),
        ({"name": "b\x1b[2J", "model": "x"}, 400, "name must not have control characters"),
        ({"name": "b", "model": "/no/such/directory"}, 400, "model"),
        ({"name": "b", "model": "x", "knobs": {"block_sise": 3}}, 400, "block_size"),
        ({"name": "b", "model": "x", "knobs": {"block_size": "big"}}, 400, "block_size"),
        ({"name": "b", "model": "x", "knobs": {"schedule_policy": "os:system"}}, 400, "must not name code"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_reason(body: Any, status: int, word: str) -> None:
    site = Site(admin_key="root", in_process=True)
    response = post(site, "/admin/models/load", body)
    assert response.status_code == status, response.text
    assert word in response.text
    if "knobs" in body:
        assert response.json()["error"]["param"] == "knobs"
    assert list(site.state.models) == ["fake"]


def test_a_queue_is_bounded_unless_the_operator_said_how() -> None:
    assert with_server_defaults(EngineConfig()).scheduler.max_queue == SERVER_MAX_QUEUE
    own = EngineConfig.from_knobs(max_queue=7)
    assert with_server_defaults(own) is own


def test_replicas_in_one_process_divide_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineConfig] = []

    def note(config: EngineConfig, **options: object) -> None:
        opened.append(config)
        raise ConfigError("that is all")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("infer.server.fleet.engines.open_model", note)
    fleet = Fleet(ServerState(config=ServerConfig(in_process=True, replicas=4)), ServerMetrics("infer"))
    with pytest.raises(ConfigError, match="that is all"):
        asyncio.run(fleet._starter._start_threads(EngineConfig.from_knobs(device="cpu")))
    assert opened[0].load.num_threads == 2


def test_models_are_loaded_served_and_unloaded_while_the_server_runs(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        config = ServerConfig(in_process=True, replicas=2, admin_key="root")
        state = ServerState(config=config)
        fleet = Fleet(state, ServerMetrics("infer"))
        app = build_app(state, fleet)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            knobs = {"dtype": "float32", "num_threads": 1, "num_blocks": 16}
            body = {"name": "b", "model": checkpoint, "knobs": knobs}
            loaded = await client.post("/admin/models/load", json=body, timeout=60)
            assert loaded.json()["num_engines"] == 2, loaded.text
            warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert sum("came without a chat template" in message for message in warned) == 1
            assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["b"]
            ask = {"model": "b", "prompt": "The engine", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            assert (await client.post("/admin/models/load", json=body)).status_code == 409
            assert (await client.post("/admin/models/unload", json={"name": "b"})).status_code == 200
            assert (await client.post("/v1/completions", json=ask)).status_code == 422
        await fleet.close()

    asyncio.run(live())


def test_create_app_starts_and_stops_its_engine_with_its_host(checkpoint: str) -> None:
    async def live() -> None:
        knobs = {"dtype": "float32", "num_threads": 1, "num_blocks": 16}
        engine = EngineConfig.from_knobs(model=checkpoint, **knobs)
        names = {"served_model_name": "mine", "model_alias": ("ours", "gpt-4o=mine")}
        app = create_app(engine, ServerConfig(in_process=True, **names))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert response.status_code == 200 and response.json()["model"] == "mine"
                for name in ("ours", "gpt-4o"):
                    ask = {"prompt": "a", "max_tokens": 2, "model": name}
                    answer = await client.post("/v1/completions", json=ask)
                    assert answer.status_code == 200 and answer.json()["model"] == name
        assert not app.state.server.models

    asyncio.run(live())


def test_an_alias_of_a_model_that_is_not_served_ends_the_start(checkpoint: str) -> None:
    async def live() -> None:
        engine = EngineConfig.from_knobs(model=checkpoint, dtype="float32", num_threads=1, num_blocks=16)
        app = create_app(engine, ServerConfig(in_process=True, model_alias=("gpt-4o=nobody",)))
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="model_alias 'gpt-4o=nobody': no model is served under the name"):
        asyncio.run(live())


def test_a_name_that_is_being_loaded_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an alias nor a second load may slip in between the start of a load and its end."""

    async def live() -> None:
        site = Site(admin_key="root", in_process=True)
        fleet: Fleet = site.app.state.fleet
        going_on = asyncio.Event()

        async def start_slowly(self: Fleet, config: EngineConfig) -> tuple[Any, list[EngineClient]]:
            await going_on.wait()
            return SimpleNamespace(
                name="fake", context_len=9, template_warning=None, has_chat_template=False
            ), [FakeClient()]

        monkeypatch.setattr(EngineStarter, "_start_threads", start_slowly)
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            load = {"name": "b", "model": "x"}
            loading = asyncio.create_task(client.post("/admin/models/load", json=load))
            while "b" not in fleet._loading:
                await asyncio.sleep(0)
            alias = await client.post("/admin/models/alias", json={"alias": "b", "name": "fake"})
            again = await client.post("/admin/models/load", json=load)
            assert (alias.status_code, again.status_code) == (409, 409)
            assert "being loaded" in alias.text and "being loaded" in again.text
            assert alias.json()["error"]["type"] == "ConflictError"
            going_on.set()
            assert (await loading).json()["max_model_len"] == 9
            assert site.state.models["b"].name == "b" and not site.state.aliases
            assert not fleet._loading
        await fleet.close()

    asyncio.run(live())


def test_engines_whose_own_name_is_taken_are_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started = [FakeClient(), FakeClient()]

    async def start(self: Fleet, config: EngineConfig) -> tuple[Any, list[EngineClient]]:
        return SimpleNamespace(name="fake"), list(started)

    monkeypatch.setattr(EngineStarter, "_start_threads", start)
    site = Site(in_process=True)
    with pytest.raises(NameTaken):
        asyncio.run(site.app.state.fleet.load("", EngineConfig()))
    assert all(client.is_closed for client in started)
    assert len(site.app.state.metrics.meters) == 1


class Gated(FakeClient):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        await self.gate.wait()
        assert not self.is_closed, "the engine was stopped under a request"
        async for output in super().generate(request):
            yield output


@pytest.mark.parametrize(("is_stream", "hangs"), [(False, False), (True, False), (True, True)])
def test_unloading_waits_for_what_was_accepted_and_takes_nothing_new(
    oracle: LLM, is_stream: bool, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does if another API process hangs, and then says so."""
    if hangs:
        hang(monkeypatch)

    async def live() -> None:
        engine = Gated()
        site = Site(engine, encoder=oracle.encoder, admin_key="root")
        model = site.state.models["fake"]
        ask = {"model": "fake", "prompt": "a", "max_tokens": 3, "stream": is_stream}
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=ask))
            while not model.num_held:  # accepted; the engine need not know of it yet
                await asyncio.sleep(0)
            unloading = asyncio.create_task(client.post("/admin/models/unload", json={"name": "fake"}))
            while site.state.models:
                await asyncio.sleep(0)
            assert (await client.post("/v1/completions", json=ask)).status_code == 422
            assert not unloading.done() and not engine.is_closed
            engine.gate.set()
            assert (await asked).status_code == 200
            answer = await unloading
            assert answer.status_code == (503 if hangs else 200)
            assert hangs or answer.json()["cut_off_requests"] == 0
            assert engine.is_closed and model.num_held == 0

    asyncio.run(live())


def test_a_model_is_replaced_without_dropping_what_it_serves(
    oracle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        old, new = Gated(), FakeClient(first_token=70)
        site = Site(old, encoder=oracle.encoder, admin_key="root", in_process=True)
        is_ready = asyncio.Event()

        async def start(self: Fleet, config: EngineConfig) -> tuple[Any, list[EngineClient]]:
            await is_ready.wait()
            return oracle.encoder, [new]

        monkeypatch.setattr(EngineStarter, "_start_threads", start)
        model, fleet = site.state.models["fake"], site.app.state.fleet
        ask = {"model": "fake", "prompt": "a", "max_tokens": 2}
        load = {"name": "fake", "model": "x", "replace": True}
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            stream = asyncio.create_task(client.post("/v1/completions", json={**ask, "stream": True}))
            while not model.num_held:
                await asyncio.sleep(0)
            loading = asyncio.create_task(client.post("/admin/models/load", json=load))
            while not fleet._loading:
                await asyncio.sleep(0)
            again = await client.post("/admin/models/load", json=load)
            assert again.status_code == 409 and "being loaded" in again.text
            assert site.state.get_model("fake") is model, "the old one serves until the new one is ready"
            is_ready.set()
            assert (await loading).status_code == 200
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            assert len(new.requests) == 1 and not old.is_closed
            assert site.state.default_model == "fake"
            old.gate.set()
            assert (await stream).text.endswith("data: [DONE]\n\n")
            while not old.is_closed:
                await asyncio.sleep(0.01)
            assert [meter.labels for meter in fleet.metrics.meters] == [("fake", "1")]
        await fleet.close()

    asyncio.run(live())


def test_an_unload_ends_a_replacement_and_the_old_model(oracle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        async def start(self: Fleet, config: EngineConfig) -> tuple[Any, list[EngineClient]]:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(EngineStarter, "_start_threads", start)
        site = Site(encoder=oracle.encoder, in_process=True)
        fleet: Fleet = site.app.state.fleet
        loading = asyncio.create_task(fleet.load("fake", EngineConfig(), replaces=True))
        while not fleet._loading:
            await asyncio.sleep(0)
        await fleet.unload("fake")
        with pytest.raises(EngineStopped):
            await loading
        assert not site.state.models and site.clients[0].is_closed

    asyncio.run(live())


def test_a_failed_replacement_leaves_the_old_model(oracle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: Fleet, config: EngineConfig) -> tuple[Any, list[EngineClient]]:
        raise ConfigError("no memory for both")

    monkeypatch.setattr(EngineStarter, "_start_threads", start)
    site = Site(encoder=oracle.encoder, admin_key="root", in_process=True)
    load = {"name": "fake", "model": "x", "replace": True}
    answer = post(site, "/admin/models/load", load)
    assert answer.status_code == 400 and "no memory" in answer.text
    assert site.request("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


class Hanging(FakeClient):
    """Answers nothing until it is closed, which its requests are told the reason for."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        raise EngineStopped(await self.closed)
        yield

    async def close(self, reason: str = "") -> None:
        self.closed.set_result(reason)
        self.is_closed = True


def test_unloading_does_not_wait_for_ever(oracle: LLM) -> None:
    async def live() -> None:
        engine = Hanging()
        site = Site(engine, encoder=oracle.encoder, admin_key="root", drain_timeout=0.05)
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site", headers=ADMIN) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            while not site.state.models["fake"].num_held:
                await asyncio.sleep(0)
            unloaded = await client.post("/admin/models/unload", json={"name": "fake"})
            assert unloaded.status_code == 200 and engine.is_closed
            assert unloaded.json() == {"name": "fake", "default_model": None, "cut_off_requests": 1}
            answer = await asked
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == (
                "model 'fake' was unloaded, and this request did not end in the 0.05 s (drain_timeout) that "
                "it had left; name another"
            )

    asyncio.run(live())


def test_closing_the_fleet_closes_a_model_that_is_being_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        has_ended, faults = asyncio.Event(), list[dict[str, Any]]()

        async def unserve(model: ServedModel, timeout_s: float) -> int:
            await has_ended.wait()
            raise EngineStopped("a process of the server has ended")

        site = Site()
        fleet: Fleet = site.app.state.fleet
        monkeypatch.setattr(fleet._workers, "unserve", unserve)
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        site.state.models["fake"].num_held = 1
        unloading = asyncio.create_task(fleet.unload("fake"))
        while site.state.models:
            await asyncio.sleep(0)
        await fleet.close()
        assert site.clients[0].is_closed
        with pytest.raises(EngineStopped, match="the server is shutting down"):
            await unloading
        has_ended.set()
        await asyncio.sleep(0.01)
        gc.collect()
        assert not faults, "nothing is left behind that fails unseen"

    asyncio.run(live())


def test_the_log_names_a_load_of_the_default_model_that_ended_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def load(*_given: object, **_options: object) -> None:
        await asyncio.sleep(60)

    async def live(*, stops: bool) -> None:
        site = Site()
        fleet: Fleet = site.app.state.fleet
        site.state.board.is_draining = stops
        loading = asyncio.create_task(fleet.load("", EngineConfig()))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    monkeypatch.setattr(Fleet, "_load", load)
    with caplog.at_level(logging.INFO):
        asyncio.run(live(stops=False))
        assert caplog.messages[-1] == "load ended model=default reason='its caller has left'"
        asyncio.run(live(stops=True))
        assert caplog.messages[-1] == "load ended model=default reason='the server stops'"


def test_every_end_of_a_request_lets_its_model_go(oracle: LLM) -> None:
    site = Site(encoder=oracle.encoder)
    model = site.state.models["fake"]
    for body, status in (
        ({"prompt": "a", "max_tokens": 2}, 200),
        ({"prompt": "a", "max_tokens": 2, "stream": True}, 200),
        ({"prompt": "a", "temperature": -1}, 422),
    ):
        assert site.request("POST", "/v1/completions", json=body).status_code == status
        assert model.num_held == 0
    assert site.request("GET", "/v1/models").status_code == 200 and model.num_held == 0


def test_without_the_default_the_model_served_longest_is_the_default() -> None:
    site = Site(admin_key="root")
    for name in ("b", "c"):
        site.state.models[name] = ServedModel(name, site.state.models["fake"].encoder, [], 0)
    assert post(site, "/admin/models/unload", {"name": "fake"}).json()["default_model"] == "b"
    assert site.state.get_model(None).name == "b"
    assert post(site, "/admin/models/unload", {"name": "c"}).json()["default_model"] == "b"
    assert post(site, "/admin/models/unload", {"name": "b"}).json()["default_model"] is None
    with pytest.raises(UnknownModel):
        site.state.get_model(None)


@pytest.mark.parametrize(
    ("failures", "is_lost"),
    [
        ((None, EngineLost("five times")), False),
        ((EngineStopped("it is being restarted"), EngineLost("five times")), False),
        ((EngineLost("four times"), EngineLost("five times")), True),
    ],
)
def test_the_fleet_is_lost_when_no_engine_can_come_back(
    failures: Sequence[EngineError | None], is_lost: bool
) -> None:
    async def live() -> None:
        site = Site(FakeClient(), FakeClient())
        fleet: Fleet = site.app.state.fleet
        lost = fleet._workers.lost
        fleet._check_all_lost()
        assert not lost.done()
        for client, failure in zip(site.clients, failures, strict=True):
            client.failure = failure
        fleet._check_all_lost()
        assert lost.done() == is_lost
        if is_lost:
            assert "five times" in lost.result()

    asyncio.run(live())


def test_two_models_cannot_have_one_name() -> None:
    site = Site()
    fleet = Fleet(site.state, ServerMetrics("infer"))
    with pytest.raises(NameTaken, match="already served"):
        asyncio.run(fleet.load("fake", EngineConfig()))
