"""Does it work here? Every family, loaded and run, one row each.

    python scripts/sanity_check.py                      the default model and a tiny one of each family
    python scripts/sanity_check.py path/to/model ...    these models instead

For each model: it loads, it generates, and what must be equal is equal:

    cached     greedy tokens with the KV cache and with everything recomputed for every token
    batched    greedy tokens of a prompt alone and of the same prompt in a batch
    streamed   the pieces of a streamed answer and the whole answer
    seeded     two answers drawn with the same seed
    reference  transformers' greedy tokens on the same files, where it is installed and reads them

Exit code 1 if any check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # the package need not be installed

from infer import LLM, SamplingParams  # noqa: E402
from infer.errors import InferError  # noqa: E402
from infer.models.registry import FAMILIES  # noqa: E402
from scripts.make_checkpoint import make_checkpoint  # noqa: E402

PROMPTS = ["The capital of France is", "Once there was a small engine", "1, 2, 3,"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
CHECKS = ("cached", "batched", "streamed", "seeded", "reference")


def check_model(model: str | None) -> dict[str, str]:
    """Run every check; "ok", "-" where it does not apply, or what went wrong."""
    started = time.perf_counter()
    try:
        llm = LLM(model, dtype="float32", max_batch_size=8, kv_cache_memory="256MiB")
        naive = LLM(model, dtype="float32", kv_cache_backend="naive", kv_cache_memory="256MiB")
    except InferError as error:
        return dict.fromkeys(CHECKS, "-") | {"loads": str(error), "seconds": ""}
    row = {"loads": f"ok, {llm.model_config.family}"}
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    tokens = [answer.token_ids for answer in alone]
    row["cached"] = _verdict(
        lambda: [answer.token_ids for answer in naive.generate(PROMPTS, GREEDY)] == tokens
    )
    row["batched"] = _verdict(
        lambda: [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == tokens
    )
    row["streamed"] = _verdict(
        lambda: (
            ["".join(piece.text for piece in llm.stream(prompt, GREEDY)) for prompt in PROMPTS]
            == [answer.text for answer in alone]
        )
    )
    row["seeded"] = _verdict(
        lambda: llm.generate(PROMPTS[0], SEEDED)[0].token_ids == llm.generate(PROMPTS, SEEDED)[0].token_ids
    )
    row["reference"] = _against_transformers(model, alone[0].prompt_token_ids, tokens[0])
    row["seconds"] = f"{time.perf_counter() - started:.1f}"
    return row


def _verdict(holds: Callable[[], bool]) -> str:
    try:
        return "ok" if holds() else "DIFFERENT"
    except InferError as error:
        return f"ERROR: {error}"


def _against_transformers(model: str | None, prompt: list[int], expected: list[int]) -> str:
    if model is None or not Path(model).is_dir() or importlib.util.find_spec("transformers") is None:
        return "-"
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in expected:
            ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], dim=1)
    return "ok" if ids[0, len(prompt) :].tolist() == expected else "DIFFERENT"


def main() -> int:
    """Check the models of the command line, or one of each family; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help="directories, GGUF files or hub ids")
    args = parser.parse_args()
    table = Table("model", "loads", *CHECKS, "s")
    num_failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[str, str | None] = {name: name for name in args.models}
        if not models:
            models["(default)"] = None
            for family in FAMILIES:
                make_checkpoint(family.name, Path(scratch) / family.name)
                models[f"tiny {family.name}"] = str(Path(scratch) / family.name)
        for label, model in models.items():
            row = check_model(model)
            num_failed += not row["loads"].startswith("ok") or any(row[c] not in ("ok", "-") for c in CHECKS)
            table.add_row(label, row["loads"], *(row[check] for check in CHECKS), row["seconds"])
            print(f"{label}: {'; '.join(f'{check} {row[check]}' for check in CHECKS)}", file=sys.stderr)
    Console().print(table)
    print(f"{len(models) - num_failed} of {len(models)} models pass")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
