"""Acceptance of drafted tokens: the trees of a step as arrays, the rule `match`, and the walk that both rules share.

`match` samples the target at every node, or on a CPU at those that it reaches, and walks down while the token was drafted:

    node, path = root, []
    while child := tree.child(node, sampled[node]):  path.append(child); node = child
    bonus = sampled[node]

Every emitted token is a fresh draw from the target's own conditional distribution, so the output distribution is the
target's for any tree. This is rejection sampling with a proposal of one point (Leviathan et al. 2023, q = 1 at the drafted
child). The draw depends on the request's seed and the position alone, so that speculative output equals plain output.

Example. The last committed token is "the"; the drafter guesses "cat sat" and "dog":

    the (0) -- cat (1) -- sat (3)        sampled[0] = cat, sampled[1] = ran, sampled[2] = ., sampled[3] = on
           `-- dog (2)

At node 0 the target draws "cat", which node 1 holds: accepted. At node 1 it draws "ran", which no child holds: "ran" is the
bonus token. So the path is (0, 1), whose KV stays, and the tokens are (cat, ran).

`eyas.sampling.rejection` has the second rule. This module needs no torch, so that the scheduler can use its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.api.request import Request, TokenLogprob
from eyas.arrays import Bools, Ints
from eyas.kernels.choice import tree_kernels
from eyas.protocol.tree import DraftTree, DraftTrees

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.kernels.arguments import Draws


TreeWords = npt.NDArray[np.uint64]


class PackedTrees(NamedTuple):
    """The nodes of several trees, one tree after the other, [R].

    Attributes:
        nodes: the nodes themselves.
        above: packed row of each node's parent [R].
        roots: packed row of each node's root [R].
        depths: distance of each node from its root [R].
        words: which nodes of its own tree each node sees, as bits [R, W], the first node in the lowest bit.
    """

    nodes: DraftTrees
    above: Ints
    roots: Ints
    depths: Ints
    words: TreeWords

    @property
    def visible(self) -> Bools:
        """The rows of each `DraftTree.ancestor_mask`, with 64 W columns for all trees, [R, 64 W]."""
        return np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)

    @property
    def masks(self) -> Bools:
        """The ancestor masks [n, n] of all trees, flat, one after the other."""
        visible, counts = self.visible, self.nodes.counts
        return visible[np.arange(visible.shape[1]) < np.repeat(counts, counts)[:, None]]


def pack_trees(trees: Sequence[DraftTree]) -> PackedTrees:
    """Pack at least one tree."""
    nodes = DraftTrees.of(trees)
    return PackedTrees(nodes, *tree_kernels().layout(nodes.counts, nodes.parents))


def are_valid_trees(trees: Sequence[DraftTree], limits: Sequence[tuple[int, int, int]], vocab_size: int) -> bool:
    """Return whether trees that may come from an untrusted drafter are deterministic and valid.

    `DraftTree.validate` is the plain way, which also says what is wrong. limits: root, most nodes and most levels of each.
    """
    if not trees:
        return False
    nodes = DraftTrees.of(trees)
    bounds = np.array(limits, np.int64).T.copy()
    return not any(nodes.sampled) and bool(
        tree_kernels().are_valid(nodes.counts, nodes.tokens, nodes.parents, bounds, vocab_size)
    )


class LogitRows(NamedTuple):
    """The rows of one request in a step's logits: those that `prompt_logprobs` asks for, then one for each node of the
    tree.

    Attributes:
        tokens: committed tokens, prompt and output so far.
        tree: nodes at which a token is drawn; a lone root at the end of a prompt, None inside a prompt.
        prompt_tokens: prompt tokens whose log-probabilities are asked for, each predicted by one row.
    """

    request: Request
    tokens: Sequence[int]
    tree: DraftTree | None
    prompt_tokens: Sequence[int] = ()

    @property
    def num_drawn(self) -> int:
        """The rows at which a token is drawn."""
        return 0 if self.tree is None else self.tree.num_nodes


@dataclass(frozen=True)
class StepLogits:
    """Logits of a forward pass, or the tokens that ranks have drawn from their parts of them, for `verify`.

    Attributes:
        logits: float32 [R, V] of the segments for which rank 0 draws.
        tokens: int64 [D], drawn by all ranks at the rows of the other segments.
        is_drawn: which these are; empty for none.
    """

    logits: Tensor
    tokens: Tensor | None = None
    is_drawn: tuple[bool, ...] = ()


class Accepted(NamedTuple):
    """Accepted part of a tree.

    Attributes:
        path: nodes whose KV stays, the root first.
        tokens: the accepted drafted tokens, then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


class Details(NamedTuple):
    """Results of a step for one request that most requests do not have.

    Attributes:
        logprobs: of each accepted token, where asked for.
        prompt_logprobs: of the rows' prompt tokens, where asked for.
        error: why the request cannot go on, else empty.
        is_invalid: whether no other engine could go on with it either.
    """

    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    is_invalid: bool = False


NO_DETAILS = Details()


class VerifyOutput(NamedTuple):
    """Output of a step for one request.

    Attributes:
        accepted: None inside a prompt.
        samples: the target's sample at every node of the tree, or UNREACHED.
    """

    accepted: Accepted | None
    samples: tuple[int, ...] = ()
    details: Details = NO_DETAILS


