"""The loop and the place where everything is put together.

engine.py        plan, run, commit, report, once per step
requests.py      live requests and what each step did to them
admission.py     what can be served at all
build.py         from an `EngineConfig` to a running engine
device_build.py  what every rank makes for it: projections, KV store, device half
observer.py      what an engine tells about itself; run_manifest.py: what a run depends on
stats.py         counts for metrics, health and the router
"""
