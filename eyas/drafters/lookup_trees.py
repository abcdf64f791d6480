"""Continuations of many sessions in, merged into one trie of nodes per session. Knows not where they were found.

All nodes of all sessions are arrays: there is no loop over nodes. Legend: M matches, D depth, K nodes, F families.

Frequencies as a draft law: a trie in, log-shares of siblings out, perturbed by the noise of the target's draw.

The formula is that of `eyas.drafters.ranking`, over the nodes that were found, all levels at once.
Legend: S sessions, K nodes, F families of siblings, C most of one, G values of s.

Scored nodes of a trie in, the best of each session within its budget out, as trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from eyas.config import DraftingConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import DraftContext
from eyas.drafters.scoring import Laws, NoiseScale
from eyas.drafters.tree_growth import Forest, best
from eyas.sampling.noise import exponential_noise_at, signed
from eyas.sampling.sampler import MIN_TEMPERATURE, filtered_probs, filtering, filters_of
from eyas.tensors import upload
from eyas.tree import DraftTree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Matches:
    """What followed a context elsewhere.

    sessions [M]: of one session the best match first. tokens [M, D], ids from 0. lengths [M]: how many tokens of a row
    count, at most D. weights [M]: of one match in the choice between the children of a node.
    """

    sessions: Ints
    tokens: Ints
    lengths: Ints
    weights: Floats


@dataclass(frozen=True)
class Trie:
    """Nodes of all sessions [K], level by level, in a level by session and by the tokens of their paths: siblings, which are
    a family, stand together.

    depths: levels above a node's own, 0 below the root; parents: nodes of this trie, below 0 for the root; tokens: token
    ids; weights: of all matches through a node; matches: the best one of them; families: of each node its family [K];
    starts: the first node of each family [F].
    """

    sessions: Ints
    depths: Ints
    parents: Ints
    tokens: Ints
    weights: Floats
    matches: Ints
    families: Ints
    starts: Ints

    def total(self, values: Floats) -> Floats:
        """Sum of values [K] over each node's family [K]."""
        return _sums(self.families, values)[self.families]

    def log_shares(self) -> Floats:
        """Log of each node's share in the weight of its family."""
        shares: Floats = np.log(self.weights) - np.log(self.total(self.weights))
        return shares

    def along_paths(self, steps: Floats) -> Floats:
        """Sums of steps [K] from the root to each node."""
        sums = steps.copy()
        bounds = np.flatnonzero(np.diff(self.depths, prepend=-1, append=-1))
        for start, end in pairwise(bounds[1:]):
            sums[start:end] += sums[self.parents[start:end]]
        return sums


def merge(matches: Matches) -> Trie:
    """Give matches that begin alike one node for what they share."""
    count, depth = matches.tokens.shape
    counted_MD = np.arange(depth) < matches.lengths[:, None]
    tokens_MD = np.where(counted_MD, matches.tokens, -1)
    order = np.lexsort((*tokens_MD.T[::-1], matches.sessions))
    sessions, tokens_MD = matches.sessions[order], tokens_MD[order]
    differs_MD = np.ones((count, depth), np.bool_)
    differs_MD[1:] = tokens_MD[1:] != tokens_MD[:-1]
    differs_MD[1:, 0] |= sessions[1:] != sessions[:-1]
    new_DM = (np.logical_or.accumulate(differs_MD, axis=1) & counted_MD[order]).T
    numbers_DM = np.cumsum(new_DM).reshape(depth, count) - 1
    depths, rows = np.nonzero(new_DM)
    parents = np.where(depths > 0, numbers_DM[depths - 1, rows], -1 - sessions[rows])
    first = np.diff(parents, prepend=parents[:1] - 1) != 0
    levels, through = np.nonzero(counted_MD.T)
    nodes = numbers_DM[levels, np.argsort(order)[through]]
    best = np.empty(len(rows), np.int64)
    best[nodes[::-1]] = through[::-1]  # of several the last one stays, which is the lowest
    return Trie(
        sessions=sessions[rows],
        depths=depths,
        parents=parents,
        tokens=tokens_MD[rows, depths],
        weights=_sums(nodes, matches.weights[through]),
        matches=best,
        families=np.cumsum(first) - 1,
        starts=np.flatnonzero(first),
    )


def _sums(groups: Ints, values: Floats) -> Floats:
    """Sum of the values of each group."""
    return np.bincount(groups, values).astype(np.float64)


