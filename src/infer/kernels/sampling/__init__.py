"""From logits to token ids.

gumbel.py        noise as a hash, and draws by Gumbel-max, in PyTorch: the host's sampler and the reference
sample_rows.py   every row of a batch sampled on the device, with the same ids, in Triton
"""
