"""The smallest `StepContext` that can hold a conversation: one list of keys and values per sequence.

    caches = [ListCache(), ListCache()]
    logits = run_step(model, [[1, 2, 3], [7]], caches)     # two prompts in one ragged batch
    logits = run_step(model, [[4], [8]], caches)           # one more token each

It attends with `attend_naive`, so whatever agrees with it agrees with the specification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.kernels.attention.reference import attend_naive
from infer.kernels.delta.reference import DeltaRule
from infer.layers.attention import AttentionLayer, StepContext
from infer.layers.whole_sequence import WholeSequence
from infer.models.model import Model


class ListCache:
    """Keys and values of one sequence, per layer."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states = WholeSequence(attend_naive, torch.device("cpu"))  # of layers with a state

    @property
    def num_computed(self) -> int:
        """How many tokens the layers with keys have seen."""
        return len(next(iter(self.keys.values()))) if self.keys else 0

    def extend(self, layer: int, k_TGH: torch.Tensor, v_TGH: torch.Tensor) -> None:
        """Append the keys and values of further tokens."""
        if layer in self.keys:
            k_TGH = torch.cat([self.keys[layer], k_TGH])
            v_TGH = torch.cat([self.values[layer], v_TGH])
        self.keys[layer], self.values[layer] = k_TGH, v_TGH


class ListStep(StepContext):
    """A step that gives `lengths[i]` tokens to `caches[i]`."""

    def __init__(self, caches: Sequence[ListCache], lengths: Sequence[int]) -> None:
        self.caches, self.lengths = caches, list(lengths)
        starts = [cache.num_computed for cache in caches]
        self.positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(starts, self.lengths, strict=True)]
        )

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Each sequence attends to itself alone."""
        parts = zip(*(torch.split(tensor, self.lengths) for tensor in (q_TNH, k_TGH, v_TGH)), strict=True)
        outputs = []
        for cache, (q, k, v) in zip(self.caches, parts, strict=True):
            if not layer.is_shared:
                cache.extend(layer.number, k, v)
            seen = cache.keys[layer.number], cache.values[layer.number]
            how = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
            outputs.append(attend_naive(q, *seen, sinks_N=layer.sinks_N, **how))  # type: ignore[arg-type]
        return torch.cat(outputs)

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Each sequence goes on from its own state."""
        parts = zip(*(torch.split(tensor, self.lengths) for tensor in (qkv_TC, b_TV, a_TV)), strict=True)
        both = zip(self.caches, parts, strict=True)
        return torch.cat([cache.states.recur(layer, rule, *part) for cache, part in both])


def run_step(
    model: Model, chunks: Sequence[Sequence[int]], caches: Sequence[ListCache] | None = None
) -> list[torch.Tensor]:
    """Run one chunk of each sequence as one ragged batch; the logits of every token, per sequence."""
    caches = [ListCache() for _ in chunks] if caches is None else caches
    lengths = [len(chunk) for chunk in chunks]
    tokens_T = torch.tensor([token for chunk in chunks for token in chunk])
    with torch.no_grad():
        hidden_TD = model(tokens_T, ListStep(caches, lengths))
        return list(torch.split(model.logits(hidden_TD), lengths))


def generate_greedy(model: Model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Prefill once, then decode one token at a time, always taking the largest logit."""
    cache, chunk, output = ListCache(), list(prompt), list[int]()
    for _ in range(num_tokens):
        chunk = [int(run_step(model, [chunk], [cache])[0][-1].argmax())]
        output += chunk
    return output
