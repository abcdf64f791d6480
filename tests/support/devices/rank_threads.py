"""Ranks that are threads of this process, with what torch.distributed offers them; counts the bytes that each sends."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

Out = TypeVar("Out")
# Seconds that a rank waits for the others.
PATIENCE = 60


class RankThreads:
    """sent: bytes of each exchange of rank 0, in order."""

    def __init__(self, size: int) -> None:
        self.sent: list[int] = []
        self._size, self._barrier, self._own = size, threading.Barrier(size), threading.local()
        self._tensors = [torch.empty(0)] * size

    def run(self, work: Callable[[int], Out]) -> list[Out]:
        """What each rank returns."""
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(self._size) as pool:
            for name in ("all_reduce", "all_gather", "gather"):
                patch.setattr(dist, name, getattr(self, name))
            return list(pool.map(self._run, [work] * self._size, range(self._size)))

    def _run(self, work: Callable[[int], Out], rank: int) -> Out:
        self._own.rank = rank
        try:
            return work(rank)
        except BaseException:
            self._barrier.abort()
            raise

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        tensors = torch.stack([theirs.view_as(tensor) for theirs in self._exchange(tensor)])
        tensor.copy_(tensors.amax(0) if op == dist.ReduceOp.MAX else tensors.sum(0))

    def all_gather(self, found: list[Tensor], tensor: Tensor) -> None:
        for place, theirs in zip(found, self._exchange(tensor), strict=True):
            place.copy_(theirs)

    def gather(self, tensor: Tensor, found: list[Tensor] | None) -> None:
        tensors = self._exchange(tensor)
        for place, theirs in zip(found or (), tensors if found else (), strict=True):
            place.copy_(theirs)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        if self._own.rank == 0:
            self.sent.append(tensor.nbytes)
        self._tensors[self._own.rank] = tensor.clone()
        self._barrier.wait(PATIENCE)
        tensors = list(self._tensors)
        self._barrier.wait(PATIENCE)
        return tensors
