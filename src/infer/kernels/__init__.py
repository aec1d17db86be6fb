"""Pure functions of tensors: the arithmetic of the network, and nothing else.

    elementwise/   norms, rotary positions, activations, embeddings, cache writes
    linear/        matrix products of few tokens, of more, and with the same bits always
    attention/     prompts and decoding, in PyTorch, Triton and CUDA C++
    moe/           expert matrices
    sampling/      from logits to ids
    cpu/           kernels in C
    runtime/       which implementation runs; compiling and launching

A file begins with the formula and the shape legend. Then come, in this order, the PyTorch *reference* (the
specification, and what runs where nothing faster can), the Triton kernel that must equal it, and the launcher
that callers import.
"""
