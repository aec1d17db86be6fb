"""The engine without HTTP, on a tiny model: that figures are there and agree, not how fast."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import micro
from benchmarks.ablations import ABLATIONS
from benchmarks.matrix import _row as row_of
from benchmarks.matrix import bench_matrix, speed_ups
from benchmarks.micro import bench_attention, bench_memory
from infer.bench import offline as offline_benches
from infer.bench.offline import batch, bench_decode, bench_latency, bench_offline, bench_prefill, run_once
from infer.bench.render import columns, provenance
from infer.bench.repeats import EngineBench, Tell, beyond_roofline, run_rows
from infer.bench.report import Row, make_row, revision_of, skip_row, write_report
from infer.bench.roofline import (
    Ceilings,
    ModelShape,
    decode_roofline,
    measure_ceilings,
    prefill_flops,
    prefill_roofline,
    shape_of,
    workload_roofline,
)
from infer.bench.run_offline import run_offline, to_ids
from infer.bench.target import TINY, BenchTarget, open_target
from infer.bench.workloads import SERVING, Arrival, Session, Turn, Workload, make_workload
from infer.errors import ConfigError, EngineError
from infer.kernels.cpu.library import library
from infer.layers.linear import Linear
from infer.models.registry import find_family
from scripts.make_checkpoint import make_checkpoint


def quiet(line: str) -> None:
    pass


def on(target: BenchTarget, *, repeats: int = 1, tell: Tell = quiet) -> EngineBench:
    return EngineBench(target=target, seed=1, repeats=repeats, tell=tell)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> BenchTarget:
    directory = tmp_path_factory.mktemp("shape")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 8, "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 256}
    (directory / "config.json").write_text(json.dumps(TINY | small))
    knobs = {"device": "cpu", "num_threads": 1, "num_blocks": 64}
    return open_target(knobs, model_config=directory)


def test_a_run_has_every_token_and_its_time(target: BenchTarget) -> None:
    workload = batch(3, 10, 5, target.vocab_size, seed=0)
    result = run_offline(target.engine(), workload)
    assert [(trace.num_prompt, trace.num_output, len(trace.chunks)) for trace in result.traces] == [
        (10, 5, 5)
    ] * 3
    assert all(trace.chunks == sorted(trace.chunks) for trace in result.traces)
    assert result.figures()["num_output_tokens"] == 15
    assert result.seconds >= max(trace.chunks[-1] for trace in result.traces)


def test_the_engine_is_seldom_asked_how_full_it_is(target: BenchTarget) -> None:
    """Asking costs time, which would be part of what is measured."""
    result = run_offline(target.engine(), batch(1, 4, 40, target.vocab_size, seed=0))
    assert len(result.step_s) == 40
    assert len(result.running) == len(result.kv_use) == 3  # after steps 1, 17 and 33


def test_a_session_goes_on_from_its_answer(target: BenchTarget) -> None:
    turns = (Turn(ids=(11, 12, 13), max_tokens=4), Turn(ids=(14,), max_tokens=2))
    workload = Workload(
        name="s",
        about="",
        arrival=Arrival(kind="closed", concurrency=1),
        sessions=(Session(turns=turns),) * 2,
    )
    result = run_offline(target.engine(), workload)
    assert [(t.session, t.turn, t.num_prompt) for t in result.traces] == [
        (0, 0, 3),
        (0, 1, 8),
        (1, 0, 3),
        (1, 1, 8),
    ]


def test_a_request_that_does_not_fit_is_an_error_of_its_own(target: BenchTarget) -> None:
    sessions = (*batch(1, 300, 5, 64, seed=0).sessions, *batch(1, 10, 5, 64, seed=0).sessions)
    workload = Workload(name="w", about="", arrival=Arrival(kind="open"), sessions=sessions)
    bad, good = run_offline(target.engine(), workload).traces
    assert bad.error is not None and good.is_ok


def test_repeats_find_nothing_in_the_cache(target: BenchTarget) -> None:
    engine, workload = target.engine(), batch(2, 40, 2, 64, seed=0)
    results = [run_once(engine, workload, repeat, target.vocab_size) for repeat in range(3)]
    assert [result.counters["num_hit_tokens"] for result in results] == [0, 0, 0]


def test_chats_become_ids() -> None:
    for name in SERVING:
        workload = to_ids(make_workload(name))
        assert all(turn.ids for session in workload.sessions for turn in session.turns)


def test_every_offline_bench_reports(
    target: BenchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)
    for module in (micro, offline_benches):  # what a machine can do takes seconds to find out
        monkeypatch.setattr(module, "measure_ceilings", lambda device, dtype: ceilings)
    monkeypatch.setattr(micro, "capacity_rows", functools.partial(micro.capacity_rows, num_requests=30))
    reports = [
        bench_offline(on(target, repeats=2), ["b1_256_256"]),
        bench_latency(on(target)),
        bench_prefill(on(target, repeats=2), lengths=[64, 4096]),
        bench_decode(on(target, repeats=2), batches=[1, 2], context=16, num_steps=4),
        bench_attention(on(target, repeats=2), batches=[2], contexts=[40]),
        bench_memory(target, seed=1, tell=quiet),
    ]
    for report in reports:
        write_report(report, tmp_path / f"{report.kind}.json")  # checks it
        assert report.model["device"] == "cpu" and report.model["dtype"] == "float32"
        assert report.model["weights"] == "fp32" and "weights fp32" in provenance(report)
        assert report.config.get("quantization", "fp32") == "fp32"  # and never "auto"
    offline, _, prefill, decode, attention, memory = reports
    roofline = offline.rows[0].figures
    assert roofline["roofline_share"].values[0] == pytest.approx(
        roofline["roofline_s"].values[0] / roofline["seconds"].values[0]
    )
    for report in (offline, prefill, decode, attention):
        shares = [row.figures["roofline_share"].median for row in report.rows if row.figures]
        assert any("above 100 %" in note for note in report.notes) is (max(shares) > 1)
    assert prefill.rows[1].skipped == "the context is 256"
    step = decode.rows[1].figures
    for report in (offline, prefill, decode, attention):  # measured ceilings are kept, and shown in a note
        assert report.rows[0].figures["copy_gb_per_s"].median > 0
        assert "copy_gb_per_s" not in columns(report)[0] and "copy" in report.notes[0]
    assert step["output_tokens_per_s"].values[0] == pytest.approx(2 / step["step_p50_s"].values[0])
    assert memory.rows[0].figures["weights_bytes"].median == target.weight_bytes


def test_the_matrix_explains_every_row(target: BenchTarget) -> None:
    report = bench_matrix(on(target), only=["paged", "graphs", "quant", "codes"])
    rows = {row.name: row for row in report.rows}
    assert len(rows) == 8
    assert rows["+codes b1_256_256"].skipped == "needs a checkpoint or a --model-config on a GPU"
    assert rows["+graphs b1_256_256"].skipped == "needs a GPU"
    assert rows["+quant b1_256_256"].skipped == "needs a checkpoint on a CPU"
    assert [name for name, _ in speed_ups(report)] == ["+paged paged_attention", "+paged w1_single"]
    for name in ("+paged paged_attention", "+paged w1_single"):
        assert "->" in rows[name].note
    assert not report.notes  # of one repeat the figures of a sentence give its ratio
    assert all(row.note.endswith(".") for row in report.rows)  # a sentence, also where nothing was measured
    assert "a decode step is launched as one graph" in rows["+graphs b1_256_256"].note
    paged = rows["+paged paged_attention"].figures
    assert paged["mean_running"].median > 6  # a contiguous cache holds six


def test_a_speed_up_of_several_repeats_is_the_median_of_their_ratios(target: BenchTarget) -> None:
    """Which is not what a reader gets who divides the two medians of the sentence, so the report says it."""
    ablation = next(ablation for ablation in ABLATIONS if ablation.name == "paged")
    before, after = (
        [{"output_tokens_per_s": speed} for speed in side]
        for side in ((10.0, 20.0, 60.0), (30.0, 40.0, 66.0))
    )
    row = row_of(ablation, ablation.best, before, after)
    assert row.figures["speed_up"].median == 2.0  # of 3, 2 and 1.1
    assert row.note.startswith("output 20 tok/s -> 40 tok/s: ")
    before[2]["output_tokens_per_s"] = 15.0
    row = row_of(ablation, ablation.best, before, after)
    assert (row.figures["speed_up"].median, row.note[:29]) == (3.0, "output 15 tok/s -> 40 tok/s: ")
    several = bench_matrix(on(target, repeats=2), only=["graphs"])
    assert several.notes == [
        "speed-ups are medians of the repeats' ratios, and not the ratio of the two medians beside them"
    ]


def test_a_share_above_the_roofline_is_explained_and_others_are_not() -> None:
    def row(name: str, *shares: float) -> Row:
        return make_row(name, "", [{"roofline_share": share} for share in shares])

    below = [
        row("batch 1", 0.4, 1.2, 0.9),
        make_row("no roofline", "", [{"seconds": 2.0}]),
        skip_row("c", "", "so"),
    ]
    assert beyond_roofline(below) == []
    (note,) = beyond_roofline([*below, row("batch 8", 1.1), row("batch 64", 1.3)])
    assert note.startswith(
        "above 100 % of the roofline (batch 8; batch 64) does not mean faster than possible"
    )


def test_rooflines_by_hand() -> None:
    shape = ModelShape(
        layer_params=1000, last_params=300, head_params=100, attention_size=5, num_layers=2, kv_elements=4
    )
    slow_memory = Ceilings(copy_bytes_per_s=100.0, matmul_flops_per_s=1e9)
    assert decode_roofline(shape, slow_memory, batch=1, context=50) == pytest.approx(22 + 50 * 4 * 2 / 100)
    slow_matmul = Ceilings(copy_bytes_per_s=1e12, matmul_flops_per_s=100.0)
    assert decode_roofline(shape, slow_matmul, batch=3, context=0) == pytest.approx(2 * 1100 * 3 / 100)
    rows, pairs = 4 * 700 + 300 + 100, (1 + 2 + 3 + 4) + 4  # of the last layer and the head one row, the last
    assert prefill_roofline(shape, slow_matmul, 4) == pytest.approx((2 * rows + 4 * 5 * pairs) / 100)
    alone = 2 * 1100 + 4 * 5 * 2  # one token passes through everything
    assert prefill_roofline(shape, slow_matmul, 1) == pytest.approx(alone / 100)
    assert prefill_roofline(shape, slow_memory, 4) == pytest.approx(22)  # reading the weights once
    both = workload_roofline(shape, slow_memory, [(4, 3), (4, 1)])
    decode = 2 * 22 + (5 + 6) * 4 * 2 / 100  # two more steps for the first, none for the second
    assert both == pytest.approx(decode, rel=1e-3)


def test_the_roofline_of_a_published_shape() -> None:
    """Qwen3-0.6B: 440 M parameters in layers, 156 M in the head, 112 KiB of cache per token in bfloat16."""
    raw: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    raw |= {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    raw |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6}
    raw |= {"max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True}
    shape = shape_of(find_family(raw).read_config(raw), weight_bytes=2, kv_bytes=2)
    assert shape.kv_elements * 2 == 112 * 1024
    assert (shape.layer_params + shape.head_params) * 2 == pytest.approx(1.192e9, rel=1e-3)
    h200 = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12)
    assert 1 / decode_roofline(shape, h200, batch=1, context=128) == pytest.approx(3564, rel=1e-3)
    wide, narrow, mlp = 1024 * 2048, 1024 * 1024, 3 * 1024 * 3072  # queries or output, keys or values, MLP
    of_all = 27 * (2 * wide + 2 * narrow + mlp) + 2 * narrow  # of the last layer only its keys and values
    of_last = 2 * wide + mlp + 1024 * 151936
    pairs = 27 * 512 * 513 / 2 + 512
    assert prefill_flops(shape, 512) == 2 * (512 * of_all + of_last) + 4 * 16 * 128 * pairs


def test_the_roofline_counts_the_experts_that_a_batch_touches() -> None:
    """Qwen3-30B-A3B: one token reads 8 of 128 experts in each layer, 32 tokens 112, very many all of them."""
    raw: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    raw |= {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "hidden_act": "silu"}
    raw |= {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    raw |= {"max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    shape = shape_of(find_family(raw).read_config(raw), weight_bytes=2, kv_bytes=2)
    expert, attention = 3 * 2048 * 768, 2048 * 128 * (2 * 32 + 2 * 4)
    assert shape.layer_params_read(1) == shape.layer_params == 48 * (attention + 8 * expert)
    chosen = 128 * (1 - (15 / 16) ** 32)
    assert shape.layer_params_read(32) == pytest.approx(48 * (attention + chosen * expert))
    assert shape.layer_params_read(10_000) == pytest.approx(48 * (attention + 128 * expert))
    memory = Ceilings(copy_bytes_per_s=4.1e12, matmul_flops_per_s=790e12)
    assert 1 / decode_roofline(shape, memory, batch=1, context=0) == pytest.approx(680, rel=0.01)
    assert 32 / decode_roofline(shape, memory, batch=32, context=0) == pytest.approx(2460, rel=0.02)


def test_the_roofline_of_a_prompt_is_what_a_model_must_multiply(target: BenchTarget) -> None:
    """Counted in the model itself: its matrices, with the last layer cut to what its last token needs."""
    config, model, length = target.loaded.config, target.loaded.model, 10
    size = {
        name: matrix.weight.numel() for name, matrix in model.named_modules() if isinstance(matrix, Linear)
    }
    keys_and_values = 2 * config.num_kv_heads * config.head_dim * config.hidden_size
    assert config.num_layers == 1  # which is the last: all but keys and values once
    once = sum(size.values()) - keys_and_values
    attention = 4 * config.num_heads * config.head_dim * length
    flops = prefill_flops(target.shape(), length)
    assert flops == 2 * (keys_and_values * length + once) + attention


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_packed_weights_are_counted_by_their_size() -> None:
    """Every matrix by its own bits; the head has 8 in any case, so int4 comes to more on average."""
    target = open_target({"device": "cpu"}, is_tiny=True)  # whose matrices fill tiles and groups
    shape = target.shape()
    num_weights = shape.layer_params + shape.head_params
    assert (shape.weight_bytes, shape.kv_bytes) == (4, 4)
    for form, kept in {
        "int8": num_weights * 8.5 / 8,
        "int4": shape.layer_params * 5 / 8 + shape.head_params * 8.5 / 8,
    }.items():
        packed = open_target({"device": "cpu", "quantization": form}, is_tiny=True)
        assert packed.shape().weight_bytes == pytest.approx(kept / num_weights)
        assert packed.shape().kv_bytes == 4
        assert target.weight_bytes - packed.weight_bytes == num_weights * 4 - kept


def test_ceilings_are_measured(target: BenchTarget) -> None:
    found = measure_ceilings(target.device, target.loaded.dtype, scale=0.05)
    assert found.copy_bytes_per_s > 1e6 and found.matmul_flops_per_s > 1e6


def test_ctrl_c_keeps_what_was_measured(target: BenchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)
    monkeypatch.setattr(offline_benches, "measure_ceilings", lambda device, dtype: ceilings)
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            raise KeyboardInterrupt

    report = bench_prefill(on(target, repeats=2, tell=tell), lengths=[8, 16, 32])
    assert report.is_partial
    first, second, third = report.rows
    assert len(first.figures["ttft_p50_s"].values) == 2
    assert len(second.figures["ttft_p50_s"].values) == 1
    assert second.note == "interrupted after 1 of 2 repeats"
    assert third.skipped == "interrupted"


def test_a_row_that_fails_does_not_take_the_others_with_it() -> None:
    def fail() -> Row:
        raise ConfigError("no room")

    good = make_row("good", "", [{"seconds": 1.0}])
    rows, is_partial = run_rows({"bad": fail, "good": lambda: good})
    assert (rows[0].skipped, rows[1], is_partial) == ("failed: no room", good, False)
    with pytest.raises(ConfigError, match="no room"):
        run_rows({"bad": fail, "worse": fail})


def test_weights_in_another_form_are_compared_with_plain_ones(
    target: BenchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the tiny model came from a file: the same one is loaded in both forms."""
    assert target.in_form("fp32") is target  # which it has already
    forms: list[str] = []

    def in_form(self: BenchTarget, quantization: str) -> BenchTarget:
        forms.append(quantization)
        return self

    monkeypatch.setattr(BenchTarget, "in_form", in_form)
    real = dataclasses.replace(target, is_random=False)
    rows = bench_matrix(on(real), only=["quant"]).rows
    assert forms == ["fp32", "int8"]
    measured = [row.name for row in rows if row.figures]
    assert measured == ["+quant b1_256_256", "+quant prefill_8x4096"]


