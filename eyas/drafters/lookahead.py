"""A draft tree that grows node by node: guesses in, the tree out. Knows not where they come from.

Lookahead decoding (Fu et al. 2024): the target's samples at all nodes of the last tree in, the next tree out.

Part of a tree is guesses, n-grams of a pool; part is the Jacobi window, whose samples fill the pool. Row 0 of the window is
a chain below the root; from each of its cells hangs the chain of the rows above: a cell attends to its ancestors alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from eyas.config import LookaheadConfig, TreeConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.sessions import Sessions
from eyas.tree import DraftTree


class GrowingTree:
    """Nodes are numbered as in the tree that comes of it."""

    def __init__(self, root: int, max_depth: int) -> None:
        self._max_depth = max_depth
        self._tokens = [root]
        self._parents = [0]
        self._depths = [0]
        self._scores = [0.0]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, score: float, max_nodes: int) -> int | None:
        """The child of `parent` that guesses `token`, new or not; None where there may be no more. score: of the step to a
        new node."""
        node = self._children.get((parent, token))
        if node is None and len(self) < max_nodes and self._depths[parent] < self._max_depth:
            self._children[parent, token] = node = len(self)
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
            self._scores.append(self._scores[parent] + score)
        return node

    def add_path(self, tokens: Sequence[int], score: float, max_nodes: int) -> None:
        """A path from the root, as far as it may go; each step costs `score`."""
        node: int | None = 0
        for token in tokens:
            if node is not None:
                node = self.add(node, token, score, max_nodes)

    def finish(self) -> DraftTree:
        """The tree of all nodes so far."""
        return DraftTree(tuple(self._tokens), tuple(self._parents), tuple(self._scores))


# Scores only rank: a guess is worth more the later its n-gram was seen, and a cell of the window less than any guess.
GUESS_SCORE = -0.5
WINDOW_SCORE = -100.0


@dataclass(frozen=True)
class _Asked:
    """A tree whose samples may come. last: the tokens up to its root. cells[j]: the nodes of column j of the window, from
    row 0 up."""

    committed_length: int
    last: tuple[int, ...]
    tree: DraftTree
    cells: list[list[int]]

    def pruned(self, nodes: Sequence[int]) -> _Asked:
        """The same without the other nodes. As parents are kept, what is left of a column is its lower end, and what is left
        of the columns the first ones."""
        numbers = {node: number for number, node in enumerate(nodes)}
        cells = [[numbers[node] for node in column if node in numbers] for column in self.cells]
        return replace(self, tree=self.tree.pruned(nodes), cells=[column for column in cells if column])


class NgramPool:
    """The n-grams seen last, at most `most` for each first token."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ngrams: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self.size = 0

    def add(self, ngram: Sequence[int]) -> None:
        """Note an n-gram; if it is known it is the latest again."""
        kept = self._ngrams.setdefault(ngram[0], OrderedDict())
        rest = tuple(ngram[1:])
        self.size += len(ngram) * (rest not in kept)
        kept[rest] = None
        kept.move_to_end(rest)
        if len(kept) > self._most:
            kept.popitem(last=False)
            self.size -= len(ngram)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, the latest first."""
        return list(reversed(self._ngrams.get(token, ())))


class _Window:
    """One session's pool and Jacobi window. rows[i][j]: a guess for the token i + j + 1 places behind the root."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self.pool = NgramPool(config.guess_set_size)
        self._last: tuple[int, ...] = ()
        self._rows: list[list[int]] = []
        self._asked: _Asked | None = None

    @property
    def size(self) -> int:
        return self.pool.size + len(self._last)

    def take(self, context: DraftContext) -> None:
        if self._asked and len(context.samples) == len(self._asked.tree):
            self._learn(self._asked, context)
            self._asked = None
        elif context.budget.wants_tree:
            self._rows, self._asked = [], None
        n = self._config.ngram_size
        tokens = [*self._last, *context.tokens]
        for end in range(max(n, len(self._last) + 1), len(tokens) + 1):
            self.pool.add(tokens[end - n : end])
        self._last = tuple(tokens[-max(n - 1, self._config.window_size + 1) :])

    def tree(self, committed: int, budget: TreeBudget) -> DraftTree:
        """Guesses first; they leave the window what it needs, but not more than half of the nodes."""
        root = self._last[-1]
        if committed == 1:
            return DraftTree.root_only(root)
        self._rows = self._rows or [_repeated(self._last[:-1], self._config.window_size)]
        growing = GrowingTree(root, budget.max_depth)
        most = max(budget.max_nodes - sum(map(len, self._rows)), (budget.max_nodes + 1) // 2)
        for rank, rest in enumerate(self.pool.after(root), 1):
            growing.add_path(rest, rank * GUESS_SCORE, most)
        cells = self._add_window(growing, budget.max_nodes)
        tree = growing.finish()
        self._asked = _Asked(committed, self._last, tree, cells)
        return tree

    def prune(self, nodes: Sequence[int]) -> None:
        """See LocalDrafter."""
        self._asked = self._asked and self._asked.pruned(nodes)

    def _add_window(self, growing: GrowingTree, max_nodes: int) -> list[list[int]]:
        """The nodes of each column, as many as there may be."""
        cells: list[list[int]] = []
        for token in self._rows[0]:
            node = growing.add(cells[-1][0] if cells else 0, token, WINDOW_SCORE, max_nodes)
            if node is None:
                break
            cells.append([node])
        for i, row in enumerate(self._rows[1:], 1):
            for column, token in zip(cells, row, strict=False):
                node = growing.add(column[-1], token, WINDOW_SCORE, max_nodes) if len(column) == i else None
                if node is not None:
                    column.append(node)
        return cells

    def _learn(self, asked: _Asked, context: DraftContext) -> None:
        """Every node's path and sample make an n-gram, and the samples above the window its next row."""
        n, tree = self._config.ngram_size, asked.tree
        paths = [asked.last[1 - n :]]
        for node in range(1, len(tree)):
            paths.append((*paths[tree.parents[node]], tree.tokens[node])[1 - n :])
        for path, sample in zip(paths, context.samples, strict=True):
            if len(path) == n - 1:
                self.pool.add((*path, sample))
        newest = [context.samples[column[-1]] for column in asked.cells]
        rows = [*self._rows, newest + self._rows[-1][len(newest) :]]
        dropped = rows[1 - n :]
        accepted = context.committed_length - asked.committed_length - 1
        passed = accepted + 1 - (len(rows) - len(dropped))
        self._rows = [_repeated(row[passed:] or row[-1:], self._config.window_size) for row in dropped]


def _repeated(tokens: Sequence[int], count: int) -> list[int]:
    """`count` tokens: those given, over and over."""
    return list(islice(cycle(tokens), count))


class LookaheadDrafter(LocalDrafter):
    """N-grams that the target itself has made while it verified. Not safe for use from several threads."""

    def __init__(self, tree: TreeConfig, config: LookaheadConfig) -> None:
        self._tree = tree
        self._sessions = Sessions(partial(_Window, config), config.max_cached_tokens)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(samples=True)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self._sessions.answer(contexts, self._grow)

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)

    def prune(self, session: str, nodes: Sequence[int]) -> None:
        window = self._sessions.memory(session)
        if window:
            window.prune(nodes)

    def _grow(self, contexts: Sequence[DraftContext], windows: Sequence[_Window]) -> list[DraftTree]:
        return [window.tree(c.committed_length, self._budget(c.budget)) for c, window in zip(contexts, windows, strict=True)]

    def _budget(self, budget: TreeBudget) -> TreeBudget:
        return TreeBudget(min(budget.max_nodes, self._tree.num_draft_tokens), min(budget.max_depth, self._tree.num_steps))
