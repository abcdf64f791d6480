"""Settings of drafters as frozen values. A value out of range raises ConfigError wherever it is constructed.

Settings of single drafting methods, each a frozen value of its own. A value out of range raises ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from eyas.config.loader import at_least, num_bytes, require
from eyas.errors import ConfigError


@dataclass(frozen=True)
class TreeConfig:
    """Shape of a dynamic draft tree. nodes counts the root; depth are levels below it; width is the frontier of a level."""

    num_draft_tokens: int = 24
    num_steps: int = 5
    top_k: int = 8

    def __post_init__(self) -> None:
        at_least(1, num_draft_tokens=self.num_draft_tokens, top_k=self.top_k)
        at_least(0, num_steps=self.num_steps)


@dataclass(frozen=True)
class DraftAheadConfig:
    """How a draft service grows trees while the target verifies.

    top_k: nodes expanded at each level; 0 grows none ahead. num_candidates: recorded of each, at least as many. num_steps: below the
    last committed token, those of the tree that was sent included.
    """

    top_k: int = 0
    num_candidates: int = 32
    num_steps: int = 8

    def __post_init__(self) -> None:
        at_least(0, top_k=self.top_k)
        at_least(max(1, self.top_k), num_candidates=self.num_candidates)
        at_least(1, num_steps=self.num_steps)


@dataclass(frozen=True)
class DraftingConfig:
    """Settings of every drafter with a law of its own.

    max_kv_tokens: token slots of draft KV for all sessions; the session unused for longest is forgotten when they run out.
    kv_cache_memory: what they take, such as 512MiB or 2GiB, in place of their number; where neither is given there are 65536.
    shared_noise: rank children by the draft law perturbed with the noise of the target's own draw (temperature > 0).
    noise_scale: softness s of the perturbed law; 0 finds it while serving, from what the target made of the trees.
    proposal_top_k: most tokens in the law of a sampled proposal; the rest of the draft law is cut off.
    cuda_graphs: on CUDA, trees of EAGLE, Medusa, Hydra and small models grow in captured graphs. cuda_graph_max_batch: most
    sessions of a round that one of them holds.
    max_head_steps: most levels of a tree that the head itself grows, 0 as many as tree.depth; in a union the other drafter may go
    deeper. draft_ahead: what a draft service does between two commits; without effect on a drafter in the engine's process.
    """

    max_kv_tokens: int = 0
    kv_cache_memory: str = ""
    shared_noise: bool = True
    noise_scale: float = 1.0
    proposal_top_k: int = 128
    cuda_graphs: bool = True
    cuda_graph_max_batch: int = 64
    max_head_steps: int = 0
    draft_ahead: DraftAheadConfig = field(default_factory=DraftAheadConfig)

    def __post_init__(self) -> None:
        at_least(1, proposal_top_k=self.proposal_top_k, cuda_graph_max_batch=self.cuda_graph_max_batch)
        at_least(0, max_kv_tokens=self.max_kv_tokens, noise_scale=self.noise_scale, max_head_steps=self.max_head_steps)
        require(
            not (self.max_kv_tokens and self.kv_cache_memory),
            f"max_kv_tokens is {self.max_kv_tokens} and memory {self.kv_cache_memory}; leave one of them out",
        )
        if self.kv_cache_memory:
            num_bytes("memory", self.kv_cache_memory)

    @property
    def num_bytes(self) -> int:
        """What `memory` says, 0 where it says nothing."""
        return num_bytes("memory", self.kv_cache_memory) if self.kv_cache_memory else 0


TreePaths = tuple[tuple[int, ...], ...]
Shape = Literal["static", "dynamic"]

# The tree that EAGLE was published with, named mc_sim_7b_63 there: 4, 8, 8, 3 and 2 nodes on five levels.
EAGLE_PATHS: TreePaths = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Eagle1Config:
    """Settings of EAGLE-1. paths: its static tree, of each node but the root the ranks by score on the way to it."""

    paths: TreePaths = EAGLE_PATHS

    def __post_init__(self) -> None:
        check_paths(self.paths, "paths")


@dataclass(frozen=True)
class MedusaConfig:
    """Settings of Medusa and Hydra.

    shape: "static" trees have the same nodes each time, "dynamic" ones those of the highest scores, as with EAGLE-2.
    paths: the static tree, of each node but the root the ranks by score on the way to it; empty takes the likeliest ones
    that tree.nodes, tree.depth and tree.width allow.
    """

    shape: Shape = "static"
    paths: TreePaths = ()

    def __post_init__(self) -> None:
        require(self.shape in get_args(Shape), f"shape is {self.shape!r}; it must be one of {', '.join(get_args(Shape))}")
        if self.paths:
            check_paths(self.paths, "paths")


@dataclass(frozen=True)
class DraftModelConfig:
    """Settings of a small draft model. Its slots, noise and laws are set by EagleConfig, as of every drafter with a law.

    chunk_tokens: most tokens that one of its forward passes takes in; a longer prompt is prefilled in chunks.
    """

    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        at_least(1, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True)
class PromptLookupConfig:
    """Prompt lookup: what followed the last tokens where they stood before in the same context.

    max_ngram, min_ngram: tokens of the context that are looked for. max_matches: most places that go into a tree.
    max_cached_tokens: tokens remembered for all sessions, about 1 KB each; the session unused for longest is forgotten beyond that.
    """

    max_ngram: int = 6
    min_ngram: int = 1
    max_matches: int = 12
    max_cached_tokens: int = 2**20

    def __post_init__(self) -> None:
        at_least(1, min_ngram=self.min_ngram, max_matches=self.max_matches, max_cached_tokens=self.max_cached_tokens)
        at_least(self.min_ngram, max_ngram=self.max_ngram)


@dataclass(frozen=True)
class RestConfig:
    """Retrieval from a datastore (REST): what followed the last tokens in a corpus.

    datastore: folder that `eyas datastore build` wrote; left out, `head` names it.
    max_ngram, min_ngram: tokens of the context that are looked for. max_matches: most places that go into a tree.
    max_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    datastore: str = ""
    max_ngram: int = 16
    min_ngram: int = 2
    max_matches: int = 96
    max_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, min_ngram=self.min_ngram, max_matches=self.max_matches, max_sessions=self.max_sessions)
        at_least(self.min_ngram, max_ngram=self.max_ngram)


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding.

    window_size: columns of the Jacobi window; ngram_size: tokens of an n-gram, so that the window has ngram - 1 rows.
    guess_set_size: most n-grams that are verified in a round, and most that are kept for each first token.
    max_cached_tokens: tokens in the n-grams of all sessions; the session unused for longest is forgotten beyond that.
    """

    window_size: int = 4
    ngram_size: int = 4
    guess_set_size: int = 6
    max_cached_tokens: int = 2**21

    def __post_init__(self) -> None:
        at_least(
            1, window_size=self.window_size, guess_set_size=self.guess_set_size, max_cached_tokens=self.max_cached_tokens
        )
        at_least(2, ngram_size=self.ngram_size)


@dataclass(frozen=True)
class CombinedConfig:
    """Two drafters at once.

    min_share: share of a tree's guesses that either drafter has for certain, if it has so many; the rest goes by score.
    max_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    min_share: float = 0.125
    max_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, max_sessions=self.max_sessions)
        require(0 <= self.min_share <= 0.5, f"min_share is {self.min_share}; it must lie in [0, 0.5]")


@dataclass(frozen=True)
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    eagle1: Eagle1Config = field(default_factory=Eagle1Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    draft_model: DraftModelConfig = field(default_factory=DraftModelConfig)
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    rest: RestConfig = field(default_factory=RestConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    combined: CombinedConfig = field(default_factory=CombinedConfig)


def check_paths(paths: TreePaths, name: str) -> None:
    """Raises ConfigError unless `paths` make a tree."""
    known = {(), *paths}
    if len(known) <= 1 or len(known) <= len(paths):
        raise ConfigError(f"{name} names {len(paths)} nodes, {len(known) - 1} of them distinct; name each one once")
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ConfigError(f"{name} holds the node {list(path)} without its parent, or with a rank below 0")
