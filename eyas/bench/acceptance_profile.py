"""What a drafter achieves, for `eyas plan`: measured by `eyas bench split`, or given in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.config.device_costs import DeviceCosts
from eyas.config.loader import above_zero, at_least, require
from eyas.errors import ConfigError


@dataclass(frozen=True)
class AcceptanceProfile:
    """What a drafter achieves, and what a step costs besides passes.

    fresh: weights of steps that accept 0, 1, 2 ... drafted tokens, with trees drafted on demand. hit, miss: the same while
    drafting ahead, of trees grown in advance and of others. hit_rate: share of the former, measured where a drafter had the
    time to grow the share `grown` of its levels during a pass. prepared: share of the steps whose tree came before the
    commit, so that they need no round trip; a part of hit_rate. 0: every step waits for an answer.
    hit_rounds, miss_rounds: time of the drafter for other hits, and for misses, in rounds on demand.
    num_nodes, num_levels, top_k: of trees, the root counted as a node. ahead_top_k: rows of a pass in
    advance; of one-pass heads nodes with a block. one_pass: whether a pass drafts all levels.
    host_ms: of the verifier in each step. wire_ms: of a round trip besides the delay. draft_host_ms: of the drafter in a
    round. hit_ms: until a drafter answers with a tree that it has.
    """

    fresh: tuple[float, ...]
    hit: tuple[float, ...] = ()
    miss: tuple[float, ...] = ()
    hit_rate: float = 0.0
    grown: float = 1.0
    prepared: float = 0.0
    hit_rounds: float = 0.0
    miss_rounds: float = 1.0
    num_nodes: int = 24
    num_levels: int = 5
    top_k: int = 8
    ahead_top_k: int = 16
    host_ms: float = 0.0
    wire_ms: float = 0.0
    draft_host_ms: float = 0.0
    hit_ms: float = 0.0
    one_pass: bool = False

    def __post_init__(self) -> None:
        require(sum(self.fresh) > 0 and min(self.fresh) >= 0, f"fresh is {self.fresh}; it must have a weight above 0")
        at_least(1, num_nodes=self.num_nodes, num_levels=self.num_levels, top_k=self.top_k)
        above_zero(grown=self.grown)
        at_least(0, prepared=self.prepared, hit_rounds=self.hit_rounds, miss_rounds=self.miss_rounds)
        require(
            self.prepared <= self.hit_rate <= 1 or not self.prepared,
            f"prepared is {self.prepared} and hit_rate {self.hit_rate}; prepared trees are hits, so it cannot be higher",
        )
        at_least(0, host_ms=self.host_ms, wire_ms=self.wire_ms, draft_host_ms=self.draft_host_ms, hit_ms=self.hit_ms)

    @property
    def tau(self) -> float:
        """Tokens of a step with a fresh tree, the bonus token included."""
        return mean_tokens(self.fresh)

    @property
    def grows_on(self) -> bool:
        """Whether trees ahead go on growing from round to round: a slow drafter has shorter ones, not fewer."""
        return self.prepared > 0 and not self.one_pass

    def grown_s(self, costs: DeviceCosts, num_sessions: int) -> float:
        """Seconds in which a drafter grows trees of sessions in advance: new tokens, and passes for all levels or one."""
        if self.one_pass:
            rows = num_sessions * (self.num_nodes + self.ahead_top_k * self.num_levels)
            return costs.seconds("draft_extend", num_sessions) + costs.seconds("draft_round", rows)
        levels_s = self.num_levels * costs.seconds("draft_level", num_sessions * self.ahead_top_k)
        return costs.seconds("draft_round", num_sessions) + levels_s

    def with_host(self, scale: float, wire_ms: float | None = None) -> AcceptanceProfile:
        """The same acceptance on hosts whose times are multiplied: 0 for none. wire_ms: of another wire, as it is."""
        times = {name: scale * getattr(self, name) for name in ("host_ms", "wire_ms", "draft_host_ms", "hit_ms")}
        return replace(self, **(times if wire_ms is None else {**times, "wire_ms": wire_ms}))


def mean_tokens(weights: Sequence[float]) -> float:
    """Tokens of a step with such weights, the bonus token included."""
    return 1 + sum(accepted * weight for accepted, weight in enumerate(weights)) / sum(weights)


def load_profile(file: Path, temperature: float) -> AcceptanceProfile:
    """The profile in a JSON file, or that of a temperature in a report of `eyas bench split`. Raises ConfigError."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        data = data["results"]["profiles"][f"{temperature:g}"] if "results" in data else data
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return AcceptanceProfile(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read a profile for temperature {temperature:g} from {file}: {error!r}") from error
