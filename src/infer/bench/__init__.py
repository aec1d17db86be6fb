"""Benchmarks: workloads, a client, figures, reports and their comparison.

    workloads ──► load (HTTP) ───────┐
    traces ──┘ └► run_offline ───────┼──► metrics ──► report (JSON) ──► render (Markdown, terminal) · compare
                  simulated ─────────┘

Nothing here is on the path of a request. `infer bench` and `infer simulate` are its commands.
"""
