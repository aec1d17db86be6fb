"""The device half of a GPU: state in device memory, CUDA graphs, results read one step late.

device.py        launches the steps of orders
warm_up.py       compiles, tries and captures what steps need
rows.py          a row of state per running sequence
step_inputs.py   the inputs of a step, at fixed addresses
step.py          the `StepContext` of a GPU
graphs.py        the captured steps, by size
readback.py      the buffers in which sampled ids arrive on the host
"""
