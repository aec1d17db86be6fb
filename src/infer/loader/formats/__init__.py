"""What is in a model's files: safetensors and GGUF, configs, tensors, number formats."""
