"""Sampling: token ids from logits.

gumbel.py          noise as a hash, and draws by Gumbel-max, in PyTorch: the host's sampler and the reference
sample_line.py     the sampling settings of a row, in twelve numbers
sample_state.py    the sampling settings of all rows, kept on the device
adjust_logits.py   bias, bans, a mask and penalties, applied to a row's logits on their way to the sampler
sample_rows.py     sampling of a batch on the device, with the same ids as on the host, in Triton
logprob_table.py   logprobs of the chosen and the likeliest tokens, as a table that is copied to the host
"""
