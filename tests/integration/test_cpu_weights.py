"""int8 and int4 weights on the CPU: other numbers than float32, and always the same ones.

Integer products do not round, and every operation of kernels/cpu works row by row in one order, so a
token's bits do not depend on its batch, its chunk or its cache. The loop they are compared with here is
the engine itself, with one sequence at a time.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM
from infer.config.settings import EngineConfig, LoadConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.execution.torch_device import TorchDevice
from infer.frontend.open_model import make_encoder
from infer.kernels.attention.reference import attend_naive, attend_sdpa
from infer.kernels.cpu.library import library
from infer.layers.linear import Linear
from infer.layers.whole_sequence import WholeSequence
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.weight_plan import kept_bytes, plan_weights
from infer.models.model import Model
from infer.quant.packed import Packed
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.checkpoints import FAMILIES
from tests.support.kv_store import fill_store
from tests.support.thinned import thinned
from tests.support.tiny import random_prompts, run_engine
from tests.support.toggles import CONTEXT_LEN, engine_knobs, pairwise_rows

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

DATA = Path(__file__).parents[1] / "data"
SIZES = Sizes(vocab_size=300, context_len=CONTEXT_LEN)
REQUESTS = [
    (
        prompt,
        SamplingParams(
            temperature=0.0 if number % 3 else 0.9, seed=number, max_tokens=6 + number, ignore_eos=True
        ),
    )
    for number, prompt in enumerate(random_prompts(8))
]


@functools.cache
def packed_model(family: str, quantization: str = "int8") -> LoadedModel:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / family
        make_checkpoint(family, path, sizes=SIZES, seed=1)
        return load_model(
            resolve_model(str(path), show_progress=False), device="cpu", quantization=quantization
        )


def make_engine(family: str, quantization: str = "int8", **knobs: Any) -> Engine:
    """An engine whose cache holds NaN wherever nothing was written."""
    knobs = {"num_blocks": 64, "attention_backend": "auto"} | knobs
    engine = build_engine(EngineConfig.from_knobs(**knobs), packed_model(family, quantization))
    assert isinstance(engine._device, TorchDevice)
    fill_store(engine._device.store, float("nan"))
    return engine


@functools.cache
def alone(family: str, quantization: str = "int8", products: str = "exact") -> list[list[list[int]]]:
    """Every request by itself in an engine that runs one sequence and shares nothing."""
    outputs = []
    knobs = {"max_batch_size": 1, "use_prefix_caching": False, "cpu_products": products}
    for request in REQUESTS:
        engine = make_engine(family, quantization, **knobs)
        outputs += run_engine(engine, [request])
    return outputs


def test_the_start_line_says_whether_weights_were_kept_or_rounded(caplog: pytest.LogCaptureFixture) -> None:
    def line(loaded: LoadedModel) -> str:
        caplog.clear()
        with caplog.at_level("INFO"):
            build_engine(EngineConfig.from_knobs(num_blocks=8), loaded)
        return next(text for text in caplog.messages if text.startswith("engine built"))

    rounded = line(packed_model("llama", "int4"))
    assert re.search(r' weights="F32 0.4MiB, rounded to int4 \S+ .*, about \+25% perplexity on the ', rounded)
    source = resolve_model(LoadConfig().model, show_progress=False)
    kept = line(load_model(source, device="cpu", quantization="auto"))
    assert re.search(r' weights="Q4_1\+Q8_0 92.0MiB, kept as int4 \S+MiB \+ int8 \S+MiB ', kept)
    assert "perplexity" not in kept


@pytest.mark.parametrize("number", thinned(range(len(pairwise_rows())), keep=3))
def test_no_toggle_changes_a_token(number: int) -> None:
    family = FAMILIES[number % len(FAMILIES)]
    knobs = engine_knobs(pairwise_rows()[number]) | {"attention_backend": "auto"}
    assert run_engine(make_engine(family, **knobs), REQUESTS) == alone(family)


@pytest.mark.parametrize("number", thinned(range(len(pairwise_rows())), keep=5))
def test_no_toggle_changes_a_token_of_int4_either(number: int) -> None:
    knobs = engine_knobs(pairwise_rows()[number]) | {"attention_backend": "auto"}
    assert run_engine(make_engine("llama", "int4", **knobs), REQUESTS) == alone("llama", "int4")


@pytest.mark.parametrize("number", range(1, len(pairwise_rows()), 4), ids=lambda number: f"row {number + 1}")
def test_no_toggle_changes_a_token_of_fast_products_either(number: int) -> None:
    """A row has one digit in a batch of any size."""
    family, quantization = (("llama", "int4"), ("qwen3_moe", "int8"))[number // 4 % 2]
    knobs = engine_knobs(pairwise_rows()[number]) | {"attention_backend": "auto", "cpu_products": "fast"}
    engine = make_engine(family, quantization, **knobs)
    assert run_engine(engine, REQUESTS) == alone(family, quantization, "fast")
    assert alone("llama", "int4", "fast") != alone("llama", "int4"), "one digit changes nothing"


@pytest.mark.parametrize("products", ["exact", "fast"])
def test_threads_change_no_token(products: str) -> None:
    c = library()
    assert c is not None
    usual = c.num_threads
    try:
        for num_threads in (1, 3):
            c.set_threads(num_threads)
            engine = make_engine("llama", "int4", cpu_products=products, deterministic=True)
            assert run_engine(engine, REQUESTS) == alone("llama", "int4", products)
    finally:
        c.set_threads(usual)


@pytest.mark.parametrize(("family", "quantization"), thinned(FAMILIES, ("int8", "int4"), keep=2))
def test_logits_are_near_those_of_the_weights_they_stand_for(family: str, quantization: str) -> None:
    """Against the same network with the dequantised weights in float32: only activations were rounded."""
    allowed = {"int8": 0.05, "int4": 0.35}[quantization]
    packed, dense = packed_model(family, quantization), packed_model(family, "fp32")
    tokens = torch.arange(20) * 7 % 300

    @torch.inference_mode()
    def logits(loaded: LoadedModel) -> torch.Tensor:
        step = WholeSequence(attend_naive, torch.device("cpu"))
        step.advance(len(tokens))
        return loaded.model.logits(loaded.model(tokens, step))

    expected = logits(dense)
    assert (logits(packed) - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_one_recorded_program(family: str) -> None:
    device = make_engine(family)._device
    assert isinstance(device, TorchDevice) and device._cpu is not None
    assert device._cpu._program is not None, "some operation of the model is not in C"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_equals_the_model_s_own_python(family: str) -> None:
    engine = make_engine(family, record_cpu_step=False)
    assert isinstance(engine._device, TorchDevice) and engine._device._cpu is not None
    assert engine._device._cpu._program is None
    assert run_engine(engine, REQUESTS) == alone(family)


def test_a_step_that_cannot_be_recorded_is_not_computed_at_the_start_either() -> None:
    layer = packed_model("llama", "fp32").model.layers[-1]
    computed: list[int] = []
    hook = layer.register_forward_hook(lambda *_: computed.append(1))
    engine = make_engine("llama", "fp32")
    assert not computed
    run_engine(engine, REQUESTS[:1])
    assert computed
    hook.remove()


def test_every_matrix_is_packed_and_nothing_is_kept_twice() -> None:
    model = packed_model("llama", "int4").model
    layers = {name: m.stored for name, m in model.named_modules() if isinstance(m, Linear)}
    bits = {name: stored.bits for name, stored in layers.items() if isinstance(stored, Packed)}
    assert bits.keys() == layers.keys() and bits.pop("head") == 8 and set(bits.values()) == {4}
    assert not any("weight" in dict(m.named_parameters()) for m in model.modules() if isinstance(m, Linear))
    if model.config.tie_embeddings:
        assert model.embedding.table is model.head.stored and model.embedding.weight.is_meta


# Public domain: the Gettysburg Address, 1863.
TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived
in Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and
so dedicated, can long endure. We are met on a great battle-field of that war. We have come to
dedicate a portion of that field, as a final resting place for those who here gave their lives that
that nation might live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this
ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor
power to add or detract. The world will little note, nor long remember what we say here, but it can
never forget what they did here."""


