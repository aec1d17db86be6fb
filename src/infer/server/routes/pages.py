"""The playground and the API's docs: static files, read once, with a strict content security policy.

Scripts, styles and connections may come only from this server, inline code is forbidden, and no other page
may put this one into a frame. So even if a model's output were rendered as markup, its scripts could not run.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

DIRECTORY = Path(__file__).parents[1] / "ui"
DOCS_DIRECTORY = Path(__file__).parents[1] / "api_docs"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_router() -> APIRouter:
    """Return the routes of the playground."""
    router = _make_router(DIRECTORY, "/ui", "/")

    @router.get("/ui/")
    async def get_page_by_its_directory() -> Response:
        return RedirectResponse("../ui")  # relative: works with any proxy and Host header

    return router


def make_docs_router() -> APIRouter:
    """Return the routes of the page that lists the API, which reads /openapi.json."""
    return _make_router(DOCS_DIRECTORY, "/docs")


def _make_router(directory: Path, path: str, *other_paths: str) -> APIRouter:
    """Return the routes of a page and its files; only files that exist now are ever served."""
    files = {
        file.name: (file.read_bytes(), MEDIA_TYPES[file.suffix])
        for file in sorted(directory.iterdir())
        if file.suffix in MEDIA_TYPES
    }
    router = APIRouter(include_in_schema=False)

    @router.get(path + "/{name}")
    async def get_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        content, media_type = files[name]
        return Response(content, headers=HEADERS | {"content-type": media_type})

    async def get_page() -> Response:
        return await get_file("index.html")

    for each in (path, *other_paths):
        router.add_api_route(each, get_page, methods=["GET", "HEAD"])
    return router
