"""Pure functions of tensors: the arithmetic of the network, and nothing else.

    elementwise/   norms, rotary positions, activations, embeddings, cache writes
    linear/        matrix products for few tokens, for many, and batch-invariant ones
    attention/     prompts and decoding, in PyTorch, Triton and CUDA C++
    moe/           expert matrices
    sampling/      token ids from logits
    cpu/           kernels in C
    runtime/       dispatch to an implementation; compilation and launches

A file begins with the formula and the shape legend. Then come, in this order, the PyTorch *reference* (the
specification, and the fallback where nothing faster runs), the Triton kernel that must equal it, and the
launcher that callers import.
"""
