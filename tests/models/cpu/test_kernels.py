"""Functions compiled with numba: where nothing can be kept on disk, and beside plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.models.inputs import RowKeys
from eyas.tensors import Floats

pytest.importorskip("numba")


def test_a_kernel_runs_where_no_folder_can_be_written_to() -> None:
    from eyas.sampling.cpu_kernels import kernel

    names: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", names)  # numba finds no folder for a function without a file
    double = kernel()(names["double"])
    assert double(3) == 6
    assert double._cache.cache_path is None


@pytest.mark.parametrize("window", [1 << 62, 40])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_in_tiles_has_the_bits_of_plain_loops(window: int, softcap: float) -> None:
    """Heads that are no whole blocks take loops of numba. With zeros behind each head these compute the same."""
    from eyas.models.cpu_kernels import attend

    random, num_kv, group, width, num_slots = np.random.default_rng(0), 2, 3, 32, 400
    rows, lengths, masked = [1, 5, 17, 33], [0, 37, 300, 15], [0, 4, 0, 0]
    ends, num_rows = np.cumsum(rows), sum(rows)
    shapes = [(n, m + n, m) for n, m in zip(rows, masked, strict=True)]
    masks = [np.tri(*shape, dtype=np.bool_) & (random.random(shape[:2]) < 0.7) for shape in shapes]
    for mask, count in zip(masks, rows, strict=True):
        mask[:, -count:] |= np.eye(count, dtype=np.bool_)
    keys = RowKeys(
        starts=ends - rows,
        ends=ends,
        prefix=np.concatenate([random.permutation(num_slots)[:n] for n in lengths]),
        prefix_ends=np.cumsum(lengths),
        num_masked=np.array(masked),
        visible=np.concatenate([mask.ravel() for mask in masks]),
        positions=np.concatenate([n - m + np.arange(r) for n, m, r in zip(lengths, masked, rows, strict=True)]),
    )
    sizes = (num_rows, num_kv * (group + 2), width), (num_slots, num_kv, width), (num_slots, num_kv, width)
    arrays = [random.standard_normal(shape, dtype=np.float32) for shape in sizes]

    def attended(qkv: Floats, *pools: Floats) -> Floats:
        out = np.full((num_rows, num_kv * group, qkv.shape[2]), np.nan, np.float32)
        attend(qkv, num_kv, *pools, *keys, 0.2, window, softcap, 0, num_kv, out)
        return out

    tiled = attended(*arrays)
    plain = attended(*(np.pad(array, ((0, 0), (0, 0), (0, 8))) for array in arrays))
    assert np.isfinite(tiled).all()
    assert np.array_equal(tiled, plain[:, :, :width])


def test_the_highest_number_may_be_below_zero_or_infinite() -> None:
    from eyas.sampling.cpu_kernels import highest_of

    random, inf = np.random.default_rng(0), np.inf
    cases = [random.standard_normal(n) - 5 for n in (1, 7, 16, 100)]
    cases += [np.array(case) for case in ([-inf, -2.0], [-inf, -inf], [3.0, inf], [-0.0, -1.0], [-1e-42, -1e30])]
    for case in cases:
        numbers = case.astype(np.float32)
        assert highest_of(numbers) == numbers.max()
