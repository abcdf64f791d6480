"""The one noise function of target and drafters: exponential noise as a function of (seed, position, token id).

A 64-bit counter hash (the finaliser of SplitMix64, Steele et al., OOPSLA 2014) gives 64 bits per (seed, position, token).
The upper 52 are read as v in (0, 1). Then e = -log1p(-v) is exponential, and argmin e / p is a draw from p (an exponential
race). The hash is integer arithmetic and the rest float64 rounded once, so that every device and both sides of the wire
agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eyas.arrays import Ints
from eyas.device.transfer import upload

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def exponential_noise(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    """Return the noise of every (seeds[i], positions[i]) at every token id: float32 [N, V], above 0.

    Args:
        seeds: in [0, 2**64).
        positions: in [0, 2**63).
        token_ids: int64 [V], or [N, V] if they differ by row.
    """
    return exponential_noise_at(_signed(seeds, token_ids), upload(positions, token_ids.device), token_ids)


def exponential_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return `exponential_noise` with seeds, as signed 64-bit integers, and positions on the device, int64 [N]."""
    return _uniform(_bits(seeds, positions, token_ids)).neg_().log1p_().neg_().float()


def uniform_noise(seeds: Sequence[int], positions: Sequence[int], indices: Tensor) -> Tensor:
    """Return uniform numbers of every (seeds[i], positions[i]) at every index: float64 [N, C], strictly between 0 and 1.

    indices: int64 [C]. Independent of `exponential_noise`: it hashes counters below 0, where no token id lies.
    """
    return _uniform(_bits(_signed(seeds, indices), upload(positions, indices.device), -2 - indices))


def row_keys(seeds: npt.NDArray[np.uint64], positions: Ints) -> Ints:
    """Return what the noise of every (seeds[i], positions[i]) is hashed from, made on the host: int64 [N]."""
    z = seeds + np.uint64(GOLDEN % 2**64)
    z = _mixed(_mixed(z) + positions.view(np.uint64) * np.uint64(GOLDEN % 2**64))
    return z.view(np.int64)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix on the host as `_mix_` does."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1 % 2**64)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2 % 2**64)
    return z ^ (z >> np.uint64(31))


def draft_seed(seed: int) -> int:
    """Return the seed of a drafter that samples from its own distribution: its noise must be independent of the target's."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"eyas draft")
    return int.from_bytes(digest.digest(), "little")


def _signed(seeds: Sequence[int], beside: Tensor) -> Tensor:
    """Return the signed integers with the bits of seeds, int64 [N], on a tensor's device."""
    return upload(np.array(seeds, np.uint64).view(np.int64), beside.device)


def _uniform(bits: Tensor) -> Tensor:
    """Return the upper 52 bits as float64 between 2**-53 and 1 - 2**-53: with more of them the largest would round to 1."""
    return _logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _bits(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Return 64 bits, as int64 [N, C], of every (seed, position) at every counter."""
    key = _mix_(_mix_(seeds + GOLDEN).add_(positions * GOLDEN))
    return _mix_(key[:, None] + (counters + 1) * GOLDEN)


def _mix_(z: Tensor) -> Tensor:
    """Return a bijection on 64-bit integers whose output bits all depend on all input bits. Multiplication wraps.

    In place, because allocation dominates with many rows.
    """
    z.bitwise_xor_(_logical_shift(z, 30)).mul_(MIX_1)
    z.bitwise_xor_(_logical_shift(z, 27)).mul_(MIX_2)
    return z.bitwise_xor_(_logical_shift(z, 31))


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
