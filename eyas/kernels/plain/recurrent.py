"""Recurrent layers over the nodes of draft trees: gated delta nets, delta attention with gates of channels, and Mamba.

All of them keep a state S [K, V] for each head. A node decays the state of its parent and adds an outer product to it:
S_i = exp(g_i) S_parent + k_i d_i. Along the path from the root to node i the decays add up to G_i, so nodes need no states
of their own: S_i = exp(G_i) S_0 + sum over j on the path of exp(G_i - G_j) k_j d_j (TreeWY, arXiv 2608.20961). A chain is a
tree whose rows are all one path. The difference of two sums is taken before its exponential, which then cannot overflow;
sums are float64, as such differences lose digits: float32 costs 40 times the error of all else over 64 rows.

Legend: B segments, N rows of the longest, H heads, K and V widths of keys and values. Rows come after their ancestors;
`seen` [B, N, N] says which rows lie on the path to a row, itself included. Padding rows have k, d and g of 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eyas.kernels.arguments import LENGTH_EPSILON, RecurrentInputs

if TYPE_CHECKING:
    from eyas.cache.state_pools import LayerStates
    from eyas.models.recurrent_rows import Pieces, RecurrentRows

# Elements of a table of decays by channel, which are computed for some segments at a time.
MOST_DECAYS = 1 << 23


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, pools: LayerStates, rows: RecurrentRows) -> Tensor:
    """Return the causal convolution [R, C] of inputs [R, C] along their paths; weight [C, W]. Columns and stash are written.

    A pass writes to no row that it reads, of the pools or of the stash.
    """
    windows = rows.windows(weight.shape[1])
    columns = pools.columns[rows.read]
    if rows.pending is not None:
        places, _mask, _last = rows.pending
        both = torch.cat([columns, pools.inputs[places]], 1)
        columns = both.gather(1, windows.columns[..., None].expand(-1, -1, both.shape[2]))
    source = torch.cat([columns.flatten(0, 1), inputs])
    found = _window_sum(source, windows.rows, weight.T, bias).to(inputs.dtype)
    pools.columns[rows.write] = source[windows.ends]
    if windows.marks is not None:
        ends, into = windows.marks
        pools.columns[into] = source[ends]
    if rows.stashed is not None:
        nodes, places = rows.stashed
        pools.inputs[places] = inputs[nodes]
    return found


def _window_sum(source: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weighted sum of each row's window, float32 [R, C]: one column of windows [R, W] after another.

    Args:
        weight: [W, C].
    """
    factors = weight.float()
    found = source[windows[:, 0]].float() * factors[0]
    for column in range(1, windows.shape[1]):
        found = found + source[windows[:, column]].float() * factors[column]
    return found if bias is None else found + bias.float()


class _Computed(NamedTuple):
    """Outputs of pieces [B, Q, H, V], and what their rows add to a state, see `delta_updates`."""

    outputs: Tensor
    keys: Tensor
    updates: Tensor
    sums: Tensor


def scan(inputs: RecurrentInputs, pools: LayerStates, rows: RecurrentRows) -> Tensor:
    """Return what the rows of a pass read from their states, float32 [R, H, V]. States and stash are written.

    A pass writes to no row that it reads, of the pools or of the stash.
    """
    states = pools.states[rows.read]
    if rows.pending is not None:
        places, mask, last = rows.pending
        states = states_after(states, pools.keys[places], pools.updates[places], pools.sums[places], last, mask)
    ready, like = _prepared(inputs), inputs.values
    out = torch.empty(like.shape, device=like.device)
    stashed = (pools.keys, pools.updates, pools.sums) if rows.stashed is not None else ()
    stash = [torch.empty(len(like), *pool.shape[1:], device=like.device) for pool in stashed]
    for pieces in rows.waves:
        before = states[pieces.segments]
        found, keys, updates, sums = _compute(ready, pieces, before)
        filled = pieces.rows[pieces.is_row]
        out[filled] = found[pieces.is_row]
        for part, own in zip(stash, (keys, updates, sums), strict=False):  # nothing without a stash
            part[filled] = own[pieces.is_row].float()
        after = states_after(before, keys, updates, sums, pieces.last, pieces.kept)
        states[pieces.segments] = after
        if pieces.marked is not None:
            which, into = pieces.marked
            pools.states[into] = after[which]
    pools.states[rows.write] = states
    if rows.stashed is not None:
        nodes, places = rows.stashed
        for pool, part in zip(stashed, stash, strict=True):
            pool[places] = part[nodes]
    return out