class DrawnRows(NamedTuple):
    """The rows of a step at which tokens are drawn.

    Attributes:
        trees: of the D requests that draw, a lone root at the end of a prompt, N nodes in all; None if none draws.
        places: numbers of these requests among all of the step, int64 [D].
        num_requests: B requests of the step.
        draws: at each node [N].
    """

    trees: PackedTrees | None
    places: Ints
    num_requests: int
    draws: Draws


@dataclass(frozen=True, eq=False)
class StepOutputs(Sequence[VerifyOutput]):
    """Results of a step for its B requests, as arrays. An item is the values of one request.

    Attributes:
        nodes: accepted nodes of each tree, its root first, one request after the other, int64 [A].
        tokens: what is emitted after each of these nodes, int64 [A].
        ends: where the nodes of each request end among these, int64 [B]. A request inside a prompt has none.
        samples: the target's sample at every node of the trees, int64 [N]; UNREACHED where none was drawn.
        sample_ends: where the samples of each request end among these, int64 [B].
        levels: below the root of each request's tree, int64 [B].
        details: by number of a request; most requests have none.
    """

    nodes: Ints
    tokens: Ints
    ends: Ints
    samples: Ints
    sample_ends: Ints
    levels: Ints
    details: Mapping[int, Details] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_requests: int, details: Mapping[int, Details] | None = None) -> StepOutputs:
        """Return the outputs of requests that draw no token."""
        nothing, zeros = np.zeros(0, np.int64), np.zeros(num_requests, np.int64)
        return cls(nothing, nothing, zeros, nothing, zeros, zeros, details or {})

    @classmethod
    def accepted(
        cls,
        rows: DrawnRows,
        samples: Ints,
        names: Ints | None = None,
        wanted: Ints | None = None,
        emitted: Ints | None = None,
    ) -> StepOutputs:
        """Walk down every tree of a step, as long as a node has a child that is wanted there.

        By the rule `match`, the default, a node's name is its token, and wanted and emitted is what the target has drawn. By
        the rule `rejection` a node's name is its row, and wanted is the row of the child that is accepted.

        Args:
            samples: drawn from the target; this and the others are of all nodes [N].
            names: of the nodes.
            wanted: name of the child that goes on from each node; the first child with it does.
            emitted: after each node if it is accepted.
        """
        trees, places = rows.trees, rows.places
        if trees is None:
            return cls.empty(rows.num_requests)
        names = trees.nodes.tokens if names is None else names
        wanted = samples if wanted is None else wanted
        kept, ends = tree_kernels().accepted_rows(trees.nodes.counts, names, trees.above, wanted)
        nodes, tokens = kept - trees.roots[kept], (samples if emitted is None else emitted)[kept]
        counts, levels = trees.nodes.counts, np.maximum.reduceat(trees.depths, trees.nodes.firsts)
        if len(places) == rows.num_requests:
            return cls(nodes, tokens, ends, samples, counts.cumsum(), levels)
        of_all = np.zeros((3, rows.num_requests), np.int64)  # nothing for requests inside prompts
        of_all[:, places] = np.diff(ends, prepend=0), counts, levels
        return cls(nodes, tokens, of_all[0].cumsum(), samples, of_all[1].cumsum(), of_all[2])

    @classmethod
    def joined(cls, first: StepOutputs, second: StepOutputs) -> StepOutputs:
        """Return the outputs of a step that was run in two parts."""
        pairs = [(getattr(first, name), getattr(second, name)) for name in ("nodes", "tokens", "samples", "levels")]
        nodes, tokens, samples, levels = map(np.concatenate, pairs)
        ends = np.concatenate([first.ends, second.ends + len(first.nodes)])
        sample_ends = np.concatenate([first.sample_ends, second.sample_ends + len(first.samples)])
        details = {**first.details, **{len(first) + number: each for number, each in second.details.items()}}
        return cls(nodes, tokens, ends, samples, sample_ends, levels, details)

    def shortened(self, lengths: Mapping[int, int]) -> StepOutputs:
        """Return the outputs with shorter paths. lengths: accepted nodes of some requests, by their number."""
        own = np.diff(self.ends, prepend=0)
        owners = np.repeat(np.arange(len(own)), own)
        most = own.copy()
        most[list(lengths)] = list(lengths.values())
        is_kept = np.arange(len(self.nodes)) - np.repeat(self.ends - own, own) < most[owners]
        return replace(self, nodes=self.nodes[is_kept], tokens=self.tokens[is_kept], ends=np.minimum(own, most).cumsum())

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        return self._outputs[index]

    def __iter__(self) -> Iterator[VerifyOutput]:
        return iter(self._outputs)

    @cached_property
    def _outputs(self) -> list[VerifyOutput]:
        nodes, tokens, samples = self.nodes.tolist(), self.tokens.tolist(), self.samples.tolist()
        outputs, start, first = list[VerifyOutput](), 0, 0
        for number, (end, last) in enumerate(zip(self.ends.tolist(), self.sample_ends.tolist(), strict=True)):
            accepted = Accepted(tuple(nodes[start:end]), tuple(tokens[start:end])) if end > start else None
            details = self.details.get(number, NO_DETAILS)
            outputs.append(VerifyOutput(accepted, tuple(samples[first:last]), details))
            start, first = end, last
        return outputs
