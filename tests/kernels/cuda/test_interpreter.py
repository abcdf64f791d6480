"""The quickened interpreter computes, bit for bit, what Triton's own interpreter computes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from eyas.kernels.arguments import AttentionRule, Draws
from eyas.kernels.cuda.sampling import BLOCK, draw_rows, top_k
from eyas.models.backends.attention_metadata import Tiling, pack_with_metadata, tight_shape
from eyas.models.layers import attention
from eyas.protocol.commit import NoiseKey
from tests.support.devices.random_passes import Heads, make_kv_cache, make_pass, num_slots, scaling_of

CPU = torch.device("cpu")
# Trees and prompt chunks: rows, and length of the prefix.
SIZES = [(True, 5, 20), (False, 3, 7)]


def attended(dtype: torch.dtype) -> torch.Tensor:
    """Attention, which has products of matrices, loops and masks."""
    heads, segments, size = Heads(2, 1, 16), make_pass(SIZES), num_slots(SIZES)
    kv_cache = make_kv_cache(size, heads, seed=size, dtype=dtype)
    packed = pack_with_metadata(segments, tight_shape(segments, Tiling(2, 1, 6)), size, CPU)
    query = torch.randn(len(packed.tokens), heads.query, heads.width, generator=torch.Generator().manual_seed(1))
    inputs = (x.to(dtype) for x in (query, kv_cache.keys, kv_cache.values))
    return attention.attend(*inputs, packed, AttentionRule(scaling_of(heads), 30, 2.0))


def results() -> list[torch.Tensor]:
    """What kernels compute in this process."""
    keys = NoiseKey(0), NoiseKey(2**64 - 1, 1.0), NoiseKey(7, 0.3, top_k=20, top_p=0.9, min_p=0.1)
    draws = Draws(keys, [2**40 * row + 5 for row in range(len(keys))])
    logits = 4 * torch.randn(len(draws), BLOCK + 70, generator=torch.Generator().manual_seed(0))
    logits[:, ::3], logits[0, 5], logits[1, 7] = -torch.inf, -0.0, torch.nan
    with np.errstate(all="ignore"):
        return [draw_rows(logits, draws), *top_k(logits, 3), attended(torch.float32), attended(torch.bfloat16)]


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_the_quickened_interpreter_changes_no_bit(tmp_path: Path) -> None:
    program = f"import torch; from {__name__} import results; torch.save(results(), {str(tmp_path / 'plain')!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results(), results()  # plans are made when operands come for the second time
    plain, quick = torch.load(tmp_path / "plain"), results()
    for one, other in zip(plain, quick, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        assert same, f"{one} and {other}"
