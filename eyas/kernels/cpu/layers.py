"""The work of a fused layer between its products, compiled for the CPU with numba (docs/decisions/0038-compiled-cpu.md).

Small operations of torch take 3 to 20 us each, whatever they compute. A kernel here takes 1 us and its arithmetic. Arrays
are float32 and contiguous. One thread runs, but several may share `run_layers`. A row's result does not depend on the other
rows of the pass, bit for bit: sums are taken over those keys alone that the row sees, in the order of their positions.

Legend: R rows, C hidden width, H query heads, J key-value heads, G query heads of a key-value head, D head width, I
intermediate width, S slots, B segments, P prefix slots of all segments, L prefix length and n keys of a segment.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, carray, float32, float64, int64, types
from numba.extending import intrinsic

from eyas.arrays import Floats, Ints
from eyas.kernels.arguments import BLOCK_OUTPUTS, KeptStates, RowKeys
from eyas.kernels.cpu.compiling import compile_all, kernel
from eyas.kernels.cpu.products import (
    PLACES_AHEAD,
    multiply_keys,
    multiply_shared,
    multiply_together,
    multiply_weight,
    num_blocks_of,
    pack_rows,
    sum_values,
    transpose_keys,
)
from eyas.kernels.cpu.sampling import HIGHEST, draw_each, exp, highest_of, rank_rows, sum_of
from eyas.kernels.cpu.sharing import PHASE_SIZE, finish_part, next_part, wait_for_parts

# Rows of a segment that are attended at a time, and keys whose scores are computed at a time.
ROWS_AT_A_TIME = 16
KEYS_AT_A_TIME = 64
# Addresses behind that of the last key, see `_find_vectors`.
MORE_PLACES = PLACES_AHEAD + BLOCK_OUTPUTS - 1
NO_WINDOW = 1 << 62
# Phases of a layer in `run_layers`, and their counters.
PHASES = 5
NUM_COUNTERS = PHASES * PHASE_SIZE


@kernel(error_model="numpy", fastmath={"contract", "reassoc"})
def _mean_square(x):
    total = np.float32(0.0)
    for c in range(len(x)):
        total += x[c] * x[c]
    return total / np.float32(len(x))


@kernel(error_model="numpy", fastmath={"contract"})
def norm(x, weight, eps, out):
    """Write the root-mean-square norm of rows x [R, C] to out; weight [C]."""
    for r in range(x.shape[0]):
        inverse = np.float32(1.0) / np.sqrt(_mean_square(x[r]) + np.float32(eps))
        for c in range(x.shape[1]):
            out[r, c] = x[r, c] * inverse * weight[c]


@kernel(error_model="numpy", fastmath={"contract"})
def add_norm(state, delta, unscale, delta_weight, delta_eps, weight, eps, out):
    """Add delta [R, C] times unscale to state [R, C] in place, and write the norm of the sum to out.

    delta_weight: of a norm that is applied to delta first, [C]; empty for none.
    """
    for r in range(state.shape[0]):
        if len(delta_weight):
            # The mean square of delta * unscale is that of delta times unscale squared.
            factor = np.float32(1.0) / np.sqrt(
                _mean_square(delta[r]) * np.float32(unscale * unscale) + np.float32(delta_eps)
            )
            for c in range(state.shape[1]):
                state[r, c] += delta[r, c] * np.float32(unscale) * factor * delta_weight[c]
        else:
            for c in range(state.shape[1]):
                state[r, c] += delta[r, c] * np.float32(unscale)
        inverse = np.float32(1.0) / np.sqrt(_mean_square(state[r]) + np.float32(eps))
        for c in range(state.shape[1]):
            out[r, c] = state[r, c] * inverse * weight[c]


@kernel(error_model="numpy", fastmath={"contract"})
def pair_inputs(states, sources, embedding, tokens, state_weight, token_weight, eps, inputs, residual):
    """Write the inputs of the first layer of an EAGLE-3 head: normed embeddings beside normed features, to inputs [R, 2 C].

    The features are the rows of states [N, C] that sources [R] name; they go to residual [R, C].

    Args:
        embedding: [V, C].
        tokens: ids [R].
        state_weight, token_weight: of the norms [C].
    """
    width = states.shape[1]
    for r in range(len(sources)):
        state, embedded = states[sources[r]], embedding[tokens[r]]
        by_state = np.float32(1.0) / np.sqrt(_mean_square(state) + np.float32(eps))
        by_token = np.float32(1.0) / np.sqrt(_mean_square(embedded) + np.float32(eps))
        for c in range(width):
            inputs[r, c] = embedded[c] * by_token * token_weight[c]
            inputs[r, width + c] = state[c] * by_state * state_weight[c]
            residual[r, c] = state[c]


@kernel(error_model="numpy", fastmath={"contract"})
def gate(gate_up, unscale, is_silu, out):
    """Write activated gates times the values beside them to out [R, I]: gate_up [R, 2 I] times unscale."""
    width, by = out.shape[1], np.float32(unscale)
    for r in range(out.shape[0]):
        gates, ups, gated = gate_up[r, :width], gate_up[r, width:], out[r]
        for i in range(width):
            g = gates[i] * by
            # SiLU: g / (1 + e^-g). GELU by tanh: 1 + tanh(z) = 2 / (1 + e^-2z), z = sqrt(2 / pi) (g + 0.044715 g^3).
            u = -g if is_silu else np.float32(-1.5957691216) * (g + np.float32(0.044715) * g * g * g)
            gated[i] = g * (ups[i] * by) / (np.float32(1.0) + exp(u if u < HIGHEST else HIGHEST))


@kernel(error_model="numpy", fastmath={"contract"})
def rotate(qkv, unscale, num_kv, cos, sin, norm_weight, eps):
    """Rotate queries and keys of qkv [R, H + 2 J, D] in place, times unscale; cos, sin [R, D].

    norm_weight: of a norm of each head before that, [H + J, D]; empty for none.
    """
    num_rotated, half = qkv.shape[1] - num_kv, qkv.shape[2] // 2
    by = np.float32(unscale)
    for r in range(qkv.shape[0]):
        for h in range(num_rotated):
            x = qkv[r, h]
            lefts, rights = x[:half], x[half:]
            for d in range(2 * half):
                x[d] *= by
            if len(norm_weight):
                inverse = np.float32(1.0) / np.sqrt(_mean_square(x) + np.float32(eps))
                for d in range(2 * half):
                    x[d] *= inverse * norm_weight[h, d]
            cos_left, cos_right, sin_left, sin_right = cos[r, :half], cos[r, half:], sin[r, :half], sin[r, half:]
            for d in range(half):
                # Rotary embedding: (left, right) turn by the angle of their position, in pairs d and d + D / 2.
                left, right = lefts[d], rights[d]
                lefts[d] = left * cos_left[d] - right * sin_left[d]
                rights[d] = right * cos_right[d] + left * sin_right[d]
        # Values are scaled, too, and not rotated.
        for h in range(num_rotated, qkv.shape[1]):
            for d in range(2 * half):
                qkv[r, h, d] *= by


@kernel(error_model="numpy", fastmath={"contract"})
def store(qkv, first, stride, keys, values, slots):
    """Write some heads of rows to their slots in keys, values [S, J, D]: J keys from head `first` of qkv [R, N, D] on, and
    J values `stride` heads behind them."""
    for r in range(qkv.shape[0]):
        for j in range(keys.shape[1]):
            for d in range(qkv.shape[2]):
                keys[slots[r], j, d] = qkv[r, first + j, d]
                values[slots[r], j, d] = qkv[r, first + stride + j, d]


@kernel(error_model="numpy", fastmath={"contract"})
def _softmax(scores):
    """Replace scores [n] by their softmax."""
    highest = highest_of(scores)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - highest)
    total = sum_of(scores)
    inverse = np.float32(1.0) / total
    for i in range(len(scores)):
        scores[i] *= inverse


@kernel(error_model="numpy", fastmath={"contract"})
def _weigh(scores, start, end, scaling, softcap):
    """Replace scores [n] of one query by its weights: softmax from `start` to `end`, 0 elsewhere."""
    seen = scores[start:end]
    for i in range(len(seen)):
        seen[i] *= np.float32(scaling)
    if softcap > 0:
        for i in range(len(seen)):
            seen[i] = np.float32(softcap) * np.tanh(seen[i] / np.float32(softcap))
    _softmax(seen)
    scores[:start] = np.float32(0.0)
    scores[end:] = np.float32(0.0)


@kernel(error_model="numpy", fastmath={"contract"})
def _weigh_named(scores, skipped, length, visible, positions, position, window, scaling, softcap):
    """Replace scores [n] of one query by its weights: softmax over what it sees, 0 elsewhere.

    Args:
        skipped: keys of the prefix without a score, the first ones.
        length: of the prefix after these.
        visible: which of the keys behind it are seen.
        positions: of the last of these.
        position: of the query. Softmax runs over the seen keys alone, side by side: a sum does not depend on how many
            others there are.
    """
    # Seen keys move together: the prefix within the window, then the named keys that are visible.
    oldest, masked = position - window + 1, len(visible) - len(positions)
    start, end = min(max(oldest - skipped, 0), length), length
    for i in range(len(visible)):
        if visible[i] and (i < masked or positions[i - masked] >= oldest):
            scores[end] = scores[length + i]
            end += 1
    _weigh(scores[:end], start, end, scaling, softcap)
    for i in range(len(visible) - 1, -1, -1):  # the last one first, because each moves to the right
        is_seen = visible[i] and (i < masked or positions[i - masked] >= oldest)
        end -= is_seen
        scores[length + i] = scores[end] if is_seen else np.float32(0.0)


@kernel(error_model="numpy")
def _first_seen(position, window, length, first):
    """Return the first key within the window of a causal row: of a prefix at positions from 0 on, and of rows behind it at
    positions from `first` on.
    """
    oldest = position - window + 1
    return length + oldest - first if oldest > first else min(max(oldest, 0), length)


@kernel(error_model="numpy", fastmath={"contract"})
def _score_keys(queries, keys, count, scores):
    """Write the products of queries [Q, D] with keys at addresses to scores [Q, n], n at least `count` in whole blocks.

    Blocks of keys are transposed so that a vector of BLOCK_OUTPUTS scores is computed at once. D is a multiple of that.
    """
    num_blocks, width = num_blocks_of(count), queries.shape[1]
    packed = pack_rows(queries)
    transposed = np.empty(KEYS_AT_A_TIME * width, np.float32)
    block_bytes = 4 * BLOCK_OUTPUTS * width
    for start in range(0, num_blocks, KEYS_AT_A_TIME // BLOCK_OUTPUTS):
        end = min(start + KEYS_AT_A_TIME // BLOCK_OUTPUTS, num_blocks)
        # The address of block 0, although the buffer begins with block `start`.
        address = transposed.ctypes.data - start * block_bytes
        for n in range(start, end):
            for d in range(0, width, BLOCK_OUTPUTS):
                transpose_keys(keys, n * BLOCK_OUTPUTS, d, address + n * block_bytes + 4 * BLOCK_OUTPUTS * d)
        multiply_keys(packed, width, address, scores, start, end)


@kernel(error_model="numpy", fastmath={"contract"})
def _attend_named(queries, keys, values, weights, count, visible, positions, first, length, window, scaling, softcap, out):
    """Write attention of queries [Q, D] over keys and values at addresses, see `_find_vectors`, to out [Q, D].

    The queries belong to rows from `first` on, the same number to each row: query heads that share these keys. Keys of the
    prefix that none sees are not read.

    Args:
        count: of the keys.
        weights: scratch, see `_score_keys`.
        visible: see `_weigh_named`.
        length: of the prefix.
    """
    per_row, lowest = len(queries) // len(visible), positions[first]
    for row in range(1, len(visible)):
        lowest = min(lowest, positions[first + row])
    start = min(max(lowest - window + 1, 0), length)
    _score_keys(queries, keys[start:], count - start, weights)
    for q in range(len(queries)):
        row = q // per_row
        scores, position = weights[q, : count - start], positions[first + row]
        _weigh_named(scores, start, length - start, visible[row], positions, position, window, scaling, softcap)
    sum_values(weights, count - start, values[start:], out)


@kernel(error_model="numpy", fastmath={"contract"})
def _attend_causally(queries, keys, values, weights, positions, first, taken, length, window, scaling, softcap, out):
    """Write attention of queries [Q, D] as `_attend_named`, of `taken` causal rows. Keys that none sees are not read.

    Args:
        positions: of the segment's rows.
        length: of the prefix.
    """
    per_row, end = len(queries) // taken, length + first + taken
    start = _first_seen(positions[first], window, length, positions[0])
    count = end - start
    _score_keys(queries, keys[start:], count, weights)
    for q in range(len(queries)):
        row = first + q // per_row
        own = _first_seen(positions[row], window, length, positions[0])
        _weigh(weights[q, :count], own - start, length + row + 1 - start, scaling, softcap)
    sum_values(weights, count, values[start:], out)


@kernel(error_model="numpy", fastmath={"contract"})
def _find_vectors(slots, cache, j, own, head, places):
    """Write addresses of head j of the cache [S, J, D] at the slots, then of a head of a segment's own rows [n, H + 2 J, D].

    places: to these [L + n + MORE_PLACES]; the last one repeats.
    """
    size = 4 * cache.shape[2]
    first, step = cache.ctypes.data + j * size, cache.shape[1] * size
    for i in range(len(slots)):
        places[i] = first + slots[i] * step
    first, step = own.ctypes.data + head * size, own.shape[1] * size
    for i in range(len(own)):
        places[len(slots) + i] = first + i * step
    # Vectors beyond the last one are read in whole blocks, get the weight 0, and are fetched ahead.
    for i in range(len(slots) + len(own), len(places)):
        places[i] = places[i - 1]


@intrinsic
def _floats_at(typing, address):
    """Return a pointer to float32 numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(float32)(address), generate


