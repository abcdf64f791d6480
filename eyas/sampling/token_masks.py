"""Which tokens may be drawn at each node of a step, where a request's output must match a grammar.

Masks are packed bits, computed on the host; the device unpacks them. They are the first thing that happens to the logits, so
that log-probabilities are those of the masked distribution, as in vLLM. Legend: R rows of a step's logits, M masked ones, V
vocabulary, B bytes of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eyas.grammar import TokenBits
from eyas.sampling.acceptance import Accepted, LogitRows
from eyas.tensors import Bools, upload

NOTHING_LEFT = "structured_outputs, together with bad words, biases or min_tokens, leaves no token to draw; ask for less"


@dataclass(frozen=True)
class NodeMask:
    """What may be drawn at a node: bits of tokens [B]. must_end: whether these are only tokens that end the output."""

    bits: TokenBits
    must_end: bool = False

    def allows(self, token: int) -> bool:
        """Whether the token may be drawn; one beyond the vocabulary stands for no token at all."""
        return token >> 3 < len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)


@dataclass(frozen=True)
class TreeMasks:
    """The masks of one tree.

    nodes: of each node, None where nothing is masked. unvisited: nodes that there was no time for; they are not accepted,
    nor what stands below them.
    """

    nodes: Sequence[NodeMask | None]
    unvisited: frozenset[int] = frozenset()

    def cut(self, accepted: Accepted) -> Accepted:
        """The accepted path up to the first unvisited node, whose token is the last one."""
        end = next((place for place, node in enumerate(accepted.path) if node in self.unvisited), len(accepted.path))
        return Accepted(accepted.path[:end], accepted.tokens[:end])


@dataclass(frozen=True)
class TokenMasks:
    """The masks of a step. trees: by request id. errors: by request id, why a request has no masks."""

    trees: Mapping[str, TreeMasks] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def applied(self, logits: Tensor, batch: Sequence[LogitRows]) -> Tensor:
        """All logits of the step [R, V] with minus infinity for tokens that may not be drawn; the given ones stay."""
        rows, masks, start = list[int](), list[TokenBits](), 0
        for request_rows in batch:
            start += len(request_rows.prompt_tokens)
            tree = None if request_rows.tree is None else self.trees.get(request_rows.request.id)
            for node, mask in enumerate(tree.nodes if tree else ()):
                if mask is not None:
                    rows.append(start + node)
                    masks.append(mask.bits)
            start += len(request_rows.positions)
        if not rows:
            return logits
        index = upload(rows, logits.device)
        allowed = unpacked(upload(np.stack(masks), logits.device), logits.shape[1])
        return logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))

    def must_end(self, request_id: str) -> Bools | None:
        """For each node of a request's tree, whether only the end may follow; None if nothing is masked."""
        tree = self.trees.get(request_id)
        return None if tree is None else np.array([mask is not None and mask.must_end for mask in tree.nodes])

    def cut(self, request_id: str, accepted: Accepted) -> Accepted:
        """What is accepted of a request, without what has no masks for want of time."""
        tree = self.trees.get(request_id)
        return tree.cut(accepted) if tree and tree.unvisited else accepted

    def error(self, request_id: str, accepted: Accepted | None) -> str:
        """Why a request cannot go on: it has no masks, or draws what they do not allow, as nothing else is left. Else empty.

        Below a token that ends the output nothing is masked, and what is drawn does not count.
        """
        tree = self.trees.get(request_id)
        if tree is not None and accepted is not None:
            for node, token in zip(accepted.path, accepted.tokens, strict=True):
                mask = tree.nodes[node]
                if mask is None:
                    break
                if not mask.allows(token):
                    return NOTHING_LEFT
        return self.errors.get(request_id, "") if accepted is not None else ""


def unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """Bits of masks uint8 [M, B] as bool [M, V]."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    flags = (bits[:, :, None] >> shifts & 1).flatten(1)
    return flags[:, :vocab_size].bool()
