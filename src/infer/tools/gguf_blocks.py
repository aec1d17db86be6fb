"""Round weights to the blocks of a GGUF file: the inverse of loader/formats/gguf_quants.py.

    Q8_0    32 weights   d, 32 integers of 8 bits                     w = d q
    Q4_0    32 weights   d, 32 of 4 bits                              w = d (q - 8)
    Q4_1    32 weights   d, m, 32 of 4 bits                           w = d q + m
    Q4_K    256 weights  d, t, 8 scales and 8 minima of 6 bits, 256 of 4 bits    w = d s q - t m

d, m and t are float16, and codes are chosen for their rounded values. Q4_1 and Q4_K try several ranges for
each group, fit a line to the codes of each (least squares) and keep the one with the smallest error.

Shapes:  R rows, B blocks, G groups of 32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_RANGES = (1.0, 0.94, 0.88, 0.82)  # tried ranges, relative to a group's own range
_TINY = 1e-12


def round_to_blocks(weight_RK: torch.Tensor, kind: str) -> torch.Tensor:
    """Return rows as the bytes of whole blocks: uint8, [R, bytes of a row]."""
    return _BLOCKS[kind](weight_RK.float()).view(len(weight_RK), -1)


def _halves(*numbers_B: torch.Tensor) -> torch.Tensor:
    """Return numbers of each block as the bytes of float16s: [B, 2 for each]."""
    return torch.stack(numbers_B, dim=-1).half().view(torch.uint8)


def _inverse(steps: torch.Tensor) -> torch.Tensor:
    """Return 1 / steps, and 0 where a step is 0, so that its group gets only the code of zero."""
    return torch.where(steps == 0, 0, 1 / steps)


def _q8_0(weight_RK: torch.Tensor) -> torch.Tensor:
    groups = weight_RK.view(-1, 32)
    steps = (groups.abs().amax(1) / 127).half().float()
    codes = (groups * _inverse(steps)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((_halves(steps), codes.view(torch.uint8)), dim=1)


def _q4_0(weight_RK: torch.Tensor) -> torch.Tensor:
    groups = weight_RK.view(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]  # this weight gets the code 0
    steps = (largest / -8).half().float()
    codes = (groups * _inverse(steps)[:, None]).round().add(8).clamp(0, 15).to(torch.uint8)
    return torch.cat((_halves(steps), _nibbles(codes, 16)), dim=1)


def _q4_1(weight_RK: torch.Tensor) -> torch.Tensor:
    groups = weight_RK.view(-1, 32)
    steps, least = (part.half().float() for part in _fit_lines(groups))
    return torch.cat((_halves(steps, least), _nibbles(_codes(groups, steps, least), 16)), dim=1)


def _q4_k(weight_RK: torch.Tensor) -> torch.Tensor:
    groups = weight_RK.view(-1, 8, 32)
    steps, least = _fit_lines(groups, most=0.0)
    whole, whole_least = (part.amax(1) / 63 for part in (steps, -least))
    whole, whole_least = whole.half().float(), whole_least.half().float()
    scales, minima = (
        (part * _inverse(unit)[:, None]).round().clamp(0, 63)
        for part, unit in ((steps, whole), (-least, whole_least))
    )
    codes = _codes(groups, scales * whole[:, None], -minima * whole_least[:, None])
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4)
    return torch.cat(
        (_halves(whole, whole_least), *packed, _nibbles(codes.view(-1, 64), 32).view(-1, 128)), 1
    )


def _fit_lines(groups: torch.Tensor, most: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return step and minimum of each group, for 16 codes; `most`: upper bound of minima."""
    low = groups.amin(-1) if most is None else groups.amin(-1).clamp(max=most)
    high = groups.amax(-1)
    middle, width = (low + high) / 2, (high - low).clamp(min=_TINY)
    best: list[torch.Tensor] = []
    for share in _RANGES:
        steps, least = width * (share / 15), middle - width * (share / 2)
        if most is not None:
            least = least.clamp(max=most)
        for fits in (False, True, True):
            codes = _codes(groups, steps, least).float()
            if fits:
                mean, centre = codes.mean(-1), groups.mean(-1)
                spread = (codes - mean[..., None]).square().sum(-1)
                along = ((codes - mean[..., None]) * (groups - centre[..., None])).sum(-1)
                steps = torch.where(spread > 0, along / spread.clamp(min=_TINY), steps).clamp(min=0)
                least = centre - steps * mean
                least = least if most is None else least.clamp(max=most)
                codes = _codes(groups, steps, least).float()
            error = (codes * steps[..., None] + least[..., None] - groups).square().sum(-1)
            found = [steps, least, error]
            best = (
                [torch.where(error < best[2], *pair) for pair in zip(found, best, strict=True)]
                if best
                else found
            )
    return best[0], best[1]


def _codes(groups: torch.Tensor, steps: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    scaled = (groups - least[..., None]) * _inverse(steps)[..., None]
    return scaled.round().clamp(0, 15).to(torch.uint8)


def _nibbles(codes_BC: torch.Tensor, run: int) -> torch.Tensor:
    """Pack codes into bytes: one in the low half, and the one `run` places later in the high half."""
    halves = codes_BC.view(len(codes_BC), 2, run)
    return halves[:, 0] | halves[:, 1] << 4


_BLOCKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k,
}  # fmt: skip
