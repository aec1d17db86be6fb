"""The layers that models are made of: linear, norm, rotary, embedding, mlp, moe, and the way to the KV cache.

A layer owns parameters and names them; the arithmetic is in `infer.kernels`. Parameters start as
uninitialised memory on the device and in the dtype that are current while the model is built, and the
loader copies each checkpoint tensor straight into its place.
"""
