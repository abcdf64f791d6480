"""The one place that knows drafters by name: name and checkpoints in, a drafter and its features out. Imports on demand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from eyas.config import EagleConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.methods import Method, Parts, find_method
from eyas.errors import ConfigError
from eyas.models.heads.features import FeatureFuser

if TYPE_CHECKING:
    from eyas.models.heads.eagle.config import Reading
    from eyas.models.heads.eagle.probe import Finding
    from eyas.models.target import TargetModel

log = logging.getLogger(__name__)

# In place of a drafter's name: plain decoding.
NO_DRAFTS = "none"


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
    """What makes the features that drafter `name` is fed, beside the target; None where it needs none, whatever it loads
    elsewhere. Raises as `build_drafter` does."""
    fuse = None if name == NO_DRAFTS else find_method(name).fuse
    if fuse is None:
        return None
    _check_head(name, head)
    return fuse(head, target, dtype, device)


def features_digest(name: str, head: str) -> str:
    """What verifier and drafter must agree on besides the target: equal digests mean equal features. Empty for NO_DRAFTS."""
    if name == NO_DRAFTS:
        return ""
    method = find_method(name)
    return (_method(name, head) if method.fuse else method).digest(head)


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
    """Raises ConfigError for an unknown method, and for one that loads something where nothing was named."""
    _check_head(name, head)
    return find_method(name)


def _check_head(name: str, head: str) -> None:
    needed = find_method(name).needs_head
    if needed and not head:
        raise ConfigError(f"drafter {name!r} needs {needed}; none was named")