def path_sums(gates: Tensor, seen: Tensor) -> Tensor:
    """Return the sums of gates [B, N, H, *] over the path to each row, in float64."""
    return (seen.double() @ gates.double().flatten(2)).view(gates.shape)


def decays(sums: Tensor, seen: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for the rows j on the path to i, else 0: [B, H, N, N] for sums [B, N, H]."""
    of_heads = sums.transpose(1, 2)
    between = of_heads[..., :, None] - of_heads[..., None, :]
    return between.masked_fill(~seen[:, None], float("-inf")).exp().float()


def products(queries: Tensor, keys: Tensor, sums: Tensor, seen: Tensor) -> Tensor:
    """Return q_i exp(G_i - G_j) k_j for rows j on the path to i, else 0: [B, H, N, N] for queries and keys [B, N, H, K].

    Args:
        sums: [B, N, H], or [B, N, H, K] with a gate for each channel of keys.
    """
    q, k = queries.transpose(1, 2), keys.transpose(1, 2)
    if sums.ndim < keys.ndim:
        return (q @ k.transpose(-1, -2)) * decays(sums, seen)
    most = max(1, MOST_DECAYS // (keys.shape[1] * keys[0].numel()))
    parts = zip(*(torch.split(x, most) for x in (q, k, sums.transpose(1, 2), seen)), strict=True)
    found = []
    for query, key, of_heads, own in parts:
        between = of_heads[..., :, None, :] - of_heads[..., None, :, :]
        between = between.masked_fill(~own[:, None, :, :, None], float("-inf")).exp().float()
        found.append((between * query[..., :, None, :] * key[..., None, :, :]).sum(-1))
    return torch.cat(found)


def walk(queries: Tensor, keys: Tensor, updates: Tensor, gates: Tensor, seen: Tensor, states: Tensor) -> Tensor:
    """Return q_i S_i for every row, [B, N, H, V], one row after another: for gates of channels [B, N, H, K] and values of a
    few numbers, where `products` would compute a table of all pairs for each channel. Arguments are as in `outputs`.
    """
    segments, count = seen.shape[:2]
    places = torch.arange(1, count + 1, device=seen.device)
    parents = (seen.tril(-1) * places).amax(2)  # the last of a row's ancestors [B, N]; 0 is before the first
    each = torch.arange(segments, device=seen.device)
    after = states.new_empty(count + 1, *states.shape)
    after[0] = states
    for row in range(count):
        added = keys[:, row, :, :, None] * updates[:, row, :, None]
        after[row + 1] = gates[:, row].exp()[..., None] * after[parents[:, row], each] + added
    return (queries.transpose(0, 1)[..., None] * after[1:]).sum(3).transpose(0, 1)


def delta_updates(keys: Tensor, values: Tensor, betas: Tensor, sums: Tensor, seen: Tensor, states: Tensor) -> Tensor:
    """Return what each row adds by the gated delta rule (arXiv 2412.06464): d_i = beta_i (v_i - k_i exp(g_i) S_parent).

    A row's d depends on the d of its ancestors: (1 + M) d = beta (v - k exp(G) S_0) with M_ij = beta_i k_i exp(G_i - G_j)
    k_j, which is lower triangular.

    Args:
        keys: [B, N, H, K], of length 1.
        values: [B, N, H, V].
        betas: [B, N, H].
        sums: see `products`.
        states: before the first row [B, H, K, V].
    """
    own = betas.transpose(1, 2)[..., None]
    known = values.transpose(1, 2) - (keys * _factors(sums)).transpose(1, 2) @ states
    updates = known * own
    if keys.shape[1] > 1:
        # The diagonal is not read: the rows' own products stand there.
        mixed = products(keys, keys, sums, seen) * own
        updates = torch.linalg.solve_triangular(mixed, updates, upper=False, unitriangular=True)
    return updates.transpose(1, 2)


def outputs(queries: Tensor, keys: Tensor, updates: Tensor, sums: Tensor, seen: Tensor, states: Tensor) -> Tensor:
    """Return q_i S_i for every row, [B, N, H, V]. Arguments are as in `delta_updates`; updates: d [B, N, H, V]."""
    from_start = (queries * _factors(sums)).transpose(1, 2) @ states
    return (from_start + products(queries, keys, sums, seen) @ updates.transpose(1, 2)).transpose(1, 2)


def states_after(states: Tensor, keys: Tensor, updates: Tensor, sums: Tensor, last: Tensor, path: Tensor) -> Tensor:
    """Return the states [B, H, K, V] behind a path: exp(G) S_0 + sum of exp(G - G_j) k_j d_j.

    Args:
        states: before the path.
        keys, updates, sums: of rows among which the path lies, [B, N, H, *].
        last: the row at the end of the path [B].
        path: whether a row belongs to it, [B, N]. Where none does, states stay.
    """
    outside = ~path.view(*path.shape, *[1] * (sums.ndim - 2))
    end = sums[torch.arange(len(sums), device=sums.device), last].masked_fill(outside.all(1), 0.0)
    left = (end[:, None] - sums).masked_fill(outside, float("-inf")).exp().float()
    # Rows that are not of the path may be another sequence's: nothing of them counts, not even a NaN.
    keys, updates = (x.masked_fill(~path[:, :, None, None], 0.0) for x in (keys, updates))
    weighted = (keys * (left if left.ndim == keys.ndim else left[..., None])).permute(0, 2, 3, 1)
    kept = end.exp().float()
    return states * (kept[..., None] if kept.ndim == 3 else kept[..., None, None]) + weighted @ updates.transpose(1, 2)


def _factors(sums: Tensor) -> Tensor:
    """Return exp(G) for keys [B, N, H, K], whose channels may share it."""
    factors = sums.exp().float()
    return factors if sums.ndim == 4 else factors[..., None]


def _prepared(inputs: RecurrentInputs) -> RecurrentInputs:
    """Return float32 inputs with queries and keys for each head of values."""
    queries, keys, values, gates, betas, is_delta = inputs
    if is_delta:
        queries, keys = (_normalized(x) for x in (queries, keys))
        queries = queries * queries.shape[-1] ** -0.5
    shared = values.shape[1] // keys.shape[1]
    queries, keys = (_of_heads(x.float(), shared) for x in (queries, keys))
    return RecurrentInputs(queries, keys, values.float(), gates.float(), betas.float(), is_delta)


def _compute(inputs: RecurrentInputs, pieces: Pieces, states: Tensor) -> _Computed:
    """Return outputs, keys, updates and sums of pieces, given the states before them [B, H, K, V]."""
    queries, keys, values, gates, betas = (_of(x, pieces) for x in inputs[:5])
    sums = path_sums(gates, pieces.seen)
    updates = values * betas[..., None]
    if gates.ndim == keys.ndim and not inputs.is_delta:
        return _Computed(walk(queries, keys, updates, gates, pieces.seen, states), keys, updates, sums)
    if inputs.is_delta:
        updates = delta_updates(keys, values, betas, sums, pieces.seen, states)
    return _Computed(outputs(queries, keys, updates, sums, pieces.seen, states), keys, updates, sums)


def _of_heads(x: Tensor, shared: int) -> Tensor:
    """Return vectors [R, J, K] for each of the heads that share one, [R, J * shared, K]."""
    return x.expand(-1, shared, -1) if x.shape[1] == 1 else x.repeat_interleave(shared, 1)


def _of(rows: Tensor, pieces: Pieces) -> Tensor:
    """Return packed rows [R, *] in the cells of pieces [B, Q, *]; padding is zero."""
    found = rows[pieces.rows]
    return found * pieces.is_row.view(*pieces.is_row.shape, *[1] * (rows.ndim - 1))


def _normalized(x: Tensor) -> Tensor:
    """Return vectors of length 1 in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPSILON)
