"""`eyas plan`: estimates rates and prices of verifiers and drafters from cost tables and a measured acceptance length.

A step of B sequences with trees of n nodes takes, with t_v(rows) of a verify pass and t_d(B) of a draft round:

    plain   t_v(B)                                  and yields B tokens
    local   t_v(B n) + t_d(B)                       on the verifier's device
    serial  t_v(B n) + t_d(B) + trip                on a drafter at the other end of a wire
    ahead   t_v(B n) + (1 - p^B) (t_d(B) + trip)    with a share p of trees that come before they are asked for

Each takes the verifier's host work besides, and all but plain decoding yield B tau tokens. A drafter that V verifiers share
drafts for all of them in the time of a step, so a step takes no less than t_d(V B). Queues, arrivals and prefill are left
out: the estimate is an upper bound of what a fleet gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from eyas.bench.report import Table, number
from eyas.config.checks import at_least, require
from eyas.emulation.costs import DeviceCosts

PlannedMode = Literal["plain", "local", "serial", "ahead"]


@dataclass(frozen=True)
class PlanSettings:
    """A verifier, its drafter, and what was measured of the draft head.

    Attributes:
        verifier, drafter: Times of their passes, and their prices.
        local: Times of the drafter's passes on the verifier's device.
        tau: Tokens of a verify step, the bonus token included, as `eyas bench offline` measures it.
        ready: Share of steps, 0 to 1, whose tree was grown ahead and came before the commit.
        num_nodes: Nodes of a draft tree, the root included.
        num_levels: Levels of a draft tree.
        top_k: Nodes that each level expands.
        num_verifiers: Verifiers that share the drafter.
        context: Cached tokens of a sequence.
        trip_s: Seconds of a round trip between verifier and drafter, without drafting.
        host_s: Seconds of the verifier's host work in a step.
    """

    verifier: DeviceCosts
    drafter: DeviceCosts
    local: DeviceCosts
    tau: float
    ready: float = 0.0
    num_nodes: int = 24
    num_levels: int = 5
    top_k: int = 8
    num_verifiers: int = 1
    context: int = 512
    trip_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.tau >= 1, f"tau is {self.tau}; a verify step yields at least 1 token, as plain decoding does")
        require(0 <= self.ready <= 1, f"ready is {self.ready}; it is a share of steps, 0 to 1")
        at_least(1, num_draft_tokens=self.num_nodes, num_steps=self.num_levels, top_k=self.top_k)
        at_least(1, verifiers=self.num_verifiers)
        at_least(0, context=self.context, trip=self.trip_s, host=self.host_s)

    def draft_s(self, costs: DeviceCosts, batch: int) -> float:
        """Return the seconds of a draft round of `batch` sequences: its first pass, and its further levels."""
        levels = (self.num_levels - 1) * costs.seconds("draft_level", batch * self.top_k)
        return costs.seconds("draft_round", batch * self.num_levels) + levels

    def step_s(self, mode: PlannedMode, batch: int) -> float:
        """Return the seconds of a step of `batch` sequences."""
        rows = batch if mode == "plain" else batch * self.num_nodes
        own = self.verifier.seconds("verify", rows, batch * self.context) + self.host_s
        if mode == "plain":
            return own
        if mode == "local":
            return own + self.draft_s(self.local, batch)
        waits = 1.0 if mode == "serial" else 1 - self.ready**batch
        alone = own + waits * (self.draft_s(self.drafter, batch) + self.trip_s)
        return max(alone, self.draft_s(self.drafter, self.num_verifiers * batch))

    def rate(self, mode: PlannedMode, batch: int) -> float:
        """Return the tokens per second of one verifier."""
        return batch * (1.0 if mode == "plain" else self.tau) / self.step_s(mode, batch)

    def dollars(self, mode: PlannedMode, batch: int) -> float:
        """Return the dollars per million tokens, with a verifier's share of the drafter; 0 without prices."""
        drafter = self.drafter.dollars_h / self.num_verifiers if mode in ("serial", "ahead") else 0.0
        return (self.verifier.dollars_h + drafter) / 3600 / self.rate(mode, batch) * 1e6


def plan_table(settings: PlanSettings, batches: Sequence[int]) -> Table:
    """Return a row for each mode and batch; "ahead" is left out while no share of prepared trees is known."""
    modes = [mode for mode in get_args(PlannedMode) if mode != "ahead" or settings.ready]
    rows = tuple(
        (
            f"{batch}",
            mode,
            number(settings.rate(mode, batch)),
            f"{settings.rate(mode, batch) / settings.rate('plain', batch):.2f}",
            number(1e3 * settings.step_s(mode, batch)),
            f"{settings.dollars(mode, batch):.3f}" if settings.verifier.dollars_h else "",
        )
        for batch in batches
        for mode in modes
    )
    note = (
        "Tokens per second of one verifier, and over plain decoding. local: drafting on the verifier's device; serial and "
        "ahead: on another one, on demand and in advance. $: dollars per million tokens, at "
        f"${settings.verifier.dollars_h:.2f} an hour for a verifier and ${settings.drafter.dollars_h:.2f} for a drafter."
    )
    return Table("Plan", ("batch", "mode", "tokens/s", "over plain", "step ms", "$"), rows, note)
