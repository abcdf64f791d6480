"""How much a replica is asked to do: what it tells of itself in, a demand out. Knows no Ray.

Demand is counted in replicas: 1 is one that is just full.
"""

from __future__ import annotations

from dataclasses import dataclass

# A late drafter wants at most one more like it at a time: how late it is says little about how many are missing.
_MOST = 2.0


@dataclass(frozen=True)
class VerifierUse:
    """A verifier now. used_slots, queued_slots: of running and of queued requests; num_slots: all there are.

    num_requests: running and queued. max_running: most requests in a step.
    """

    used_slots: float
    queued_slots: float
    num_slots: float
    num_requests: float
    max_running: float

    @property
    def demand(self) -> float:
        """By slots or by requests, whichever is scarcer."""
        by_slots = (self.used_slots + self.queued_slots) / self.num_slots if self.num_slots else 0.0
        return max(by_slots, self.num_requests / self.max_running)


@dataclass(frozen=True)
class DraftUse:
    """A drafter of late. occupancy: share of the time that it drafted; with several drafters on a device, their sum.
    answers, late: a second; late are those that no verifier waited for."""

    occupancy: float
    answers: float
    late: float

    def demand(self, late_share: float) -> float:
        """By occupancy, or by the share of late answers where `late_share` is a full drafter's."""
        by_lateness = self.late / self.answers / late_share if self.answers else 0.0
        return max(min(self.occupancy, _MOST), min(by_lateness, _MOST))
