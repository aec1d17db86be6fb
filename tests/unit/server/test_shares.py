"""An alias of several models: who gets which, and what the answer says."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest

from infer.config.server import ServerConfig, parse_alias
from infer.errors import ConfigError, EngineStopped
from infer.frontend.llm import LLM
from infer.server.fleet.fleet import Fleet
from infer.server.fleet.shares import choose_model
from infer.server.state import ServedModel
from tests.support.app import Site
from tests.support.fake_client import FakeClient

ADMIN = {"authorization": "Bearer root"}
USERS = [f"user-{number}" for number in range(2000)]
NINE_TO_ONE = {"v1": 90, "v2": 10}


def make_site(oracle: LLM, **knobs: Any) -> Site:
    """A server of two models and an alias "chat" for both."""
    site = Site(encoder=oracle.encoder, admin_key="root", **knobs)
    fleet: Fleet = site.app.state.fleet
    for name in ("v1", "v2"):
        client = FakeClient()
        site.clients.append(client)
        metered = fleet.metrics.add(name, client)
        site.state.models[name] = ServedModel(name, oracle.encoder, [metered], 0)
    answer = site.request(
        "POST", "/admin/models/alias", json={"alias": "chat", "models": NINE_TO_ONE}, headers=ADMIN
    )
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"alias": "chat", "models": NINE_TO_ONE}
    return site


def post_alias(site: Site, body: dict[str, Any]) -> None:
    answer = site.request("POST", "/admin/models/alias", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text


def ask(
    site: Site, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None
) -> httpx.Response:
    answer = site.request("POST", path, json={"model": "chat"} | body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer


def served(answer: httpx.Response) -> str:
    return str(answer.headers["x-infer-model"])


@pytest.mark.parametrize("weights", [{"v1": 90, "v2": 10}, {"v1": 1, "v2": 1}, {"a": 1, "b": 2, "c": 5}])
def test_weights_hold_within_two_percent_of_2000_users(weights: dict[str, float]) -> None:
    counts = Counter(choose_model(weights, "chat", user) for user in USERS)
    for name, weight in weights.items():
        assert abs(counts[name] / len(USERS) - weight / sum(weights.values())) < 0.02


def test_a_choice_never_changes() -> None:
    """A change of this text would send users to another model at an update."""
    text = "".join(choose_model({"1": 1, "2": 1, "3": 1}, "chat", user) for user in USERS[:40])
    assert text == "2233333111112321233233122112223121131212"


def test_only_users_who_must_change_their_model() -> None:
    before = {user: choose_model({"a": 50, "b": 50}, "chat", user) for user in USERS}
    without_b = {user: choose_model({"a": 50}, "chat", user) for user in USERS}
    with_c = {user: choose_model({"a": 50, "b": 50, "c": 50}, "chat", user) for user in USERS}
    less_b = {user: choose_model({"a": 50, "b": 25}, "chat", user) for user in USERS}
    assert set(without_b.values()) == {"a"}
    assert all(with_c[user] in ("c", before[user]) for user in USERS)
    assert all(less_b[user] == "a" for user in USERS if before[user] == "a")


def test_experiments_are_independent() -> None:
    one, other = ([choose_model({"a": 1, "b": 1}, alias, user) for user in USERS] for alias in ("x", "y"))
    agree = sum(a == b for a, b in zip(one, other, strict=True))
    assert 0.45 < agree / len(USERS) < 0.55


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
    ("/completion", {"prompt": "a", "n_predict": 1}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 1}}),
    ("/v1/embeddings", {"input": "a"}),
    ("/tokenize", {"prompt": "a"}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_sends_a_user_to_the_same_model(oracle: LLM, path: str, body: dict[str, Any]) -> None:
    site = make_site(oracle)
    found = {
        user: {served(ask(site, path, {**body, "user": user})) for _ in range(2)}
        for user in ("a", "d", "stranger")
    }
    assert found == {user: {choose_model(NINE_TO_ONE, "chat", f"user {user}")} for user in found}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"user": "u"}, "user"),
        ({"safety_identifier": "u"}, "safety_identifier"),
        ({"metadata": {"user_id": "u"}}, "metadata"),
    ],
)
def test_a_field_that_decides_is_not_called_ignored(oracle: LLM, fields: dict[str, Any], name: str) -> None:
    site = make_site(oracle)
    body = {"prompt": "a", "max_tokens": 1, **fields}
    answer = ask(site, "/v1/completions", body)
    assert "x-infer-ignored" not in answer.headers
    assert ask(site, "/v1/completions", {**body, "model": "v1"}).headers["x-infer-ignored"] == name


def test_an_answer_has_the_name_that_was_asked_for_and_counts_belong_to_the_model(oracle: LLM) -> None:
    site = make_site(oracle)
    users = USERS[:40]
    answers = [ask(site, "/v1/completions", {"prompt": "a", "max_tokens": 1, "user": user}) for user in users]
    assert {answer.json()["model"] for answer in answers} == {"chat"}
    wanted = Counter(choose_model(NINE_TO_ONE, "chat", f"user {user}") for user in users)
    assert Counter(map(served, answers)) == wanted and len(wanted) == 2
    counts = site.metrics()
    for name, number in wanted.items():
        labels = f'engine="0",finished_reason="length",model_name="{name}"'
        assert counts[f"infer_request_success_total{{{labels}}}"] == number
    assert [len(client.requests) for client in site.clients] == [0, wanted["v1"], wanted["v2"]]


def test_a_key_stays_with_one_model_unless_the_body_names_a_user(oracle: LLM) -> None:
    keys = tuple(f"key-{number}" for number in range(12))
    site = make_site(oracle, api_key=keys)
    body = {"prompt": "a", "max_tokens": 1}
    of_keys = [
        {served(ask(site, "/v1/completions", body, headers={"x-api-key": key})) for _ in range(3)}
        for key in keys
    ]
    assert all(len(models) == 1 for models in of_keys)
    post_alias(site, {"alias": "chat", "models": {"v1": 1, "v2": 1}})
    of_keys = [
        {served(ask(site, "/v1/completions", body, headers={"x-api-key": key})) for _ in range(3)}
        for key in keys
    ]
    assert all(len(models) == 1 for models in of_keys) and len(set.union(*of_keys)) == 2
    of_users = {
        user: {
            served(ask(site, "/v1/completions", {**body, "user": user}, headers={"x-api-key": key}))
            for key in keys[:3]
        }
        for user in USERS[:8]
    }
    assert all(len(models) == 1 for models in of_users.values()), "whichever key it comes with"


def test_without_a_user_or_a_key_every_request_draws(oracle: LLM) -> None:
    site = make_site(oracle)
    post_alias(site, {"alias": "chat", "models": {"v1": 1, "v2": 1}})
    body = {"prompt": "a", "max_tokens": 1}
    found = {served(ask(site, "/v1/completions", body)) for _ in range(64)}  # one in 2**63 is alike
    assert found == {"v1", "v2"}


def test_the_share_of_a_model_that_is_down_or_gone_goes_to_the_others(oracle: LLM) -> None:
    site = make_site(oracle)
    body = {"prompt": "a", "max_tokens": 1}
    of_v2 = next(user for user in USERS if choose_model(NINE_TO_ONE, "chat", f"user {user}") == "v2")
    ask_it = {**body, "user": of_v2}
    assert served(ask(site, "/v1/completions", ask_it)) == "v2"
    site.clients[2].failure = EngineStopped("it is being restarted")
    assert served(ask(site, "/v1/completions", ask_it)) == "v1"
    site.clients[2].failure = None
    assert served(ask(site, "/v1/completions", ask_it)) == "v2"
    assert site.request("POST", "/admin/models/unload", json={"name": "v2"}, headers=ADMIN).status_code == 200
    assert site.state.aliases == {"chat": {"v1": 90}}
    assert served(ask(site, "/v1/completions", ask_it)) == "v1"
    assert site.request("POST", "/admin/models/unload", json={"name": "v1"}, headers=ADMIN).status_code == 200
    assert not site.state.aliases


def test_an_alias_of_models_that_are_all_down_says_so(oracle: LLM) -> None:
    site = make_site(oracle)
    for client in site.clients:
        client.failure = EngineStopped("it is being restarted")
    body = {"model": "chat", "prompt": "a", "max_tokens": 1}
    answer = site.request("POST", "/v1/completions", json=body)
    assert answer.status_code == 503 and "being restarted" in answer.text


def test_the_alias_is_listed_with_its_weights(oracle: LLM) -> None:
    cards = make_site(oracle).request("GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["fake", "v1", "v2", "chat"]
    assert cards[3]["models"] == NINE_TO_ONE and cards[3]["parent"] == "v1"
    assert "models" not in cards[1]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"models": {}}, 400, "is empty"),
        ({"models": {"v1": 0, "v2": 1}}, 400, "numbers above 0, got 0"),
        ({"models": {"v1": -1, "v2": 1}}, 400, "numbers above 0, got -1"),
        ({"models": {"v1": 1e999, "v2": 1}}, 400, "not valid JSON"),
        ({"models": {"v1": "a lot"}}, 400, "models"),
        ({"models": {"v1": 1, "nobody": 1}}, 404, "nobody"),
        ({"models": {"v1": 1}, "name": "v1"}, 400, "give either name"),
        ({}, 400, "give either name"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    oracle: LLM, body: dict[str, Any], status: int, words: str
) -> None:
    site = make_site(oracle)
    before = dict(site.state.aliases)
    content = json.dumps({"alias": "chat", **body})
    headers = ADMIN | {"content-type": "application/json"}
    answer = site.request("POST", "/admin/models/alias", content=content, headers=headers)
    assert answer.status_code == status and words in answer.text, answer.text
    assert site.state.aliases == before


def test_an_alias_of_several_models_is_replaced_and_removed_like_any(oracle: LLM) -> None:
    site = make_site(oracle)
    post_alias(site, {"alias": "chat", "name": "v2"})
    assert site.state.aliases == {"chat": {"v2": 1}}
    post_alias(site, {"alias": "chat", "name": None})
    assert not site.state.aliases


def test_aliases_at_the_start() -> None:
    assert parse_alias("gpt") == ("gpt", {"": 1})
    assert parse_alias("gpt=llama:8b") == ("gpt", {"llama:8b": 1}), "a name may hold a colon"
    assert parse_alias("chat=v1:90,v2:10") == ("chat", {"v1": 90, "v2": 10})
    assert parse_alias("chat=a:8b:0.5, b:1") == ("chat", {"a:8b": 0.5, "b": 1})


@pytest.mark.parametrize(
    "text", ["chat=v1,v2", "chat=v1:90,v1:10", "chat=v1:0,v2:1", "chat=v1:nan,v2:1", "chat=:1,"]
)
def test_bad_weights_end_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="model_alias 'chat="):
        ServerConfig(model_alias=(text,))


def test_a_name_beyond_ascii_is_written_so_that_a_header_can_have_it(oracle: LLM) -> None:
    site = make_site(oracle)
    site.state.models["modèle/8b:q4"] = site.state.models["v1"]
    site.state.models["v1"].name = "modèle/8b:q4"
    answer = ask(site, "/v1/completions", {"model": "modèle/8b:q4", "prompt": "a", "max_tokens": 1})
    assert served(answer) == "mod%C3%A8le/8b:q4"
