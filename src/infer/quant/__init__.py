"""Number formats of weights: what a linear layer stores, and how it multiplies with that.

    dense      the numbers of the checkpoint, in the dtype of the model; as fast as can be, or row by row
    packed     int8 or int4 in groups of 32, for the kernels of kernels/cpu

A *scheme* is one of these for one layer. `layers/linear.py` asks its scheme for every product, so a
format is added here without touching a model; `loader/` decides which scheme a layer gets.
"""
