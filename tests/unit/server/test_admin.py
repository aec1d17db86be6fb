from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from infer.config import EngineConfig, ServerConfig
from infer.errors import RequestError
from infer.server.app import build_app, create_app
from infer.server.fleet import DEFAULT_MAX_WAITING, Fleet, with_server_defaults
from infer.server.metrics import ServerMetrics
from infer.server.state import ServerState
from tests.support.app import Site
from tests.support.fake_client import FakeClient

ADMIN = {"authorization": "Bearer root"}


def post(site: Site, path: str, body: Any) -> httpx.Response:
    return site.request("POST", path, json=body, headers=ADMIN)


def test_an_alias_can_be_made_and_pointed_elsewhere_but_not_onto_a_model() -> None:
    site = Site(admin_key="root")
    assert post(site, "/admin/models/alias", {"alias": "gpt-4", "name": "fake"}).status_code == 200
    assert site.state.get_model("gpt-4") is site.state.models["fake"]
    assert post(site, "/admin/models/alias", {"alias": "fake", "name": "fake"}).status_code == 422
    unknown = post(site, "/admin/models/alias", {"alias": "x", "name": "nobody"})
    assert unknown.status_code == 422 and "nobody" in unknown.json()["error"]["message"]


def test_unloading_stops_the_engines_and_forgets_aliases_and_meters() -> None:
    site = Site(FakeClient(), FakeClient(), admin_key="root")
    post(site, "/admin/models/alias", {"alias": "other", "name": "fake"})
    assert post(site, "/admin/models/unload", {"name": "fake"}).status_code == 200
    assert all(client.is_closed for client in site.clients)
    assert not site.state.models and not site.state.aliases and site.state.default_model is None
    assert not site.app.state.metrics.meters
    assert post(site, "/admin/models/unload", {"name": "fake"}).status_code == 422


def test_resetting_empties_every_engine_of_one_model_or_of_all() -> None:
    site = Site(FakeClient(), FakeClient(), admin_key="root")
    assert post(site, "/admin/reset_prefix_cache", {}).json() == {"num_blocks": 6}
    assert post(site, "/admin/reset_prefix_cache", {"model": "fake"}).json() == {"num_blocks": 6}
    assert post(site, "/admin/reset_prefix_cache", {"model": "fak"}).status_code == 422
    assert [client.num_resets for client in site.clients] == [2, 2]


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
        ({"name": "b", "model": "x", "nome": 1}, 422, "nome"),
        ({"name": "fake", "model": "x"}, 422, "already"),
        ({"name": "b", "model": "/no/such/directory"}, 422, "model"),
        ({"name": "b", "model": "x", "knobs": {"block_sise": 3}}, 422, "block_size"),
        ({"name": "b", "model": "x", "knobs": {"block_size": "big"}}, 422, "block_size"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_reason(body: Any, status: int, word: str) -> None:
    site = Site(admin_key="root", in_process=True)
    response = post(site, "/admin/models/load", body)
    assert response.status_code == status, response.text
    assert word in response.text
    assert list(site.state.models) == ["fake"]


def test_a_queue_is_bounded_unless_the_operator_said_how() -> None:
    assert with_server_defaults(EngineConfig()).scheduler.max_waiting == DEFAULT_MAX_WAITING
    own = EngineConfig.from_knobs(max_waiting=7)
    assert with_server_defaults(own) is own


def test_models_are_loaded_served_and_unloaded_while_the_server_runs(checkpoint: str) -> None:
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
            assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["b"]
            ask = {"model": "b", "prompt": "The engine", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            assert (await client.post("/admin/models/load", json=body)).status_code == 422
            assert (await client.post("/admin/models/unload", json={"name": "b"})).status_code == 200
            assert (await client.post("/v1/completions", json=ask)).status_code == 422
        await fleet.close()

    asyncio.run(live())


def test_create_app_starts_and_stops_its_engine_with_its_host(checkpoint: str) -> None:
    async def live() -> None:
        knobs = {"dtype": "float32", "num_threads": 1, "num_blocks": 16}
        engine = EngineConfig.from_knobs(model=checkpoint, **knobs)
        app = create_app(engine, ServerConfig(in_process=True, served_model_name="mine"))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert response.status_code == 200 and response.json()["model"] == "mine"
        assert not app.state.server.models

    asyncio.run(live())


def test_two_models_cannot_have_one_name() -> None:
    site = Site()
    fleet = Fleet(site.state, ServerMetrics("infer"))
    with pytest.raises(RequestError, match="already served"):
        asyncio.run(fleet.load("fake", EngineConfig()))
