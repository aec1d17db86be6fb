"""Slices: the part of every tensor that one rank holds when a model is split over several devices.

    module                 is cut along         one rank has
    attention.qkv          rows of each part    heads of q, and the heads of k and v that they attend to
    attention.out          columns              the columns of its heads of q
    mlp.gate_up, mlp.up    rows of each part    an equal share; of experts, a share of each expert
    shared.gate_up         rows of each part    an equal share of the expert that all tokens go through
    mlp.down, shared.down  columns              the same share: the columns that its rows of gate and up feed
    embedding, head        rows                 a range of the vocabulary; the last rank a shorter one
    attention (its sinks)  rows                 the rows of its heads of q
    all others             neither              everything: norms, routers, positions

Rows and columns are the axes of W [out, in]. A product cut along rows gives each rank some outputs. The next
product, cut along columns, reads just these, and its partial sums are added up: two cuts, one all-reduce. So
a bias is cut with its rows, and a bias after a cut along columns is added by rank 0 alone. If there are more
ranks than heads of k and v, several ranks hold the same head.

The `leaves` of a slice are the same ranges in a format's words, groups and scales (formats/axes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from infer.config.settings import MAX_RANKS
from infer.errors import ConfigError
from infer.kernels.cpu.collectives import column_share
from infer.layers.parallel import BY_COLUMNS, BY_ROWS, BY_VOCABULARY, kind_of
from infer.loader.formats.axes import Ranges
from infer.loader.headers import WeightSource
from infer.models.config import ModelConfig
from infer.quant.projection import WeightSpec

PROJECTION_NORMS = ("attention.q_norm", "attention.k_norm")
_NEEDS_ALL_HEADS = "queries and keys are normalised over all heads, and no rank has all of them"
_SIZES = ("intermediate_size", "the size of experts", "the size of the shared expert")


class Rank(NamedTuple):
    """One of the processes that share a model."""

    number: int = 0  # rank within the ranks that share the same layers
    world_size: int = 1  # number of these ranks
    stage: int = 0  # pipeline stage of its layers, out of `num_stages` (layers/stages.py)
    num_stages: int = 1

    @classmethod
    def of(cls, number: int, world_size: int, num_stages: int) -> Rank:
        """Return the rank with this global number; the last stage, where the engine is, comes first."""
        return cls(number % world_size, world_size, num_stages - 1 - number // world_size, num_stages)

    @property
    def num_ranks(self) -> int:
        """The number of ranks in all stages."""
        return self.world_size * self.num_stages

    @property
    def number_of_all(self) -> int:
        """The global number, which `of` takes."""
        return (self.num_stages - 1 - self.stage) * self.world_size + self.number

    @property
    def settings(self) -> dict[str, int]:
        """The parallel sizes that are larger than 1, by the names of their settings."""
        sizes = {"tensor_parallel_size": self.world_size, "pipeline_parallel_size": self.num_stages}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def is_alone(self) -> bool:
        """True if it has the whole model."""
        return self.num_ranks == 1


ALONE = Rank()


class Slice(NamedTuple):
    """The part of one tensor that a rank holds."""

    rows: Ranges  # rows of the matrix, or entries of the bias; (): none, another rank has the tensor
    columns: Ranges  # columns of the matrix; (): a bias or norm has none
    leaves: Mapping[str, tuple[Ranges | None, ...]]  # ranges for each axis of a leaf; None: the whole axis


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts matrices and tensors for one rank, and records what cannot be cut."""

    config: ModelConfig
    rank: Rank
    uncut: dict[str, str] = field(default_factory=dict)  # tensors that cannot be cut: name -> reason

    def cut(
        self, module: str, sources: Sequence[WeightSource], spec: WeightSpec | None = None
    ) -> tuple[WeightSpec | None, tuple[Slice, ...]]:
        """Return the rank's part of a layer's matrix, and its slices of the tensors; (): all of them."""
        if self.rank.world_size == 1:
            return spec, ()
        parts, found = spec.parts if spec else {}, list[Slice]()
        for source in sources:
            try:
                found.append(slice_source(source, parts, self.config, self.rank))
            except ConfigError as error:
                self.uncut[source.name] = str(error)
        with suppress(ConfigError):  # already recorded for its tensors
            spec = spec and cut_spec(module, spec, self.config, self.rank)
        return spec, tuple(found) if len(found) == len(sources) else ()


def cut_spec(module: str, spec: WeightSpec, config: ModelConfig, rank: Rank) -> WeightSpec:
    """Return the rank's part of a layer's matrix."""
    kind = kind_of(module)
    if kind in BY_ROWS:
        parts = {part: len(_share(part, size, config, rank)) for part, size in spec.parts.items()}
        num_rows = sum(parts.values()) or len(_share(kind, spec.num_rows, config, rank))
        return replace(spec, parts=parts, num_rows=num_rows)
    if kind in BY_COLUMNS:
        return replace(spec, size=len(_share(kind, spec.size, config, rank)))
    return replace(spec, num_rows=len(_vocabulary(spec.num_rows, rank))) if kind in BY_VOCABULARY else spec


