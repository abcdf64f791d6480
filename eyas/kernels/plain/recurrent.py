"""Recurrent layers over the nodes of draft trees: gated delta nets, delta attention with gates of channels, and Mamba-2.

All of them keep a state S [K, V] for each head. A node decays the state of its parent and adds an outer product to it:
S_i = exp(g_i) S_parent + k_i d_i. Along the path from the root to node i the decays add up to G_i, so nodes need no states
of their own: S_i = exp(G_i) S_0 + sum over j on the path of exp(G_i - G_j) k_j d_j (TreeWY, arXiv 2608.20961). A chain is a
tree whose rows are all one path. The difference of two sums is taken before its exponential, which then cannot overflow;
sums are float64, as such differences lose digits: float32 costs 40 times the error of all else over 64 rows.

Legend: B segments, N rows of the longest, H heads, K and V widths of keys and values. Rows come after their ancestors;
`seen` [B, N, N] says which rows lie on the path to a row, itself included. Padding rows have k, d and g of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a table of decays by channel, which are computed for some segments at a time.
MOST_DECAYS = 1 << 26


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


def delta_updates(keys: Tensor, values: Tensor, betas: Tensor, sums: Tensor, seen: Tensor, states: Tensor) -> Tensor:
    """Return what each row adds by the gated delta rule (arXiv 2412.06464): d_i = beta_i (v_i - k_i exp(g_i) S_parent).

    A row's d depends on those of its ancestors: (1 + M) d = beta (v - k exp(G) S_0) with M_ij = beta_i k_i exp(G_i - G_j)
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
        last: the sums at the end of the path, [B, H] or [B, H, K].
        path: whether a row belongs to it, [B, N]. With none of them and a `last` of 0, states stay.
    """
    left = (last[:, None] - sums).masked_fill(~path.view(*path.shape, *[1] * (sums.ndim - 2)), float("-inf")).exp().float()
    weighted = (keys * (left if left.ndim == keys.ndim else left[..., None])).permute(0, 2, 3, 1)
    kept = last.exp().float()
    return states * (kept[..., None] if kept.ndim == 3 else kept[..., None, None]) + weighted @ updates.transpose(1, 2)


def _factors(sums: Tensor) -> Tensor:
    """Return exp(G) for keys [B, N, H, K], whose channels may share it."""
    factors = sums.exp().float()
    return factors if sums.ndim == 4 else factors[..., None]
