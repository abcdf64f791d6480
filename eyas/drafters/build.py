"""The one place that knows drafters by name: a name and checkpoints in, a drafter out. Imports on demand."""

from __future__ import annotations

from eyas.config import EagleConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.errors import ConfigError

DRAFTERS = ("eagle3",)


def build_drafter(
    name: str, target: str, head: str, dtype: str, device: str, tree: TreeConfig, eagle: EagleConfig
) -> LocalDrafter:
    """Raises ConfigError for an unknown name, CheckpointError for a head that does not fit the target."""
    if name not in DRAFTERS:
        raise ConfigError(f"unknown drafter {name!r}; known: {', '.join(DRAFTERS)}")
    from eyas.drafters.eagle import EagleDrafter
    from eyas.models.heads.eagle import load_head

    return EagleDrafter(load_head(head, target, dtype, device), tree, eagle)
