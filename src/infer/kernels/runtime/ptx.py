"""PTX instructions that Triton has no function for, as pieces of Triton kernels."""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, tl


@jit
def prefetch_l2(ptrs):
    """Ask for the cache lines at these addresses to come to L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
