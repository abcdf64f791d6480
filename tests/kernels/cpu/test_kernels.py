"""Functions compiled with numba: where nothing can be kept on disk, and beside plain loops."""

from collections.abc import Sequence

import numpy as np
import pytest

from eyas.arrays import Floats
from eyas.kernels.arguments import RowKeys

pytest.importorskip("numba")

SCALING = 0.2


def test_a_kernel_runs_where_no_folder_can_be_written_to() -> None:
    from eyas.kernels.cpu.compiling import kernel

    names: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", names)  # numba finds no folder for a function without a file
    double = kernel()(names["double"])
    assert double(3) == 6
    assert double.stats.cache_path is None


def attended_plainly(arrays: Sequence[Floats], keys: RowKeys, window: int, softcap: float) -> Floats:
    """What `attend` gives for SCALING, one query and one key after the other in float64."""
    qkv, pool_keys, pool_values = (array.astype(np.float64) for array in arrays)
    num_kv = pool_keys.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv
    out, first_slot, first_bit = np.zeros((len(qkv), num_heads, qkv.shape[2])), 0, 0
    fields = keys.starts, keys.ends, keys.prefix_ends, keys.causal, keys.num_masked
    for start, end, last_slot, is_causal, masked in zip(*fields, strict=True):
        slots, named = keys.prefix[first_slot:last_slot], masked + end - start
        if is_causal:
            mask = np.tri(end - start, dtype=np.bool_)
        else:
            mask = keys.visible[first_bit : first_bit + (end - start) * named].reshape(end - start, named)
            first_bit += mask.size
        first_slot = last_slot
        before = len(slots) - masked
        at = np.concatenate([np.arange(len(slots)), keys.positions[start:end]])
        for row, head in np.ndindex(int(end - start), num_heads):
            j = head * num_kv // num_heads
            own = qkv[start:end, num_heads + j], qkv[start:end, num_heads + num_kv + j]
            seen = np.concatenate([np.ones(before, np.bool_), mask[row]]) & (at > keys.positions[start + row] - window)
            scores = np.concatenate([pool_keys[slots, j], own[0]]) @ qkv[start + row, head] * SCALING
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores - scores[seen].max()) * seen
            out[start + row, head] = weights / weights.sum() @ np.concatenate([pool_values[slots, j], own[1]])
    return out


@pytest.mark.parametrize("window", [1 << 62, 40])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_in_tiles_is_that_of_plain_loops(window: int, softcap: float) -> None:
    """Zeros behind each head, so that its width is no multiple of a block's, change no bit."""
    from eyas.kernels.cpu.layers import attend

    random, num_kv, group, width, num_slots = np.random.default_rng(0), 2, 3, 32, 400
    rows, lengths, masked = [1, 5, 17, 33, 70, 20], [0, 37, 300, 15, 30, 100], [0, 4, 0, 0, 0, 0]
    causal = np.array([False] * 4 + [True] * 2)
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
        causal=causal,
        num_masked=np.array(masked),
        visible=np.concatenate([mask.ravel() for mask in masks[:4]]),
        positions=np.concatenate([n - m + np.arange(r) for n, m, r in zip(lengths, masked, rows, strict=True)]),
    )
    sizes = (num_rows, num_kv * (group + 2), width), (num_slots, num_kv, width), (num_slots, num_kv, width)
    arrays = [random.standard_normal(shape, dtype=np.float32) for shape in sizes]

    def attended(qkv: Floats, *pools: Floats) -> Floats:
        out = np.full((num_rows, num_kv * group, qkv.shape[2]), np.nan, np.float32)
        attend(qkv, num_kv, *pools, *keys, SCALING, window, softcap, 0, num_kv, out)
        return out

    tiled = attended(*arrays)
    padded = attended(*(np.pad(array, ((0, 0), (0, 0), (0, 8))) for array in arrays))
    assert np.allclose(tiled, attended_plainly(arrays, keys, window, softcap), atol=2e-6)
    assert np.array_equal(tiled, padded[:, :, :width])


def test_the_highest_number_may_be_below_zero_or_infinite() -> None:
    from eyas.kernels.cpu.sampling import highest_of

    random, inf = np.random.default_rng(0), np.inf
    cases = [random.standard_normal(n) - 5 for n in (1, 7, 16, 100)]
    cases += [np.array(case) for case in ([-inf, -2.0], [-inf, -inf], [3.0, inf], [-0.0, -1.0], [-1e-42, -1e30])]
    for case in cases:
        numbers = case.astype(np.float32)
        assert highest_of(numbers) == numbers.max()
