"""Tiny tokenizers, corpora, commits and trees for tests of drafters without a model."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from eyas.drafters.base import DraftContext
from eyas.drafters.lookup.datastore import build_datastore, vocabulary_digest
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree

GREEDY = NoiseKey(0)
BUDGET = TreeBudget(24, 5)


def write_tokenizer(folder: Path, vocab_size: int = 48) -> Tokenizer:
    """A tokenizer whose token i is the word t{i}."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_datastore(target: Path, documents: Sequence[Sequence[int]], out: Path) -> Path:
    """A datastore of these documents for a tiny target, which gets the tokenizer that it lacks."""
    tokenizer = write_tokenizer(target)
    build_datastore(documents, tokenizer.get_vocab_size(), vocabulary_digest(tokenizer), out)
    return out


def commit(
    session: str, tokens: Sequence[int], base: int = 0, noise: NoiseKey = GREEDY, budget: TreeBudget = BUDGET,
    epoch: int = 0, samples: tuple[int, ...] = (),
) -> DraftContext:  # fmt: skip
    """The tokens from `base` on; no features."""
    return Commit(session, epoch, base, tuple(tokens[base:]), None, noise, budget, samples)


def grown(root: int, steps: Sequence[tuple[int, int, float]]) -> DraftTree:
    """Each step (parent, token, score) adds a child, if it is new, to one of the nodes so far."""
    nodes: dict[tuple[int, int], float] = {}
    for parent, token, score in steps:
        nodes.setdefault((parent % (len(nodes) + 1), token), score)
    parents, tokens = zip(*nodes, strict=True) if nodes else ((), ())
    return DraftTree.of((root, *tokens), (0, *parents), (0.0, *nodes.values()), grown_ahead=len(steps) % 5 == 4)


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens from below the root to each drafted node, in order, and its score."""
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]): tree.log_probs[node] for node in range(1, len(tree))}
