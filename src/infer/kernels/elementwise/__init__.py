"""Memory-bound operations between the matrices: norms, rotary positions, activations, embeddings, copies.

`step_state.py` holds the state that a captured decode step reads and advances on the device.
"""
