"""HTTP in front of the engine: OpenAI's routes, exact on the wire.

from infer.server import create_app
app = create_app(EngineConfig(...), ServerConfig(...))     # an ASGI application
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.server.app import create_app as create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module 'infer.server' has no attribute {name!r}")
    from infer.server.app import create_app

    return create_app
