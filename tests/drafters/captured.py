"""Drafters whose trees come out of captured graphs, where there is no CUDA device: what would be captured runs again."""

from collections.abc import Callable
from typing import TypeVar

import torch

from eyas.config import EagleConfig, MethodsConfig, OffsetsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.eagle.drafter import EagleDrafter
from eyas.drafters.offsets.drafter import hydra_drafter, medusa_drafter
from eyas.drafters.static import StaticTree
from eyas.models.cuda.graphs import Capture, CudaCapture
from eyas.models.heads.eagle import load_head
from eyas.models.heads.offsets.hydra import load_hydra
from eyas.models.heads.offsets.medusa import load_medusa
from tests.tiny_offsets import tiny_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = ("eagle1", "eagle2", "eagle3", "medusa", "hydra-prefix", "hydra-dynamic")

Out = TypeVar("Out")


def run_again(run: Callable[[], Out]) -> Callable[[], Out]:
    """A captured pass runs again from the same closure, on what its static inputs hold by then."""
    run()
    return run


def capturing() -> Capture:
    return CudaCapture(torch.device("cuda")) if DEVICE == "cuda" else run_again


def make(
    method: str, target: str, head: str, tree: TreeConfig, config: EagleConfig, capture: Capture | None
) -> LocalDrafter:
    """A drafter of a method over tiny heads."""
    if method.startswith("eagle"):
        kind, folder = ("eagle3", head) if method == "eagle3" else ("eagle", f"{head}/eagle1")
        plan = StaticTree(MethodsConfig().eagle1.paths) if method == "eagle1" else None
        return EagleDrafter(load_head(folder, target, "float32", DEVICE, kind), tree, config, plan, capture)
    shape = OffsetsConfig("dynamic") if method == "hydra-dynamic" else OffsetsConfig()
    folder = tiny_heads(method.removesuffix("-dynamic"), head)
    if method == "medusa":
        return medusa_drafter(load_medusa(folder, target, "float32", DEVICE), tree, config, shape, capture)
    return hydra_drafter(load_hydra(folder, target, "float32", DEVICE), tree, config, shape, capture)
