"""The ranks of a node after the first: `infer serve MODEL --nnodes 2 --node-rank 1 ...`.

A program starts it as `python -m infer.client.rank_node`, with a `NodeLaunch` on its standard input.

It joins node 0, starts its ranks, and mirrors their shared memory (execution/rank_mirror.py). When the group
ends, for whatever reason, its ranks end, and it waits for node 0 to start again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

import torch

from infer.client.load import check_ranks
from infer.client.messages import TOKEN, NodeLaunch
from infer.client.rank_greeting import facts_of, join, read_token
from infer.client.rank_group import serve_ranks
from infer.client.spawn import take_orders
from infer.config.settings import EngineConfig
from infer.errors import InferError
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.rank_placement import node_device, rank_threads
from infer.log import setup_logging

logger = logging.getLogger(__name__)


def serve_node(config: EngineConfig) -> NoReturn:
    """Serve one group after another; raises `ConfigError` if node 0 rejects this node or the model."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    load, device = config.load, node_device(config.load)
    token, facts = read_token(load), facts_of(config, device)
    source = resolve_model(load.model, revision=load.revision, show_progress=False)
    # node 0 makes the same check, and does not listen if it fails
    check_ranks(config, read_headers(source, load.model_impl))
    num_threads = rank_threads(load, load.num_threads or torch.get_num_threads())
    while True:
        connection = join(load, token, facts)
        logger.info("node joined node=%d address=%s:%d", load.node_rank, load.master_addr, load.master_port)
        reason = serve_ranks(config, connection, num_threads, device)
        logger.warning("ranks have ended node=%d reason=%r", load.node_rank, reason)


def main() -> int:
    """Serve for the program that started this process, until it closes standard input."""
    launch = take_orders(NodeLaunch)
    setup_logging(launch.log_level)
    os.environ[TOKEN] = launch.token
    try:
        serve_node(launch.config)
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
