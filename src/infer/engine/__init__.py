"""The engine loop, and the code that builds an engine.

engine.py        plan, run, commit, report, once per step
requests.py      running requests: appends ids, forks and ends sequences
admission.py     refuses requests that can never be served
build.py         builds an engine from an `EngineConfig`
device_build.py  parts that every rank builds: projections, KV store, device half
observer.py      events for the recorder; run_manifest.py: facts that a run depends on
stats.py         counts for metrics, health and the router
"""
