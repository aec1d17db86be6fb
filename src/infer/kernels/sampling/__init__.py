"""From logits to token ids.

gumbel.py          noise as a hash, and draws by Gumbel-max, in PyTorch: the host's sampler and the reference
sample_line.py     the sampling settings of a row, in twelve numbers
sample_state.py    the sampling settings of all rows, kept on the device
adjust_logits.py   bias, bans, a mask and penalties, applied to a row's logits on their way to the sampler
sample_rows.py     every row of a batch sampled on the device, with the same ids, in Triton
logprob_table.py   logprobs of the chosen tokens and of the likeliest, as a table that travels to the host
"""