def test_a_report_holds_what_auto_meant(target: BenchTarget) -> None:
    knobs = target.knobs()
    assert (knobs["dtype"], knobs["device"], knobs["max_seq_len"]) == ("float32", "cpu", 256)
    assert knobs["max_batch_size"] and knobs["max_num_batched_tokens"] and knobs["prefill_chunk_size"]
    assert knobs["num_blocks"] == 64 and "model" not in knobs


def test_a_report_names_the_revision_of_a_checkpoint_and_random_weights_have_none(
    target: BenchTarget, tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path)
    real = open_target({"model": str(tmp_path), "device": "cpu"})
    assert real.facts()["revision"] == revision_of(tmp_path)
    assert "revision" not in target.facts()
    report = bench_latency(on(real))
    assert f"revision {real.revision[7:19]}" in provenance(report)


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_random_weights_may_be_packed() -> None:
    packed = open_target({"device": "cpu", "quantization": "int8"}, is_tiny=True)
    assert packed.weights == "int8" and packed.facts()["weights"] == "int8"
    assert packed.weight_bytes < 0.4 * open_target({"device": "cpu"}, is_tiny=True).weight_bytes


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_random_weights_of_a_shape_come_in_another_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    plain = open_target({"device": "cpu"}, model_config=tmp_path)
    packed = plain.in_form("int8")
    assert (plain.weights, packed.weights, packed.in_form("fp32").weights) == ("fp32", "int8", "fp32")
    assert packed.knobs()["quantization"] == "int8"


