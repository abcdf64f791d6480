"""Windows of packed documents, which a pass trains on, in a seeded order."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.errors import CheckpointError, ConfigError
from eyas.train.data import TRAIN, StoredDocuments, read_prepared


@dataclass(frozen=True)
class Batch:
    """Windows of packed documents: tokens, documents and positions int64 [N, L], loss_mask bool [N, L].

    Attributes:
        documents: number of each position's document within the window; -1 is padding.
        positions: within the document.
        index: numbers of the windows.
        draws: how many windows of the run came before each; they seed what is random.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    index: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        tokens, loss_mask = self.tokens.to(device), self.loss_mask.to(device)
        return Batch(tokens, loss_mask, self.documents.to(device), self.positions.to(device), self.index, self.draws)

    def random(self, seed: int, *shape: int) -> Tensor:
        """Return the uniform values in [0, 1), float32 [N, *shape]; those of a window are the same in any
        batch and process.
        """
        generators = (torch.Generator().manual_seed(seed * 1_000_003 + draw) for draw in self.draws or self.index)
        values = torch.stack([torch.rand(shape, generator=generator) for generator in generators])
        return values.to(self.tokens.device)

    @property
    def is_packed(self) -> bool:
        """Return whether a window holds more than one document, or padding."""
        return bool((self.documents != 0).any())


class Windows:
    """The windows of a split. Documents stay whole where they fit; the packing depends on length and order alone."""

    def __init__(self, folder: Path, max_length: int, split: str = TRAIN) -> None:
        """Raises ConfigError for a folder that `eyas train prepare` did not write."""
        self.info, self.documents = read_prepared(folder), StoredDocuments(folder, split)
        self.max_length = max_length
        self.packs = _pack(self.documents.lengths.tolist(), max_length)

    def __len__(self) -> int:
        return len(self.packs)

    @cached_property
    def digest(self) -> str:
        """Return the digest of all that windows hold, in their order, which states computed of other
        windows do not match.
        """
        found = hashlib.sha256(f"{self.max_length}".encode())
        for ids, mask in self.documents:
            found.update(ids.tobytes() + mask.tobytes())
        return found.hexdigest()[:16]

    def batch(self, indices: Sequence[int], draws: Sequence[int] = ()) -> Batch:
        """Return the windows of these numbers. draws: see Batch."""
        shape = (len(indices), self.max_length)
        tokens, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        positions, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, index in enumerate(indices):
            at = 0
            for number, (document, start) in enumerate(self.packs[index]):
                ids, flags = (column[start : start + self.max_length] for column in self.documents[document])
                place = slice(at, at + len(ids))
                tokens[row, place], mask[row, place] = ids, flags
                documents[row, place], positions[row, place] = number, np.arange(len(ids))
                mask[row, at] = False  # nothing before it predicts it
                at += len(ids)
        arrays = [torch.from_numpy(array) for array in (tokens, mask, documents, positions)]
        return Batch(arrays[0], arrays[1], arrays[2], arrays[3], tuple(indices), tuple(draws))

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the windows in an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(self), generator=generator)

    def step_batch(self, seed: int, step: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> Batch:
        """Return the windows of a process in a pass. All processes together take the windows that one alone would take."""
        first = (step * num_ranks + rank) * batch_size
        numbers = range(first, first + batch_size)
        orders = {epoch: self.order(seed, epoch) for epoch in {number // len(self) for number in numbers}}
        return self.batch([int(orders[number // len(self)][number % len(self)]) for number in numbers], numbers)


def _pack(lengths: Sequence[int], size: int) -> list[list[tuple[int, int]]]:
    """Return (document, start) of what each window holds: parts of `size` of long documents, then first fit in order of
    length.
    """
    packs: list[list[tuple[int, int]]] = []
    rests: list[tuple[int, int, int]] = []
    for document, length in enumerate(lengths):
        starts = range(0, length, size)
        for start in starts:
            if length - start >= size:
                packs.append([(document, start)])
            elif length - start > 1:
                rests.append((length - start, document, start))
    free: dict[int, list[int]] = {}
    rooms: list[int] = []  # those that some pack has, ascending
    for length, document, start in sorted(rests, key=lambda rest: (-rest[0], rest[1])):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            packs.append([])
            pack, room = len(packs) - 1, size
        else:
            room = rooms[place]
            pack = free[room].pop()
            if not free[room]:
                del rooms[place]
        packs[pack].append((document, start))
        if not free.setdefault(room - length, []):
            insort(rooms, room - length)
        free[room - length].append(pack)
    return packs


def check_mask_token(windows: Windows, mask_token_id: int) -> None:
    """Raises ConfigError if the reserved token occurs in the data: its embedding must mean nothing else."""
    places = sum(int((ids == mask_token_id).sum()) for ids, _ in windows.documents)
    if places:
        raise ConfigError(
            f"head.mask_token_id is {mask_token_id}, which occurs {places} times in the data; name an id that never does"
        )


def check_prepared(windows: Windows, model: str, vocab_size: int) -> None:
    """Raises for data of another vocabulary, and for data without a supervised token."""
    if windows.info.vocab_size != vocab_size:
        raise CheckpointError(
            f"the data were prepared for {windows.info.model} with a vocabulary of {windows.info.vocab_size}, but {model} "
            f"has {vocab_size}; prepare them for this model"
        )
    if not len(windows) or not any(bool(mask.any()) for _, mask in windows.documents):
        raise ConfigError("the data hold no supervised token; prepare conversations with turns of the assistant, or text")
