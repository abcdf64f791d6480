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

NOTHING_LEFT = (
    "structured_outputs, together with bad words, biases or min_tokens, leaves no token to draw; ask for less. "
    "Or the target gave logits that are not numbers"
)


@dataclass(frozen=True)
class NodeMask:
    """What may be drawn at a node: bits of tokens [B]. must_end: whether these are only tokens that end the output."""

    bits: TokenBits
    must_end: bool = False

    def allows(self, token: int) -> bool:
        """Whether the token may be drawn; one beyond the vocabulary stands for no token at all."""
        return token >> 3 < len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)


@dataclass(frozen=True)
class TokenMasks:
    """The masks of a step.

    nodes: by request id, the mask of each node of its tree, None where nothing is masked. errors: by request id, why a
    request has no masks.
    """

    nodes: Mapping[str, Sequence[NodeMask | None]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def applied(self, logits: Tensor, batch: Sequence[LogitRows]) -> Tensor:
        """All logits of the step [R, V] with minus infinity for tokens that may not be drawn; the given ones stay."""
        rows, masks, start = list[int](), list[TokenBits](), 0
        for request_rows in batch:
            start += len(request_rows.prompt_tokens)
            for node, mask in enumerate(self.nodes.get(request_rows.request.id, ()) if request_rows.tree else ()):
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
        masks = self.nodes.get(request_id)
        return None if masks is None else np.array([mask is not None and mask.must_end for mask in masks])

    def error(self, request_id: str, accepted: Accepted | None) -> str:
        """Why a request cannot go on: it has no masks, or draws what they do not allow, as nothing else is left. Else empty.

        Below a token that ends the output nothing is masked, and what is drawn does not count.
        """
        masks = self.nodes.get(request_id)
        if masks is not None and accepted is not None:
            for node, token in zip(accepted.path, accepted.tokens, strict=True):
                mask = masks[node]
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
