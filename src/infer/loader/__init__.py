"""From a name to tensors in their final place.

    find/             which files?      path, hub id or the default model
    formats/          what is in them?  config, tensors, number formats; safetensors, plain or quantized, GGUF
    text_headers.py   and about text?   tokenizer, sampling, pooling: what a server reads, without PyTorch
    placement.py      where to?         each tensor to its parameter, or its part of a fused one
    load.py           go                the device, the number format (dtype.py, quantization.py), the copying

code_cache.py keeps rounded weights on disk where rounding took long.
read_ahead.py asks the disk for weights, or for kept codes of them, while PyTorch is still being imported.
random_weights.py stands in for all of it where only the shapes of a model matter.
"""
