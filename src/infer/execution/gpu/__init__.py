"""The device half of a GPU: state in device memory, CUDA graphs, results read one step late.

device.py        takes an order and picks the kind of step: sized_steps.py, window_steps.py, ragged_steps.py
launcher.py      the kernels of a step, launched one by one or recorded by graphs.py
step.py          the `StepContext` of a GPU
rows.py          a row of state per running sequence
step_inputs.py   the inputs of a step, at fixed addresses
graphs.py        the captured steps, by size
step_ids.py      where ids go; readback.py: the buffers in which they arrive on the host
draft_device.py  the device of a draft model or a draft head
warm_up.py       compiles, tries and captures what steps need
"""
