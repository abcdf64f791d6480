"""Drafters with captured trees on machines without CUDA: what would be captured runs again."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.config import DraftingConfig, DraftModelConfig, MedusaConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.block import BlockDrafter
from eyas.drafters.draft_model import ModelDrafter
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.mtp import MtpDrafter
from eyas.drafters.multi_head import MultiHeadDrafter
from eyas.drafters.peagle import PEagleDrafter
from eyas.drafters.trees.growth import StaticTree
from eyas.models.backends.cuda_graphs import Capture, CudaCapture
from eyas.models.heads.block import load_block_head, serve
from eyas.models.heads.eagle import load_head
from eyas.models.heads.hydra import load_hydra
from eyas.models.heads.medusa import load_medusa
from eyas.models.heads.mtp import load_mtp_head
from eyas.models.loading import load_target
from tests.support.devices.interpreter import clear_results, run_again
from tests.support.devices.launches import Launch
from tests.support.tiny import write_small
from tests.support.tiny_block import tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import tiny_heads
from tests.support.tiny_mtp import tiny_mtp_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = (
    "eagle1", "eagle2", "eagle3", "peagle", "mtp", "medusa", "hydra-prefix", "hydra-dynamic", "sps", "dspark", "dspark-rnn",
    "dflash-window", "dflash2",
)  # fmt: skip

Out = TypeVar("Out")


class NoSyncMode(TorchDispatchMode):
    """Refuses operations that CUDA graphs cannot capture: those that sync with the device or copy to it."""

    REFUSED = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "unique",
        "lift_fresh",
        "equal",
        "bincount",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if masks or name.startswith(self.REFUSED):
            raise RuntimeError(f"{name} syncs with the device or copies to it")
        return func(*args, **(kwargs or {}))


class OutsideMemory(TorchDispatchMode):
    """Notes the memory that a capture finds and uses. A graph keeps only the memory that it allocates itself."""

    def __init__(self) -> None:
        super().__init__()
        # By the address of a storage; a weak reference keeps the address from being taken again.
        self._own: dict[int, StorageWeakRef] = {}
        self._found: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._take((args, kwargs), func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage.cdata not in self._found:
                self._own[storage.cdata] = storage
        return out

    def take_launch(self, launch: Launch) -> None:
        """Note the memory of a kernel's arguments."""
        self._take(launch.arguments, launch.function.__name__)
        clear_results(launch)

    def _take(self, arguments: Any, name: str) -> None:
        for storage in _storages(arguments):
            if storage.cdata not in self._own:
                self._found.setdefault(storage.cdata, (storage, name))

    def check(self) -> None:
        """Raises RuntimeError if a replay would use memory that is free once the capture has ended."""
        if freed := sorted({name for storage, name in self._found.values() if storage.expired()}):
            raise RuntimeError(f"{', '.join(freed)} of a replay would use memory that has been freed")


def _storages(values: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def checked_capture(run: Callable[[], Out]) -> Callable[[], Out]:
    """As `run_again`, and refuses what could not be captured or replayed.

    As on CUDA, the function runs once before the capture, so that it must not change what it reads the next time. Memory of
    the first run is freed.
    """
    run_again(run)
    outside = OutsideMemory()
    with NoSyncMode(), outside:
        run_again(run, outside.take_launch)
    outside.check()
    return lambda: run_again(run)()  # the second of two runs, as a graph is


def capturing() -> Capture:
    return CudaCapture(torch.device("cuda")) if DEVICE == "cuda" else checked_capture


@cache
def loaded(method: str, target: str, head: str) -> Any:
    """What drafters of a method compute with. They change nothing in it, and so share it."""
    if method.startswith(("dspark", "dflash")):
        return serve(load_block_head(tiny_block_head(method, target), target, "float32", DEVICE))
    if method == "peagle":
        return load_head(tiny_peagle_head(head), target, "float32", DEVICE, "peagle")
    if method.startswith("eagle"):
        kind, folder = ("eagle3", head) if method == "eagle3" else ("eagle", f"{head}/eagle1")
        return load_head(folder, target, "float32", DEVICE, kind)
    if method == "mtp":
        return load_mtp_head(tiny_mtp_module(target), target, "float32", DEVICE)
    if method == "sps":
        return load_target(write_small(target), "float32", DEVICE)
    load = load_medusa if method == "medusa" else load_hydra
    return load(tiny_heads(method.removesuffix("-dynamic"), head), target, "float32", DEVICE)


def make(
    method: str, target: str, head: str, tree: TreeConfig, config: DraftingConfig, capture: Capture | None
) -> LocalDrafter:
    """A drafter of a method over tiny heads."""
    model = loaded(method, target, head)
    if method.startswith(("dspark", "dflash")):
        return BlockDrafter(model, tree, config, capture)
    if method == "peagle":
        return PEagleDrafter(model, tree, config, capture)
    if method.startswith("eagle"):
        plan = StaticTree(MethodsConfig().eagle1.tree_choices, torch.device(DEVICE)) if method == "eagle1" else None
        return EagleDrafter(model, tree, config, plan, capture)
    if method == "mtp":
        return MtpDrafter(model, tree, config, capture)
    if method == "sps":
        return ModelDrafter(model, tree, config, DraftModelConfig(), capture)
    shape = MedusaConfig("dynamic") if method == "hydra-dynamic" else MedusaConfig()
    return MultiHeadDrafter(model, tree, config, shape, capture)
