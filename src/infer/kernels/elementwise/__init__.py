"""Memory-bound operations between the matrices: norms, rotary positions, activations, embeddings, copies.

`step_state.py` holds what a captured decode step reads and advances on the device.
"""
