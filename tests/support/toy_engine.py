"""An engine without a model: every slot remembers the whole path of tokens that it was computed for.

The next token is a function of the path, so that the right output is known; what a slot holds shows at once when it is read
for another path.
"""

import random
import zlib
from collections.abc import Sequence as Seq

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.cache.slot_tables import TableRows
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.budget.base import FixedDraftBudget
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import DraftReply, ScheduledSequence, Sequence
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted
from tests.support.clock import Clock
from tests.support.strategies import accept, outputs_of

VOCAB = 3
TREE = TreeConfig(num_draft_tokens=6, num_steps=3, top_k=2)


def next_token(path: Seq[int]) -> int:
    return zlib.crc32(bytes(path)) % VOCAB


def generate(request: Request) -> list[int]:
    """What a request must get."""
    tokens = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt_ids) :]


def largest_budgets(scheduler: Scheduler, sequences: Seq[Sequence]) -> list[TreeBudget]:
    """The largest trees that sequences can use in the next step."""
    sizes = FixedDraftBudget().choose([sequence.request.id for sequence in sequences], scheduler.max_tree_nodes)
    return scheduler.tree_budgets(sequences, sizes)


class ToyEngine:
    """Steps a real scheduler with random trees, and checks every slot that is read, on a device that gets new ones only."""

    def __init__(self, seed: int = 0, tree: TreeConfig = TREE, **limits: float) -> None:
        self.clock = Clock()
        config = EngineConfig(**{"max_kv_tokens": 48, "max_prefill_tokens": 8, "max_num_seqs": 4, **limits})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, tree, frozenset(), self.clock)
        self.chunks: dict[str, list[Chunk]] = {}
        self.num_rows = 0
        self._slots: dict[int, tuple[int, ...]] = {}
        self._tables, self._received = TableRows(config.max_num_seqs), dict[int, list[int]]()
        self._random = random.Random(seed)

    def submit(
        self, name: str, prompt: Seq[int], max_tokens: int, session: str = "", priority: int = 0, tenant: str = ""
    ) -> Request:
        sampling = SamplingParams(max_tokens, temperature=0, seed=0)
        request = Request(name, tuple(prompt), sampling, session, priority, tenant=tenant, cache_salt=tenant)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """One step, after which everything is whole."""
        drafts = [DraftReply(s, self._tree(s), 0, 0) for s in self.scheduler.running if not s.prefilling]
        chunks = self.scheduler.reap()
        batch = self.scheduler.schedule(drafts)
        self.num_rows = sum(len(scheduled.slots) for scheduled in batch)
        accepted = [self._forward(*each) for each in zip(batch, self._prefixes(batch), strict=True)]
        chunks += self.scheduler.commit(batch, outputs_of(accepted))
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.sequences:
            self.step()

    def output(self, name: str) -> list[int]:
        return [token for chunk in self.chunks[name] for token in chunk.token_ids]

    def num_cached(self, name: str) -> int:
        return sum(chunk.num_cached for chunk in self.chunks[name])

    def _tree(self, sequence: Sequence) -> DraftTree:
        (budget,) = largest_budgets(self.scheduler, [sequence])
        tokens, parents, depths = [sequence.tokens[-1]], [0], [0]
        for _ in range(self._random.randrange(budget.max_nodes)):
            parent = self._random.randrange(len(tokens))
            if depths[parent] < budget.max_depth:
                tokens.append(self._random.randrange(VOCAB))
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree.of(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    def _prefixes(self, batch: Seq[ScheduledSequence]) -> list[list[int]]:
        """The slots before the rows of each sequence, as a receiver of new slots has them."""
        prefixes = [scheduled.sequence.slots[: scheduled.first] for scheduled in batch]
        update = self._tables.place([scheduled.sequence.table for scheduled in batch], prefixes)
        for row, kept, prefix in zip(*update, prefixes, strict=True):
            self._received[row] = self._received.get(row, [])[:kept] + prefix[kept:].tolist()
        return [self._received[row] for row in update.rows]

    def _forward(self, scheduled: ScheduledSequence, prefix: list[int]) -> Accepted | None:
        tokens, tree = scheduled.sequence.tokens, scheduled.tree
        read = [self._slots[slot] for slot in prefix]
        assert read == [tuple(tokens[: i + 1]) for i in range(scheduled.first)], (
            "a slot holds another token than its owner thinks"
        )
        if tree is None:
            paths = [tuple(tokens[: scheduled.first + i + 1]) for i in range(len(scheduled.slots))]
        else:
            paths = [(*tokens[: scheduled.first], *(tree.tokens[n] for n in tree.path(i))) for i in range(len(tree))]
        self._slots.update(zip(scheduled.slots.tolist(), paths, strict=True))
        if scheduled.logit_rows.tree is None:
            return None
        samples = [next_token(path) for path in paths]
        return accept(tree or DraftTree.root_only(tokens[-1]), samples if tree else samples[-1:])
