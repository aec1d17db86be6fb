"""Steps on a GPU: state in device memory, CUDA graphs, results read one step late.

rows.py          a row of state per running sequence
step_inputs.py   what a step reads, at fixed addresses
step.py          the `StepContext` of a GPU
graphs.py        which sizes are captured
runner.py        launches steps
readback.py      where sampled ids arrive on the host
"""
