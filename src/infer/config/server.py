"""The knobs of a server, one section next to the engine's (settings.py), and the names of its models."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from infer.config.defaults import MAX_SEQUENCES
from infer.config.knobs import check_knobs, host_size, knob, knob_rows, parse_bytes, refuse
from infer.errors import ConfigError

MAX_API_PROCESSES = 64
LEAST_SIZE = 1 << 20  # bytes; no model is smaller


def check_size(name: str, size: str, why: str = "") -> None:
    """Refuse a size that cannot be read, or that is too small."""
    if parse_bytes(size, name) < LEAST_SIZE:
        raise ConfigError(f"{name} must be at least {LEAST_SIZE >> 20}MiB, got {size}{why}")


def is_loopback(name: str) -> bool:
    """Return True if a host name or address means the machine that resolves it."""
    bare = (name[1:-1] if name[:1] + name[-1:] == "[]" else name).rstrip(".").lower()
    with suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return bare == "localhost" or bare.endswith(".localhost")


_EFFECTS = (  # a knob of the server, and the knobs that have no effect without it (or with it):
    ("without", "on_demand", {"max_loaded_models", "loaded_memory", "idle_unload", "model_memory"}),
    ("without", "record", {"record_text", "record_bytes", "overwrite"}),
    ("without", "cluster", {"ray_address", "max_replicas"}),
    ("without", "max_replicas", {"target_queue_time", "scale_down_after"}),
    ("without", "api_key", {"cache_isolation"}),
    ("without", "replicas", {"share_device"}),
    ("with", "uds", {"allowed_host"}),
    ("with", "api_key", {"allowed_host"}),
    ("with", "in_process", {"api_processes", "record", "restart_engine", "share_device"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's address, its clients, and the limits of its work."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = knob(8000, "TCP port; 0: any free one", least=0, most=65535)
    uds: str | None = knob(None, "listen on this unix socket instead of host and port")
    served_model_name: str | None = knob(None, "name of the model for clients; default: its own name")
    model_alias: tuple[str, ...] = knob(
        (),
        "another name of a model, as ALIAS=NAME, or ALIAS of the first model; ALIAS=NAME:90,OTHER:10 shares "
        "its requests among models by weight; may be repeated",
    )
    on_demand: bool = knob(False, "load models at their first request; each needs a name: --model NAME=MODEL")
    max_loaded_models: int | None = knob(
        None,
        "with on_demand: most models loaded at a time; the least recently used is unloaded for the next; "
        "default: 1, or any number within loaded_memory",
    )
    loaded_memory: str | None = knob(
        None,
        "with on_demand: memory of all loaded models together, such as 60GiB, with their KV caches as infer "
        "plan counts them; the least recently used is unloaded for the next; default: no limit in bytes",
        is_size=True,
    )
    idle_unload: float = knob(
        0.0,
        "with on_demand: seconds without requests after which a model is unloaded; 0: only to make room",
        least=0,
    )
    model_memory: str | None = knob(
        None,
        "with on_demand: host memory that keeps the weights of unloaded models, such as 64GiB, so that they "
        "load again in seconds; the model unloaded first is dropped for the next; a number alone is GiB; "
        "default, or 0: none is kept",
        is_size=True,
    )
    api_key: tuple[str, ...] = knob((), "clients must send one of these as a bearer token; may be repeated")
    cache_isolation: str = knob(
        "none",
        "requests that share cached prefixes: none: all with the same cache_salt; key: only requests with "
        "the same API key as well, so that no client learns from response times what others have asked",
        choices=("none", "key"),
    )
    admin_key: str | None = knob(None, "key of the admin routes; without one they are off")
    cors_origin: tuple[str, ...] = knob(
        (), "web page origin that browsers may call from; may be repeated", aliases=("allowed_origins",)
    )
    allowed_host: tuple[str, ...] = knob(
        (), "further host name to answer for, on loopback without keys; may be repeated"
    )
    tls_cert: str | None = knob(None, "PEM certificate: serve HTTPS", aliases=("ssl_certfile",))
    tls_key: str | None = knob(None, "PEM key of tls_cert", aliases=("ssl_keyfile",))
    max_body_size: str = knob("8MiB", "largest request body", is_size=True)
    max_prompts: int = knob(256, "prompts in one completion request (embeddings: 2048 inputs)")
    max_n: int = knob(16, "outputs (n, best_of or beams) of one prompt", most=MAX_SEQUENCES)
    request_timeout: float = knob(600.0, "seconds after which a request ends with an error", least=0)
    drain_timeout: float = knob(
        30.0,
        "seconds that running requests get when the server stops",
        least=0,
        aliases=("shutdown_timeout",),
    )
    api_processes: int | None = knob(
        None,
        "processes that answer HTTP; default: one per 4 cores next to a GPU, at most 8, else 1",
        most=MAX_API_PROCESSES,
    )
    replicas: int = knob(
        1,
        "engines that serve the model in parallel, each on its own GPU or share of the processor's cores",
        aliases=("data_parallel_size", "num_replicas"),
    )
    cluster: str = knob(
        "none",
        "where replicas run: none: on this machine, in one server; ray: on the nodes of a Ray cluster, each "
        "with its own server, to which this one forwards requests",
        choices=("none", "ray"),
    )
    ray_address: str | None = knob(None, "address of the Ray cluster; default: found by Ray")
    max_replicas: int | None = knob(
        None, "in a cluster: add replicas up to this many while requests wait; default: as many as replicas"
    )
    target_queue_time: float = knob(1.0, "seconds that requests may wait before max_replicas adds a replica")
    scale_down_after: float = knob(300.0, "seconds without a queue until an added replica is ended")
    share_device: bool = knob(
        False,
        "let replicas share GPUs and divide device_memory if there are fewer GPUs than they need; "
        "otherwise that is refused",
    )
    in_process: bool = knob(False, "run the engine in the server's own process, for debugging")
    restart_engine: bool = knob(True, "restart an engine that died")
    stuck_timeout: float = knob(
        120.0, "seconds without progress until an engine counts as stuck; 0: never", least=0
    )
    metrics_prefix: str = knob(
        "infer",
        "prefix of a second name for every metric, next to infer_; vllm: the names in vLLM's dashboards",
    )
    otlp_traces_endpoint: str | None = knob(
        None,
        "send OpenTelemetry traces to the collector at this URL, over HTTP; needs pip install 'infer[otel]'",
    )
    access_log: bool = knob(True, "log one line per request")
    unknown_fields: str = knob(
        "ignore",
        "unknown fields of a body that resemble no known field, except on /v1/completions: ignore: they are "
        "named in the header x-infer-ignored and once in the log; refuse: an error",
        choices=("ignore", "refuse"),
    )
    response_store: int = knob(
        1000,
        "responses of /v1/responses kept in memory, to be continued with previous_response_id; 0: none",
        least=0,
    )
    explain_requests: int = knob(
        256,
        "ended requests that /explain/ID can still explain, for each engine and each process that answers "
        "HTTP; 0: nothing can be explained, running requests neither",
        least=0,
    )
    record: str | None = knob(
        None,
        "record the arrivals and lengths of requests in this file, for 'infer simulate --trace'; FILE-1, "
        "FILE-2 and so on for further engines",
    )
    record_text: bool = knob(
        False, "with record: record the whole run, for 'infer replay'; the file holds prompts and outputs"
    )
    record_bytes: str = knob("1GiB", "with record: disk space for the files of one engine", is_size=True)
    overwrite: bool = knob(False, "let record replace existing files")
    ui: bool = knob(True, "serve the playground, a web page, at / and /ui")
    docs: bool = knob(False, "serve a page at /docs that lists the API and can call it")
    headless: bool = knob(False, "serve no HTTP, only ranks for node 0; implied by a node_rank above 0")

    def __post_init__(self) -> None:
        check_knobs(self)
        check_size("record_bytes", self.record_bytes)
        if self.model_memory is not None:
            object.__setattr__(self, "model_memory", host_size(self.model_memory, "model_memory"))
        for name in ("loaded_memory", "model_memory"):
            if (size := getattr(self, name)) is not None:
                check_size(name, size, ", which is too small for any model")
        refuse(server_faults(self))
        parse_bytes(self.max_body_size, "max_body_size")
        if fault := name_fault(self.served_model_name or ""):
            raise ConfigError(f"served_model_name {fault}")
        for alias in self.model_alias:
            parse_alias(alias)
        if any(not key for key in self.api_key) or self.admin_key == "":
            raise ConfigError("an empty key would let every client in; give a key or none")
        if not (self.otlp_traces_endpoint or "http://").startswith(("http://", "https://")):
            raise ConfigError(
                "otlp_traces_endpoint must be a URL such as http://127.0.0.1:4318, "
                f"got {self.otlp_traces_endpoint!r}"
            )
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ConfigError(
                "metrics_prefix must be letters, digits, underscores and colons, and not begin with a digit, "
                f"such as infer or vllm, got {self.metrics_prefix!r}"
            )


def server_faults(server: ServerConfig) -> Iterator[str]:
    """Yield the error of every rule that the knobs of a server break."""
    rows = knob_rows("server", ServerConfig)
    given = {row.name for row in rows if getattr(server, row.name) != row.default}
    given -= {"api_processes"} if server.api_processes == 1 else set()  # in_process has one as well
    for how, other, names in _EFFECTS:
        for name in sorted(given & names) if (other in given) == (how == "with") else ():
            change = f"leave out {name}, or {'give ' * (how == 'without')}{other}"
            yield f"{name} has no effect {how} {other}; {change}"
    if server.allowed_host and not is_loopback(server.host):
        yield f"allowed_host has no effect with host={server.host}; leave out one of the two"
    if server.model_memory is not None:
        for name in ("in_process", "record"):
            if getattr(server, name):
                yield f"model_memory needs engine processes that may sleep; leave out {name}"
        if (server.api_processes or 1) > 1:
            yield "model_memory works with one API process so far; leave out api_processes"
    most = server.max_replicas  # only a cluster has it
    if most is not None and most < server.replicas:
        yield f"max_replicas is {most}, fewer than the {server.replicas} replicas to start with"
    alone = {
        "admin_key": (server.admin_key is not None, "admin routes act on one server"),
        "in_process": (server.in_process, "replicas are processes on other machines"),
        "record": (server.record is not None, "replicas write to disks of other machines"),
        "share_device": (server.share_device, "Ray gives each replica a GPU of its own"),
        "api_processes": (server.api_processes is not None, "the front is one process"),
        "response_store": (server.response_store not in (0, 1000), "replicas share no stored responses"),
    }
    for name, (is_given, why) in alone.items():
        if is_given and server.cluster != "none":
            yield f"{name} cannot be used with --cluster ray: {why}; leave it out"
    if (server.tls_cert is None) != (server.tls_key is None):
        yield "tls_cert and tls_key belong together; give both or neither"


def name_fault(name: str) -> str | None:
    """Return the fault of a model's name: control characters, which could forge log lines; else None."""
    return None if name.isprintable() else f"must not have control characters, got {name[:100]!r}"


