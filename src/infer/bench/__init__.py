"""What each idea is worth, measured: workloads, a client, figures, reports and their comparison.

    workloads ──► load (HTTP) ──┐
              └─► offline ──────┼──► metrics ──► report (JSON) ──► render (Markdown, terminal) · compare
                  virtual ──────┘

Nothing here is on the path of a request. `infer bench` is the door to all of it.
"""
