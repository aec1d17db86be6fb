"""The device half of a GPU: state in device memory, CUDA graphs, results read one step late.

device.py        launches the steps of orders
warm_up.py       compiles, tries and captures what steps need
rows.py          a row of state per running sequence
step_inputs.py   what a step reads, at fixed addresses
step.py          the `StepContext` of a GPU
graphs.py        which sizes are captured
readback.py      where sampled ids arrive on the host
"""