class Frequencies:
    """Shares of one propose call, of which the scale is told. At temperature 0, or without shared noise, plain ones."""

    def __init__(self, contexts: Sequence[DraftContext], config: DraftingConfig, scale: NoiseScale) -> None:
        self._contexts = contexts
        self._noises = [context.noise for context in contexts]
        self._scale = scale
        self._shared_S = np.array([config.shared_noise and noise.temperature > 0 for noise in self._noises])

    def log_shares(self, trie: Trie) -> Floats:
        """Log-shares [K] of nodes among their siblings."""
        plain = trie.log_shares()
        if not self._shared_S.any():
            self._scale.skip()
            return plain
        perturbed = self._perturbed(trie)
        softness = np.array([self._scale.value(noise.temperature) for noise in self._noises])[trie.sessions]
        scaled = perturbed / softness
        noisy = scaled - _normalisers(trie, scaled[:, None])[trie.families, 0]
        if self._scale.grid:
            self._tell(trie, noisy, _normalisers(trie, perturbed[:, None] / np.array(self._scale.grid)))
        self._scale.skip()
        return np.where(self._shared_S[trie.sessions], noisy, plain)

    def _perturbed(self, trie: Trie) -> Floats:
        """[K], up to a constant of each family."""
        seeds = np.array([signed(noise.seed) for noise in self._noises])[trie.sessions]
        positions = np.array([context.committed_length for context in self._contexts])[trie.sessions] + trie.depths
        tokens = torch.from_numpy(trie.tokens)[:, None]
        noise = exponential_noise_at(torch.from_numpy(seeds), torch.from_numpy(positions), tokens)
        perturbed: Floats = self._law(trie) - np.log(noise[:, 0].double().numpy())
        return perturbed

    def _law(self, trie: Trie) -> Floats:
        """Logarithms [K] of what temperature and filters make of the weights, up to a constant of each family."""
        if all(noise.top_k == 0 and noise.top_p >= 1 and noise.min_p == 0 for noise in self._noises):
            temperatures = np.array([max(noise.temperature, MIN_TEMPERATURE) for noise in self._noises])
            tempered: Floats = np.log(trie.weights) / temperatures[trie.sessions]
            return tempered
        columns = np.arange(len(trie.tokens)) - trie.starts[trie.families]
        logits_FC = np.full((len(trie.starts), int(columns.max()) + 1), -np.inf, np.float32)
        logits_FC[trie.families, columns] = np.log(trie.weights)
        noises = [self._noises[session] for session in trie.sessions[trie.starts]]
        cpu = torch.device("cpu")
        law_FC = filtered_probs(torch.from_numpy(logits_FC), filters_of(noises, cpu), upload(filtering(noises), cpu))
        law: Floats = law_FC.log().double().numpy()[trie.families, columns]
        return law

    def _tell(self, trie: Trie, log_shares: Floats, normalisers: Floats) -> None:
        """Tell the scale what each session with shared noise was offered, under which laws [F, G]."""
        scores = trie.along_paths(log_shares)
        for session in np.unique(trie.sessions[self._shared_S[trie.sessions]]).tolist():
            nodes = np.flatnonzero(trie.sessions == session)
            families = trie.families[nodes]
            firsts = np.flatnonzero(np.diff(families, prepend=-1))
            laws = Laws(
                starts=np.append(firsts, len(nodes)),
                tokens=trie.tokens[nodes],
                scores=scores[nodes],
                groups=_places(trie.parents[nodes[firsts]], nodes),
                normalisers=normalisers[families[firsts]],
            )
            self._scale.note(self._contexts[session], laws)


def _places(parents: Ints, nodes: Ints) -> Ints:
    """Place of each parent among nodes, from 1; 0 for the root."""
    places: Ints = np.where(parents < 0, 0, np.searchsorted(nodes, parents) + 1)
    return places


def _normalisers(trie: Trie, scores: Floats) -> Floats:
    """logsumexp of scores [K, G] over each family [F, G]."""
    most = np.maximum.reduceat(scores, trie.starts)
    sums = np.add.reduceat(np.exp(scores - most[trie.families]), trie.starts)
    normalisers: Floats = most + np.log(sums)
    return normalisers


def select(trie: Trie, scores: Floats, roots: Sequence[int], budgets: Sequence[TreeBudget]) -> list[DraftTree]:
    """Of each session's nodes the best `max_nodes - 1` within `max_depth`, by cumulative scores [K] in float32.

    Ties go to the shallower node, then to the lower tokens: with scores that never grow along a path, a chosen node's parent
    is chosen too. The same as `eyas.drafters.expand.select`, where nothing is on a device.
    """
    limits, depths = np.array([(budget.max_nodes - 1, budget.max_depth) for budget in budgets]).T
    rounded = scores.astype(np.float32)
    places = np.flatnonzero((trie.depths < depths[trie.sessions]) & np.isfinite(rounded))
    chosen = np.zeros(len(scores), np.bool_)
    chosen[places[best(trie.sessions[places], limits, -rounded[places])]] = True
    return Forest(trie.sessions, trie.parents, trie.tokens, rounded.astype(np.float64)).trees(chosen, roots)
