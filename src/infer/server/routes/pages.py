"""The playground and the API's docs: static files, read once, under a policy that forbids everything else.

Scripts, styles and connections may come from this server only, nothing may be inlined, and no other
page may put this one into a frame. Even text that a model wrote as markup would find no way to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

DIRECTORY = Path(__file__).parents[1] / "ui"
DOCS_DIRECTORY = Path(__file__).parents[1] / "api_docs"
Files: TypeAlias = Mapping[str, tuple[bytes, str]]  # content and media type by name

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
    """Routes of the playground; the files that exist now are all that are ever served."""
    files = _read_files(DIRECTORY)
    router = APIRouter(include_in_schema=False)

    @router.head("/")
    @router.get("/")
    @router.head("/ui")
    @router.get("/ui")
    async def get_page() -> Response:
        return _send(files, "index.html")

    @router.get("/ui/")
    async def get_page_by_its_directory() -> Response:
        return RedirectResponse("../ui")  # relative: right behind any proxy, whatever Host it sends

    @router.get("/ui/{name}")
    async def get_file(name: str) -> Response:
        return _send(files, name)

    return router


def make_docs_router() -> APIRouter:
    """Routes of the page that lists the API, which reads /openapi.json."""
    files = _read_files(DOCS_DIRECTORY)
    router = APIRouter(include_in_schema=False)

    @router.head("/docs")
    @router.get("/docs")
    async def get_docs() -> Response:
        return _send(files, "index.html")

    @router.get("/docs/{name}")
    async def get_docs_file(name: str) -> Response:
        return _send(files, name)

    return router


def _read_files(directory: Path) -> Files:
    return {
        path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in sorted(directory.iterdir())
        if path.suffix in MEDIA_TYPES
    }


def _send(files: Files, name: str) -> Response:
    if name not in files:
        raise HTTPException(404)
    content, media_type = files[name]
    return Response(content, headers=HEADERS | {"content-type": media_type})
