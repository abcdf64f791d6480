"""Settings of drafters as frozen values. A value out of range raises ConfigError wherever it is constructed."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.config.checks import at_least, num_bytes, require


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
class AheadConfig:
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
class EagleConfig:
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
    ahead: AheadConfig = field(default_factory=AheadConfig)

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
