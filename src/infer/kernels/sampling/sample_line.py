"""The line of twelve numbers with the sampling settings of a row, packed for the device.

It is separate from the rest of a row's state (sample_state.py) because the host packs lines without a tensor:
an engine is imported in processes that never load PyTorch.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

SMALLEST_TEMPERATURE = 2.0**-126  # smallest normal float32; below it, float32 would divide by zero


class SampleLine(NamedTuple):
    """The sampling settings of one row: the fields of its line, in order."""

    row: int
    has_uses: int = 0  # 1: the row has penalties or bans, and its uses are counted
    top_k: int = 0  # 0: off
    seed: int = 0  # modulo 2^64, as two's complement
    ban_end: int = 0  # first position at which banned ids are allowed again
    num_biased: int = 0
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # float64, so that rounding does not move the edge; 1: off
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def pack(self) -> bytes:
        """The line as an entry of `enter_rows`; values out of range are clamped to the nearest possible.

        A tiny temperature does not become 0, which means greedy.
        """
        return _LINE.pack(
            *self._replace(
                top_k=min(max(self.top_k, 0), 2**31 - 1),
                seed=((self.seed + 2**63) % 2**64) - 2**63,
                temperature=max(self.temperature, SMALLEST_TEMPERATURE) if self.temperature else 0.0,
            )
        )

    @classmethod
    def unpack(cls, packed: bytes) -> SampleLine:
        """Unpack the line of an entry."""
        return cls(*_LINE.unpack(packed))


_LINE = Struct("=6q6d")
NUM_FIELDS = _LINE.size // 8
