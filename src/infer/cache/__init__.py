"""The KV cache: owners of blocks, the prefix cache, block tables of sequences, and the tensors."""
