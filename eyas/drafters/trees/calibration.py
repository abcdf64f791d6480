"""The ranking temperature of each band of temperatures, corrected by what the target accepts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext
from eyas.protocol.commit import NoiseKey
from eyas.protocol.tree import DraftTree

# Highest temperatures of all bands but the last; a request at temperature 0 is in the first.
BAND_ENDS = (0.0, 0.4, 0.8)
# Of each band before the first correction; about those of the demo's heads.
FIRST_RANKING_TEMPERATURES = (0.6, 0.6, 0.6, 0.8)
RANKING_TEMPERATURES = (0.1, 5.0)
# Nodes between two corrections, and the largest correction.
NUM_VISITS = 512
MAX_CORRECTION = 1.25


class Ranking:
    """The ranking temperature, by the temperature of requests; and its calibration by what the target accepts.

    A tree's scores claim how likely the children of each node are. When the session goes on, each node on its path shows
    whether one of its children was right. Over NUM_VISITS such nodes the two are compared: scores that claimed too little
    lower the ranking temperature, scores that claimed too much raise it. All sessions of a drafter share it.
    """

    def __init__(self, config: DraftingConfig) -> None:
        self._config = config
        self._bands = [_Band(first) for first in FIRST_RANKING_TEMPERATURES]
        self._trees: dict[str, tuple[int, DraftTree, _Band]] = {}  # by session: its committed length then, and its last tree

    def shares_noise(self, key: NoiseKey) -> bool:
        """Return whether scores have the noise of the target's draw."""
        return self._config.shared_noise and key.temperature > 0

    def temperature(self, key: NoiseKey) -> float:
        """Return the ranking temperature for a request; 1 where the drafter cannot know what is drawn."""
        if self._config.ranking_temperature:
            return self._config.ranking_temperature
        return self._band(key).temperature if self.shares_noise(key) or key.temperature == 0 else 1.0

    def proposed(self, context: DraftContext, tree: DraftTree) -> None:
        """Note the tree that a session gets."""
        if tree.num_drafted and (self.shares_noise(context.noise) or context.noise.temperature == 0):
            self._trees[context.session] = context.committed_length, tree, self._band(context.noise)

    def observe(self, context: DraftContext) -> None:
        """Compare a session's last tree with the tokens that came."""
        committed_length, tree, band = self._trees.get(context.session, (-1, None, None))
        if tree is None or band is None or committed_length >= context.committed_length:
            return  # the tree is for a later commit
        del self._trees[context.session]
        if committed_length != context.start_position:
            return
        node = 0
        for token in context.tokens:
            children = tree.families.get(node)
            if not children:
                break
            claimed = math.fsum(math.exp(tree.log_probs[child] - tree.log_probs[node]) for child in children)
            found = tree.child(node, token)
            band.count(claimed, found is not None)
            if found is None:
                break
            node = found

    def release(self, sessions: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for session in sessions:
            self._trees.pop(session, None)

    def _band(self, key: NoiseKey) -> _Band:
        return self._bands[bisect_left(BAND_ENDS, key.temperature)]


@dataclass
class _Band:
    """The ranking temperature of requests with similar temperatures.

    Attributes:
        num_visits: nodes seen since it changed.
        claimed: the sum of their children's probabilities.
        num_right: how many of the nodes had the right child.
    """

    temperature: float
    num_visits: int = 0
    claimed: float = 0.0
    num_right: int = 0

    def count(self, claimed: float, is_right: bool) -> None:
        """Add a node, and correct the temperature after every NUM_VISITS of them."""
        self.num_visits, self.claimed, self.num_right = (
            self.num_visits + 1,
            self.claimed + claimed,
            self.num_right + is_right,
        )
        if self.num_visits == NUM_VISITS:
            ratio = min(max(self.claimed / max(self.num_right, 1), 1 / MAX_CORRECTION), MAX_CORRECTION)
            low, high = RANKING_TEMPERATURES
            self.temperature = min(max(self.temperature * ratio, low), high)
            self.num_visits, self.claimed, self.num_right = 0, 0.0, 0
