"""Native multi-token prediction: the modules of a target's own checkpoint as an EAGLE drafter.

One module runs again on its own states. Of several, module k drafts the token k + 1 after the last known one, as in
training (DeepSeek-V3, 2412.19437, section 2.2); beyond them the last one runs on its own states. Row j of module k joins
token j + k + 1 with the state of row j of module k - 1, for the first with feature j. It stands at position j, in slot j of
layer k. So module k has k rows less than a session has pairs, and a tree grows in it below a prefix without k slots.
Legend: S sessions, W rows of a level, R rows, H hidden, M modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.sessions import KVSession, num_features
from eyas.drafters.trees.growth import Expansion
from eyas.drafters.trees.rows import GroupLevels, GrowthShape, Levels, Roots
from eyas.kernels.plain.layers import take_rows
from eyas.models.backends.cuda_graphs import Capture
from eyas.models.heads.mtp import MtpHead
from eyas.models.inputs import Segment


class MtpDrafter(EagleDrafter):
    """Dynamic trees by modules for multi-token prediction. A session's state [M * H] has the last row of each module.

    Raises ConfigError for a tree that the modules cannot grow.

    Args:
        capture: how to capture whole trees as CUDA graphs.
        num_grown_slots: as of EagleDrafter; only for one module.
    """

    def __init__(
        self,
        head: MtpHead,
        tree: TreeConfig,
        config: DraftingConfig,
        capture: Capture | None = None,
        num_grown_slots: int = 0,
    ) -> None:
        self._modules = head
        super().__init__(head, tree, config, capture=capture, num_grown_slots=num_grown_slots)

    @property
    def _num_passes(self) -> int:
        last = self._modules.num_modules - 1
        return last + 1 + sum(last + 1 - min(level, last) for level in range(1, self.tree.num_steps))

    def _has_state(self, context: DraftContext) -> bool:
        """Return whether every module has a row."""
        return len(self.sessions[context.session].slots) >= self._modules.num_modules

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        return MtpExpansion(self._modules, self._kv, roots)

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        if self._modules.num_modules == 1:
            return super()._extend(contexts)
        counts = [num_features(context) for context in contexts]
        rows = list(torch.split(self._features(contexts), counts))
        owners = [self.sessions[context.session] for context in contexts]
        lasts = list[list[Tensor]]()
        for module in range(self._modules.num_modules):
            if module:
                rows = [self._inputs_of(module, *each) for each in zip(owners, rows, counts, strict=True)]
            rows = self._run_module(module, contexts, rows, counts)
            lasts.append([own[-1] if len(own) else own.new_zeros(own.shape[1]) for own in rows])
        for session, *own in zip(owners, *lasts, strict=True):
            session.state = torch.cat(own)
        ready = [session.state for context, session in zip(contexts, owners, strict=True) if self._has_state(context)]
        if not ready:
            size = self._modules.num_modules * self._modules.config.hidden
            return torch.empty(0, size, dtype=self._dtype, device=self.draft_ids.device)
        return torch.stack([state for state in ready if state is not None])

    def _inputs_of(self, module: int, session: KVSession[Tensor], outputs: Tensor, count: int) -> Tensor:
        """Return the states that new rows of a module read, of what the module before it gave for its own new rows."""
        start = len(session.slots) - count - module
        if start < 0:  # the first rows are new in both
            return outputs[: max(len(session.slots) - module, 0)]
        assert session.state is not None, "it has run rows before"
        hidden = outputs.shape[1]
        known = session.state[(module - 1) * hidden : module * hidden]
        return torch.cat([known[None], outputs[:-1]])

    def _run_module(
        self, module: int, contexts: Sequence[DraftContext], rows: Sequence[Tensor], counts: Sequence[int]
    ) -> list[Tensor]:
        """Run the new rows of a module, [R, H] of each session. Returns what it gives for them."""
        segments = list[Segment]()
        for context, own in zip(contexts, rows, strict=True):
            slots = self.sessions[context.session].slots
            end = len(slots) - module
            start = end - len(own)
            tokens = np.array(context.tokens[len(context.tokens) - len(own) :])
            if len(own):
                last = np.array([len(own) - 1])
                segments.append(Segment(tokens, np.arange(start, end), slots[start:end], slots[:start], None, last))
        if not segments:
            return list(rows)
        states = self._modules.run_module(module, torch.cat(list(rows)), self._pack(segments), self._kv)
        return list(torch.split(states, [len(own) for own in rows]))


class MtpExpansion:
    """Expansion by modules for multi-token prediction. A row attends to the prefix, to its ancestors and to itself.

    Level n needs module n and, for the levels below it, those after it.
    """

    def __init__(self, head: MtpHead, kv: KVCache, roots: Roots) -> None:
        self._head = head
        self._kv = kv
        self._states = roots.states[:, None]
        self._rows: list[Levels] = [roots.rows]
        if isinstance(roots.rows, GroupLevels):
            self._rows = [roots.rows.without_last(module) for module in range(head.num_modules)]

    def first(self) -> Tensor:
        return self._logits(0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = take_rows(self._states, parents)
        hidden = self._head.config.hidden
        count = self._head.num_modules
        states = above.new_zeros(above.shape)
        self._rows = list(self._rows)  # copies of this expansion keep the other list
        for module in range(min(level, count - 1), count):
            rows = self._rows[module] = self._rows[module].level(level, parents, tokens)
            source = module if level >= count else module - 1
            features = above[..., source * hidden : (source + 1) * hidden].flatten(0, 1)
            found = self._head.run_module(module, features, rows.packed, self._kv)
            states[..., module * hidden : (module + 1) * hidden] = found.view(*tokens.shape, -1)
        self._states = states
        return self._logits(level)

    def _logits(self, level: int) -> Tensor:
        module = min(level, self._head.num_modules - 1)
        hidden = self._head.config.hidden
        return self._head.module_logits(module, self._states[..., module * hidden : (module + 1) * hidden])