def test_a_request_that_fails_is_no_figure(target: BenchTarget) -> None:
    with pytest.raises(ConfigError, match="a request of 1 x 300/5 failed: "):
        run_once(target.engine(), batch(1, 300, 5, 64, seed=0), 0, target.vocab_size)


def test_a_process_that_fails_has_no_first_byte() -> None:
    with pytest.raises(EngineError, match="ValueError: no such model"):
        micro.first_byte_s([sys.executable, "-c", "raise ValueError('no such model')"])
    assert micro.first_byte_s([sys.executable, "-c", ""]) > 0


def test_decoding_that_does_not_fit_names_its_own_flags(target: BenchTarget) -> None:
    with pytest.raises(ConfigError, match="--steps is 9999, but a sequence has room for .* tokens here"):
        bench_decode(on(target), batches=[1], context=8, num_steps=9999)


def test_decoding_at_a_context_that_does_not_fit_says_so(target: BenchTarget) -> None:
    lines: list[str] = []
    bench_decode(on(target, tell=lines.append), batches=[1], context=8, num_steps=4)
    assert len(lines) == 1
    report = bench_decode(on(target, tell=lines.append), batches=[1], context=300, num_steps=4)
    assert lines[1] == "batch 1: a context of 300 tokens does not fit, so it is 252"
    assert report.rows[0].about == "1 sequences of about 254 tokens"


@pytest.mark.skipif(library() is None, reason="the C kernels are not built here")
def test_the_attention_that_is_timed_is_that_of_the_engine(
    target: BenchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the kernel in C, and it computes what PyTorch does."""

    def attend(batch: int, context: int) -> torch.Tensor:
        torch.manual_seed(0)
        work, num_bytes = micro._attention(target, batch, context, seed=1)
        assert num_bytes == batch * context * 2 * 8 * 4  # keys and values of one head of 8
        out: torch.Tensor = work()
        return out

    sizes = [(2, 40), (3, 16), (1, 700)]
    ours = [attend(*size) for size in sizes]
    monkeypatch.setattr(micro, "_c_kernel", lambda target: None)
    for size, out in zip(sizes, ours, strict=True):
        torch.testing.assert_close(out, attend(*size))
