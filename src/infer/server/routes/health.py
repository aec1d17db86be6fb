"""`/health`, `/version` and `/metrics`: the routes for monitoring.

`/health` is 200 only if every engine is alive and makes progress. It is 503 while the first models are
loading (so that traffic waits), while the server drains (so that traffic goes elsewhere), and when an engine
is dead or stuck (so that the server is restarted); the message gives the reason.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from infer import __version__
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import CONTENT_TYPE
from infer.server.protocol.errors import ApiError
from infer.server.state import ServerState

router = APIRouter(tags=["watching"])


def why_unwell(state: ServerState) -> str | None:
    """Return the reason this server should get no traffic; None if it should."""
    if state.board.is_starting:
        return "starting: a model is being loaded"
    if state.board.is_draining:
        return "draining: no new requests are taken"
    for model in state.models.values():
        for number, client in enumerate(model.clients):
            reason = client.failure
            if reason is not None:
                return f"engine {number} of {model.name}: {reason}"
    return None


@router.head("/health", response_model=None, include_in_schema=False)
@router.get("/health", response_model=None)
async def get_health(http: Request) -> dict[str, str] | Response:
    """Answer 200 if every engine can serve, else 503 with the reason."""
    reason = why_unwell(http.app.state.server)
    if reason is None:
        return {"status": "ok"}
    return ApiError.for_now(reason).response()


@router.head("/version", response_model=None, include_in_schema=False)
@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return the version of this package."""
    return {"version": __version__}


@router.head("/metrics", response_model=None, include_in_schema=False)
@router.get("/metrics", response_model=None)
async def get_metrics(http: Request) -> Response:
    """Return counters and histograms in Prometheus' text format."""
    fleet: Fleet = http.app.state.fleet
    return Response(await fleet.metrics_text(), media_type=CONTENT_TYPE)
