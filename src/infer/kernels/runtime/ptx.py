"""PTX instructions that Triton does not expose, as functions for Triton kernels."""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, tl


@jit
def prefetch_l2(ptrs):
    """Prefetch the cache lines at these addresses into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
