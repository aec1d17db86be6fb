"""Programs around the engine: nothing that serves a request imports them.

record.py, record_reader.py, replay.py   a run written down, and repeated bit for bit
simulate.py, step_cost.py, trace.py      the real scheduler under any load on a virtual clock
memory_plan.py                           what fits, from config and headers alone
doctor.py                                what this machine brings to running a model
activation_diff.py                       the first tensor in which two models differ
"""
