"""Settings of single drafting methods, each a frozen value of its own. A value out of range raises ConfigError."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from eyas.errors import ConfigError

TreePaths = tuple[tuple[int, ...], ...]
Shape = Literal["static", "dynamic"]


@dataclass(frozen=True)
class OffsetsConfig:
    """Settings of Medusa and Hydra.

    shape: "static" trees have the same nodes each time, "dynamic" ones those of the highest scores, as with EAGLE-2.
    paths: the static tree, of each node but the root the ranks by score on the way to it; empty takes the likeliest ones
    that tree.nodes, tree.depth and tree.width allow.
    """

    shape: Shape = "static"
    paths: TreePaths = ()

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ConfigError(f"shape is {self.shape!r}; it must be one of {', '.join(get_args(Shape))}")
        if self.paths:
            check_paths(self.paths, "paths")


@dataclass(frozen=True)
class MethodsConfig:
    """Settings that one drafting method has and others do not."""

    offsets: OffsetsConfig = field(default_factory=OffsetsConfig)


def check_paths(paths: TreePaths, name: str) -> None:
    """Raises ConfigError unless `paths` make a tree."""
    known = {(), *paths}
    if len(known) <= 1 or len(known) <= len(paths):
        raise ConfigError(f"{name} names {len(paths)} nodes, {len(known) - 1} of them distinct; name each one once")
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ConfigError(f"{name} holds the node {list(path)} without its parent, or with a rank below 0")