@kernel(error_model="numpy", fastmath={"contract"})
def _copy_padded(places, width, out):
    """Copy the vectors [width] at addresses to the first columns of wider rows, and name these copies in their place."""
    for i in range(len(places)):
        vector, copy = carray(_floats_at(places[i]), (width,)), out[i]
        for d in range(width):
            copy[d] = vector[d]
        places[i] = copy.ctypes.data


@kernel()
def _row_of_weights(count):
    """Return the floats of a row of weights in `attend`: an odd number of blocks, so that columns spread over the
    cache.
    """
    return (num_blocks_of(count) | 1) * BLOCK_OUTPUTS


@kernel(error_model="numpy", fastmath={"contract"})
def attend(
    qkv, num_kv, keys, values, starts, ends, prefix, prefix_ends, causal, num_masked, visible, positions, scaling, window,
    softcap, first, end, out,
):  # fmt: skip
    """Write attention of some segments' rotated rows qkv [R, H + 2 J, D], to out [R, H, D], of key-value heads `first` to
    `end`.

    A row sees its segment's prefix, in keys and values [S, J, D], and of the segment's rows itself and all before it,
    or what `visible` names. Their keys and values are in qkv. The other arguments: see RowKeys.

    Args:
        window: in tokens, at most NO_WINDOW; slots that `visible` names lie within it.
        softcap: 0 for none.
    """
    width, num_heads = qkv.shape[2], qkv.shape[1] - 2 * num_kv
    group, padded = num_heads // num_kv, num_blocks_of(width) * BLOCK_OUTPUTS
    first_prefix = first_mask = 0
    for b in range(len(ends)):
        first_row, length = starts[b], prefix_ends[b] - first_prefix
        num_rows = ends[b] - first_row
        slots = prefix[first_prefix : first_prefix + length]
        num_named = 0 if causal[b] else num_masked[b] + num_rows
        mask = visible[first_mask : first_mask + num_rows * num_named].reshape(num_rows, num_named)
        own, at = qkv[first_row : ends[b]], positions[first_row : ends[b]]
        count = length + num_rows
        key_places, value_places = np.empty((2, count + MORE_PLACES), np.int64)
        # Kernels work on whole blocks of a head's width; narrower heads are copied to padded rows.
        key_copies, value_copies = np.zeros((2, len(key_places) if padded > width else 0, padded), np.float32)
        most = min(num_rows, ROWS_AT_A_TIME) * group
        queries, found = np.zeros((most, padded), np.float32), np.empty((most, padded), np.float32)
        weights = np.empty((most, _row_of_weights(count)), np.float32)
        for j in range(first, end):
            _find_vectors(slots, keys, j, own, num_heads + j, key_places)
            _find_vectors(slots, values, j, own, num_heads + num_kv + j, value_places)
            if padded > width:
                _copy_padded(key_places, width, key_copies)
                _copy_padded(value_places, width, value_copies)
            for start in range(0, num_rows, ROWS_AT_A_TIME):
                taken = min(ROWS_AT_A_TIME, num_rows - start)
                for r in range(taken):  # query heads of one key-value head side by side
                    queries[r * group : (r + 1) * group, :width] = own[start + r, j * group : (j + 1) * group]
                num = taken * group
                if causal[b]:
                    _attend_causally(
                        queries[:num], key_places, value_places, weights[:num], at, start, taken, length, window, scaling,
                        softcap, found[:num],
                    )  # fmt: skip
                else:
                    seeing, unmasked = mask[start : start + taken], length - num_masked[b]
                    _attend_named(
                        queries[:num], key_places, value_places, weights[:num], count, seeing, at, start, unmasked, window,
                        scaling, softcap, found[:num],
                    )  # fmt: skip
                for r in range(taken):
                    out[first_row + start + r, j * group : (j + 1) * group] = found[r * group : (r + 1) * group, :width]
        first_mask += num_rows * num_named
        first_prefix = prefix_ends[b]


