"""The KV cache: what holds which block, which prompt starts like which, what a sequence may write."""