def slice_source(source: WeightSource, parts: Mapping[str, int], config: ModelConfig, rank: Rank) -> Slice:
    """Return the rank's slice of a tensor; `parts` are the parts of the layer that the tensor fills."""
    assert source.target is not None, source.name
    tensor, kind, shape = source.tensor, kind_of(source.module), source.tensor.shape
    is_swapped = source.target.transposed and len(shape) == 2
    if source.leaf == "bias":  # also the bias of experts, [E, N]
        shape = shape[-1:]
    num_rows, *size = shape[::-1] if is_swapped else shape[-2:]
    if kind in PROJECTION_NORMS and config.projection_norm:
        raise ConfigError(_NEEDS_ALL_HEADS)
    rows: Ranges = (range(num_rows),)
    columns: Ranges = (range(size[0]),) if size else ()
    if kind in BY_VOCABULARY:
        rows = (_vocabulary(num_rows, rank),)
    elif kind in BY_ROWS:
        part = source.target.part
        rows = _part_rows({part: num_rows} if part else parts or {kind: num_rows}, config, rank)
    elif kind in BY_COLUMNS and columns:
        columns = (_share(kind, size[0], config, rank),)
    elif kind in BY_COLUMNS and rank.number:
        rows = ()
    elif source.leaf == "sinks":
        rows = (_share("q", num_rows, config, rank),)
    ranges = {"rows": (rows, num_rows), "columns": (columns, size[0] if size else 0)}
    leaves = {}
    for leaf, axes in tensor.axes.items():
        axes = axes[::-1] if is_swapped and tensor.transpose() is None else axes
        cut = tuple(axis.cut(*ranges[axis.along]) if axis.along else None for axis in axes)
        leaves[leaf if size else source.leaf] = cut
    return Slice(rows, columns, leaves)


def rank_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """Return the network that one rank computes: its heads, and its share of every feed-forward block.

    The vocabulary stays whole. A network that cannot be split equally is refused.
    """
    if rank.world_size == 1:
        return config
    if config.delta is not None:
        raise ConfigError(
            f"{config.family} cannot be shared by ranks: its layers keep a state; leave out "
            "tensor_parallel_size"
        )
    if config.layer_specs:
        raise ConfigError(
            f"{config.family} cannot be shared by ranks: its layers differ in size; leave out "
            "tensor_parallel_size"
        )
    if config.projection_norm:
        raise ConfigError(_NEEDS_ALL_HEADS)
    experts, size = config.experts, config.intermediate_size
    if experts is not None:
        share = len(_share("the size of experts", experts.size, config, rank))
        shared = len(_share("the size of the shared expert", experts.shared_size, config, rank))
        experts = replace(experts, size=share, shared_size=shared)
    if any(config.experts_of(layer) is None for layer in range(config.num_layers)):
        size = len(_share("intermediate_size", size, config, rank))
    if len(_vocabulary(config.vocab_size, Rank(rank.world_size - 1, rank.world_size))) == 0:
        raise ConfigError(f"a vocabulary of {config.vocab_size} is too small for {rank.world_size} ranks")
    return replace(
        config,
        num_heads=len(_share("q", config.num_heads, config, rank)),
        num_kv_heads=len(_share("k", config.num_kv_heads, config, rank)),
        experts=experts,
        intermediate_size=size,
    )


def rank_counts(config: ModelConfig) -> list[int]:
    """Return the possible numbers of ranks for a network; groups of quantized weights may rule out some."""
    found = []
    for count in range(1, MAX_RANKS + 1):
        with suppress(ConfigError):
            rank_config(config, Rank(count - 1, count))
            found.append(count)
    return found


def own_kv_heads(config: ModelConfig, rank: Rank) -> slice:
    """The kv heads that a rank has."""
    heads = _share("k", config.num_kv_heads, config, rank)
    return slice(heads.start, heads.stop)


def own_vocabulary(config: ModelConfig, rank: Rank) -> range:
    """The rows of the embedding that a rank has."""
    return _vocabulary(config.vocab_size, rank)


def own_part(
    module: str, parts: Mapping[str, int], shape: tuple[int, int], config: ModelConfig, rank: Rank
) -> tuple[Ranges | None, Ranges | None]:
    """Return a rank's rows and columns of a layer's matrix, or of some of its parts; None: all."""
    kind, (num_rows, size) = kind_of(module), shape
    if kind in BY_ROWS:
        return _part_rows(parts or {kind: num_rows}, config, rank), None
    return None, (_share(kind, size, config, rank),) if kind in BY_COLUMNS else None


def _part_rows(parts: Mapping[str, int], config: ModelConfig, rank: Rank) -> Ranges:
    """Return the rows that a rank has of each part of a matrix."""
    found, first = [], 0
    for part, size in parts.items():
        share = _share(part, size, config, rank)
        found.append(range(first + share.start, first + share.stop))
        first += size
    return tuple(found)


def _share(part: str, size: int, config: ModelConfig, rank: Rank) -> range:
    """Return the rank's equal share of a part's rows, or of a matrix's columns, in whole heads."""
    number, count = rank.number, rank.world_size
    units, what = size, "numbers of " + part if part in _SIZES else "rows or columns"
    if part in ("k", "v"):
        units, what = config.num_kv_heads, "kv heads"
        if count > units and count % units == 0:  # several ranks have the same head
            number, count = number * units // count, units
    elif part in ("q", "attention.out"):
        units, what = config.num_heads, "heads"
    if units % count:
        raise ConfigError(f"{units} {what} cannot be shared equally by {count} ranks")
    return range(number * size // count, (number + 1) * size // count)


def _vocabulary(size: int, rank: Rank) -> range:
    """Return the rank's range of the vocabulary."""
    step = column_share(size, rank.world_size)
    return range(min(rank.number * step, size), min((rank.number + 1) * step, size))