@kernel(error_model="numpy", fastmath={"contract"})
def _attend_shared(qkv, num_kv, own_keys, own_values, keys, scaling, window, softcap, out, tickets, phase, by_head):
    """Run `attend` by all threads that call it, for RowKeys; a part is one key-value head, or all of them."""
    num_parts, part = num_kv if by_head else 1, next_part(tickets, phase)
    while part < num_parts:
        attend(
            qkv, num_kv, own_keys, own_values, keys.starts, keys.ends, keys.prefix, keys.prefix_ends, keys.causal,
            keys.num_masked, keys.visible, keys.positions, scaling, window, softcap,
            num_kv * part // num_parts, num_kv * (part + 1) // num_parts, out,
        )  # fmt: skip
        finish_part(tickets, phase)
        part = next_part(tickets, phase)
    wait_for_parts(tickets, phase, num_parts)


class LayerStack(NamedTuple):
    """Layers of one shape, as `run_layers` takes them.

    Legend: M layers, E products of a layer, in the order of CpuProducts.

    Attributes:
        weights: their addresses [M, E].
        stored: how the kernels find their numbers, see `multiply_weight`, [M, E].
        scales: what to multiply the products by [M, E].
        biases: of the first product [M, N], or [M, 0].
        norms: factors of the norms before the MLP and before the next layer [M, 2, C].
        delta_norms: of those behind attention and MLP [M, 2, C], or [M, 2, 0].
        head_norms: of query and key heads [M, H + J, D], or [M, 0, 0].
        eps: of the five norms, in this order [M, 5].
        windows: see `attend` [M].
        sizes: H, J, D and I.
        scaling, softcap: see `attend`.
        is_silu: see `gate`.
    """

    weights: Ints
    stored: Ints
    scales: npt.NDArray[np.float64]
    biases: Floats
    norms: Floats
    delta_norms: Floats
    head_norms: Floats
    eps: npt.NDArray[np.float64]
    windows: Ints
    sizes: Ints
    scaling: float
    softcap: float
    is_silu: bool


