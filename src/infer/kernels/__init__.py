"""Pure functions of tensors: the arithmetic of the network, and nothing else.

    rms_norm, layer_norm, rope, gated_activation, embedding    what stands between the matrices
    linear_small, linear_split, moe, linear_invariant          few tokens, more, experts, the same bits always
    heads, attention_decode, attention_prefill                 attention on a GPU, from projection to output
    attention, paged_attention                                 attention in PyTorch
    sample, sample_rows                                        from logits to ids
    step_state, copy_block                                     what a step on a GPU reads, advances and moves
    cpu/, cuda/                                                kernels in C and in CUDA C++
    dispatch, launch                                           which implementation runs; launches made before

A file begins with the formula and the shape legend. Then come, in this order, the PyTorch *reference* (the
specification, and what runs where nothing faster can), the Triton kernel that must equal it, and the launcher
that callers import. Long kernels have files of their own (`*_kernels.py`, `*_parts.py`), and so have the
sizes they are compiled for (`*_configs.py`).
"""
