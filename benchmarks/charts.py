"""Ratios as charts: bars of characters for a terminal, and a picture if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from infer.errors import ConfigError


def ratio_bars(pairs: Sequence[tuple[str, float]], *, width: int = 48) -> str:
    """Return ratios as bars of characters on a logarithmic scale: right of the line better, left worse.

    Twice as fast and half as fast are equally far from the line, which is at 1.
    """
    if not pairs:
        return ""
    logs = [math.log(max(value, 1e-9)) for _, value in pairs]
    left, right = max(0.0, -min(logs)), max(0.0, max(logs))
    per_unit = width / ((left + right) or 1.0)
    margin, longest = math.ceil(left * per_unit), max(len(label) for label, _ in pairs)
    lines = []
    for (label, value), log in zip(pairs, logs, strict=True):
        bar = "█" * round(abs(log) * per_unit)
        drawn = f"{bar.rjust(margin)}│" if log < 0 else f"{' ' * margin}│{bar}"
        lines.append(f"{label.ljust(longest)}  {drawn} {value:.3g}x\n")
    return "".join(lines)


def can_draw() -> bool:
    """Return True if matplotlib (extra `bench`) is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_png(title: str, pairs: Sequence[tuple[str, float]], path: Path) -> None:
    """Write ratios as a picture, in the format that the name ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(pairs) + 1))
    labels, values = [label for label, _ in pairs], [value for _, value in pairs]
    colors = ["tab:green" if value >= 1 else "tab:red" for value in values]
    drawn = axes.barh(labels, [value - 1 for value in values], left=1.0, color=colors)
    axes.bar_label(drawn, labels=[f"{value:.3g}x" for value in values], padding=3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.margins(x=0.15)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_title(title)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the chart {path}: {error}") from None
    finally:
        pyplot.close(figure)
