"""The one place that knows drafters by name: name and checkpoints in, a drafter and its features out. Imports on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.config import EagleConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.errors import ConfigError
from eyas.models.heads.features import FeatureFuser

if TYPE_CHECKING:
    from eyas.models.heads.eagle.config import Reading
    from eyas.models.heads.eagle.probe import Finding
    from eyas.models.target import TargetModel

log = logging.getLogger(__name__)

# In place of a drafter's name: plain decoding.
NO_DRAFTS = "none"
# In place of a digest of features: drafts are made without any; they are the target's last states, the same for all.
NO_FEATURES = "none"
FINAL_FEATURES = "final"


@dataclass(frozen=True)
class Parts:
    """What a drafter is made of. head: folder, hub id or file of what the method loads; empty for one that loads nothing.
    reading: how to read an EAGLE head, in place of what its config says."""

    target: str
    head: str
    dtype: str
    device: str
    tree: TreeConfig
    eagle: EagleConfig
    methods: MethodsConfig
    reading: Reading | None = None


@dataclass(frozen=True)
class Method:
    """A way to draft. needs_head: what `head` must name, in words; empty where the method loads nothing.

    build: makes the drafter. fuse: what runs beside the target for it, from (head, target, dtype, device); None for a
    method without features. digest: of what decides those features, from the head. probe: tries out beside the loaded target
    how the head is to be read, from (target model, head, target, dtype, device); None where there is nothing to try.
    """

    needs_head: str
    build: Callable[[Parts], LocalDrafter]
    fuse: Callable[[str, str, str, str], FeatureFuser] | None = None
    digest: Callable[[str], str] = lambda head: NO_FEATURES
    probe: Callable[[TargetModel, str, str, str, str], Finding] | None = None


def build_drafter(
    name: str,
    target: str,
    head: str,
    dtype: str,
    device: str,
    tree: TreeConfig,
    eagle: EagleConfig,
    methods: MethodsConfig | None = None,
    reading: Reading | None = None,
) -> LocalDrafter:
    """Raises ConfigError for an unknown name or a missing head, CheckpointError for a head that does not fit the target."""
    parts = Parts(target, head, dtype, device, tree, eagle, methods or MethodsConfig(), reading)
    return _method(name, head).build(parts)


def build_fuser(name: str, head: str, target: str, dtype: str, device: str) -> FeatureFuser | None:
    """What makes the features that drafter `name` is fed, beside the target; None where it needs none. Raises as
    `build_drafter` does."""
    if name == NO_DRAFTS:
        return None
    fuse = _method(name, head).fuse
    return fuse(head, target, dtype, device) if fuse else None


def features_digest(name: str, head: str) -> str:
    """What verifier and drafter must agree on besides the target: equal digests mean equal features. Empty for NO_DRAFTS."""
    return "" if name == NO_DRAFTS else _method(name, head).digest(head)


def probe_head(name: str, model: TargetModel, head: str, target: str, dtype: str, device: str) -> Finding | None:
    """How the head that drafter `name` loads works when read in each plausible way, beside `model`, which is the loaded
    target; None for a method without such a head. Raises as `build_drafter` does."""
    if name == NO_DRAFTS:
        return None
    probe = _method(name, head).probe
    return probe(model, head, target, dtype, device) if probe else None


def settle_reading(
    name: str, model: TargetModel, fuser: FeatureFuser, head: str, target: str, dtype: str, device: str
) -> Reading | None:
    """Probe the head and have target and fuser tap what was found to work. The reading that drafters should take, which the
    log tells of; None for a method without such a head. Raises CheckpointError for a head that works in none."""
    finding = probe_head(name, model, head, target, dtype, device)
    if finding is None:
        return None
    finding.require(head)
    if finding.best is finding.trials[0]:
        log.info("%s", finding)
    else:
        log.warning("%s; `eyas check head --write` records it in the config, for draft services to read it so too", finding)
    fuser.taps = finding.best.reading.taps
    model.tap(fuser.taps)
    return finding.best.reading


def default_drafter(name: str, head: str) -> str:
    """The method meant by a name that may be left out."""
    return name or ("eagle3" if head else NO_DRAFTS)


def _method(name: str, head: str) -> Method:
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"unknown drafter {name!r}; known: {', '.join(METHODS)}")
    if method.needs_head and not head:
        raise ConfigError(f"drafter {name!r} needs {method.needs_head}; none was named")
    return method


def _eagle1(parts: Parts) -> LocalDrafter:
    from eyas.drafters.eagle.drafter import EagleDrafter
    from eyas.drafters.static import StaticTree
    from eyas.models.heads.eagle import load_head

    head = load_head(parts.head, parts.target, parts.dtype, parts.device, "eagle")
    return EagleDrafter(head, parts.tree, parts.eagle, StaticTree(parts.methods.eagle1.paths))


def _eagle2(parts: Parts) -> LocalDrafter:
    from eyas.drafters.eagle.drafter import EagleDrafter
    from eyas.models.heads.eagle import load_head

    head = load_head(parts.head, parts.target, parts.dtype, parts.device, "eagle")
    return EagleDrafter(head, parts.tree, parts.eagle)


def _eagle3(parts: Parts) -> LocalDrafter:
    from eyas.drafters.eagle.drafter import EagleDrafter
    from eyas.models.heads.eagle import load_head

    head = load_head(parts.head, parts.target, parts.dtype, parts.device, reading=parts.reading)
    return EagleDrafter(head, parts.tree, parts.eagle)


def _final_features(head: str, target: str, dtype: str, device: str) -> FeatureFuser:
    from eyas.models.checkpoint import read_target_config, resolve
    from eyas.models.heads.features import final_state

    return final_state(int(read_target_config(resolve(target))["hidden_size"]))


def _eagle3_features(head: str, target: str, dtype: str, device: str) -> FeatureFuser:
    from eyas.models.heads.eagle import load_fuser

    return load_fuser(head, target, dtype, device)


def _eagle3_digest(head: str) -> str:
    from eyas.models.checkpoint import head_fingerprint

    return head_fingerprint(head)


def _probe_eagle(model: TargetModel, head: str, target: str, dtype: str, device: str) -> Finding:
    from eyas.models.heads.eagle.probe import probe

    return probe(model, head, target, dtype, device, "eagle")


def _probe_eagle3(model: TargetModel, head: str, target: str, dtype: str, device: str) -> Finding:
    from eyas.models.heads.eagle.probe import probe

    return probe(model, head, target, dtype, device)


METHODS: Mapping[str, Method] = {
    "eagle1": Method("a draft head", _eagle1, _final_features, lambda head: FINAL_FEATURES, _probe_eagle),
    "eagle2": Method("a draft head", _eagle2, _final_features, lambda head: FINAL_FEATURES, _probe_eagle),
    "eagle3": Method("a draft head", _eagle3, _eagle3_features, _eagle3_digest, _probe_eagle3),
}
