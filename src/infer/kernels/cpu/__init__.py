"""CPU kernels in C, for operations that are slow in PyTorch.

With a small model, PyTorch spends more time between operations than in them, and it has no fast
product for weights in groups of small integers. About a thousand lines of C solve both problems:

    csrc/linear.c        int8 and int4 weights times activations (linear.h: the memory layout of both)
    csrc/linear_neon.h   the same on ARM
    csrc/activations.c   quantization of activations for a product
    csrc/attention.c     attention of a ragged batch directly from the paged cache
    csrc/elementwise.c   norms, rotary positions, gates
    csrc/kv_codes.c      cache writes, as floats or as codes of 8 bits
    csrc/pack.c          weights into the layout of linear.h
    csrc/threads.c       a thread pool that processes the chunks of one operation after another

    build.py             compiles them on first use, for this processor, into the user's cache
    library.py           loads the compiled library, if there is one
    operations.py        one Python function per operation: checks, arguments, launch
    program.py           records a model's operations once and runs them all with one call

Without a compiler, everything runs on PyTorch, only slower: callers ask `kernels/runtime/dispatch.py`,
as they do for Triton.
"""
