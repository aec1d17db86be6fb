"""Read the counters of a server's /metrics page before and after a run, if it has one.

Names have the same endings in all engines (`infer_num_preemptions_total`, `vllm:num_preemptions_total`), so a
figure is found by the end of its name, and values with different labels are added up. If a page has a series
under two names, the first one counts. Without the page only these figures are missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

COUNTERS = {
    "queue_s": "request_queue_time_seconds_sum",
    "num_queued": "request_queue_time_seconds_count",
    "num_preemptions": "num_preemptions_total",
    "num_queried": "prefix_cache_queries_total",
    "num_hits": "prefix_cache_hits_total",
    "num_drafts": "spec_decode_num_draft_tokens_total",
    "num_kept": "spec_decode_num_accepted_tokens_total",
    "gpu_bytes": "gpu_memory_used_bytes",
}
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_counters(page: str) -> dict[str, float]:
    """Return the counters of COUNTERS that a metrics page has."""
    found: dict[str, float] = {}
    names: dict[str, str] = {}
    for name, _, value in _LINE.findall(page):
        for counter, ending in COUNTERS.items():
            if name.endswith(ending) and names.setdefault(counter, name) == name:
                try:
                    found[counter] = found.get(counter, 0.0) + float(value)
                except ValueError:
                    continue
    return found


def read_config(page: str) -> dict[str, str]:
    """Return the labels of `cache_config_info`: the server's settings, as far as it exposes them."""
    for name, labels, _ in _LINE.findall(page):
        if name.endswith("cache_config_info"):
            return dict(_LABEL.findall(labels))
    return {}


def figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of the run between two readings."""
    change = {name: after[name] - before[name] for name in after if name in before}
    found = {}
    if change.get("num_queued"):
        found["queue_mean_s"] = change.get("queue_s", 0.0) / change["num_queued"]
    if "num_preemptions" in change:
        found["num_preemptions"] = change["num_preemptions"]
    if change.get("num_queried"):
        found["cache_hit_share"] = change.get("num_hits", 0.0) / change["num_queried"]
    if change.get("num_drafts"):
        found["draft_share"] = change.get("num_kept", 0.0) / change["num_drafts"]
    return found
