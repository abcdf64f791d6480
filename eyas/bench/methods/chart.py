"""The bar chart of `eyas bench methods`: scores in, a picture out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.bench.methods.results import MethodScore
from eyas.errors import ConfigError

INCHES_PER_METHOD = 0.9


def draw(scores: Sequence[MethodScore], path: Path) -> None:
    """One group of bars per method, a bar per temperature: above the speedup over plain decoding, below tau, where a line
    across a bar is tau without shared noise.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib; install it with: pip install 'eyas[bench]'") from error
    methods = list(dict.fromkeys(score.method for score in scores))
    temperatures = list(dict.fromkeys(score.temperature for score in scores))
    width = 0.8 / len(temperatures)
    figure = Figure(figsize=(2 + INCHES_PER_METHOD * len(methods), 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for offset, temperature in enumerate(temperatures):
        its = [score for score in scores if score.temperature == temperature]
        places = [methods.index(score.method) + (offset - (len(temperatures) - 1) / 2) * width for score in its]
        above.bar(places, [s.overall.speedup.median for s in its], width, label=f"temperature {temperature:g}")
        taus = [score.overall.tau or 0.0 for score in its]
        below.bar_label(below.bar(places, taus, width), [f"{tau:.1f}" if tau else "" for tau in taus], fontsize=7)
        own = [(p, s.own_noise_tau) for p, s in zip(places, its, strict=True) if s.own_noise_tau is not None]
        below.hlines([tau for _, tau in own], [p - width / 2 for p, _ in own], [p + width / 2 for p, _ in own], "black")
    above.axhline(1.0, color="black", linewidth=0.8)
    above.set_ylabel("speedup over plain decoding")
    above.legend()
    below.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    below.set_ylabel("tokens per verify step (tau)")
    below.set_title("Lines across bars: without shared noise", fontsize=9)
    figure.savefig(path, dpi=150)
