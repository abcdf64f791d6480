"""What requests ask of their logits, applied to those of a draft model: biases, and the masks of grammars.

Legend: S sessions, R rows per session, W nodes of a frontier, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext, Path, PathMasks
from eyas.drafters.trees.growth import Expansion
from eyas.grammar.compiler import TokenBits


class RuledExpansion:
    """An Expansion whose logits have what the target will add to its own, see Commit.logit_biases, and minus infinity for
    tokens that the sessions' grammars do not allow.

    The masks of a frontier are computed while the draft model runs it. A node whose mask is not known, or allows nothing of
    the draft vocabulary, is left as it is.

    Args:
        path_masks: of the nodes below the roots, whose own masks the contexts have; None if they are not known.
    """

    def __init__(
        self, expansion: Expansion, contexts: Sequence[DraftContext], draft_ids: Tensor, path_masks: PathMasks | None
    ) -> None:
        self._expansion, self._contexts, self._draft_ids = expansion, contexts, draft_ids
        self._path_masks = path_masks if any(context.allowed for context in contexts) else None
        self._paths: list[list[Path]] = [[()] for _ in contexts]
        biases = [(row, b.token, b.num_levels, b.bias) for row, c in enumerate(contexts) for b in c.logit_biases]
        self._biases = np.array(biases, np.float64).reshape(-1, 4).T
        self._last_column = int(self._biases[1].max(initial=-1)) + 1  # of biases by token: that of all tokens beyond, 0

    @cached_property
    def _flags(self) -> Tensor:
        """The bit of each draft id in its byte, id >> 3, of a mask [D]."""
        return (1 << (self._draft_ids & 7)).to(torch.uint8)

    @cached_property
    def _columns(self) -> Tensor:
        """The column of each draft id among biases by token [D]."""
        return self._draft_ids.clamp(max=self._last_column)

    def first(self) -> Tensor:
        """See Expansion."""
        allowed = {c.session: [np.frombuffer(c.allowed, dtype=np.uint8)] for c in self._contexts if c.allowed}
        return self._biased(self._masked(self._expansion.first(), allowed), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """See Expansion. Waits for the device where masks are known, for the frontier's tokens."""
        if self._path_masks is None:
            return self._biased(self._expansion.next(level, parents, tokens), level)
        rows, ids = parents.tolist(), self._draft_ids[tokens].tolist()
        self._paths = [
            [(*above[row], token) for row, token in zip(own_rows, own_ids, strict=True)]
            for above, own_rows, own_ids in zip(self._paths, rows, ids, strict=True)
        ]
        wait = self._path_masks({c.session: own for c, own in zip(self._contexts, self._paths, strict=True) if c.allowed})
        logits = self._expansion.next(level, parents, tokens)
        return self._biased(self._masked(logits, wait()), level)

    def _masked(self, logits: Tensor, found: Mapping[str, Sequence[TokenBits | None]]) -> Tensor:
        """Return logits [S, R, D] with the masks of some nodes, by session, as [S, W, D]."""
        width = len(self._paths[0])
        masks = {
            session * width + place: bits
            for session, context in enumerate(self._contexts)
            for place, bits in enumerate(found.get(context.session, ()))
            if bits is not None
        }
        if not masks:
            return logits
        bits = upload(np.stack(list(masks.values())), logits.device)
        banned = (bits[:, self._draft_ids >> 3] & self._flags) == 0
        # A mask that bans the whole draft vocabulary would leave no scores: it is dropped.
        banned &= ~banned.all(-1, keepdim=True)
        logits = logits.expand(-1, width, -1)
        if len(masks) == len(logits) * width:
            return logits.masked_fill(banned.view_as(logits), -torch.inf)
        flat, index = logits.flatten(0, 1), upload(list(masks), logits.device)
        return flat.index_copy(0, index, flat[index].masked_fill_(banned, -torch.inf)).view_as(logits)

    def _biased(self, logits: Tensor, level: int) -> Tensor:
        """Return logits [S, R, D] of the children of a level's nodes with the biases that they have."""
        if not self._biases.size:
            return logits
        sessions, tokens, _, biases = self._biases[:, self._biases[2] > level]
        # added [S, columns]: the bias of each token at this level
        added = torch.zeros(len(self._contexts), self._last_column + 1, device=logits.device)
        where = (upload(column.astype(np.int64), logits.device) for column in (sessions, tokens))
        added.index_put_(tuple(where), upload(biases, logits.device).float(), accumulate=True)
        return logits + added[:, None, self._columns]
