"""Bodies no client would write, made from the server's own description of itself: never a 5xx, never a hang.

The engine is scripted, so that a body that happens to be valid costs nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")
import schemathesis  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402

from infer.config.settings import LoadConfig  # noqa: E402
from infer.frontend.open_model import find_source, make_encoder  # noqa: E402
from infer.loader.headers import read_headers  # noqa: E402
from infer.sampling.params import SamplingParams  # noqa: E402
from scripts.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.app import Site  # noqa: E402
from tests.support.fake_client import FakeClient  # noqa: E402


class ShortClient(FakeClient):
    """Answers in at most three tokens, whatever was asked for; bodies that ask for many choices are fine."""

    async def generate(self, request: Any) -> Any:
        limit = min(request.params.max_tokens or 1, 3)
        lines = request.params.n if request.params.use_beam_search else request.params.num_sequences
        async for output in super().generate(_shortened(request, limit, lines)):
            yield output

    def abort(self, request_id: str, index: int | None = None) -> None:
        """A stop string was found: nothing is left to stop."""


def _shortened(request: Any, max_tokens: int, num_lines: int) -> Any:
    return replace(request, params=SamplingParams(max_tokens=max_tokens, n=num_lines))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory: Path = tmp_path_factory.mktemp("schema") / "llama"
    make_checkpoint("llama", directory)
    config = LoadConfig(model=str(directory))
    encoder = make_encoder(config, read_headers(find_source(config, show_progress=False)))
    yield Site(ShortClient(), encoder=encoder, access_log=False)


@pytest.fixture(scope="module")
def schema(site: Site) -> Any:
    gc.disable()  # CPython 3.11 cannot be interrupted while it parses: a collection fails the import
    try:
        return schemathesis.openapi.from_asgi("/openapi.json", site.app)
    finally:
        gc.enable()


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions/stream"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/score"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("POST", "/api/show"),
    ("GET", "/api/version"),
    ("POST", "/api/pull"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("POST", "/api/push"),
    ("POST", "/api/blobs/{digest}"),
    ("DELETE", "/api/delete"),
    ("POST", "/completion"),
    ("POST", "/completions"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/explain/{request_id}"),
]


def test_the_list_above_has_every_route(site: Site) -> None:
    paths = site.app.openapi()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(OPERATIONS)


# The check for the module `random` sees all threads, also those that an earlier test has left behind.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("num_examples", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: str(value))
def test_no_body_makes_the_server_fail(
    site: Site, schema: Any, method: str, path: str, num_examples: int
) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy())
    def check(case: Any) -> None:
        response = case.call()
        ran_out_of_time = response.status_code == 504 and "timeout" in (case.body or {})  # as it asked for
        if not ran_out_of_time:
            case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400 and path.startswith("/api/"):
            assert isinstance(response.json()["error"], str)
        elif response.status_code >= 400:
            keys = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) - {"details"} == keys

    try:
        check()
    except SystemError as error:  # CPython 3.11 loses count of its own recursion while the fuzzer parses
        pytest.skip(f"this Python failed, not the server: {error}")
