"""Drafters of tests, most of them bad: random, failing or forgetful. The engine's output must not depend on them."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree


class StatelessDrafter(LocalDrafter):
    """Answers each context by itself and remembers no session."""

    needs = DrafterNeeds()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self.draft(context) for context in contexts]

    @abstractmethod
    def draft(self, context: DraftContext) -> Draft:
        """The answer to one context."""

    def release(self, sessions: Sequence[str]) -> None:
        pass


class DrafterAround(LocalDrafter):
    """Passes everything on to another drafter."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self.drafter = drafter

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self.drafter.propose(contexts)

    def release(self, sessions: Sequence[str]) -> None:
        self.drafter.release(sessions)


class RandomDrafter(StatelessDrafter):
    """Trees of any shape with random tokens; now and then an invalid tree, none, or a refusal."""

    needs = DrafterNeeds(samples=True)

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def draft(self, context: DraftContext) -> Draft:
        rng, kind = self._rng, int(self._rng.integers(10))
        if kind == 0:
            return None
        if kind == 1:
            return ResyncRequired(context.session, context.epoch, int(rng.integers(-2, context.start_position + 3)))
        size = int(rng.integers(1, context.budget.max_nodes + (3 if kind == 2 else 1)))
        tokens = rng.integers(0, self._vocab_size + (9 if kind == 3 else 0), size).tolist()
        parents = [0, *(int(rng.integers(node)) for node in range(1, size))]
        return DraftTree.of((context.tokens[-1], *tokens[1:]), tuple(parents), (0.0,) * size)


class KnowingDrafter(StatelessDrafter):
    """Knows the outputs: every tree has the right path, wrong siblings and duplicates."""

    def __init__(self, outcomes: Mapping[str, Sequence[int]], vocab_size: int, seed: int = 0) -> None:
        """outcomes: by request id, prompt and output."""
        self._outcomes = outcomes
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def draft(self, context: DraftContext) -> DraftTree:
        budget, rng = context.budget, self._rng
        right = self._outcomes[context.session][context.committed_length :][: budget.max_depth]
        tokens, parents, last = [context.tokens[-1]], [0], 0
        for token in right[: max(budget.max_nodes - 1, 0) // 3] if budget.wants_tree else []:
            wrong = [int(rng.integers(self._vocab_size)), int(tokens[rng.integers(len(tokens))])]
            where = len(tokens) + int(rng.integers(3))
            tokens += [*wrong[: where - len(tokens)], token, *wrong[where - len(tokens) :]]
            parents += [last] * 3
            last = where
        return DraftTree.of(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


class DyingDrafter(DrafterAround):
    """Works for some steps, then returns nothing, then works again without its state."""

    def __init__(self, drafter: LocalDrafter, dies: int, returns: int) -> None:
        super().__init__(drafter)
        self._dies, self._returns, self._round = dies, returns, 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._round += 1
        if self._dies <= self._round < self._returns:
            self.release([context.session for context in contexts])
            return [None] * len(contexts)
        return super().propose(contexts)


class MovingDrafter(DrafterAround):
    """Another drafter takes over after some rounds.

    Attributes:
        num_tokens: taken in, by session.
        num_resyncs: by session.
        taken: of each commit taken in, its start and its numbers of tokens and features.
    """

    def __init__(self, first: LocalDrafter, second: LocalDrafter, moves: int) -> None:
        super().__init__(first)
        self._second, self._moves, self._round = second, moves, 0
        self.num_tokens, self.num_resyncs, self.length_at_move = Counter[str](), Counter[str](), dict[str, int]()
        self.taken = list[tuple[int, int, int]]()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._round += 1
        if self._round == self._moves:
            self.drafter = self._second
            self.length_at_move = {context.session: context.committed_length for context in contexts}
        drafts = super().propose(contexts)
        for context, draft in zip(contexts, drafts, strict=True):
            if isinstance(draft, ResyncRequired):
                self.num_resyncs[context.session] += 1
            else:
                self.num_tokens[context.session] += len(context.tokens)
                num_features = 0 if context.features is None else len(context.features)
                self.taken.append((context.start_position, len(context.tokens), num_features))
        return drafts


class WorkingDrafter(DrafterAround):
    """Lets a drafter draft ahead between two steps, for a varying number of levels."""

    can_sample = True

    def __init__(self, drafter: LocalDrafter, seed: int = 0) -> None:
        super().__init__(drafter)
        self._rng = np.random.default_rng(seed)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        for _ in range(int(self._rng.integers(10))):
            self.drafter.draft_ahead()
        return drafts
