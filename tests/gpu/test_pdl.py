"""Programmatic dependent launch (PDL): the same bits as kernels that are launched one after the other."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.attention.decode import attend_decode, attend_projected
from infer.kernels.attention.decode_cuda import attend_decode_cuda, attend_projected_cuda
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.elementwise.heads import CacheSlots, HeadTransform, norm_rope_write
from infer.kernels.elementwise.rms_norm import add_rms_norm
from infer.kernels.linear.small import linear
from tests.gpu.graphs import check_that_starting_early_leaves_no_trace, random
from tests.kernels.attention_contract import Heads, make_paged

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

N, G, H, D, NUM_LAYERS, EPS = 16, 8, 128, 1024, 6, 1e-6


class Step:
    """Some layers of one step: each kernel reads what the one before has written."""

    def __init__(self, lens: list[int], attention: str) -> None:
        S = len(lens)
        self.attention = {
            "heads": self.attend, "heads_cuda": self.attend_cuda,
            "projected": self.attend_projected, "cuda": self.attend_projected_cuda,
        }[attention]  # fmt: skip
        self.paged = make_paged(lens, Heads(N, G, H), block_size=16, dtype=torch.bfloat16, device="cuda")
        self.rows = torch.arange(S, dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.positions = self.lens.long() - 1
        at = self.paged.tables.gather(1, self.positions[:, None] // 16)[:, 0]
        self.slots = at.long() * 16 + self.positions % 16
        angles = torch.rand(4096, H // 2, device="cuda")
        self.gain, head_gain = random(D), random(H)
        self.transform = HeadTransform((head_gain, head_gain), angles.cos(), angles.sin(), N, G, EPS)
        self.weights = [
            (random((N + 2 * G) * H, D, scale=0.03), random(2 * D, N * H, scale=0.02))
            for _ in range(NUM_LAYERS)
        ]
        self.work = DecodeWork(
            max_rows=S, max_len=4096, num_heads=N, num_kv_heads=G, head_dim=H, device="cuda"
        )
        self.x = random(S, D)

    def __call__(self) -> torch.Tensor:
        self.work.plan(self.rows, self.lens)
        x, residual = self.x * 1.0, torch.zeros_like(self.x)
        for qkv_weight, out_weight in self.weights:
            x, residual = add_rms_norm(x, residual, self.gain, eps=EPS)
            qkv = linear(x, qkv_weight)
            x = gated_activation(linear(self.attention(qkv).flatten(1), out_weight), activation="silu")
        return x + residual

    def write_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """The queries; the newest keys and values go to the cache."""
        cache = CacheSlots(self.paged.keys, self.paged.values, self.slots)
        return norm_rope_write(qkv, self.transform, self.positions, cache)[0]

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Two kernels: heads, then attention."""
        q = self.write_heads(qkv)
        return attend_decode(q, self.paged.kv(H**-0.5), self.rows, self.lens, self.work)

    def attend_cuda(self, qkv: torch.Tensor) -> torch.Tensor:
        """Two kernels, and the second asks for older keys and values while the first writes the newest."""
        q = self.write_heads(qkv)
        return attend_decode_cuda(q, self.paged.kv(H**-0.5), self.work)

    def attend_projected(self, qkv: torch.Tensor) -> torch.Tensor:
        """The same in one kernel."""
        return attend_projected(qkv, self.transform, self.paged.kv(H**-0.5), self.rows, self.lens, self.work)

    def attend_projected_cuda(self, qkv: torch.Tensor) -> torch.Tensor:
        """And by hand."""
        return attend_projected_cuda(qkv, self.transform, self.paged.kv(H**-0.5), self.work)


UNEVEN = [70, 400, 1, 1000, 16, 33, 257, 64]
# The newest position is the last but one, the last or the first of a tile, often of a warp's first tile.
AROUND_TILES = [16 * (1 + i % 11) + i % 3 - 1 for i in range(96)]


@pytest.mark.parametrize("attention", ["heads", "heads_cuda", "projected", "cuda"])
@pytest.mark.parametrize("lens", [[400], UNEVEN, [300] * 32, AROUND_TILES], ids=len)
def test_pdl_leaves_no_trace(lens: list[int], attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(lens, attention)
    check_that_starting_early_leaves_no_trace(lambda: (step(),), step.x, monkeypatch, num_replays=20)


@pytest.mark.parametrize("attention", ["heads_cuda", "projected", "cuda"])
@pytest.mark.parametrize("lens", [[400], UNEVEN, AROUND_TILES], ids=len)
def test_the_others_compute_what_two_kernels_of_triton_do(lens: list[int], attention: str) -> None:
    step = Step(lens, attention)
    qkv = random(len(lens), (N + 2 * G) * H)
    step.work.plan(step.rows, step.lens)
    two = step.attend(qkv)
    keys, values = step.paged.keys[step.slots].clone(), step.paged.values[step.slots].clone()
    step.paged.keys[step.slots] = step.paged.values[step.slots] = torch.nan
    other = step.attention(qkv)
    torch.testing.assert_close(other, two, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(step.paged.keys[step.slots], keys, rtol=2e-2, atol=2e-2)
    assert torch.equal(step.paged.values[step.slots], values)


def test_a_head_has_the_same_bits_whatever_the_number_of_tokens() -> None:
    T = 2048
    qkv, gain = random(T, (N + 2 * G) * H), random(H)
    angles = torch.rand(T, H // 2, device="cuda")
    transform = HeadTransform((gain, gain), angles.cos(), angles.sin(), N, G, EPS)
    positions = torch.arange(T, device="cuda")

    def heads(tokens: slice) -> list[torch.Tensor]:
        caches = [torch.zeros(T, G, H, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        q, _, _ = norm_rope_write(
            qkv[tokens], transform, positions[tokens], CacheSlots(caches[0], caches[1], positions[tokens])
        )
        return [q, *(cache[tokens] for cache in caches)]

    together = heads(slice(0, T))
    for first in (0, 5, T - 3):
        alone = heads(slice(first, first + 3))
        assert all(torch.equal(a, b[first : first + 3]) for a, b in zip(alone, together, strict=True))
