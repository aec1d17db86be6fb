"""`GET /explain/{id}`: the story of a request, and what would have made it faster.

The id is the response's `x-request-id`, or its `id`. A request is explained to the API key that it came with,
and to the operator; any other key gets the same 404, whether the request exists or not. The answer is JSON,
or plain text if the client asks for it (`accept: text/plain`).
"""

from __future__ import annotations

from fastapi import Request, Response

from infer.server.explain.tell import as_text, explain
from infer.server.fleet.fleet import Fleet
from infer.server.protocol.errors import ApiError
from infer.server.routes.json_route import ErrorBody, json_response, make_router
from infer.server.state import current_record

MAX_ID = 300  # characters: an engine's id has a few more than a client's
UNKNOWN = (
    "no request with this id is known: it was made with another key, never reached an engine, or is "
    "forgotten after many others (explain_requests)"
)

router = make_router()


@router.get(
    "/explain/{request_id:path}",
    response_model=None,
    tags=["watching"],
    responses={404: {"model": ErrorBody}},
)
async def get_explanation(request_id: str, http: Request) -> Response:
    """Explain why a request took as long as it did."""
    fleet: Fleet = http.app.state.fleet
    record = current_record()
    owner = "" if record is None else record.owner
    found = await explain(fleet, request_id, owner) if len(request_id) <= MAX_ID else None
    if found is None:
        return ApiError(status=404, message=UNKNOWN, code="request_not_found").response()
    if wants_text(http.headers.get("accept", "")):
        return Response(as_text(found), media_type="text/plain; charset=utf-8")
    return json_response(found)


def wants_text(accept: str) -> bool:
    """Return True if a client accepts plain text, and does not name JSON before it."""
    kinds = [kind.partition(";")[0].strip().lower() for kind in accept.split(",")]
    named = [kind for kind in kinds if kind in ("text/plain", "application/json")]
    return named[:1] == ["text/plain"]
