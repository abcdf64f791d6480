"""The one place that knows drafters by name: name and checkpoints in, a drafter and its features out. Imports on demand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from eyas.config import EagleConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.methods import Parts, find_method
from eyas.errors import CheckpointError, ConfigError
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
    with _loading(name, head):
        drafter = find_method(name).build(parts)
    drafter.warm_up()
    return drafter


def build_fuser(name: str, head: str, target: str, dtype: str, device: str) -> FeatureFuser | None:
    """What makes the features that drafter `name` is fed, beside the target; None where it needs none, whatever it loads
    elsewhere. Raises as `build_drafter` does."""
    fuse = None if name == NO_DRAFTS else find_method(name).fuse
    if fuse is None:
        return None
    with _loading(name, head):
        return fuse(head, target, dtype, device)


def features_digest(name: str, head: str) -> str:
    """What verifier and drafter must agree on besides the target: equal digests mean equal features. Empty for NO_DRAFTS."""
    if name == NO_DRAFTS:
        return ""
    method = find_method(name)
    with _loading(name, head) if method.fuse else nullcontext():
        return method.digest(head)


def probe_head(name: str, model: TargetModel, head: str, target: str, dtype: str, device: str) -> Finding | None:
    """How the head that drafter `name` loads works when read in each plausible way, beside `model`, which is the loaded
    target; None for a method without such a head. Raises as `build_drafter` does."""
    probe = None if name == NO_DRAFTS else find_method(name).probe
    if probe is None:
        return None
    with _loading(name, head):
        return probe(model, head, target, dtype, device)


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


@contextmanager
def _loading(name: str, head: str) -> Iterator[None]:
    """Raises ConfigError for an unknown method, and for one that loads something where nothing was named. Says of what does
    not load what the drafter would have needed: the head may be fine, and the name the mistake."""
    needed = find_method(name).needs_head
    if needed and not head:
        raise ConfigError(f"drafter {name!r} needs {needed}; none was named")
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error} (drafter {name} needs {needed})" if needed else str(error)) from error