@kernel(error_model="numpy")
def _keep(kept, layer, rows):
    """Copy rows [R, C] to where the states before a layer, or behind the last one, are kept, if they are."""
    width = rows.shape[1]
    for i in range(len(kept.layers)):
        if kept.layers[i] == layer:
            for r in range(len(rows)):
                kept.states[kept.rows[r], i * width : (i + 1) * width] = rows[r]


@kernel(error_model="numpy", fastmath={"contract"})
def run_layers(
    stack, state, normed, inputs, cos, sin, kinds, pools, num_slots, slots, keys, kept, memory, tickets, num_parts
):
    """Advance rows through layers as `CpuLayer.run` does one by one. Threads that call it with the same arguments share it.

    Args:
        stack: a LayerStack.
        state: the residual stream [R, C]; replaced by that behind the layers.
        normed: to this goes its norm [R, C].
        inputs: what the first layer's attention reads [R, X].
        cos, sin: of each kind of rotary embedding [K, R, D]. kinds: of each layer [M].
        pools: addresses of keys and values of each layer, `num_slots` tokens each [M, 2].
        slots: where the rows' keys and values belong [R]; empty if they are not kept.
        keys: RowKeys. kept: a KeptStates.
        memory: of all rows: qkv, attention's output, gates and ups, gated, what is added to the residual.
        tickets: zeros for M times NUM_COUNTERS, see `eyas.kernels.cpu.sharing`. num_parts: of each product.
    """
    num_heads, num_kv, head_width, inner = stack.sizes
    num_rows, width, shape = len(state), num_heads * head_width, (num_slots, num_kv, head_width)
    sizes = num_rows * np.array([width + 2 * num_kv * head_width, width, 2 * inner, inner, state.shape[1]])
    a, b, c, d, e = np.cumsum(sizes)
    flat, attended = memory[:a].reshape(num_rows, -1), memory[a:b].reshape(num_rows, -1)
    gate_up, gated = memory[b:c].reshape(num_rows, -1), memory[c:d].reshape(num_rows, -1)
    delta, left, phase = memory[d:e].reshape(num_rows, -1), inputs, 0
    qkv, heads = flat.reshape(num_rows, -1, head_width), attended.reshape(num_rows, num_heads, head_width)
    for n in range(len(stack.weights)):
        weights, stored, by, eps = stack.weights[n], stack.stored[n], stack.scales[n], stack.eps[n]
        norms, before_norms = stack.norms[n], stack.delta_norms[n]
        own_keys, own_values = carray(_floats_at(pools[n, 0]), shape), carray(_floats_at(pools[n, 1]), shape)
        # multiply_shared is true in the last thread alone: it works between two products; the others wait for a part more.
        if multiply_shared(left, weights[0], stored[0], flat, tickets, phase, num_parts):
            _keep(kept, n, state)
            for r in range(num_rows):
                for i in range(stack.biases.shape[1]):
                    flat[r, i] += stack.biases[n, i]
            rotate(qkv, by[0], num_kv, cos[kinds[n]], sin[kinds[n]], stack.head_norms[n], eps[4])
            if len(slots):
                store(qkv, num_heads, num_kv, own_keys, own_values, slots)
            finish_part(tickets, phase)
        wait_for_parts(tickets, phase, num_parts + 1)
        scaling, window, softcap = stack.scaling, stack.windows[n], stack.softcap
        _attend_shared(
            qkv, num_kv, own_keys, own_values, keys, scaling, window, softcap, heads, tickets, phase + 1, num_parts > 1
        )
        if multiply_shared(attended, weights[1], stored[1], delta, tickets, phase + 2, num_parts):
            add_norm(state, delta, by[1], before_norms[0], eps[2], norms[0], eps[0], normed)
            finish_part(tickets, phase + 2)
        wait_for_parts(tickets, phase + 2, num_parts + 1)
        if multiply_shared(normed, weights[2], stored[2], gate_up, tickets, phase + 3, num_parts):
            gate(gate_up, by[2], stack.is_silu, gated)
            finish_part(tickets, phase + 3)
        wait_for_parts(tickets, phase + 3, num_parts + 1)
        if multiply_shared(gated, weights[3], stored[3], delta, tickets, phase + 4, num_parts):
            add_norm(state, delta, by[3], before_norms[1], eps[3], norms[1], eps[1], normed)
            if n == len(stack.weights) - 1:
                _keep(kept, n + 1, state)
                _keep(kept, -1, normed)
            finish_part(tickets, phase + 4)
        wait_for_parts(tickets, phase + 4, num_parts + 1)
        left, phase = normed, phase + PHASES


