"""Write the tables of what was measured on an H200 from the reports of benchmarks/reports.

    serve-*.json           python -m benchmarks.serve_rows MODEL_DIR --passes 2 --out FILE -- FLAGS
    traffic-h200.json      the same, with other rows
    gpu-*.json             python -m benchmarks.gpu_table CFG_DIR --out-dir benchmarks/reports
    neighbours-h200.json   python -m benchmarks.neighbours CFG_DIR --out FILE

A report that is made again changes its tables with the next run of scripts/docs.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

EXPERTS = "qwen3-30b-a3b"
SHAPES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-3.2-1b": "Llama-3.2-1B", "qwen3-8b": "Qwen3-8B"}
SHAPES |= {EXPERTS: "Qwen3-30B-A3B"}
SERVED = ("qwen3-0.6b", "qwen3-8b")
FORMS = {"bfloat16": "", "fp8": "-fp8", "int8": "-int8", "int4": "-int4"}
PHASES = {
    "import": "import_s",
    "weights": "load_weights_s",
    "memory": "plan_memory_s",
    "prepare": "capture_s",
}
ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "benchmarks" / "reports"
CONSTRAINTS = ROOT / "constraints.txt"


def read(name: str) -> dict[str, Any]:
    """Return a report."""
    found: dict[str, Any] = json.loads((REPORTS / name).read_text(encoding="utf-8"))
    return found


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def measured() -> list[str]:
    """Return the README's table: what a user asks first, beside a peer."""
    served, vllm = {shape: read(f"serve-{shape}.json") for shape in SERVED}, read("serve-vllm-h200.json")
    peer = f"({vllm['engine'].replace('vllm', 'vLLM')} {vllm['version']})"
    rows = []
    for shape, name, load in (
        ("qwen3-0.6b", "c1_512_128", "1 stream, 512 in, 128 out"),
        ("qwen3-0.6b", "c64_512_128", "64 streams, 512 in, 128 out"),
        ("qwen3-8b", "c64_512_128", "64 streams, 512 in, 128 out"),
        ("qwen3-0.6b", "c128_2048_128", "128 streams, 2,048 in, 128 out"),
    ):
        row, (rate, ttft_ms, _) = served[shape]["pass_1"][name], vllm[shape][name]
        ours = f"{row['out_tok_s']:,} tok/s, first token after {row['ttft_ms'][0]:.0f} ms"
        theirs = f"{rate:,}, {ttft_ms[0]:.0f} ms {peer}"
        rows.append(["H200, over HTTP", f"{SHAPES[shape]} shape, {load}", ours, theirs])
    for shape, name, load in (
        ("llama-3.2-1b", "b32_256_256", "decode, 32 sequences"),
        ("qwen3-8b", "b1_256_256", "decode, 1 sequence"),
        (EXPERTS, "b1_256_256", "decode, 1 sequence"),
        (EXPERTS, "b32_256_256", "decode, 32 sequences"),
    ):
        dense = read(f"gpu-{shape}.json")
        ours = f"{dense[name]['out_tok_s']:,.0f} tok/s"
        forms = {"qwen3-8b": ("fp8", "int4"), EXPERTS: ("fp8",)}.get(shape, ())
        rates = {form: read(f"gpu-{shape}-{form}.json")[name]["out_tok_s"] for form in forms}
        if rates:
            ours += "; " + ", ".join(f"{rate:,.0f} in {form}" for form, rate in rates.items())
        theirs = f"{dense['peers'][0][name]['out_tok_s']:,.0f} in bfloat16 {peer}"
        rows.append(["H200, engine alone", f"{SHAPES[shape]} shape, {load}", ours, theirs])
    cpu = read("cpu.json")
    rates = {engine: figures["http 8"]["per_s"] for engine, figures in cpu["threads"]["2"].items()}
    theirs = f"{rates['llama.cpp Q4_0']:,.0f} (llama-server, Q4_0, {cpu['of']['llama.cpp Q4_0']['version']})"
    ours = f"{rates['ours int4']:,.0f} tok/s; {rates['ours int4 fast']:,.0f} with `--cpu-products fast`"
    rows.append(["Xeon, 2 threads, over HTTP", "SmolLM2-135M int4, 8 streams, 80 in, 64 out", ours, theirs])
    return [*table(["machine", "workload", "infer", "peer"], rows), "", versions()]