def test_packed_weights_are_as_sure_of_a_text_as_float32() -> None:
    """The default model, a file of 4-bit weights: one percent of perplexity is 0.01 of its logarithm."""
    source = resolve_model(None, show_progress=False)
    tokens = torch.tensor(make_encoder(LoadConfig(), read_headers(source)).tokenizer.encode(TEXT))

    @torch.inference_mode()
    def surprise(model: Model) -> float:
        step = WholeSequence(attend_sdpa, torch.device("cpu"))
        step.advance(len(tokens))
        return torch.nn.functional.cross_entropy(model.logits(model(tokens, step))[:-1], tokens[1:]).item()

    exact, int8, int4 = (
        load_model(source, device="cpu", quantization=quantization, max_seq_len=1024).model
        for quantization in ("fp32", "int8", "int4")
    )
    expected = surprise(exact)
    assert surprise(int8) == pytest.approx(expected, abs=0.01)
    assert surprise(int4) == pytest.approx(expected, abs=0.001)
    for name, layer in exact.named_modules():
        if isinstance(layer, Linear) and layer is not exact.head:  # int4 keeps the numbers of the file
            stored = int4.get_submodule(name).stored
            assert isinstance(stored, Packed) and torch.equal(
                stored.matrices[0].dequantized(), layer.weight
            ), name


@pytest.mark.parametrize("quantization", ["int8", "auto"])
def test_the_first_question_is_answered_as_in_float32(quantization: str) -> None:
    """Its first token is nearly a tie: 'The' is 8 % likelier than the runner-up, which leads astray."""
    llm = LLM(quantization=quantization, device="cpu", num_threads=1, max_seq_len=256)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0]
    assert answer.text == "The capital of France is Paris."


def test_what_auto_keeps_of_the_default_model_continues_as_transformers_does() -> None:
    """A file of 4-bit weights: the greedy tokens recorded in float32 are those of int4, in one batch."""
    recorded = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))
    llm = LLM(device="cpu", num_threads=1, max_seq_len=512)
    assert llm.engine.stats().weights == "int4"
    params = SamplingParams(temperature=0.0, max_tokens=recorded["max_new_tokens"])
    answers = llm.generate([case["prompt_ids"] for case in recorded["cases"]], params)
    assert [answer.token_ids for answer in answers] == [case["output_ids"] for case in recorded["cases"]]


def test_the_plan_knows_what_packed_weights_take() -> None:
    headers = read_headers(resolve_model(None, show_progress=False))
    model = load_model(
        headers.source, device="cpu", quantization="int4", max_seq_len=1024, headers=headers
    ).model
    kept = sum(m.stored.num_bytes() for m in model.modules() if isinstance(m, Linear))
    plan = plan_weights(headers, quantization="int4", dtype="auto", device=torch.device("cpu"))
    planned = kept_bytes(plan.skeleton)
    assert planned == pytest.approx(kept, rel=0.01)
