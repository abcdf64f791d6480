"""Accepted paths on the device: trees and the draws at their nodes in, rows and tokens of each path out.

For what is told of a path in the same copy that brings the draws; what is emitted, the walk on the host decides.
Legend: N drawn rows of the step, T trees, L levels of the deepest, the root's included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.engine.acceptance.trials import Trials
from eyas.models.inputs import Ints
from eyas.models.tensors import upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Paths:
    """rows: drawn rows of each tree's accepted nodes, the last again behind it; tokens: what is emitted after each. Both
    int64 [T, L]."""

    rows: Tensor
    tokens: Tensor


def paths(trees: Mapping[int, DraftTree], tokens: Tensor, trials: Trials) -> Paths:
    """What `accept` and `accept_drawn` say of each tree, given by the drawn row of its root; at least one.

    tokens: the target's own samples, int64 [N]. Does not wait for the device.
    """
    size, width, device = len(tokens), trials.verdicts.shape[1], tokens.device
    verdicts = {row: size + family * width for family, row in enumerate(trials.families)}
    last, guesses = np.arange(size), np.zeros(size, dtype=np.int64)
    last[list(verdicts)] = [first + width - 1 for first in verdicts.values()]
    for start, tree in trees.items():
        guesses[start : start + len(tree)] = tree.tokens
    nodes = np.concatenate([_nodes(tree, start, verdicts) for start, tree in trees.items()], axis=1)
    rows, parents, cells, wanted = upload(nodes, device)
    said = torch.cat([tokens, trials.verdicts.flatten()])
    eldest = torch.full_like(tokens, size).scatter_reduce(0, parents, torch.where(said[cells] == wanted, rows, size), "amin")
    following = torch.where(eldest < size, eldest, torch.arange(size, device=device))
    ends, guessed = upload(np.stack([last, guesses]), device)
    emitted = torch.where(eldest < size, guessed[following], said[ends])
    path = [upload(list(trees), device)]
    for _ in range(max(tree.depth for tree in trees.values())):
        path.append(following[path[-1]])
    walked = torch.stack(path, 1)
    return Paths(walked, emitted[walked])


def _nodes(tree: DraftTree, start: int, verdicts: Mapping[int, int]) -> Ints:
    """Of each drafted node its row, its parent's row, the place of what decides on it, and what that says if it is taken.

    verdicts: where those of a row begin, if its children were tried; else its sample decides.
    """
    columns = []
    for parent, children in tree.families.items():
        tried = verdicts.get(start + parent)
        for rank, child in enumerate(children):
            decides = (start + parent, tree.tokens[child]) if tried is None else (tried + rank, 1)
            columns.append((start + child, start + parent, *decides))
    return np.array(columns, dtype=np.int64).reshape(-1, 4).T
