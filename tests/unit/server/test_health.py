from __future__ import annotations

import pytest

from infer import __version__
from infer.errors import EngineError, EngineStopped
from tests.support.app import Site
from tests.support.fake_client import FakeClient


def test_a_server_whose_engines_are_well_is_well() -> None:
    response = Site(FakeClient(), FakeClient()).request("GET", "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok"}


@pytest.mark.parametrize("failure", [EngineStopped("it died"), EngineError("no progress for 130 s")])
def test_one_engine_that_is_dead_or_stuck_makes_the_server_unwell(failure: EngineError) -> None:
    site = Site(FakeClient(), FakeClient())
    site.clients[1].failure = failure
    response = site.request("GET", "/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == f"engine 1 of fake: {failure}"
    site.clients[1].failure = None
    assert site.request("GET", "/health").status_code == 200


def test_starting_and_draining_are_told_apart_and_ask_to_come_back() -> None:
    site = Site()
    site.state.board.is_starting = True
    starting = site.request("GET", "/health")
    site.state.board.is_starting, site.state.board.is_draining = False, True
    draining = site.request("GET", "/health")
    assert starting.status_code == draining.status_code == 503
    assert "starting" in starting.text and "draining" in draining.text
    assert int(starting.headers["retry-after"]) > 0


def test_health_answers_head() -> None:
    site = Site()
    response = site.request("HEAD", "/health")
    assert (response.status_code, response.content) == (200, b"")
    site.state.board.is_draining = True
    assert site.request("HEAD", "/health").status_code == 503


def test_the_version_is_the_package_s() -> None:
    assert Site().request("GET", "/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/ui"])
def test_what_is_watched_takes_head_and_says_so(path: str) -> None:
    site = Site()
    assert site.request("HEAD", path).status_code == 200
    wrong = site.request("DELETE", path)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.json()["error"]["message"] == f"{path} does not take DELETE; it takes GET, HEAD"


def test_a_wrong_method_hears_of_all_that_a_path_takes() -> None:
    assert Site().request("POST", "/v1/models").headers["allow"] == "GET, HEAD"
    assert Site().request("GET", "/v1/completions").headers["allow"] == "POST"
