"""Small integers packed in words of 32 bits.

Almost every published format is packed like this: codes of b bits lie end to end in one little-endian stream,
so a code may straddle two words if b does not divide 32:

    4 bits   word 0: │ 7 │ 6 │ 5 │ 4 │ 3 │ 2 │ 1 │ 0 │             code 0 in the lowest bits
    3 bits   word 0: │10│ 9 │ 8 │ 7 │ 6 │ 5 │ 4 │ 3 │ 2 │ 1 │ 0 │  two bits of code 10; its third is in word 1
"""

from __future__ import annotations

import torch


def unpack(words: torch.Tensor, bits: int, count: int, *, padded: bool = False) -> torch.Tensor:
    """Return the first `count` codes of each row of int32 words, as uint8.

    `padded`: no code straddles two words; the highest bits may be unused (compressed-tensors before 0.17).
    """
    words = words.contiguous()
    if bits in (2, 4, 8):
        parts = words.view(torch.uint8)
        if bits < 8:
            shifts = [parts >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
            parts = torch.stack(shifts, dim=-1).flatten(-2)
        return parts[..., :count]
    number = torch.arange(count, device=words.device)
    if padded:
        word, bit = number // (32 // bits), number % (32 // bits) * bits
    else:
        word, bit = number * bits // 32, number * bits % 32
    low = words.long() & 0xFFFFFFFF
    pairs = low | torch.nn.functional.pad(low[..., 1:], (0, 1)) << 32  # a word, and the next one above it
    return (pairs[..., word] >> bit & (1 << bits) - 1).to(torch.uint8)
