"""Tools around the engine: records and replays, planning, diagnosis and readings for metrics.

record.py, replay.py   record a run, and repeat it bit for bit
typed_json.py          parse files into structs, with errors that name the place and the fault
step_cost.py           the time of a step, as a formula that is fitted to a record
memory_plan.py         the memory of a model, from config and headers alone; its parts (memory_needs.py), and
                       what would fit (memory_advice.py)
nvml.py                the utilisation and memory of a GPU, for metrics
doctor.py              a report on this machine's parts that matter for running a model
activation_diff.py     the first tensor in which two models differ
"""
