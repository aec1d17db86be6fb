"""The names that a server knows: models, aliases and adapters, which share one space of names.

    check       is a name free for a model, or for an adapter?
    aliases     other names of one model, or of several by weight; they can be changed at any time
    forget      an unloaded model leaves all aliases, and another one becomes the default

The names are in the `ServerState`; every change is sent to the other API processes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from infer.config.server import ModelShares, name_fault, weight_fault
from infer.config.settings import EngineConfig
from infer.errors import NameTaken, RequestError, UnknownModel
from infer.server.processes import messages
from infer.server.processes.workers import Workers
from infer.server.state import ServerState

logger = logging.getLogger(__name__)


class Names:
    """Checks and changes the names of a `ServerState`; `loading` has the names of running loads."""

    def __init__(self, state: ServerState, workers: Workers, loading: Collection[str]) -> None:
        self._state, self._workers, self._loading = state, workers, loading

    def check(self, name: str, *, replaces: bool = False) -> None:
        """Reject a name that a new model cannot have."""
        if fault := name_fault(name):
            raise RequestError.about("name", fault)
        is_served = (name in self._state.models and not replaces) or name in self._state.adapters
        if name in self._state.aliases:
            models = ", ".join(map(repr, self._state.aliases[name]))
            way = 'remove it (POST /admin/models/alias with "name": null), or use another name'
            raise NameTaken(f"{name!r} is an alias of {models}; {way}", param="name")
        if is_served or name in self._loading:
            raise name_taken(name, "being loaded" if name in self._loading else "already served")

    def check_adapters(self, name: str, config: EngineConfig) -> None:
        """Reject a model whose adapters (lora_modules) have names that are taken."""
        for adapter in config.adapters.modules:
            if self._state.adapters.get(adapter, name) != name or adapter in (name, *self._state.names):
                way = "use another; every model loads lora_modules, /admin/adapters/load is for one"
                raise NameTaken(f"lora_modules: the name {adapter!r} is taken; {way}", param="knobs")

    def check_adapter(self, name: str) -> None:
        """Reject a name that a new adapter cannot have; a model that is not loaded keeps its name."""
        self.check(name)
        if name in self._state.names:
            raise NameTaken(f"a model named {name!r} is loaded on demand; use another name", param="name")

    def set_alias(self, alias: str, weights: ModelShares) -> None:
        """Set an alias of a model, or of several by weight; it can be changed at any time."""
        for name, weight in weights.items():
            if name not in self._state.names:
                param = "name" if len(weights) == 1 else "models"
                raise UnknownModel(f"no model is served under the name {name!r}", param=param)
            if fault := weight_fault(weight):
                raise RequestError.about("models", fault)
        if fault := name_fault(alias) if alias else "must not be empty":
            raise RequestError.about("alias", fault)
        if alias in (*self._state.names, *self._state.adapters) or alias in self._loading:
            what = "is being loaded" if alias in self._loading else "is served"
            raise NameTaken(f"a model named {alias!r} {what}; an alias must be another name", param="alias")
        self._state.aliases[alias] = dict(weights)
        self.tell()

    def remove_alias(self, alias: str) -> None:
        """Remove an alias."""
        if self._state.aliases.pop(alias, None) is None:
            raise UnknownModel(f"there is no alias {alias!r}", param="alias")
        self.tell()

    def forget(self, name: str) -> None:
        """Remove a model from all aliases; the first of the others replaces it as the default."""
        state = self._state
        rest = {
            alias: {each: weights[each] for each in weights if each != name}
            for alias, weights in state.aliases.items()
        }
        state.aliases = {alias: weights for alias, weights in rest.items() if weights}
        if state.default_model == name:
            state.default_model = next(iter(state.names), None)
            logger.warning("default model changed model=%s", state.default_model or "none")
        self.tell()

    def tell(self) -> None:
        """Send the names to the other API processes."""
        self._workers.tell(self._message())

    async def share(self) -> None:
        """Send the names, and wait until every API process knows them."""
        await self._workers.call(self._message())

    def _message(self) -> messages.SetNames:
        state = self._state
        return messages.SetNames(state.aliases, state.adapters, state.default_model, list(state.loadable))


def name_taken(name: str, what: str) -> NameTaken:
    """Return the error for a model whose name is taken; `what` says by what."""
    text = f"a model named {name!r} is {what}; unload or replace it, or use another name"
    return NameTaken(text, param="name")
