"""Weights as float16 blocks: every number of bfloat16, and float32 beside what float16 holds, against torch's conversion."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from eyas.kernels.arguments import BLOCK_OUTPUTS
from eyas.kernels.cpu.packing import narrow_blocks

EXPONENTS = (0, 1, 13, -3, 40, 140)


def narrowed(weight: Tensor, exponent: int) -> Tensor | None:
    """The weight [N, K] times 2**exponent in float16 blocks, or None if that changes a number."""
    bits = weight.view(torch.uint16 if weight.dtype == torch.bfloat16 else torch.uint32).numpy()
    blocks = torch.full((-(-len(weight) // BLOCK_OUTPUTS), weight.shape[1], BLOCK_OUTPUTS), 7, dtype=torch.float16)
    return blocks if narrow_blocks(bits, exponent, blocks.view(torch.uint16).numpy()) else None


def check(numbers: Tensor, exponent: int) -> None:
    """Compare the kernel with torch over finite numbers: one block of those that stay the same, and each of the others."""
    scaled = numbers.double() * 2.0**exponent
    expected = scaled.half()
    stays = expected.double() == scaled
    kept = numbers[stays]
    kept = kept[: len(kept) // BLOCK_OUTPUTS * BLOCK_OUTPUTS].reshape(BLOCK_OUTPUTS, -1)
    blocks = narrowed(kept, exponent)
    assert blocks is not None
    assert torch.equal(blocks[0].T.double(), kept.double() * 2.0**exponent)
    assert all(narrowed(number.view(1, 1), exponent) is None for number in numbers[~stays][::37])


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_every_bfloat16_is_kept_or_refused(exponent: int) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    normal = numbers[numbers.isfinite() & ((numbers == 0) | (numbers.float().abs() >= 2.0**-126))]
    check(normal, exponent)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_float32_near_float16_is_kept_or_refused(exponent: int) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    exact = halves[halves.isfinite()] * 2.0**-exponent
    bits = exact.numpy().view(np.uint32)
    near = torch.from_numpy((bits[:, None] ^ np.array([0, 1, 1 << 12, 1 << 13], np.uint32)).reshape(-1).view(np.float32))
    check(near[near.isfinite() & ((near == 0) | (near.abs() >= 2.0**-126))], exponent)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40])
def test_no_number_and_float32_subnormals_are_refused(number: float) -> None:
    weight = torch.tensor([[number]])
    assert all(narrowed(weight, exponent) is None for exponent in EXPONENTS)


def test_zeros_fill_the_last_block() -> None:
    blocks = narrowed(torch.ones(BLOCK_OUTPUTS + 1, 3), 2)
    assert blocks is not None
    assert torch.equal(blocks[0], torch.full((3, BLOCK_OUTPUTS), 4.0, dtype=torch.float16))
    assert torch.equal(blocks[1, :, 1:], torch.zeros(3, BLOCK_OUTPUTS - 1, dtype=torch.float16))
