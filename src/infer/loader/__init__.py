"""Loading: from a model's name to tensors in their final place.

    find/             which files?      path, hub id or the default model
    formats/          what is in them?  config, tensors, number formats; safetensors, plain or quantized, GGUF
    headers.py        all of that       before a weight is read
    text_headers.py   and about text?   tokenizer, sampling, pooling: all that a server reads, without PyTorch
    weight_plan.py    in what form?     the form (forms.py) of every matrix, by quantization.py and dtype.py
    slices.py         on which rank?    the slice of every tensor that each rank holds
    placement.py      where to?         the parameter, or the part of a fused one, that each tensor fills
    load.py           go                the device, the plan, the copying

code_cache.py caches rounded weights on disk if rounding them was slow.
read_ahead.py prefetches weights, or cached codes of them, while PyTorch is still being imported.
random_weights.py replaces all of it where only the shapes of a model matter.
"""