def versions() -> str:
    """Return of which torch and Triton the reports of a GPU are, beside those that `make` installs."""
    found = [
        json.loads(path.read_text(encoding="utf-8")).get("versions", {}) for path in REPORTS.glob("*.json")
    ]
    used = {_short(each["torch"], each["triton"]) for each in found if "triton" in each}
    pins = dict(re.findall(r"^(torch|triton)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    installed = _short(pins["torch"], pins["triton"])
    said = f"The figures of a GPU are of {', or of '.join(sorted(used))}"
    return f"{said}." if used == {installed} else f"{said}; `make` installs {installed}."


def _short(torch: str, triton: str) -> str:
    return " and ".join(
        f"{name} {'.'.join(v.split('.')[:2])}" for name, v in (("torch", torch), ("Triton", triton))
    )


def http() -> list[str]:
    """Return what clients of a server see, in its first minute, warm, and of the peer."""
    vllm = read("serve-vllm-h200.json")
    rows = []
    for shape in SERVED:
        found = read(f"serve-{shape}.json")
        for name, first in found["pass_1"].items():
            warm = found.get("pass_2", {}).get(name)
            peer = vllm[shape].get(name)
            theirs = dict(zip(("out_tok_s", "ttft_ms", "gap_ms"), peer, strict=True)) if peer else None
            rows.append([f"`{name}`", shape, _seen(first), _seen(warm), _seen(theirs)])
    return table(["row", "shape", "first minute", "warm", f"vLLM {vllm['version']}"], rows)


def _seen(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    first, gaps = ("/".join(digits(ms) for ms in row[name][:2]) for name in ("ttft_ms", "gap_ms"))
    return f"{row['out_tok_s']:,}, {first}, {gaps}"


def digits(value: float) -> str:
    """Return a figure with one digit behind the point below 10, none from there on."""
    return f"{value:,.1f}" if value < 9.95 else f"{value:,.0f}"


def traffic() -> list[str]:
    """Return rows that no peer was measured with: very many streams, very long prompts."""
    found = read("traffic-h200.json")
    starts = [found[f"qwen3-0.6b, compile caches {kind}"] for kind in ("of another max_seq_len", "empty")]
    rows = [
        [
            f"`{name}`",
            f"{row['out_tok_s']:,}",
            *("/".join(digits(ms) for ms in row[figure][:2]) + " ms" for figure in ("ttft_ms", "gap_ms")),
            f"{digits(row['tpot_ms'][0])} ms",
            f"{row['gpu_busy']:.0%}",
        ]
        for start in starts
        for name, row in start["rows"].items()
    ]
    heads = ["row", "tokens per second", "first token, p50/p95", "between tokens, p50/p95", "per token, p50"]
    return table([*heads, "GPU busy"], rows)


def together() -> list[str]:
    """Return what long prompts take together, beside the sum of their parts."""
    found = read("traffic-h200.json")["mixed64"]
    rows = [
        [
            shape,
            *(f"{found[shape][part]:.2f} s" for part in ("s", "prompts_alone_s", "decoding_alone_s")),
            f"{found[shape]['ratio']:.2f} x",
            f"{found[shape]['steps_with_prompts']} of {found[shape]['steps']}",
        ]
        for shape in SERVED
    ]
    heads = ["shape", "whole", "prompts alone", "decoding alone", "whole / sum", "steps with prompts"]
    return table(heads, rows)


def starts() -> list[str]:
    """Return the seconds from the start of a server to its first answer, and what they were spent on."""
    small, large, vllm = (read(f"serve-{name}.json") for name in (*SERVED, "vllm-h200"))
    listed = {("qwen3-0.6b", "empty"): small, ("qwen3-8b", "filled by the other shape"): large}
    if "filled_caches" in small:
        listed["qwen3-0.6b", "filled"] = small["filled_caches"]
    rows = []
    for (shape, caches), found in listed.items():
        said = " ".join(line for line in found.get("phases", ()) if line.startswith("model loaded"))
        spent = dict(re.findall(r"(\w+_s)=([\d.]+)", said))
        parts = [f"{float(spent[phase]):.1f}" if phase in spent else "" for phase in PHASES.values()]
        rows.append([shape, caches, f"{found['first_answer_s']:.1f}", *parts])
    for shape in SERVED:
        rows.append(
            [f"{shape}, vLLM {vllm['version']}", "its own", f"{vllm[shape]['healthy_s']:.1f}", *[""] * 4]
        )
    return table(["shape", "compile caches", "seconds", *PHASES], rows)


def neighbours() -> list[str]:
    """Return what one request with wishes leaves of the tokens per second of 32 rows."""
    found = read("neighbours-h200.json")
    ratios = {name: row["ratio"] for name, row in found.items() if isinstance(row, dict) and "ratio" in row}
    return table(list(ratios), [[f"{ratio:.3f}" for ratio in ratios.values()]])


def forms() -> list[str]:
    """Return tokens per second of the shapes with weights of each form."""
    columns = {
        "batch 1": ("b1_256_256", "out_tok_s"),
        "batch 32": ("b32_256_256", "out_tok_s"),
        "batch 128": ("b128_256_256", "out_tok_s"),
        "prompts of 4,096": ("prefill_8x4096", "in_tok_s"),
    }
    rows = []
    for shape, title in SHAPES.items():
        for form, suffix in FORMS.items():
            if not (REPORTS / f"gpu-{shape}{suffix}.json").exists():
                continue
            found = read(f"gpu-{shape}{suffix}.json")
            cells = [
                f"{found[name][figure]:,.0f}" if name in found else "" for name, figure in columns.values()
            ]
            knobs = "".join(f", `{name}={value}`" for name, value in found["knobs"].items())
            rows.append([f"{title}, {form}{knobs}", *cells, found["commit"][:8]])
    return table(["shape and form", *columns, "commit"], rows)
