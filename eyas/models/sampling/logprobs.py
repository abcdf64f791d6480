"""Log-probabilities of chosen tokens and the likeliest ones beside them: logits in, numbers out. Knows no request.

Legend: N rows, V vocabulary, k reported tokens. The law is the softmax of the logits as they are given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.models.sampling.law import Ranked, rank

# Rows that are ranked at once: a long prompt must not need its own size of temporary tensors.
BLOCK = 64


class LogProbs(NamedTuple):
    """chosen: log-probability of each row's token [N]. top: the k likeliest, ties to the lowest id [N, k]."""

    chosen: Tensor
    top: Ranked


def log_probs(logits: Tensor, tokens: Tensor, k: int) -> LogProbs:
    """logits float32 [N, V]; tokens int64 [N]; N at least 1; 0 <= k <= V."""
    blocks = [_block(logits[at : at + BLOCK], tokens[at : at + BLOCK], k) for at in range(0, len(logits), BLOCK)]
    top = Ranked(torch.cat([b.top.scores for b in blocks]), torch.cat([b.top.ids for b in blocks]))
    return LogProbs(torch.cat([b.chosen for b in blocks]), top)


def _block(logits: Tensor, tokens: Tensor, k: int) -> LogProbs:
    law = torch.log_softmax(logits, dim=-1)
    return LogProbs(law.gather(-1, tokens[:, None])[:, 0], rank(law, k))
