"""The one door between a model and the KV cache.

A model is written for a *ragged batch*: the tokens of all sequences of a step laid end to end, no
padding, no phases. It computes queries, keys and values for these T tokens and calls `step.attend`.
Whoever runs the model decides what that means: write K and V into the cache, read back what each
token may see, compute attention. The model never learns where the cache lives or how long a
sequence is; a parity test can pass a six-line `StepContext` that attends over the batch itself.

A context whose cache is a table of slots can say so (`slots`): norm, rotation and the write to the cache
are then one pass over the fused projection, and `attend` finds keys and values already there. One that can
take the projection as it is (`attend_projected`) does all of it at once.

Shapes:  T tokens of all sequences laid end to end, N query heads, G kv heads, H head size,
X = (N + 2 G) H.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infer.kernels.elementwise.heads import CacheSlots, HeadTransform


class StepContext(Protocol):
    """What a model needs to know about the step it is part of."""

    @property
    def positions(self) -> torch.Tensor:
        """Where each of the T tokens stands in its own sequence, from 0; int64."""
        ...

    def slots(self, layer: int) -> CacheSlots | None:
        """Where the model itself puts keys and values before it calls `attend`; None: `attend` sees to it."""
        return None

    def attend_projected(
        self, layer: int, qkv_TX: torch.Tensor, transform: HeadTransform, *, scale: float, window: int | None
    ) -> torch.Tensor | None:
        """Norm and rotate the heads of the projection, then do as `attend` does; None: ask `attend`."""
        return None

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGH: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Cache these keys and values, then let each token attend to its sequence up to itself.

        With a `window` w a token at position p sees positions p - w + 1 .. p. Returns [T, N, H].
        """
        ...
