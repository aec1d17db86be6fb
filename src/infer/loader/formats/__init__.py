"""The content of a model's files: safetensors and GGUF, configs, tensors, number formats."""
