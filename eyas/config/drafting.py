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

    nodes: int = 24
    depth: int = 5
    width: int = 8

    def __post_init__(self) -> None:
        at_least(1, nodes=self.nodes, width=self.width)
        at_least(0, depth=self.depth)


@dataclass(frozen=True)
class DraftAheadConfig:
    """How a draft service grows trees while the target verifies.

    rows: nodes expanded at each level; 0 grows none ahead. children: recorded of each, at least as many. levels: below the
    last committed token, those of the tree that was sent included.
    """

    rows: int = 0
    children: int = 32
    levels: int = 8

    def __post_init__(self) -> None:
        at_least(0, rows=self.rows)
        at_least(max(1, self.rows), children=self.children)
        at_least(1, levels=self.levels)


@dataclass(frozen=True)
class DraftingConfig:
    """Settings of every drafter with a law of its own.

    num_slots: token slots of draft KV for all sessions; the session unused for longest is forgotten when they run out.
    memory: what they take, such as 512MiB or 2GiB, in place of their number; where neither is given there are 65536.
    shared_noise: rank children by the draft law perturbed with the noise of the target's own draw (temperature > 0).
    noise_scale: softness s of the perturbed law; 0 finds it while serving, from what the target made of the trees.
    law_tokens: most tokens in the law of a sampled proposal; the rest of the draft law is cut off.
    cuda_graphs: on CUDA, trees of EAGLE, Medusa, Hydra and small models grow in captured graphs. graph_sessions: most
    sessions of a round that one of them holds.
    levels: most levels of a tree that the head itself grows, 0 as many as tree.depth; in a union the other drafter may go
    deeper. ahead: what a draft service does between two commits; without effect on a drafter in the engine's process.
    """

    num_slots: int = 0
    memory: str = ""
    shared_noise: bool = True
    noise_scale: float = 1.0
    law_tokens: int = 128
    cuda_graphs: bool = True
    graph_sessions: int = 64
    levels: int = 0
    ahead: DraftAheadConfig = field(default_factory=DraftAheadConfig)

    def __post_init__(self) -> None:
        at_least(1, law_tokens=self.law_tokens, graph_sessions=self.graph_sessions)
        at_least(0, num_slots=self.num_slots, noise_scale=self.noise_scale, levels=self.levels)
        require(
            not (self.num_slots and self.memory),
            f"num_slots is {self.num_slots} and memory {self.memory}; leave one of them out",
        )
        if self.memory:
            num_bytes("memory", self.memory)

    @property
    def num_bytes(self) -> int:
        """What `memory` says, 0 where it says nothing."""
        return num_bytes("memory", self.memory) if self.memory else 0


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

    longest, shortest: tokens of the context that are looked for. num_matches: most places that go into a tree.
    num_tokens: tokens remembered for all sessions, about 1 KB each; the session unused for longest is forgotten beyond that.
    """

    longest: int = 6
    shortest: int = 1
    num_matches: int = 12
    num_tokens: int = 2**20

    def __post_init__(self) -> None:
        at_least(1, shortest=self.shortest, num_matches=self.num_matches, num_tokens=self.num_tokens)
        at_least(self.shortest, longest=self.longest)


@dataclass(frozen=True)
class RestConfig:
    """Retrieval from a datastore (REST): what followed the last tokens in a corpus.

    datastore: folder that `eyas datastore build` wrote; left out, `head` names it.
    longest, shortest: tokens of the context that are looked for. num_matches: most places that go into a tree.
    num_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    datastore: str = ""
    longest: int = 16
    shortest: int = 2
    num_matches: int = 96
    num_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, shortest=self.shortest, num_matches=self.num_matches, num_sessions=self.num_sessions)
        at_least(self.shortest, longest=self.longest)


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding.

    window: columns of the Jacobi window; ngram: tokens of an n-gram, so that the window has ngram - 1 rows.
    num_guesses: most n-grams that are verified in a round, and most that are kept for each first token.
    num_tokens: tokens in the n-grams of all sessions; the session unused for longest is forgotten beyond that.
    """

    window: int = 4
    ngram: int = 4
    num_guesses: int = 6
    num_tokens: int = 2**21

    def __post_init__(self) -> None:
        at_least(1, window=self.window, num_guesses=self.num_guesses, num_tokens=self.num_tokens)
        at_least(2, ngram=self.ngram)


@dataclass(frozen=True)
class CombinedConfig:
    """Two drafters at once.

    floor: share of a tree's guesses that either drafter has for certain, if it has so many; the rest goes by score.
    num_sessions: sessions remembered; the one unused for longest is forgotten beyond that.
    """

    floor: float = 0.125
    num_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, num_sessions=self.num_sessions)
        require(0 <= self.floor <= 0.5, f"floor is {self.floor}; it must lie in [0, 0.5]")


@dataclass(frozen=True)
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    eagle1: Eagle1Config = field(default_factory=Eagle1Config)
    offsets: MedusaConfig = field(default_factory=MedusaConfig)
    small: DraftModelConfig = field(default_factory=DraftModelConfig)
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    rest: RestConfig = field(default_factory=RestConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    union: CombinedConfig = field(default_factory=CombinedConfig)


def check_paths(paths: TreePaths, name: str) -> None:
    """Raises ConfigError unless `paths` make a tree."""
    known = {(), *paths}
    if len(known) <= 1 or len(known) <= len(paths):
        raise ConfigError(f"{name} names {len(paths)} nodes, {len(known) - 1} of them distinct; name each one once")
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ConfigError(f"{name} holds the node {list(path)} without its parent, or with a rank below 0")
