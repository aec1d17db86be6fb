"""The facts that single layers are built from; part of `ModelConfig` (models/config.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond the trained context of a model (layers/rotary.py).

    `dynamic` and `longrope` depend on the length that is served: tables are made for one length, because
    cached keys keep the rotation that they were written with.
    """

    kind: str  # "linear", "dynamic", "llama3", "yarn", "longrope" or "proportional"
    factor: float
    original_context_len: int = 0  # trained context in tokens; not used by linear
    low_freq_factor: float = 1.0  # llama3: with up to this many turns in that context, a pair is slowed fully
    high_freq_factor: float = 1.0  # llama3: with this many turns or more, a pair keeps its frequency
    beta_fast: float = 32.0  # yarn: with this many turns or more, a pair keeps its frequency
    beta_slow: float = 1.0  # yarn: with up to this many turns, a pair is slowed fully
    truncate: bool = True  # yarn: the two bounds are rounded outwards to whole pairs
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the pairs' frequencies within that context
    long_factors: tuple[float, ...] = ()  # longrope: divisors beyond it
    attention_factor: float = 1.0  # yarn, longrope: factor on the length of rotated pairs
    num_pairs: int = 0  # proportional: the number of pairs that rotate, from the first on

    @property
    def depends_on_length(self) -> bool:
        """True if the tables depend on the longest sequence that is served."""
        return self.kind in ("dynamic", "longrope")

    def stretched(self, context_len: int) -> int:
        """The stretched context of a model; some configs give the trained one as `context_len`."""
        if self.kind == "dynamic":
            return int(context_len * max(self.factor, 1.0))
        stretched = int(self.original_context_len * self.factor) if self.kind == "yarn" else 0
        return max(context_len, stretched)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The experts that take the place of a layer's MLP (layers/moe.py)."""

    num_experts: int
    num_choices: int  # experts that a token is sent to
    size: int  # the intermediate size of one expert
    normalized: bool  # the weights of a token's experts add up to 1
    shared_size: int = 0  # size of the gated expert that every token goes through; 0: none
    dense_layers: tuple[int, ...] = ()  # layers that have a plain MLP of `intermediate_size` instead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The layers that have a state in place of keys and values (layers/delta.py)."""

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # tokens that the convolution mixes

    @property
    def num_channels(self) -> int:
        """The channels of q, k and v together: the convolution's."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
