"""Continuations of many sessions in, merged into one trie of scored candidates per session. Knows not where they were found.

Legend: S sessions, M matches, D depth, K nodes of a level of all sessions, P candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.drafters.expand import Candidates

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Matches:
    """What followed a context elsewhere.

    sessions [M]: ascending; of one session the best match first. tokens [M, D]. lengths [M]: how many tokens of a row
    count, at most D. weights [M]: of one match in the choice between the children of a node.
    """

    sessions: Ints
    tokens: Ints
    lengths: Ints
    weights: Floats


@dataclass(frozen=True)
class Level:
    """The children of one level's nodes, ordered by parent. depth: levels above it; all others [K].

    sessions; parents: their numbers in the level above, which is that of the sessions at first; tokens: token ids;
    weights: of all matches through a node; matches: the best one of them.
    """

    depth: int
    sessions: Ints
    parents: Ints
    tokens: Ints
    weights: Floats
    matches: Ints


# Log-probabilities [K] of a level's nodes, each given its parent; none above 0.
Scores = Callable[[Level], Floats]


@dataclass(frozen=True)
class Merged:
    """Candidates [S, P] of all sessions, for `expand.select` with these target_ids."""

    candidates: Candidates
    target_ids: Tensor


def merge(matches: Matches, num_sessions: int, scores: Scores) -> Merged:
    """Give matches that begin alike one node for what they share. At least one match must have a length."""
    ids, compact = np.unique(matches.tokens, return_inverse=True)
    compact = compact.reshape(matches.tokens.shape)
    alive, node = np.arange(len(matches.sessions)), matches.sessions
    above_sessions, above_numbers = np.arange(num_sessions), np.zeros(num_sessions, np.int64)
    above_scores = np.zeros(num_sessions)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    ends = [0]
    for depth in range(matches.tokens.shape[1]):
        kept = matches.lengths[alive] > depth
        alive, node = alive[kept], node[kept]
        if not len(alive):
            break
        keys, first, inverse = np.unique(node * len(ids) + compact[alive, depth], return_index=True, return_inverse=True)
        parents, tokens = keys // len(ids), keys % len(ids)
        sessions, weights = above_sessions[parents], _sums(inverse, matches.weights[alive])
        level = Level(depth, sessions, parents, ids[tokens], weights, alive[first])
        above_scores = above_scores[parents] + scores(level)
        counts = np.bincount(sessions, minlength=num_sessions)
        column = np.arange(len(keys)) - (np.cumsum(counts) - counts)[sessions]
        places = (sessions, column, num_sessions, int(counts.max()))
        columns.append(
            (
                _spread(tokens, 0, *places),
                _spread(above_numbers[parents], 0, *places),
                _spread(above_scores.astype(np.float32), -np.inf, *places),
            )
        )
        above_sessions, above_numbers, node = sessions, ends[-1] + 1 + column, inverse
        ends.append(ends[-1] + places[-1])
    tokens_SP, parents_SP, scores_SP = (torch.cat(parts, 1) for parts in zip(*columns, strict=True))
    return Merged(Candidates(tokens_SP, parents_SP, scores_SP, tuple(ends[1:])), torch.from_numpy(ids))


def log_shares(level: Level) -> Floats:
    """Log of each node's share in the weight of all children of its parent."""
    return np.log(level.weights) - np.log(_sums(level.parents, level.weights)[level.parents])


def _sums(groups: Ints, weights: Floats) -> Floats:
    """Sum of the weights of each group."""
    return np.bincount(groups, weights).astype(np.float64)


def _spread(
    values: npt.NDArray[np.generic], rest: float, sessions: Ints, column: Ints, num_sessions: int, width: int
) -> Tensor:
    """values [K] at their sessions' rows and columns, `rest` elsewhere; [S, width]."""
    spread = np.full((num_sessions, width), rest, values.dtype)
    spread[sessions, column] = values
    return torch.from_numpy(spread)
