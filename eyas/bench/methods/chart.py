"""The bar chart of `eyas bench methods`: scores in, a picture out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.bench.methods.results import MethodScore
from eyas.errors import ConfigError

INCHES_PER_METHOD = 0.9


def draw(scores: Sequence[MethodScore], path: Path) -> None:
    """One group of bars per method: speedup over plain decoding at each temperature, tau written above it.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib; install it with: pip install 'eyas[bench]'") from error
    methods = list(dict.fromkeys(score.method for score in scores))
    temperatures = list(dict.fromkeys(score.temperature for score in scores))
    width = 0.8 / len(temperatures)
    figure = Figure(figsize=(2 + INCHES_PER_METHOD * len(methods), 4.5), layout="constrained")
    axes = figure.subplots()
    for offset, temperature in enumerate(temperatures):
        its = [score for score in scores if score.temperature == temperature]
        places = [methods.index(score.method) + (offset - (len(temperatures) - 1) / 2) * width for score in its]
        bars = axes.bar(places, [s.overall.speedup.median for s in its], width, label=f"temperature {temperature:g}")
        labels = ["" if score.overall.tau is None else f"{score.overall.tau:.1f}" for score in its]
        axes.bar_label(bars, labels, fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    axes.set_ylabel("speedup over plain decoding")
    axes.set_title("Above the bars: mean tokens per verify step (tau)", fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=150)
