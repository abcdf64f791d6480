"""A picture of what verifier, wire and drafter do in a few rounds of one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.split.results import Decoded
from eyas.emulation.device import PassRecord
from eyas.errors import ConfigError, MissingPackage

COLOURS = {
    "verify": "tab:blue",
    "draft": "tab:orange",
    "grow": "tab:green",
    "repair": "tab:red",
    "wait": "0.85",
    "wire": "0.4",
}
NUM_DRAWN = 6


@dataclass(frozen=True)
class Timeline:
    """Some rounds of one request: the passes of both devices in a window of time."""

    title: str
    verifier: tuple[PassRecord, ...]
    drafter: tuple[PassRecord, ...]
    started: float
    ended: float

    @classmethod
    def of(cls, title: str, request: Decoded, verifier: Sequence[PassRecord], drafter: Sequence[PassRecord]) -> Timeline:
        """Return the middle rounds of a request: NUM_DRAWN verify passes and what the drafter did meanwhile."""
        own = [r for r in verifier if request.started <= r.began <= request.ended]
        middle = own[max(len(own) // 2 - NUM_DRAWN // 2, 0) :][:NUM_DRAWN]
        if not middle:
            raise ConfigError(f"no verify pass was logged in the request that the timeline {title!r} should show")
        started, ended = middle[0].began, middle[-1].ended
        inside = tuple(r for r in drafter if r.ended > started and r.began < ended)
        return cls(title, tuple(middle), inside, started, ended)

    def bars(self) -> list[tuple[str, str, float, float]]:
        """Bars as (lane, what, begin, seconds). Between two passes the verifier waits, for the wire and for drafts."""
        bars = [("verifier", "verify", r.began, r.ended - r.began) for r in self.verifier]
        bars += [("drafter", r.label or "draft", r.began, r.ended - r.began) for r in self.drafter]
        asked = [r for r in self.drafter if r.label in ("", "draft")]
        for before, after in zip(self.verifier, self.verifier[1:], strict=False):
            bars.append(("verifier", "wait", before.ended, max(after.began - before.ended, 0.0)))
            drafted = [r for r in asked if before.ended <= r.launched < after.began]
            first, last = (drafted[0].began, drafted[-1].ended) if drafted else (after.began, after.began)
            bars.append(("wire", "wire", before.ended, max(first - before.ended, 0.0)))
            bars.append(("wire", "wire", last, max(after.began - last, 0.0)))
        return bars


def draw(timelines: Sequence[Timeline], paths: Iterable[Path]) -> None:
    """Draw one panel for each timeline, and write it to every path, in the format of its suffix.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("the timeline", "matplotlib", "bench") from error
    lanes = ("drafter", "wire", "verifier")
    figure = Figure(figsize=(11, 1 + 1.6 * len(timelines)), layout="constrained")
    for axes, timeline in zip(figure.subplots(len(timelines), squeeze=False)[:, 0], timelines, strict=True):
        seen: dict[str, Any] = {}
        for lane, what, begin, seconds in timeline.bars():
            left, colour = 1e3 * (begin - timeline.started), COLOURS[what]
            bar = axes.barh(lanes.index(lane), 1e3 * seconds, left=left, color=colour, edgecolor="white", linewidth=0.5)
            seen.setdefault(what, bar)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_xlim(0, 1e3 * (timeline.ended - timeline.started))
        axes.set_title(timeline.title, fontsize=9, loc="left")
        axes.legend(list(seen.values()), list(seen), fontsize=7, ncols=len(seen), loc="lower right", bbox_to_anchor=(1, 1))
    figure.axes[-1].set_xlabel("ms")
    for path in paths:
        figure.savefig(path, dpi=150)


def typical(requests: Sequence[Decoded]) -> Decoded:
    """Return the request with the median rate."""
    middle = median(request.rate for request in requests)
    return min(requests, key=lambda request: abs(request.rate - middle))
