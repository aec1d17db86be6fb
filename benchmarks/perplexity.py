"""What a form of the weights costs in accuracy: perplexity on a text, divergence, the share of equal guesses.

    python -m benchmarks.perplexity TEXT.txt [--model MODEL] [--weights fp32 int8 int4] [--windows 16]
    python -m benchmarks.perplexity TEXT.txt --weights none gpu:fp8 gpu:int8 gpu:int4

The text is cut into windows of `--window-len` tokens, and every token but the first of a window is predicted
from those before it. The first form named is what the others are compared with. `gpu:` means as a GPU keeps
the weights, with products in float32: what the codes cost, wherever this runs. `int4:fast` is int4 with
cpu_products=fast.

    KL          KL(first ‖ form) of the next token's distribution, the mean over all predictions
    +-          the uncertainty of `more`, that of the mean difference in log-probability, token by token:
                both see the same text, so it is far smaller than that of the perplexity itself
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.machine import facts, parse, write
from infer.bench.report import revision_of
from infer.config.settings import LoadConfig
from infer.frontend.open_model import make_encoder
from infer.kernels.attention.reference import attend_sdpa
from infer.layers.bind import bind
from infer.layers.whole_sequence import WholeSequence
from infer.loader.find.source import ModelSource, resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import load_model
from infer.models.model import Model

ON_GPU, FAST = "gpu:", ":fast"


class Guesses(NamedTuple):
    """Of every predicted token: its log-probability, the token that was likeliest, any divergence."""

    logprobs: list[float]
    best_ids: list[int]
    divergences: list[float]

    @property
    def perplexity(self) -> float:
        """E to the mean surprise."""
        return math.exp(-statistics.fmean(self.logprobs))


def cut(ids: list[int], num_windows: int, window_len: int) -> list[list[int]]:
    """The first whole windows of a text."""
    windows = [ids[i : i + window_len] for i in range(0, len(ids) - window_len + 1, window_len)]
    if not windows:
        sys.exit(f"the text has {len(ids)} tokens, which is less than a window of {window_len}")
    return windows[:num_windows]


def load(source: ModelSource, weights: str, device: str) -> Model:
    """The model with its weights in a form."""
    name = weights.removeprefix(ON_GPU).removesuffix(FAST)
    home, dtype = ("cuda", "float32") if weights.startswith(ON_GPU) else (None, "auto")
    if name == "none":
        dtype = "float32"
    model = load_model(source, device=device, dtype=dtype, quantization=name, home=home).model
    if weights.endswith(FAST):
        bind(model, torch.device(device), deterministic=False, cpu_products="fast")
    return model


@torch.inference_mode()
def distributions(model: Model, windows: list[list[int]], device: str) -> Iterator[torch.Tensor]:
    """The logarithms of the next token's probabilities, [T - 1, V], of each window."""
    for window in windows:
        tokens = torch.tensor(window, device=device)
        step = WholeSequence(attend_sdpa, torch.device(device))
        step.advance(len(tokens))
        yield model.logits(model(tokens, step))[:-1].float().log_softmax(-1)


def guess(
    model: Model, windows: list[list[int]], base: list[torch.Tensor], device: str
) -> tuple[Guesses, list[torch.Tensor]]:
    """What a model makes of the windows, and its distributions, if there are none to compare with."""
    logprobs: list[float] = []
    best_ids: list[int] = []
    divergences: list[float] = []
    kept = []
    for number, found in enumerate(distributions(model, windows, device)):
        told = torch.tensor(windows[number][1:], device=device)
        logprobs += found.gather(1, told[:, None])[:, 0].tolist()
        best_ids += found.argmax(1).tolist()
        expected = base[number] if base else found
        divergences += (expected.exp() * (expected - found)).sum(1).tolist()
        kept += [] if base else [found]
    return Guesses(logprobs, best_ids, divergences), base or kept


def compare(guesses: Guesses, base: Guesses) -> dict[str, float]:
    """The row of the table."""
    worse = [b - a for a, b in zip(guesses.logprobs, base.logprobs, strict=True)]
    same = sum(a == b for a, b in zip(guesses.best_ids, base.best_ids, strict=True))
    return {
        "perplexity": round(guesses.perplexity, 3),
        "more": round(math.expm1(statistics.fmean(worse)), 5),
        "uncertainty": round(statistics.stdev(worse) / len(worse) ** 0.5, 5),
        **({"kl": round(statistics.fmean(guesses.divergences), 5)} if guesses.divergences else {}),
        "same_best": round(same / len(worse), 4),
    }


def main() -> None:
    """Measure the forms one after the other and print a table."""
    parser = argparse.ArgumentParser(description="Perplexity of a text with weights in several forms.")
    parser.add_argument("text", type=Path, help="a text file, or one of token ids with spaces between (.ids)")
    parser.add_argument("--model", default=None, help="default: the default model")
    parser.add_argument("--weights", nargs="+", default=["fp32", "int8", "int4"], help="forms of the weights")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window-len", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    args = parse(parser)
    if args.windows < 1 or args.window_len < 2:
        parser.error(
            f"--windows must be at least 1 and --window-len 2, got {args.windows} and {args.window_len}"
        )
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {args.text}: {error}; give a text file in UTF-8")
    source = resolve_model(args.model, show_progress=False)
    if args.text.suffix == ".ids":
        ids = [int(word) for word in text.split()]
    else:
        ids = make_encoder(LoadConfig(), read_headers(source)).tokenizer.encode(text, add_special=False)
    windows, base = cut(ids, args.windows, args.window_len), list[torch.Tensor]()
    found: dict[str, Guesses] = {}
    table: dict[str, dict[str, float]] = {}
    print(f"{'weights':10} {'perplexity':>10} {'more':>9} {'+-':>7} {'KL':>9} {'same best':>10}")
    for weights in args.weights:
        found[weights], base = guess(load(source, weights, args.device), windows, base, args.device)
        table[weights] = row = compare(found[weights], found[args.weights[0]])
        print(
            f"{weights:10} {row['perplexity']:10.3f} {row['more']:9.2%} {row['uncertainty']:7.2%} "
            f"{row['kl']:9.5f} {row['same_best']:10.1%}",
            flush=True,
        )
    if args.out:
        num = len(found[args.weights[0]].logprobs)
        revision = revision_of(source.path)
        report: dict[str, object] = {"machine": facts(), "revision": revision, "text": args.text.name}
        report |= {"num_predictions": num, "weights": table}
        write(report, args.out)


if __name__ == "__main__":
    main()
