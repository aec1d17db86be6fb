"""Read the keys of a `config.json`, which is untrusted input.

Each family reads its keys through a `RawConfig`, which returns a checked value or raises an error that names
the key:

    CheckpointError    the file is broken: a key is missing, has the wrong type, or cannot be true
    ConfigError        the file is fine, but asks for something this package does not do

`null` counts as absent, because configs write `"head_dim": null` for "derive it".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from infer.errors import CheckpointError, ConfigError
from infer.models.config import RopeScaling

MAX_SIZE = 2**24  # far above any real model: a larger size is a damaged file, not a network
MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096
MAX_STRETCH = 4096.0  # largest context length as a multiple of the trained one
DEFAULT_WINDOW = 4096  # value of a missing key in the references of all families
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")  # layers without and with a window
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class RawConfig:
    """Checked access to the keys of one JSON object."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def with_defaults(self, **defaults: Any) -> RawConfig:
        """A copy of the config with these values for keys that are absent or null."""
        given = {name: value for name, value in self.raw.items() if value is not None}
        return RawConfig(defaults | given, self.where)

    def without(self, *names: str) -> RawConfig:
        """A copy of the config without these keys."""
        return RawConfig({key: self.raw[key] for key in self.raw if key not in names}, self.where)

    def get(self, *names: str) -> Any:
        """The first of these keys that is present and not null, or None."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, at_most: int = MAX_SIZE) -> int:
        """A positive integer; `names` are spellings of one key."""
        value = self._required(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= at_most:
            raise CheckpointError(f"{self._key(names)} must be an integer in 1..{at_most}, got {value!r}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._required(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # an integer may have 4,000 digits
            raise CheckpointError(f"{self._key(names)} must be a positive number, got {value!r}")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive finite numbers."""
        value = self._required((name,), None)
        if not isinstance(value, list) or len(value) != count:
            raise CheckpointError(
                f"{self._key((name,))} must be a list of {count} numbers, got {value!r:.100}"
            )
        return tuple(RawConfig({name: each}, self.where).number(name) for each in value)

    def flag(self, name: str, *, default: bool) -> bool:
        """The boolean of a key, or the default if it is absent or null."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._key((name,))} must be true or false, got {value!r}")
        return value

    def section(self, name: str) -> RawConfig:
        """A nested object; an empty one if the key is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{self._key((name,))} must be an object, got {value!r}")
        return RawConfig(value or {}, f"{name} of {self.where}")

    def activation(self, *names: str, default: str) -> str:
        """An activation in our spelling."""
        value = self.get(*names)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ConfigError(
                f"{self._key(names)} is {value!r}, which is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def expect_silu(self) -> None:
        """Raise an error if a family in which the activation is fixed has another one."""
        if self.activation("hidden_act", default="silu") != "silu":
            raise ConfigError(f"{self._key(('hidden_act',))} must be silu, got {self.get('hidden_act')!r}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of one or several tokens, as `7` or `[7, 9]`.

        Ids outside the vocabulary are left out: configs copied from another model carry some, and no
        model can read or write them.
        """
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise CheckpointError(f"{self._key((name,))} must be a token id or a list, got {value!r}")
        return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)

    def refuse(self, name: str, why: str) -> None:
        """Raise an error if a key for an unsupported feature is set (neither null nor false)."""
        if self.get(name) not in (None, False):
            raise ConfigError(f"{self._key((name,))} is {self.get(name)!r}: {why}")

    def _required(self, names: tuple[str, ...], default: float | None) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} has no {' or '.join(map(repr, names))}, which is required")
        return value

    def _key(self, names: tuple[str, ...]) -> str:
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        return f"{name!r} in {self.where}"


def read_heads(raw: RawConfig) -> tuple[int, int]:
    """The numbers of query and kv heads; the same number if the config gives only one."""
    num_heads = raw.size("num_attention_heads")
    num_kv_heads = raw.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:  # each kv head must serve as many query heads
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads


def read_head_dim(raw: RawConfig, hidden_size: int, num_heads: int, default: int | None) -> int:
    """The size of a head: given, or the family's own, or an equal share of the hidden size."""
    share = max(hidden_size // num_heads, 1)
    head_dim = raw.size("head_dim", default=default or share, at_most=MAX_HEAD_DIM)
    if raw.get("head_dim") is None and default is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and head_dim is not given"
        )
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even for rotary positions, got {head_dim}")
    return head_dim


def read_rope(raw: RawConfig, context_len: int, rotary_dim: int) -> tuple[float, RopeScaling | None]:
    """Read base and scaling from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    section = rope_section(raw)
    theta = raw.number("rope_theta", default=10_000.0)
    theta = section.number("rope_theta", default=theta)
    if theta <= 1:
        raise CheckpointError(f"rope_theta in {raw.where} must exceed 1, got {theta!r}")
    return theta, read_rope_scaling(section, context_len, rotary_dim, top=raw)


def read_two_ropes(
    raw: RawConfig, context_len: int, head_dim: int, *, theta: float, local_theta: float
) -> tuple[float, float, RopeScaling | None]:
    """Read the base of layers without a window, the base of layers with one, and the scaling of the former.

    Newer configs have a section for each kind of layer; in older ones windowed layers are never scaled.
    """
    theta = raw.number("rope_theta", default=theta)
    if raw.get("rope_parameters") is None:
        scaling = read_rope_scaling(raw.section("rope_scaling"), context_len, head_dim, top=raw)
        return theta, local_theta, scaling
    both = raw.section("rope_parameters")
    if "full_attention" not in both.raw and "sliding_attention" not in both.raw:
        raise CheckpointError(
            f"{both.where} must hold 'full_attention' and 'sliding_attention', got {sorted(both.raw)}"
        )
    of_global, of_local = both.section("full_attention"), both.section("sliding_attention")
    for section in (of_global, of_local):
        read_rotary_dim(section, head_dim)  # raises an error if only a part of each head rotates
    if read_rope_scaling(of_local, context_len, head_dim) is not None:
        raise ConfigError(
            f"rope scaling in {of_local.where} is not supported: only global layers may have it"
        )
    return (
        of_global.number("rope_theta", default=theta),
        of_local.number("rope_theta", default=local_theta),
        read_rope_scaling(of_global, context_len, head_dim),
    )


def rope_section(raw: RawConfig) -> RawConfig:
    """The rope section of a config: `rope_parameters`, or the older `rope_scaling`."""
    return raw.section("rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling")


def read_rotary_dim(raw: RawConfig, head_dim: int, *, default: float | None = None) -> int:
    """The number of channels of a head that rotate; `default` is a share, None: the family rotates all."""
    section = rope_section(raw)
    share = raw.number("partial_rotary_factor", default=default or 1.0)
    share = section.number("partial_rotary_factor", default=share)
    if default is None and share != 1.0:
        raise ConfigError(
            f"partial_rotary_factor in {section.where} is {share:g}, which is not supported: this family "
            "rotates the whole head"
        )
    rotary_dim = int(head_dim * min(share, 2.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor in {raw.where} is {share:g}, so {rotary_dim} of {head_dim} channels "
            "rotate; an even number of them must"
        )
    return rotary_dim


def read_rope_scaling(
    section: RawConfig, context_len: int, rotary_dim: int, *, top: RawConfig | None = None
) -> RopeScaling | None:
    """Read the scaling of one rope section; None: plain rotary positions.

    A trained context length at the `top` of the config overrides the section's.
    """
    kind = section.get("rope_type", "type")
    if kind is None:
        kind = "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope type {kind!r} in {section.where} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=section.number("factor"))
    if kind == "dynamic":
        if rotary_dim == 2:
            raise CheckpointError(
                f"{section.where} is dynamic, which needs heads with more than one rotated pair"
            )
        return RopeScaling(kind=kind, factor=_read_stretch(section), original_context_len=context_len)
    name = "original_max_position_embeddings"
    original = section.size(name, default=context_len)
    original = original if top is None else top.size(name, default=original)
    if kind == "llama3":
        return _read_llama3(section, original)
    factor = _read_stretch(section, default=context_len / original)
    if kind == "yarn":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context_len=original,
            beta_fast=section.number("beta_fast", default=32.0),
            beta_slow=section.number("beta_slow", default=1.0),
            truncate=section.flag("truncate", default=True),
            attention_factor=_yarn_attention_factor(section, factor),
        )
    if original == 1:
        raise CheckpointError(f"{name} in {section.where} must exceed 1 for longrope")
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_context_len=original,
        short_factors=section.numbers("short_factor", rotary_dim // 2),
        long_factors=section.numbers("long_factor", rotary_dim // 2),
        attention_factor=section.number("attention_factor", default=default),
    )


def _read_stretch(section: RawConfig, default: float | None = None) -> float:
    """Read the longest context as a multiple of the trained one."""
    factor = section.number("factor", default=default)
    if factor > MAX_STRETCH:
        raise CheckpointError(f"'factor' in {section.where} must be at most {MAX_STRETCH}, got {factor!r}")
    return factor


def _read_llama3(section: RawConfig, original_context_len: int) -> RopeScaling:
    scaling = RopeScaling(
        kind="llama3",
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_context_len=original_context_len,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"high_freq_factor in {section.where} must exceed low_freq_factor, "
            f"got {scaling.high_freq_factor} and {scaling.low_freq_factor}"
        )
    return scaling


def _yarn_attention_factor(section: RawConfig, factor: float) -> float:
    """The attention factor of yarn: as given, or computed from the stretch and two `mscale` keys."""

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = sharpening(1.0)
    if section.get("mscale") and section.get("mscale_all_dim"):
        default = sharpening(section.number("mscale")) / sharpening(section.number("mscale_all_dim"))
    return section.number("attention_factor", default=default)


def read_window(raw: RawConfig, *, default: int | None = DEFAULT_WINDOW) -> int | None:
    """Read the sliding window in tokens. Unlike an absent key, null switches the window off."""
    is_off = default is None or "sliding_window" in raw.raw
    if is_off and raw.get("sliding_window") is None:
        return None
    return raw.size("sliding_window", default=default)


def read_windows(
    raw: RawConfig, num_layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types` or by the family's rule; (): no layer has one."""
    types = raw.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[slides(layer)] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"'layer_types' in {raw.where} must name {num_layers} layers, got {types!r}")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"layer type {kind!r} in {raw.where} is not supported; supported: {', '.join(LAYER_TYPES)}"
            )
    if "sliding_attention" not in types:
        return ()
    if window is None:
        raise CheckpointError(f"'layer_types' in {raw.where} names sliding layers, but no window is set")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
