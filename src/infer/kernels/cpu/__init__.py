"""The kernels of the CPU, in C, where PyTorch is slow.

PyTorch spends more time between operations than in them when a model is small, and it has no fast
product for weights in groups of small integers. Both are mended by about a thousand lines of C:

    csrc/linear.c        int8 and int4 weights times activations (linear.h: how both lie in memory)
    csrc/linear_neon.h   the same on ARM
    csrc/activations.c   activations into integers, on their way to a product
    csrc/attention.c     attention of a ragged batch straight from the paged cache
    csrc/elementwise.c   norms, rotary positions, gates
    csrc/kv_codes.c      cache writes, as floats or as codes of 8 bits
    csrc/pack.c          weights into the layout of linear.h
    csrc/threads.c       a pool that shares out the chunks of one operation after another

    build.py             compiles them on first use, for this processor, into the user's cache
    library.py           loads the result; knows whether there is one
    operations.py        one Python function per operation: checks, arguments, launch
    program.py           records a model's operations once and runs them all with one call

Without a compiler none of this exists and everything runs on PyTorch, only slower: callers ask
`kernels/runtime/dispatch.py`, as they do for Triton.
"""
