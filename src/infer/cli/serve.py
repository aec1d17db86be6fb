"""`infer serve`: answer over HTTP until Ctrl-C.

    infer serve                                   the default model
    infer serve path/to/model --port 9000         one model, under its own name
    infer serve --model small=DIR --model big=org/name      several; the first is the default

Standard output gets one line, the URL, once the server accepts requests; the log goes to standard error.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.cli import flags
from infer.cli.interrupts import importing
from infer.client.spawn import SpareEngines
from infer.config.server import ServerConfig, name_fault, parse_alias
from infer.config.settings import EngineConfig, LoadConfig, knob_table
from infer.errors import ConfigError, EngineError
from infer.loader.find.source import check_model

logger = logging.getLogger(__name__)

HELP = "answer over HTTP, as OpenAI's API does"
DESCRIPTION = "Serve one or more models over HTTP, for every client of OpenAI's API and for browsers."
USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  infer serve
  infer serve path/to/model --served-model-name my-model --port 9000
  infer serve --model small=path/to/model --model big=org/name --api-key secret
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
       -d '{"prompt": "Once upon a time", "max_tokens": 32}'
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    models = parser.add_argument_group("models")
    flags.add_rows(models, {"positional_model [MODEL]": (str, "model directory, GGUF file or hub id")})
    models.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="the same, with the name that clients use for it; may be given several times",
    )
    models.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="name of the first model for clients; further names are aliases; default: its own name",
    )
    flags.add_knob_flags(parser, without=("model", "served_model_name"), with_server=True)
    flags.add_common_flags(parser, log_level="info")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; exit code 1 if no engine can be started or kept alive."""
    knobs = flags.knobs_from(args, with_server=True)
    models, config = read_models(args, knobs)
    try:
        if any(engine.load.node_rank > 0 for engine in models.values()):
            with importing():
                from infer.client.rank_node import serve_node

            (engine,) = models.values()
            serve_node(engine)
        elif config.cluster == "ray":
            _serve_cluster(models, config, args.log_level)
        else:
            _serve_here(models, config)
    except EngineError as error:
        logger.critical("server ends error=%s", error, exc_info=error if args.debug else None)
        return 1
    return 0


def _serve_here(models: Mapping[str, EngineConfig], config: ServerConfig) -> None:
    """Serve from engines on this machine; they start before most of this program is imported."""
    for engine in models.values():
        check_model(engine.load.model, revision=engine.load.revision)
        if engine.speculation.is_on and engine.speculation.draft_model is not None:
            check_model(engine.speculation.draft_model)
    with SpareEngines(0 if config.in_process or config.on_demand else config.replicas) as spares:
        with importing():
            import asyncio

            from infer.server.serve import loop_factory, serve

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(models, config, announce=_announce, spares=spares))


def _serve_cluster(models: Mapping[str, EngineConfig], config: ServerConfig, log_level: str) -> None:
    """Serve from replicas on other machines, which look for the models there."""
    import asyncio

    from infer.cluster.serve import serve_cluster
    from infer.server.serve import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve_cluster(models, config, announce=_announce, log_level=log_level))


def _announce(url: str) -> None:
    print(f"ready: {url}", flush=True)


def read_models(
    args: argparse.Namespace, knobs: dict[str, Any]
) -> tuple[dict[str, EngineConfig], ServerConfig]:
    """Return each model's settings by the name it is served under ("": its own), and the server's."""
    table = knob_table(with_server=True)
    server = {name: value for name, value in knobs.items() if table[name].section == "server"}
    if args.served_model_name:
        server |= _read_names(args, server)
    engine = {name: value for name, value in knobs.items() if table[name].section != "server"}
    config = ServerConfig(**server)
    given = [] if args.positional_model is None else [args.positional_model]
    named: list[tuple[str, str | None]] = [split_name(text) for text in (*given, *args.models)]
    named = named or [("", engine.get("model"))]
    if config.served_model_name is not None:
        if named[0][0]:
            raise ConfigError(
                f"the first model has two names, {named[0][0]!r} and --served-model-name; give one"
            )
        named[0] = (config.served_model_name, named[0][1])
    models: dict[str, EngineConfig] = {}
    for name, model in named:
        if fault := name_fault(name):
            raise ConfigError(f"the NAME of --model NAME=MODEL {fault}")
        if config.on_demand and not name:
            raise ConfigError(f"on_demand needs a name for every model: --model NAME={model or 'MODEL'}")
        if name in models:
            raise ConfigError("every model needs a name of its own: --model NAME=MODEL for each")
        models[name] = EngineConfig.from_knobs(**(engine | {"model": model}))
    _check_aliases(config.model_alias, list(models))
    _check_nodes([engine.load for engine in models.values()], config)
    return models, config


def _check_nodes(loads: Sequence[LoadConfig], config: ServerConfig) -> None:
    """Refuse settings that ranks on several machines cannot have."""
    nnodes, node_rank = loads[0].nnodes, loads[0].node_rank
    if config.cluster != "none":
        for name in ("node_rank", "master_addr", "master_port"):
            if getattr(loads[0], name) != getattr(LoadConfig(), name):
                raise ConfigError(f"with --cluster ray, Ray finds {name}; leave it out")
    if config.headless and node_rank == 0:
        raise ConfigError("headless is for nodes other than the first; give --node-rank as well, from 1 on")
    num_engines = len(loads) * (config.replicas if config.cluster == "none" else 1)
    if nnodes > 1 and num_engines > 1:
        raise ConfigError(
            f"nnodes={nnodes} is for one engine, and there would be {num_engines}; start a "
            "server for each, with another master_port"
        )


def _check_aliases(given: Sequence[str], names: Sequence[str]) -> None:
    """Refuse aliases of models that are not served, and names that are given twice."""
    taken = set(names)
    for text in given:
        alias, weights = parse_alias(text)
        for name in weights:
            if name and name not in names and "" not in names:
                known = ", ".join(names)
                raise ConfigError(f"--model-alias {text}: no model is served as {name!r}, but {known}")
        if alias in taken:
            raise ConfigError(f"{alias!r} is given twice as a name; every alias must be a different name")
        taken.add(alias)


def _read_names(args: argparse.Namespace, server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `--served-model-name NAME ALIAS ...`, which may have swallowed the MODEL."""
    name, *aliases = args.served_model_name
    for alias in aliases if args.positional_model is None and not args.models else ():
        if "/" in alias or Path(alias).exists():
            raise ConfigError(
                f"--served-model-name takes {alias!r} for a name; MODEL goes in front: "
                f"infer serve {alias} --served-model-name {name}"
            )
    return {"served_model_name": name, "model_alias": (*server.get("model_alias", ()), *aliases)}


def split_name(text: str) -> tuple[str, str | None]:
    """Return the two parts of `name=path`; a path that has an equals sign itself has a slash before it."""
    name, equals, model = text.partition("=")
    if not equals or "/" in name:
        return "", text
    if not name or not model:
        raise ConfigError(f"--model takes MODEL or NAME=MODEL, got {text!r}")
    return name, model