ModelShares: TypeAlias = dict[str, float]  # shares by the name of a model; an ordinary alias has one


def parse_alias(text: str) -> tuple[str, ModelShares]:
    """Return the alias of a `model_alias` and its models; an empty name is the first model."""
    alias, equals, rest = text.partition("=")
    fault = name_fault(text)
    if fault is None and (not alias or (equals and not rest)):
        fault = f"must be ALIAS=NAME, ALIAS or ALIAS=NAME:WEIGHT,NAME:WEIGHT, got {text!r}"
    if fault is not None:
        raise ConfigError(f"model_alias {fault}")
    if "," not in rest:  # a name may hold a colon
        return alias, {rest: 1.0}
    weights: ModelShares = {}
    for part in rest.split(","):
        name, _, number = part.strip().rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or (fault := weight_fault(weight)):
            fault = fault or f"has {part!r}, but needs NAME:WEIGHT, each with another NAME"
            raise ConfigError(f"model_alias {text!r} {fault}")
        weights[name] = weight
    return alias, weights


def weight_fault(weight: float) -> str | None:
    """Return the fault of the weight of a model in an alias, or None."""
    if math.isfinite(weight) and weight > 0:
        return None
    return f"needs weights that are numbers above 0, got {weight:g}; leave out a model that gets no requests"
