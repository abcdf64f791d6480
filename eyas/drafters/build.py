"""The one place that knows drafters by name: name and checkpoints in, a drafter and its features out. Imports on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.config import EagleConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.errors import ConfigError
from eyas.models.heads.features import FeatureFuser

# features: the target's, of committed positions; samples: the target's at every node of the last tree; prompt: one that says
# something of what follows it.
Need = Literal["features", "samples", "prompt"]
# "anywhere" includes a service of its own on another machine.
Place = Literal["anywhere", "beside the target"]

# In place of a drafter's name: plain decoding.
NO_DRAFTS = "none"
# In place of a digest of features: drafts are made without any.
NO_FEATURES = "none"


@dataclass(frozen=True)
class Parts:
    """What a drafter is made of. head: folder, hub id or file of what the method loads; empty for one that loads nothing."""

    target: str
    head: str
    dtype: str
    device: str
    tree: TreeConfig
    eagle: EagleConfig
    methods: MethodsConfig


@dataclass(frozen=True)
class Method:
    """A way to draft. needs_head: what `head` must name, in words; empty where the method loads nothing.

    build: makes the drafter. fuse: what runs beside the target for it, from (head, target, dtype, device); None for a
    method without features. digest: of what decides those features, from the head. needs: what it lives on, besides the
    committed tokens that every drafter is told. place: where it may run.
    """

    needs_head: str
    build: Callable[[Parts], LocalDrafter]
    fuse: Callable[[str, str, str, str], FeatureFuser] | None = None
    digest: Callable[[str], str] = lambda head: NO_FEATURES
    needs: tuple[Need, ...] = ()
    place: Place = "anywhere"


def build_drafter(
    name: str,
    target: str,
    head: str,
    dtype: str,
    device: str,
    tree: TreeConfig,
    eagle: EagleConfig,
    methods: MethodsConfig | None = None,
) -> LocalDrafter:
    """Raises ConfigError for an unknown name or a missing head, CheckpointError for a head that does not fit the target."""
    _check_head(name, head)
    return find_method(name).build(Parts(target, head, dtype, device, tree, eagle, methods or MethodsConfig()))


def build_fuser(name: str, head: str, target: str, dtype: str, device: str) -> FeatureFuser | None:
    """What makes the features that drafter `name` is fed, beside the target; None where it needs none. Raises as
    `build_drafter` does."""
    if name == NO_DRAFTS:
        return None
    fuse = find_method(name).fuse
    if fuse is None:
        return None
    _check_head(name, head)
    return fuse(head, target, dtype, device)


def features_digest(name: str, head: str) -> str:
    """What verifier and drafter must agree on besides the target: equal digests mean equal features. Empty for NO_DRAFTS."""
    if name == NO_DRAFTS:
        return ""
    method = find_method(name)
    if method.fuse is not None:
        _check_head(name, head)
    return method.digest(head)


def default_drafter(name: str, head: str) -> str:
    """The method meant by a name that may be left out."""
    return name or ("eagle3" if head else NO_DRAFTS)


def find_method(name: str) -> Method:
    """Raises ConfigError for an unknown name."""
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"unknown drafter {name!r}; known: {', '.join(METHODS)}")
    return method


def _check_head(name: str, head: str) -> None:
    """Raises ConfigError for a method that loads something where nothing was named."""
    needs_head = find_method(name).needs_head
    if needs_head and not head:
        raise ConfigError(f"drafter {name!r} needs {needs_head}; none was named")


def _eagle3(parts: Parts) -> LocalDrafter:
    from eyas.drafters.eagle.ahead import AheadDrafter
    from eyas.drafters.eagle.drafter import EagleDrafter
    from eyas.models.heads.eagle import load_head

    head = load_head(parts.head, parts.target, parts.dtype, parts.device)
    drafter = EagleDrafter(head, parts.tree, parts.eagle)
    return AheadDrafter(drafter, parts.eagle.ahead) if parts.eagle.ahead.rows else drafter


def _eagle3_features(head: str, target: str, dtype: str, device: str) -> FeatureFuser:
    from eyas.models.heads.eagle import load_fuser

    return load_fuser(head, target, dtype, device)


def _eagle3_digest(head: str) -> str:
    from eyas.models.checkpoint import head_fingerprint

    return head_fingerprint(head)


def _small(parts: Parts) -> LocalDrafter:
    from eyas.drafters.small.drafter import SmallDrafter
    from eyas.models.target import load_target
    from eyas.models.vocabulary import check_vocabulary

    check_vocabulary(parts.head, parts.target)
    model = load_target(parts.head, parts.dtype, parts.device)
    return SmallDrafter(model, parts.tree, parts.eagle, parts.methods.small)


METHODS: Mapping[str, Method] = {
    "eagle3": Method("a draft head", _eagle3, _eagle3_features, _eagle3_digest, needs=("features",)),
    "sps": Method("a causal LM with the target's vocabulary", _small),
}
