"""The one interface between a model and the KV cache.

A model is written for a *ragged batch*: the tokens of all sequences of a step laid end to end, without
padding or phases. It computes queries, keys and values for these T tokens and calls `step.attend`. The device
half then writes K and V into the cache, reads the positions that each token may see, and computes attention.
The model never learns where the cache is or how long a sequence is; a parity test can pass a six-line
`StepContext` that attends over the batch itself.

If the cache is a table of slots, a context can provide it (`slots`): norm, rotation and the write to the
cache are then one pass over the fused projection, and `attend` finds keys and values in the cache. A context
with `attend_projected` takes the projection and does all of this at once.

A layer of linear attention has a state in place of keys and values, and calls `recur` (delta.py).

A step also says which of its tokens need logits (`logit_indices`). After the last attention, `LastLayerStep`
returns only these rows, and removes the others from the residual stream.

A step may ask for the residual stream at the input of some layers (`layer_inputs`), for an EAGLE head.

Shapes:  T tokens of all sequences laid end to end, S of them that need logits, D hidden size, C layers whose
input is kept, N query heads, G kv heads, H head size, X = (N + 2 G) H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from infer.errors import EngineError
from infer.kernels.delta.reference import DeltaRule
from infer.kernels.elementwise.heads import CacheSlots, HeadTransform
from infer.quant.residual import ResidualStream


class AttentionLayer(NamedTuple):
    """The facts about a layer that attention needs."""

    number: int  # the layer whose keys and values it reads
    scale: float  # factor on scores
    window: int | None = None  # w: a token at position p sees positions p - w + 1 .. p; None: all up to p
    softcap: float | None = None  # c: a score s becomes c tanh(s / c) (Gemma 2); None: no cap
    sinks_N: torch.Tensor | None = None  # one extra score per query head, which has no position (gpt-oss)
    is_shared: bool = False  # True: reads another layer's keys and values, caches none (Gemma 4)


class LayerInputs:
    """The residual stream of all tokens of a step at the input of some layers.

    Nothing is copied: these are the sums that the model computes anyway. Holding them keeps their memory from
    being reused, also in a CUDA graph or a recorded program.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, torch.Tensor] = {}

    def watch(self, layer: int, stream: ResidualStream) -> None:
        """Keep the stream's sum if this layer's input is asked for; called before the layer runs."""
        if layer in self.layers:
            stream.on_sum = partial(self._found.__setitem__, layer)

    def states(self, num_tokens: int | None = None) -> torch.Tensor:
        """Return the inputs of all these layers side by side, in the order requested: [T, C D].

        `num_tokens`: the number of first tokens to return; None: all.
        """
        return torch.cat([self._found[layer][:num_tokens] for layer in self.layers], dim=-1)


class StepContext(Protocol):
    """The facts about a step that a model needs while it computes it."""

    positions: torch.Tensor  # position of each of the T tokens in its own sequence, from 0; int64
    logit_indices: torch.Tensor | None = None  # tokens whose hidden states are needed; None: all
    layer_inputs: LayerInputs | None = None  # keeps the inputs of some layers; None: they are not read
    # called with the tokens that are kept after the last attention
    on_select: Callable[[torch.Tensor], None] | None = None
    rows: torch.Tensor | None = None  # state row of each token, for a network that keeps states by row

    def slots(self, layer: int) -> CacheSlots | None:
        """The slots that the model writes keys and values to before `attend`; None: `attend` writes them."""
        return None

    def attend_projected(
        self, layer: AttentionLayer, qkv_TX: torch.Tensor, transform: HeadTransform
    ) -> torch.Tensor | None:
        """Norm and rotate the heads of the projection, then do what `attend` does; None: unsupported."""
        return None

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Cache these keys and values, then let each token attend to its sequence up to itself: [T, N, H].

        A layer that shares another layer's keys and values passes none, and nothing is cached.
        """

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Update each sequence's state of the layer, token by token; returns their outputs, [T, V, H]."""
        raise EngineError(f"{type(self).__name__} keeps no states")

    def needed(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The rows that `attend` and `recur` return: all rows, except in the last layer."""
        return x_TD


class LastLayerStep(StepContext):
    """A step in the last layer: attention and the stream continue with only the rows that need logits."""

    def __init__(self, step: StepContext, stream: ResidualStream, indices_S: torch.Tensor) -> None:
        self._step, self._indices_S = step, indices_S
        self.positions = step.positions  # includes the tokens without logits
        self._stream: ResidualStream | None = stream  # None once its rows are selected

    def slots(self, layer: int) -> CacheSlots | None:
        """The cache slots of all the step's tokens; None: `attend` itself caches keys and values."""
        return self._step.slots(layer)

    def attend_projected(
        self, layer: AttentionLayer, qkv_TX: torch.Tensor, transform: HeadTransform
    ) -> torch.Tensor | None:
        """Attend as the step does, and return [S, N, H]."""
        self._select_stream()
        seen_TNH = self._step.attend_projected(layer, qkv_TX, transform)
        return None if seen_TNH is None else seen_TNH.index_select(0, self._indices_S)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Attend as the step does, and return [S, N, H]."""
        self._select_stream()
        return self._step.attend(layer, q_TNH, k_TGH, v_TGH).index_select(0, self._indices_S)

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Recur as the step does, and return [S, V, H]."""
        self._select_stream()
        return self.needed(self._step.recur(layer, rule, qkv_TC, b_TV, a_TV))

    def needed(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The rows that need logits."""
        return x_TD.index_select(0, self._indices_S)

    def _select_stream(self) -> None:
        """Remove the other rows from the stream, once; the layer has read it before."""
        if self._stream is not None:
            self._stream.select(self._indices_S)
            if self._step.on_select is not None:
                self._step.on_select(self._indices_S)
            self._stream = None
