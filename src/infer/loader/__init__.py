"""From a name to tensors in their final place.

source.py         which files?      path, hub id (hub.py) or the default model (default_model.py, wheel.py)
hf_config.py      what network?     config.json and generation_config.json; gguf_config.py for GGUF
checkpoint.py     which tensors?    safetensors; gguf.py, gguf_tensors.py and gguf_quants.py for GGUF
placement.py      where to?         each tensor to its parameter, or its part of a fused one
load.py           go                the device, the number format (dtype.py), and the copying
"""
