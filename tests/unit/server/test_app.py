from __future__ import annotations

import logging
import re

import pytest
from fastapi import FastAPI

from infer.frontend.llm import LLM
from infer.server.app import build_app
from tests.support.app import Site


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "infer.server.middleware.access_log"]


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "A.b:c_9"])
def test_a_plain_request_id_is_sent_back(given: str) -> None:
    response = Site().request("GET", "/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "x\ty", "a;b", "<script>"])
def test_any_other_request_id_is_replaced_by_a_fresh_one(given: str) -> None:
    site = Site()
    answers = {
        site.request("GET", "/health", headers={"x-request-id": given}).headers["x-request-id"] for _ in "12"
    }
    assert given not in answers and len(answers) == 2
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", answer) for answer in answers)


def test_errors_carry_the_request_id_too() -> None:
    site = Site(api_key=("k",))
    for path in ("/v1/models", "/nowhere"):
        assert site.request("GET", path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_a_request_is_one_line_in_the_log_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        Site(api_key=("secret-key",)).request(
            "GET",
            "/version?token=hidden",
            headers={"authorization": "Bearer secret-key", "x-request-id": "r1"},
        )
    (line,) = logged(caplog)
    pattern = r'method=GET path="/version" status=200 ms=[\d.]+ prompt_tokens=0 output_tokens=0 request_id=r1'
    assert re.fullmatch(pattern, line)


SECRET = "my secret prompt"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({}, 400, 'param="prompt" error="the required field \'prompt\' is missing"'),
        ({"prompt": "a", "tempratur": 1}, 422, "did you mean 'temperature'?\""),
        ({"prompt": {"text": SECRET}}, 400, 'param="prompt" error="prompt: must be a string'),
        ({"prompt": "a", "stop": {"x": SECRET}}, 400, 'param="stop" error="stop: must be a string or'),
        ({"prompt": "a", "prompt_embeds": SECRET}, 422, 'param="prompt_embeds" error="prompt_embeds is not'),
        ({"prompt": "a", SECRET: 1}, 422, 'error="unknown field \'..."'),
        ({"prompt": "a", "model": "gpt\n4"}, 422, "code=model_not_found"),
        ([SECRET], 400, "error="),
    ],
)
def test_the_line_of_a_refused_request_says_why_and_quotes_no_text_of_the_client(
    body: object, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        response = Site().request("POST", "/v1/completions", json=body)
    assert response.status_code == status
    (line,) = logged(caplog)
    assert f"status={status}" in line and reason in line
    assert SECRET not in line and "\n" not in line


def test_a_request_refused_before_any_route_has_a_reason_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site(api_key=("secret-key",), max_body_size="1KiB")
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        site.request("GET", "/v1/models", headers={"authorization": "Bearer sk-wrong"})
        site.request("GET", "/nowhere", headers={"authorization": "Bearer secret-key"})
    wrong_key, no_route = logged(caplog)
    assert "status=401 " in wrong_key and 'error="' in wrong_key
    assert "secret-key" not in wrong_key and "sk-wrong" not in wrong_key
    assert 'error="there is no route GET /nowhere' in no_route


def test_the_reason_in_the_log_is_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        Site().request("POST", "/v1/completions", json={"prompt": "a", "x" * 5000: 1, "model": "\n" * 250})
    (line,) = logged(caplog)
    assert len(line) < 800


def test_a_path_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        Site().request("GET", "/x%0astatus=200%20request_id=fake" + "y" * 1000)
    (line,) = logged(caplog)
    assert "\n" not in line and len(line) < 600


def test_a_poll_of_health_is_logged_when_it_fails_in_a_new_way(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    caplog.set_level(logging.DEBUG, logger="infer.server.middleware.access_log")
    for is_starting in (True, True, False, False, True):
        site.state.board.is_starting = is_starting
        site.request("GET", "/health")
        site.request("GET", "/version")
    levels = [
        (record.levelname, re.search(r"status=\d+", record.getMessage())[0])  # type: ignore[index]
        for record in caplog.records
        if "/health" in record.getMessage()
    ]
    assert levels == [
        ("INFO", "status=503"),
        ("DEBUG", "status=503"),
        ("DEBUG", "status=200"),
        ("DEBUG", "status=200"),
        ("INFO", "status=503"),
    ]
    others = [record.levelname for record in caplog.records if "/version" in record.getMessage()]
    assert others == ["INFO"] * 5


def test_the_counts_are_read_in_silence_unless_they_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="infer.server.middleware.access_log")
    site = Site(api_key=("k",))
    for key in ("k", "wrong", "wrong"):
        site.request("GET", "/metrics", headers={"authorization": f"Bearer {key}"})
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO", "INFO"]


def test_the_line_of_a_request_names_the_model_that_served_it(
    oracle: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(encoder=oracle.encoder)
    site.state.aliases["other"] = {"fake": 1.0}
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        for fields in ({}, {"model": "fake"}, {"model": "other"}):
            site.request("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
        site.request("POST", "/v1/completions", json={"prompt": "a", "model": "absent"})
    *served, refused = logged(caplog)
    assert len(served) == 3
    assert all("status=200" in line and ' model="fake" request_id=' in line for line in served)
    assert " model=" not in refused


def test_the_access_log_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        Site(access_log=False).request("GET", "/health")
    assert not logged(caplog)


def test_an_unforeseen_failure_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    app: FastAPI = site.app

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret at /home/somebody/file.py 0x7f0011223344")

    response = site.request("GET", "/broken", headers={"x-request-id": "r7"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r7"
    assert "secret" not in response.text and "Traceback" not in response.text
    assert response.json()["error"]["code"] == 500
    assert any(record.exc_info for record in caplog.records), "the operator sees the traceback"
    assert site.metrics()['infer_http_requests_total{method="GET",route="/broken",status="500"}'] == 1


def test_a_body_over_the_limit_is_a_413() -> None:
    response = Site(max_body_size="1KiB").request("POST", "/v1/completions", content=b"x" * 2000)
    assert response.status_code == 413
    assert response.json()["error"]["message"].startswith("the request body is larger than 1KiB")


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_page_comes_with_a_policy_that_forbids_foreign_code(path: str) -> None:
    response = Site().request("GET", path)
    assert response.status_code == 200 and "<html" in response.text
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_every_file_the_page_names_is_served() -> None:
    site = Site()
    named = re.findall(r'(?:href|src)="(/ui/[^"]+)"', site.request("GET", "/").text)
    assert len(named) >= 2
    for path in named:
        assert site.request("GET", path).status_code == 200


def test_the_page_can_be_switched_off() -> None:
    assert Site(ui=False).request("GET", "/").text == "infer is running"


def test_browsers_elsewhere_are_refused_unless_their_origin_is_configured() -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    closed = Site(api_key=("k",)).request("OPTIONS", "/v1/models", headers=ask)
    assert "access-control-allow-origin" not in closed.headers
    site = Site(api_key=("k",), cors_origin=("https://a.example",))
    allowed = site.request("OPTIONS", "/v1/models", headers=ask)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = site.request("OPTIONS", "/v1/models", headers=ask | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = site.request("GET", "/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_a_browser_may_send_what_openai_s_client_describes_itself_with() -> None:
    wanted = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    ask = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    site = Site(cors_origin=("https://a.example",))
    allowed = site.request("OPTIONS", "/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200
    assert set(wanted.split(",")) <= set(re.split(r", ?", allowed.headers["access-control-allow-headers"]))


def test_a_request_for_another_host_is_refused_with_an_id_a_line_and_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site()
    site.app = build_app(site.state, check_host=True)
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        refused = site.request("GET", "/version", headers={"host": "evil.example", "x-request-id": "r9"})
    assert refused.status_code == 403 and refused.headers["x-request-id"] == "r9"
    (line,) = logged(caplog)
    assert "status=403" in line
    assert site.request("GET", "/version", headers={"host": "localhost:8000"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_page_answers_head(path: str) -> None:
    response = Site().request("HEAD", path)
    assert (response.status_code, response.content) == (200, b"")


def test_no_redirect_is_built_from_a_host_header() -> None:
    site = Site()
    response = site.request("GET", "/ui/", headers={"host": "evil.example"})
    assert response.status_code == 307 and response.headers["location"] == "../ui"
    assert site.request("GET", "/v1/models/", headers={"host": "evil.example"}).status_code == 404


def test_no_page_of_the_framework_that_loads_foreign_scripts_is_served() -> None:
    site = Site()
    assert [site.request("GET", path).status_code for path in ("/docs", "/redoc")] == [404, 404]
    assert site.request("GET", "/openapi.json").status_code == 200
