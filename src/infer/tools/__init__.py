"""Programs around the engine: nothing that serves a request imports them.

record.py, replay.py   a run written down, and repeated bit for bit
typed_json.py          files into structs, with errors that say what is wrong where
step_cost.py           the time of a step, as a formula that is fitted to a record
memory_plan.py         what fits, from config and headers alone
nvml.py                how busy a GPU is, for metrics
doctor.py              the parts of this machine that matter for running a model
activation_diff.py     the first tensor in which two models differ
"""
