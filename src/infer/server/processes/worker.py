"""An API process other than process 0: `python -m infer.server.processes.worker`, started by `workers.py`.

It has the routes, the tokenizer of every model and its own socket to every engine, and accepts connections
from the same listening socket. Process 0 starts and watches the engines, notifies this process about them,
and handles what only one process can: loads on demand, stored responses, and requests about the whole server
(messages.py).

Standard input closes when process 0 ends, for whatever reason, and this process then exits, too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from typing import Any

from infer.client.client import EngineClient
from infer.client.link import EngineLink
from infer.client.messages import Ready
from infer.client.process_client import ProcessClient
from infer.client.spawn import take_orders
from infer.client.subscribers import CLOSED
from infer.client.supervisor import ProcessOptions, RestartPolicy
from infer.config.settings import EngineConfig, LoadConfig
from infer.errors import EngineStopped
from infer.frontend.open_model import find_source, make_served_encoder, open_text
from infer.loader.text_headers import TextHeaders
from infer.log import setup_logging
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.processes import messages
from infer.server.processes.board import Board
from infer.server.processes.channel import Channel
from infer.server.response_store import RemoteStore
from infer.server.serve import HttpServer, loop_factory, uvicorn_config
from infer.server.state import ServedModel, ServerState
from infer.tokenizer.tokenizer import Tokenizer


class EngineFeed:
    """The successive processes ("lives") of one engine, as process 0 reports them."""

    def __init__(self) -> None:
        self._starting: EngineLink | None = None
        self._running: EngineLink | None = None
        self._lives: asyncio.Queue[tuple[EngineLink, Ready] | None] = asyncio.Queue()

    def spawned(self, endpoint: str) -> None:
        """Bind the endpoint that a new engine connects to."""
        self.down("the engine process has ended")  # the previous one, if its end was not reported
        if self._starting is not None:  # it died before it was ready
            self._starting.close_now()
        link = self._starting = EngineLink(endpoint)
        link.ready.add_done_callback(lambda ready: self._set_ready(link, ready.result()))

    def down(self, reason: str) -> None:
        """Note that the engine is gone, even if its `Ready` has not been read yet."""
        link = self._running or self._starting
        if link is not None and not link.exited.is_set():
            link.set_exited(reason)
        self._running = None

    def close(self) -> None:
        """Close the sockets of lives that have no client; there will be no more lives."""
        self.down(CLOSED)
        if self._starting is not None:
            self._starting.close_now()
            self._starting = None
        while not self._lives.empty():
            if (life := self._lives.get_nowait()) is not None:
                life[0].close_now()
        self._lives.put_nowait(None)

    async def next(self) -> tuple[EngineLink, Ready]:
        """Wait for the next life of the engine; raises `EngineStopped` if it was closed."""
        if (life := await self._lives.get()) is None:
            raise EngineStopped(CLOSED)
        return life

    def _set_ready(self, link: EngineLink, ready: Ready) -> None:
        if link is not self._starting:  # closed: replaced by a later life
            return
        self._starting = None
        self._running = None if link.exited.is_set() else link
        self._lives.put_nowait((link, ready))


class Worker:
    """An API process other than process 0, which sends it messages."""

    def __init__(self, state: ServerState, metrics: ServerMetrics, models: list[EngineConfig]) -> None:
        self._state = state
        self._metrics = metrics
        self._feeds: dict[int, EngineFeed] = {}
        self._replaced: list[ServedModel] = []  # models that lost their names, until they are unserved
        self._has_frozen = False
        self.stopping = asyncio.Event()
        self._texts = {config: self._open(config.load) for config in models}

    def answer(self, message: messages.FromFirst) -> Any:
        """Handle a message; returns the answer to a question, or an awaitable of it."""
        state = self._state
        match message:
            case messages.Spawned(engine, endpoint):
                return self._bind(engine, endpoint)
            case messages.Down(engine, reason):
                return self._feeds[engine].down(reason)
            case messages.Gone(engines):
                return self._let_go(engines)
            case messages.Serve():
                return self._serve(message)
            case messages.Unserve(engines, timeout_s):
                return self._unserve(engines, timeout_s)
            case messages.SetNames(aliases, adapters, default, loadable):
                state.aliases, state.adapters = aliases, adapters
                state.default_model, state.loadable = default, loadable
            case messages.ForgetPrefixes(name):
                return self._forget_prefixes(name)
            case messages.GetUses():
                return {name: model.use for name, model in state.models.items()}
            case messages.Scrape():
                return self._metrics.snapshot()
            case messages.FindServed(request_id, owner):
                return state.stories.find(request_id, owner)
            case messages.CountAlike(owner, prefixes, salt):
                return state.stories.count_alike(owner, tuple(prefixes), salt)
            case messages.End():
                self.stopping.set()
        return None

    def _bind(self, engine: int, endpoint: str) -> None:
        """Bind the endpoint of a new engine, unless it has already ended and its directory is gone."""
        feed = self._feeds.setdefault(engine, EngineFeed())
        if os.path.exists(os.path.dirname(endpoint.removeprefix("ipc://"))):
            feed.spawned(endpoint)

    async def _let_go(self, engines: list[int]) -> None:
        """Drop engines for good, and a model that they still serve, whose load failed in another process."""
        for feed in [self._feeds.pop(engine) for engine in engines if engine in self._feeds]:
            feed.close()
        await self._unserve(engines, self._state.config.drain_timeout)

    async def _serve(self, served: messages.Serve) -> None:
        """Serve a model once its engines are ready."""
        name, config, engines = served.name, served.config, served.engines
        text = await (self._texts.pop(config, None) or self._open(config.load))
        clients: list[EngineClient] = []
        readies: list[Ready] = []
        try:
            for engine, label in zip(engines, served.labels, strict=True):
                link, ready = await self._feeds[engine].next()
                readies.append(ready)
                policy = RestartPolicy(max_restarts=sys.maxsize, first_delay=0.0)
                options = ProcessOptions(stuck_timeout=0.0, restart=False, policy=policy)  # process 0 decides
                client = ProcessClient(link, ready, options, self._feeds[engine].next)
                clients.append(self._metrics.add(name, client, label=label))
            encoder = await asyncio.to_thread(make_served_encoder, config.load, text, readies)
            if not self._feeds.keys() >= set(engines):
                raise EngineStopped(f"the engines of {name!r} were closed while it was loaded")
        except BaseException:
            await self._close(clients)
            raise
        self._replaced += [old for old in (self._state.models.get(name),) if old is not None]
        model = ServedModel(name, encoder, clients, served.created, engines=engines, config=config)
        self._state.models[name] = model
        if not self._has_frozen:
            self._has_frozen = True
            gc.collect()
            gc.freeze()  # startup objects stay; models loaded later may be unloaded

    async def _unserve(self, engines: list[int], timeout_s: float) -> int:
        """Stop serving the model of these engines; returns the number of requests that were cut off.

        If it had replaced a model that is still here, that model is served again.
        """
        models = (*self._state.models.values(), *self._replaced)
        model = next((each for each in models if not set(engines).isdisjoint(each.engines)), None)
        if model is None:
            return 0
        if self._state.models.get(model.name) is model:
            del self._state.models[model.name]
            for old in [each for each in self._replaced if each.name == model.name][-1:]:
                self._replaced.remove(old)
                self._state.models[model.name] = old
        else:
            self._replaced.remove(model)
        await model.wait_unheld(timeout_s)
        num_cut_off = model.num_held
        await self._close(model.clients, model.why_cut_off(timeout_s) if num_cut_off else CLOSED)
        return num_cut_off

    async def _close(self, clients: list[EngineClient], reason: str = CLOSED) -> None:
        for client in clients:
            self._metrics.remove(client)
            await client.close(reason)

    def _forget_prefixes(self, name: str) -> None:
        if (model := self._state.models.get(name)) is not None:
            for client in model.clients:
                model.router.forget(client)

    def _open(self, load: LoadConfig) -> asyncio.Task[tuple[TextHeaders, Tokenizer]]:
        """Open the tokenizer and text headers of a model, in a thread."""
        return asyncio.create_task(
            asyncio.to_thread(lambda: open_text(load, find_source(load, show_progress=False)))
        )


async def run(launch: messages.WorkerLaunch) -> None:
    """Serve requests until process 0 sends `End` or is gone."""
    board = Board(launch.num_processes, launch.number, launch.board)
    state, metrics = ServerState(launch.server, board=board), ServerMetrics(launch.server.metrics_prefix)
    worker = Worker(state, metrics, launch.models)
    channel = Channel(socket.socket(fileno=launch.channel), messages.FromFirst, worker.answer)
    state.responses = RemoteStore(channel)
    if launch.server.on_demand:
        state.demand = lambda name: channel.call(messages.LoadOnDemand(name))
    await channel.open()
    listening = asyncio.create_task(channel.run())
    http = uvicorn_config(state, Fleet(state, metrics), ask=channel.call)
    server = HttpServer(http, socket.socket(fileno=launch.listener), board)
    serving = asyncio.create_task(server.serve())
    ends = [asyncio.create_task(worker.stopping.wait()), listening, serving]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    if listening.done():
        listening.result()  # raises the error of the channel


def main() -> int:
    """Run the process from the first line of input until it ends; returns the exit code."""
    launch = take_orders(messages.WorkerLaunch)
    setup_logging(launch.log_level)
    logging.getLogger("infer.client.process_client").setLevel(logging.CRITICAL)  # process 0 logs the same
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
