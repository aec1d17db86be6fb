"""A `StepContext` without a cache: one sequence, all of it in this step. For measuring a model's pace."""

from __future__ import annotations

import torch

from infer.kernels.attention import attend_sdpa


class BatchOnlyStep:
    """The T tokens are one sequence from its start, and nothing is kept."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._positions = torch.arange(num_tokens, device=device)

    @property
    def positions(self) -> torch.Tensor:
        """0 to T - 1."""
        return self._positions

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
        """Attend over this step's own keys and values."""
        return attend_sdpa(q_TNH, k_TGH, v_TGH, scale=scale, window=window)
