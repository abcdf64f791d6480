"""Which drafted tokens are accepted: the rule `match`, and the walk down a tree that both rules share.

`match` samples the target once at every node and walks down while the sampled token was drafted:

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
bonus token. `accept` returns path (0, 1), whose KV stays, and tokens (cat, ran).

`eyas.sampling.rejection` has the second rule. This module needs no torch, so that the scheduler can use its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eyas.api.request import Request, TokenLogprob
from eyas.protocol.tree import DraftTree, Ints
from eyas.sampling.packed_trees import PackedTrees, accepted_rows

if TYPE_CHECKING:
    from torch import Tensor


class LogitRows(NamedTuple):
    """The rows of one request in a step's logits: those that `prompt_logprobs` asks for, then one for each node of the tree.

    tokens: committed tokens, prompt and output so far.
    tree: nodes at which a token is drawn; a lone root at the end of a prompt, None inside a prompt.
    positions: absolute position of the token that is drawn at each node.
    prompt_tokens: prompt tokens whose log-probabilities are asked for, each predicted by one row.
    """

    request: Request
    tokens: Sequence[int]
    tree: DraftTree | None
    positions: tuple[int, ...]
    prompt_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class StepOutput:
    """What a forward pass gives `verify`.

    logits: float32 [R, V] of the segments for which rank 0 draws. tokens: int64 [D], drawn by all ranks at the rows of the
    other segments. is_drawn: which these are; empty for none.
    """

    logits: Tensor
    tokens: Tensor | None = None
    is_drawn: tuple[bool, ...] = ()


class Accepted(NamedTuple):
    """path: nodes whose KV stays, the root first. tokens: the accepted drafted tokens, then the bonus token."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


class VerifyOutput(NamedTuple):
    """What a step gives one request.

    accepted: None inside a prompt. samples: the target's sample at every node of the tree. logprobs: of each accepted
    token, prompt_logprobs: of the rows' prompt tokens, where asked for. error: why the request cannot go on, else empty.
    is_invalid: whether no other engine could go on with it either.
    """

    accepted: Accepted | None
    samples: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    is_invalid: bool = False


class TreeOutputs(Sequence[VerifyOutput]):
    """The outputs of requests with trees that ask for nothing but the tokens that are drawn, as arrays. Those of one request
    are made on first use.

    rows: packed rows of all accepted paths, one path after the other [A]. tokens: what is emitted after each [A]. ends:
    where the path of each tree ends among these [B].
    """

    def __init__(self, trees: PackedTrees, samples: Ints) -> None:
        """Apply the rule `match`. samples: the target's sample at every row [R]."""
        self.rows, self.ends = accepted_rows(trees, samples)
        self.tokens = samples[self.rows]
        self._trees, self._samples = trees, samples

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[VerifyOutput]:
        return iter(self._outputs)

    def __getitem__(self, index: Any) -> Any:
        return self._outputs[index]

    @cached_property
    def depths(self) -> Ints:
        """Levels of each tree [B]."""
        levels: Ints = np.maximum.reduceat(self._trees.depths, self._trees.batch.firsts)
        return levels

    @cached_property
    def _outputs(self) -> list[VerifyOutput]:
        nodes, tokens = (self.rows - self._trees.roots[self.rows]).tolist(), self.tokens.tolist()
        samples, outputs, start, first = self._samples.tolist(), list[VerifyOutput](), 0, 0
        for end, last in zip(self.ends.tolist(), self._trees.batch.counts.cumsum().tolist(), strict=True):
            accepted = Accepted(tuple(nodes[start:end]), tuple(tokens[start:end]))
            outputs.append(VerifyOutput(accepted, tuple(samples[first:last])))
            start, first = end, last
        return outputs


def accept(tree: DraftTree, sampled: Sequence[int]) -> Accepted:
    """Apply the rule `match`. sampled[i]: the target's sample at node i."""
    guesses, node, path = tree.guesses, 0, [0]
    while (child := guesses.get((node, sampled[node]))) is not None:
        path.append(node := child)
    return Accepted(tuple(path), tuple([sampled[node] for node in path]))


def walk(tree: DraftTree, passed: Sequence[bool], drawn: Sequence[int]) -> Accepted:
    """Walk down to the first child that passed, as long as there is one.

    passed[i]: whether node i is accepted if its parent is and the siblings before it are not. drawn[i]: the bonus token if
    the walk ends at node i. `accepted_paths` in eyas.sampling.logprobs is the same walk on the device: log-probabilities of
    a path must be computed before its tokens reach the host, because a step waits for the device only once.
    """
    path, child = [0], next((node for node in tree.families.get(0, ()) if passed[node]), None)
    while child is not None:
        path.append(child)
        child = next((node for node in tree.families.get(child, ()) if passed[node]), None)
    return Accepted(tuple(path), (*(tree.tokens[node] for node in path[1:]), drawn[path[-1]]))
