"""Lookahead decoding (Fu et al. 2024): trees of n-grams that the target itself produced while it verified.

One part of a tree are guesses: n-grams of a pool that begin with the root. The other part is the Jacobi window, whose
samples fill the pool. Row 0 of the window is a chain below the root; from each of its cells hangs the chain of the rows
above, because a node attends to its ancestors only:

    root -- r0c0 -- r0c1 -- r0c2         columns c of the window, window_size
             |       |       |
            r1c0    r1c1    r1c2         rows r of the window, ngram_size - 1
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from eyas.config import LookaheadConfig, TreeConfig
from eyas.drafters.base import DraftContext, DrafterNeeds, drawable, within
from eyas.drafters.lookup.base import LookupDrafter
from eyas.drafters.sessions import MemoryLedger
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree

# Scores only rank: guesses with later n-grams first, cells of the window after all guesses.
GUESS_SCORE = -0.5
WINDOW_SCORE = -100.0


class TreeBuilder:
    """A draft tree that grows node by node. Nodes are numbered as in the finished tree.

    Args:
        can_draw: whether the target can draw a token at a level, 0 below the root.
    """

    def __init__(self, root: int, max_depth: int, can_draw: Callable[[int, int], bool]) -> None:
        self._max_depth = max_depth
        self._can_draw = can_draw
        self._tokens = [root]
        self._parents = [0]
        self._depths = [0]
        self._scores = [0.0]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, score: float, max_nodes: int) -> int | None:
        """Return the child of `parent` that guesses `token`, added if there is none; None if the limits, or the target,
        forbid it.

        score: log-score of the step to a new node.
        """
        node = self._children.get((parent, token))
        depth = self._depths[parent]
        if node is None and len(self) < max_nodes and depth < self._max_depth and self._can_draw(token, depth):
            self._children[parent, token] = node = len(self)
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(depth + 1)
            self._scores.append(self._scores[parent] + score)
        return node

    def build(self) -> DraftTree:
        """Return the tree of all nodes so far."""
        return DraftTree.of(self._tokens, self._parents, self._scores)


@dataclass(frozen=True)
class _ProposedTree:
    """A tree whose samples are expected.

    Attributes:
        last: the tokens up to its root.
        cells[j]: the nodes of column j of the window, from row 0 up.
    """

    committed_length: int
    last: tuple[int, ...]
    tree: DraftTree
    cells: list[list[int]]

    def pruned(self, nodes: Sequence[int]) -> _ProposedTree:
        """Return the tree of these nodes alone. Parents are kept: the lower ends of columns stay, and the first of the
        columns.
        """
        numbers = {node: number for number, node in enumerate(nodes)}
        cells = [[numbers[node] for node in column if node in numbers] for column in self.cells]
        return replace(self, tree=self.tree.pruned(nodes), cells=[column for column in cells if column])


class NgramPool:
    """The n-grams seen last, at most `max_per_token` for each first token. size: tokens in all of them."""

    def __init__(self, max_per_token: int) -> None:
        self._max_per_token = max_per_token
        self._ngrams: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self.size = 0

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make a known one the latest."""
        kept = self._ngrams.setdefault(ngram[0], OrderedDict())
        rest = tuple(ngram[1:])
        self.size += len(ngram) * (rest not in kept)
        kept[rest] = None
        kept.move_to_end(rest)
        if len(kept) > self._max_per_token:
            kept.popitem(last=False)
            self.size -= len(ngram)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the rests of the n-grams that begin with `token`, the latest first."""
        return list(reversed(self._ngrams.get(token, ())))


class _Window:
    """One session's pool and Jacobi window. rows[i][j]: a guess for the token i + j + 1 places behind the root."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self.pool = NgramPool(config.guess_set_size)
        self._last: tuple[int, ...] = ()
        self._rows: list[list[int]] = []
        self._proposed: _ProposedTree | None = None

    @property
    def size(self) -> int:
        return self.pool.size + len(self._last)

    def extend(self, context: DraftContext) -> None:
        if self._proposed and len(context.samples) == len(self._proposed.tree):
            self._update(self._proposed, context)
            self._proposed = None
        elif context.budget.wants_tree:
            self._rows, self._proposed = [], None
        n = self._config.ngram_size
        tokens = [*self._last, *context.tokens]
        for end in range(max(n, len(self._last) + 1), len(tokens) + 1):
            self.pool.add(tokens[end - n : end])
        self._last = tuple(tokens[-max(n - 1, self._config.window_size + 1) :])

    def tree(self, context: DraftContext, budget: TreeBudget) -> DraftTree:
        """Return the guesses come first; they leave the window the nodes that it needs, up to half of all."""
        root, committed = self._last[-1], context.committed_length
        if committed == 1:
            return DraftTree.root_only(root)
        can_draw = drawable(context)
        rows = self._rows or [_repeated(self._last[:-1], self._config.window_size)]
        self._rows = [self._drawable_row(row, i, can_draw) for i, row in enumerate(rows)]
        builder = TreeBuilder(root, budget.max_depth, can_draw)
        max_guesses = max(budget.max_nodes - sum(map(len, self._rows)), (budget.max_nodes + 1) // 2)
        self._add_guesses(builder, root, max_guesses)
        cells = self._add_window(builder, budget.max_nodes)
        tree = builder.build()
        self._proposed = _ProposedTree(committed, self._last, tree, cells)
        return tree

    def _add_guesses(self, builder: TreeBuilder, root: int, max_nodes: int) -> None:
        """Add the n-grams that begin with the root."""
        for rank, rest in enumerate(self.pool.after(root), 1):
            node: int | None = 0
            for token in rest:
                node = None if node is None else builder.add(node, token, rank * GUESS_SCORE, max_nodes)

    def _drawable_row(self, row: Sequence[int], number: int, can_draw: Callable[[int, int], bool]) -> list[int]:
        """Return a row of the window with the latest token of the text that can be drawn in place of each
        one that cannot.
        """
        choices = [(token, *reversed(self._last)) for token in row]
        return [
            next((token for token in tokens if can_draw(token, number + column)), tokens[0])
            for column, tokens in enumerate(choices)
        ]

    def prune(self, nodes: Sequence[int]) -> None:
        """See LocalDrafter."""
        self._proposed = self._proposed and self._proposed.pruned(nodes)

    def _add_window(self, builder: TreeBuilder, max_nodes: int) -> list[list[int]]:
        """Add as many cells as the limits allow; returns the nodes of each column."""
        cells: list[list[int]] = []
        for token in self._rows[0]:
            node = builder.add(cells[-1][0] if cells else 0, token, WINDOW_SCORE, max_nodes)
            if node is None:
                break
            cells.append([node])
        for i, row in enumerate(self._rows[1:], 1):
            for column, token in zip(cells, row, strict=False):
                node = builder.add(column[-1], token, WINDOW_SCORE, max_nodes) if len(column) == i else None
                if node is not None:
                    column.append(node)
        return cells

    def _update(self, proposed: _ProposedTree, context: DraftContext) -> None:
        """Add the n-gram of every node's path and sample; the samples at the tops of the columns become the next row."""
        n, tree = self._config.ngram_size, proposed.tree
        paths = [proposed.last[1 - n :]]
        for node in range(1, len(tree)):
            paths.append((*paths[tree.parents[node]], tree.tokens[node])[1 - n :])
        for path, sample in zip(paths, context.samples, strict=True):
            if len(path) == n - 1:
                self.pool.add((*path, sample))
        newest = [context.samples[column[-1]] for column in proposed.cells]
        rows = [*self._rows, newest + self._rows[-1][len(newest) :]]
        dropped = rows[1 - n :]
        accepted = context.committed_length - proposed.committed_length - 1
        passed = accepted + 1 - (len(rows) - len(dropped))
        self._rows = [_repeated(row[passed:] or row[-1:], self._config.window_size) for row in dropped]


def _repeated(tokens: Sequence[int], count: int) -> list[int]:
    """Return the tokens repeated up to `count`."""
    return list(islice(cycle(tokens), count))


class LookaheadDrafter(LookupDrafter[_Window]):
    """Guesses and windows of all sessions."""

    def __init__(self, tree: TreeConfig, config: LookaheadConfig) -> None:
        super().__init__(MemoryLedger(partial(_Window, config), config.max_cached_tokens), tree)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(samples=True)

    def prune(self, session: str, nodes: Sequence[int]) -> None:
        known = self._sessions.get(session)
        if known and known.memory:
            known.memory.prune(nodes)

    def _grow(self, contexts: Sequence[DraftContext], memories: Sequence[_Window]) -> list[DraftTree]:
        return [window.tree(c, within(c.budget, self._tree)) for c, window in zip(contexts, memories, strict=True)]
