"""From a name to tensors in their final place.

    find/             which files?      path, hub id or the default model
    formats/          what is in them?  config, tensors, number formats; safetensors, plain or quantized, GGUF
    headers.py        all of that       before a weight is read
    text_headers.py   and about text?   tokenizer, sampling, pooling: what a server reads, without PyTorch
    weight_plan.py    kept how?         the form (forms.py) of every matrix, by quantization.py and dtype.py
    slices.py         by whom?          the part of every tensor that one rank of several holds
    placement.py      where to?         each tensor to its parameter, or its part of a fused one
    load.py           go                the device, the plan, the copying

code_cache.py keeps rounded weights on disk where rounding took long.
read_ahead.py asks the disk for weights, or for kept codes of them, while PyTorch is still being imported.
random_weights.py stands in for all of it where only the shapes of a model matter.
"""
