"""From a name to tensors in their final place.

source.py         which files?      path, hub id (hub.py) or the default model (default_model.py, wheel.py)
hf_config.py      what network?     config.json, generation_config.json, pooling.py; gguf_config.py for GGUF
checkpoint.py     which tensors?    safetensors; gguf.py, gguf_tensors.py and gguf_quants.py for GGUF
placement.py      where to?         each tensor to its parameter, or its part of a fused one
load.py           go                the device, the number format (dtype.py, cpu_weights.py), and the copying

random_weights.py stands in for all of it where only the shapes of a model matter.
"""
