"""Settings of single drafting methods, each a frozen value of its own. A value out of range raises ConfigError."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.errors import ConfigError

TreePaths = tuple[tuple[int, ...], ...]

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
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    eagle1: Eagle1Config = field(default_factory=Eagle1Config)


def check_paths(paths: TreePaths, name: str) -> None:
    """Raises ConfigError unless `paths` make a tree."""
    known = {(), *paths}
    if len(known) <= 1 or len(known) <= len(paths):
        raise ConfigError(f"{name} names {len(paths)} nodes, {len(known) - 1} of them distinct; name each one once")
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ConfigError(f"{name} holds the node {list(path)} without its parent, or with a rank below 0")
