"""The dashboard and the rules in deploy/ ask for series that a server really has, and say what they mean."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from infer.engine.stats import EngineStats
from infer.tools.nvml import GpuReading
from tests.support.app import Site
from tests.support.fake_client import FakeClient

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "infer.json"
ADDED = {"job", "instance", "le"}  # labels that Prometheus adds, and that of buckets
OF_PROMETHEUS = {"up"}  # its own series
MACROS = {"$__rate_interval": "5m", "$model": ".*", "$engine": ".*"}  # Grafana fills these in

Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def page() -> Labels:
    """The label names of every series on the page of a server that has answered, refused and failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.server.metrics.read_gpu", lambda name: GpuReading(1, 2, 0.5, 0.5, 90.0, 40.0))
        client = FakeClient()
        stats = EngineStats(gpu="GPU-1", accepted_by_position=(1,), rank_wait_s=(0.0, 1.0, 2.0))
        patch.setattr(client, "stats", lambda: stats)
        site = Site(client)
        assert site.request("GET", "/nothing/here").status_code == 404
        text = site.request("GET", "/metrics").text
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        names = {f"{family.name}_bucket", f"{family.name}_sum", f"{family.name}_count"}
        for name in names if family.type == "histogram" else ():
            found.setdefault(name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def read_rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text("utf-8"))["panels"] if each["type"] != "row"]


def check_query(query: str, page: Labels, recorded: set[str]) -> None:
    """Every series of a query exists, with the labels that it is asked by."""
    selectors = re.findall(r"\b(infer[_:][\w:]*|up)\b(?:\{([^}]*)\})?", query)
    assert selectors, query
    known: set[str] = set(ADDED)
    for name, matchers in selectors:
        if name in recorded | OF_PROMETHEUS:
            known |= {"model_name", "engine"}
            continue
        assert name in page, f"{name} is not on the page at /metrics: {query}"
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert asked <= page[name] | ADDED, f"{name} has no label {asked - page[name]}: {query}"
        known |= page[name]
    for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query):
        grouped = {name.strip() for name in names.split(",")}
        assert grouped <= known, f"no series has a label {grouped - known}: {query}"


def test_every_panel_asks_for_series_that_exist(page: Labels) -> None:
    for panel in panels():
        for target in panel["targets"]:
            check_query(target["expr"], page, set())
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                names = re.findall(r"\b(infer_\w+)", target["expr"])
                assert all(label in page[name] for name in names), (panel["title"], label)


def test_variables_of_the_dashboard_exist(page: Labels) -> None:
    for variable in json.loads(DASHBOARD.read_text("utf-8"))["templating"]["list"][1:]:
        name, label = re.fullmatch(  # type: ignore[union-attr]
            r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"]
        ).groups()
        assert label in page[name]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    everything = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({each["id"] for each in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for each in everything:
        box = each["gridPos"]
        cells = {
            (x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, each["title"]
        taken |= cells


def test_every_rule_asks_for_series_that_exist(page: Labels) -> None:
    recorded = {rule["record"] for rule in read_rules("recording.yml")}
    for rule in (*read_rules("recording.yml"), *read_rules("alerts.yml")):
        check_query(rule["expr"], page, recorded)


def test_every_metric_family_with_a_meaning_for_operators_is_watched(page: Labels) -> None:
    """A series that is renamed or added shows up here, and somebody decides about it."""
    text = DASHBOARD.read_text("utf-8")
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in page}
    unwatched = {name for name in families if name not in text}
    assert unwatched == {
        "infer_cache_config_info",
        "infer_kv_host_blocks",
        "infer_kv_host_bytes_in_total",
        "infer_kv_host_bytes_out_total",
        "infer_model_state",
        "infer_prefix_cache_host_hits_total",
        "infer_rank_step_seconds_total",
        "infer_rank_wait_seconds_total",
        "infer_request_generation_tokens",
        "infer_request_inference_time_seconds",
        "infer_request_max_num_generation_tokens",
        "infer_request_params_max_tokens",
        "infer_request_params_n",
        "infer_request_prompt_tokens",
        "infer_request_time_per_output_token_seconds",
        "infer_spec_decode_num_accepted_tokens_per_pos_total",
        "infer_spec_decode_num_drafts_total",
        "infer_startup_time_seconds",
    }


def test_every_alert_is_explained_and_tested() -> None:
    alerts = [rule["alert"] for rule in read_rules("alerts.yml")]
    text = (ROOT / "docs" / "operating.md").read_text("utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == alerts
    cases = yaml.safe_load((RULES / "rules_test.yml").read_text("utf-8"))["tests"]
    tested = [
        check["alertname"] for case in cases for check in case["alert_rule_test"] if check["exp_alerts"]
    ]
    assert tested == alerts
    for rule in read_rules("alerts.yml"):
        assert (
            rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]
        )


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def run_promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=RULES, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_the_rules_do_what_they_say() -> None:
    run_promtool("check", "config", "prometheus.yml")
    run_promtool("test", "rules", "rules_test.yml")


@promtool
def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, target in enumerate(target for panel in panels() for target in panel["targets"]):
        query = target["expr"]
        for macro, value in MACROS.items():
            query = query.replace(macro, value)
        rules.append({"record": f"panel:query{number}", "expr": query})
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run_promtool("check", "rules", str(file))