@cache
def compile_kernels() -> None:
    """Compile the kernels of passes and draws, once for each installation; other processes load the result."""
    row, rows, heads, ids = float32[::1], float32[:, ::1], float32[:, :, ::1], int64[::1]
    compile_all(
        {
            norm: (rows, row, float64, rows),
            add_norm: (rows, rows, float64, row, float64, row, float64, rows),
            gate: (rows, float64, boolean, rows),
            pair_inputs: (rows, ids, rows, ids, row, row, float64, rows, rows),
            rotate: (heads, float64, int64, rows, rows, rows, float64),
            store: (heads, int64, int64, heads, heads, ids),
            attend: (
                *(heads, int64, heads, heads, ids, ids, ids, ids, boolean[::1], ids, boolean[::1], ids),
                *(float64, int64, float64, int64, int64, heads),
            ),
            rank_rows: (rows, rows, int64[:, ::1]),
            draw_each: (rows, ids, ids, row, ids, row, row, ids, ids, ids),
            multiply_weight: (rows, int64, int64, rows),
            multiply_together: (rows, int64, int64, rows, ids, int64),
            run_layers: (
                *(_type_of(LayerStack), rows, rows, rows, heads, heads, ids, int64[:, ::1], int64, ids),
                *(_type_of(RowKeys), _type_of(KeptStates), row, ids, int64),
            ),
        }
    )


def _type_of(kind: type[LayerStack] | type[RowKeys] | type[KeptStates]) -> Any:
    """Return numba's type of a tuple of arrays."""
    ids, row, cube = int64[::1], float64[:, ::1], float32[:, :, ::1]
    fields: dict[str, Any] = {
        "weights": int64[:, ::1], "scales": row, "eps": row, "biases": float32[:, ::1], "norms": cube, "delta_norms": cube,
        "head_norms": cube, "scaling": float64, "softcap": float64, "is_silu": boolean, "visible": boolean[::1],
        "causal": boolean[::1], "stored": int64[:, ::1],
        "states": float32[:, ::1],
    }  # fmt: skip
    return types.NamedTuple([fields.get(name, ids) for name in kind._fields], kind)
