"""The knobs of LoRA adapters: the adapters loaded at the start, and the room for others.

    --lora-modules sql=/path/a chat=/path/b      loaded at the start; requests name them as their model
    --enable-lora                                room for adapters that are loaded later
    --max-loras 8 --max-lora-rank 16             that room: adapters at a time, and their largest rank

The room is allocated once, when the engine is built, because captured steps read from fixed addresses
(docs/features/adapters.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infer.config.knobs import check_knobs, knob
from infer.errors import ConfigError

MAX_ADAPTERS: Final = 1024
MAX_RANK: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The LoRA adapters that are loaded, and the room for others."""

    lora_modules: tuple[str, ...] = knob(
        (),
        "LoRA adapters to load, each as NAME=DIRECTORY of a PEFT checkpoint; a request names an adapter as "
        "its model, and a command such as generate uses the adapter given; may be repeated; --lora takes a "
        "single adapter, so that a prompt may follow",
        aliases=("lora",),
        takes_several=True,
    )
    enable_lora: bool | None = knob(
        None, "keep room for LoRA adapters that are loaded later; default: if lora_modules names any"
    )
    max_loras: int | None = knob(
        None, "most LoRA adapters loaded at a time; default: 8, or as many as lora_modules names, if more"
    )
    max_lora_rank: int | None = knob(
        None,
        f"largest rank of a LoRA adapter, {MAX_RANK} or less; default: as lora_modules needs, at least 16",
        most=MAX_RANK,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if len(self.modules) < len(self.lora_modules):
            raise ConfigError("lora_modules gives two adapters one name; each needs its own")

    @property
    def is_on(self) -> bool:
        """True if the engine has adapters, or room for them."""
        return bool(self.lora_modules) if self.enable_lora is None else self.enable_lora

    @property
    def num_slots(self) -> int:
        """The most adapters that are loaded at a time; 0: none."""
        return (self.max_loras or max(8, len(self.lora_modules))) if self.is_on else 0

    @property
    def modules(self) -> dict[str, str]:
        """The directory of each adapter that is loaded at the start, by name."""
        return dict(map(parse_module, self.lora_modules))


def parse_module(text: str) -> tuple[str, str]:
    """Return the name and the directory of an entry of `lora_modules`; a directory alone is its own name."""
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).name, text
    if fault := adapter_name_fault(name):
        raise ConfigError(f"lora_modules: {fault}")
    if not path:
        raise ConfigError(f"lora_modules must be NAME=DIRECTORY, got {text!r}")
    return name, path


def adapter_name_fault(name: str) -> str | None:
    """Return what is wrong with an adapter's name, which clients send as a model's name, or None."""
    if name and name.isprintable() and len(name) <= 200:
        return None
    return f"the name of an adapter must be 1 to 200 printable characters, got {name[:100]!r}"
