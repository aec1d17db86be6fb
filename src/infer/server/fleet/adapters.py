"""LoRA adapters that are loaded and unloaded while a server runs.

    load       into every engine of a model, one after another; then its name is served
    restore    again into an engine that was restarted, and into a model that was loaded on demand
    unload     first the name is removed; requests that began with the adapter finish with it

The adapters of a model's own settings (`lora_modules`) are loaded by its engines; only their names are here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from infer.client.client import EngineClient
from infer.errors import EngineStopped, InferError, UnknownModel, closest
from infer.server.fleet.load import Load, finish, in_turn
from infer.server.fleet.metered_client import MeteredClient
from infer.server.fleet.names import Names
from infer.server.state import ServerState

logger = logging.getLogger(__name__)


class ServedAdapters:
    """The adapters of a `ServerState`."""

    def __init__(self, state: ServerState, names: Names) -> None:
        self._state, self._names = state, names
        self.waiting: dict[str, Load] = {}  # loads that wait for their turn
        self._paths: dict[str, str] = {}  # directories of adapters loaded at run time
        self._turn = asyncio.Lock()  # adapters are loaded and unloaded one at a time

    async def load(self, name: str, path: str, base: str | None = None, *, replaces: bool = False) -> str:
        """Load an adapter into every engine of a model, the default one unless named.

        Returns the model's name. An adapter that it replaces serves until then, and keeps serving if this one
        cannot be read; requests that began with the old adapter always finish with it. An engine that is down
        gets the adapter when it is back. A load that waits for its turn can be ended, and cancelled; one that
        has begun is finished.
        """
        async with in_turn(name, self.waiting, self._turn):
            loading = asyncio.create_task(self._load(name, path, base, replaces=replaces))
            await finish(loading)
            return loading.result()

    async def _load(self, name: str, path: str, base: str | None, *, replaces: bool) -> str:
        base = base or self._state.default_model
        model = self._state.get_model(base)
        is_replaced = replaces and self._state.adapters.get(name) == model.name
        if not is_replaced:
            self._names.check_adapter(name)
        num_done, down = 0, dict[EngineClient, EngineStopped]()
        try:
            for client in model.clients:  # a restarted engine may have one of this name
                try:
                    await client.set_adapter(name, path, replaces=True)
                    num_done += 1
                except EngineStopped as error:
                    down[client] = error
            if not num_done:
                raise next(iter(down.values()))
            if self._state.models.get(model.name) is not model:
                gone = f"model {model.name!r} was unloaded or replaced meanwhile"
                raise UnknownModel(gone, param="model")
            if not is_replaced:
                self._names.check_adapter(name)  # a model or an alias may have taken the name meanwhile
        except BaseException:
            if num_done:  # the engines no longer agree
                for client in model.clients:
                    with suppress(InferError):
                        await client.set_adapter(name, None)
                if is_replaced:
                    self._state.adapters.pop(name, None)
                    self._paths.pop(name, None)
                self._names.tell()
            raise
        self._state.adapters[name] = model.name
        self._paths[name] = path
        for client in down:
            assert isinstance(client, MeteredClient)
            client.reload_adapters()
        await self._names.share()
        return model.name

    async def unload(self, name: str) -> None:
        """Unload an adapter; requests that began with it finish. A load of it that waits is cancelled."""
        if (load := self.waiting.get(name)) is not None:
            await load.end("the adapter was unloaded")
        async with self._turn:
            base = self._state.adapters.pop(name, None)
            if base is None:
                if load is not None:
                    return
                hint = closest(name, self._state.adapters)
                raise UnknownModel(f"no adapter is served under the name {name!r}{hint}", param="name")
            self._paths.pop(name, None)
            try:
                await self._names.share()
            finally:  # even if an API process hangs
                for client in self._state.models[base].clients if base in self._state.models else ():
                    with suppress(UnknownModel, EngineStopped):  # an engine that was restarted, or is down
                        await client.set_adapter(name, None)

    def note(self, name: str, adapters: Iterable[str]) -> None:
        """Set the adapters of a model to the given ones."""
        kept = {each: base for each, base in self._state.adapters.items() if base != name}
        self._paths = {each: path for each, path in self._paths.items() if each in kept}
        self._state.adapters = kept | dict.fromkeys(adapters, name)

    async def restore(self, model: str, client: EngineClient) -> None:
        """Reload the adapters that were loaded at run time into a restarted engine.

        A load or an unload that is running comes first: the engine may have restarted after its turn in it.
        """
        async with self._turn:
            for name, path in self.paths_of(model).items():
                try:
                    await client.set_adapter(name, path, replaces=True)
                except EngineStopped:
                    return  # the watcher calls again when it is back
                except InferError as error:
                    told = "adapter not reloaded model=%s adapter=%s reason=%r, so its requests fail"
                    logger.error(told, model, name, str(error))

    def bring_back(self, model: str, own: Iterable[str]) -> None:
        """Set the adapters of a model that was loaded again: its `own`, and those loaded at run time."""
        again = self.paths_of(model)
        self.note(model, [*own, *again])
        self._paths |= again

    def paths_of(self, model: str) -> dict[str, str]:
        """Return the directories of a model's adapters that were loaded at run time."""
        return {n: path for n, path in self._paths.items() if self._state.adapters.get(n) == model}
