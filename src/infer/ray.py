"""A Ray Serve application, for clusters that Ray Serve or KubeRay manages.

    applications:
      - name: infer
        import_path: infer.ray:app
        args: {model: org/name, max_seq_len: 8192, deployment: {num_replicas: 2}}

`args` holds knobs of the engine and of the server; `deployment` holds arguments of `serve.deployment`, such
as `num_replicas`, `autoscaling_config` or `ray_actor_options`. Each Serve replica runs one infer server in a
process of its own and forwards requests to it.

Serve's proxy listens on the network and accepts any Host header: without `api_key` anyone who can reach it
may use the model, and a warning says so.

`infer serve --cluster ray` does without Serve, so its tokens do not pass through Serve's proxy.
"""

# No `from __future__ import annotations`: Serve sends the class below to other processes without the names
# that only strings mention, and FastAPI has to know what `request` is.
import importlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from infer.cluster.child import ReplicaLaunch, ReplicaProcess
from infer.cluster.front import build_front
from infer.cluster.placing import FULL_PRIORITY, bundle_of, import_ray
from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.cluster.serve import replica_launch
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig, knob_table
from infer.errors import ConfigError
from infer.server.state import ServerState

logger = logging.getLogger(__name__)

OF_SERVE = {  # settings that a Serve application cannot have
    "admin_key": "admin routes act on one server, but a request goes to any replica",
    **dict.fromkeys(("host", "port", "uds", "tls_cert", "tls_key", "allowed_host"), "Serve's proxy listens"),
}


class _Relayed(Response):
    """A response that the front writes to the client's connection with Serve."""

    def __init__(self, front: Any) -> None:
        super().__init__()
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)


class ServeReplica:
    """A Serve replica: an infer server in a process of its own, and the front that forwards to it."""

    def __init__(self, launch: ReplicaLaunch, key: str, config: ServerConfig) -> None:
        server = replace(launch.server, host="127.0.0.1", port=0)
        self._process = ReplicaProcess(msgspec.structs.replace(launch, server=server))
        replicas = ReplicaSet()
        replicas.servers.append(RemoteServer(0, self._process.wait_ready(), key))
        self._replicas = replicas
        self.front = build_front(ServerState(config=config), replicas, check_host=False)

    async def check_health(self) -> None:
        """Raise if the server has ended: Serve then restarts this replica."""
        if self._process.has_ended:
            raise RuntimeError(f"the server of this replica has ended: {self._process.wait_end()}")
        await self._replicas.probe()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.stop()


def app(args: Mapping[str, Any]) -> Any:
    """Build the application from knobs; Serve calls it with `args` from its configuration."""
    for name in sorted(OF_SERVE.keys() & args.keys()):
        raise ConfigError(f"{name} cannot be used with infer.ray:app: {OF_SERVE[name]}; leave it out")
    import_ray()
    serve = importlib.import_module("ray.serve")
    given = dict(args)
    deployment = dict(given.pop("deployment", {}))
    of_server = {name for name, row in knob_table(with_server=True).items() if row.section == "server"}
    server = {name: given.pop(name) for name in sorted(of_server & given.keys())}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in server.items()
    }
    config = ServerConfig(**settings)
    if not config.api_key:
        logger.warning("api_key is not set: anyone who can reach Serve's proxy may use the model")
    models = {config.served_model_name or "": EngineConfig.from_knobs(**given)}
    key = secrets.token_hex(16)
    bundle = bundle_of(models)
    options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "runtime_env": FULL_PRIORITY}
    options |= deployment.pop("ray_actor_options", {})
    routes = FastAPI(openapi_url=None)

    @serve.ingress(routes)
    class InferReplica(ServeReplica):
        @routes.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
        async def forward(self, request: Request) -> Response:
            return _Relayed(self.front)

    made = serve.deployment(InferReplica, ray_actor_options=options, **deployment)
    return made.bind(replica_launch(models, config, key, "info"), key, config)
