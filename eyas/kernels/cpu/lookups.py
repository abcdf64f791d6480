"""Lookups on the CPU, compiled with numba (docs/decisions/0038-compiled-cpu.md): n-grams of a text, and trees of what
followed them.

The plain path is `eyas.drafters.lookup.prompt_lookup`. Arrays are contiguous. Legend: P tokens of a text, N lengths of
n-grams, M matches, K nodes, B bans.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types, uint8

from eyas.arrays import Ints, Reals
from eyas.kernels.cpu.compiling import compile_all, kernel
from eyas.kernels.cpu.trees import take_best

MIX = 0x2545F4914F6CDD1D  # multiplies a hash for each token
NO_BITS, NO_IDS, NO_BANS = np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros((2, 0), np.int64)


class Ngrams(NamedTuple):
    """The n-grams of a text, of `shortest` tokens and more.

    Attributes:
        text: its tokens, with room for more [P].
        previous: for each place and length, the place behind the previous occurrence of the n-gram that ends there, 0 if
            there is none [P, N].
        table: a hash table of the places behind the latest occurrences, each times N plus the number of the length; 0 in
            empty entries. trials, with PRIOR_TRIALS, hits and prior: see HitRates [N].
        weights: of a session's matches [M].
        seed: of the hashes, which no client knows.
    """

    text: Ints
    previous: Ints
    table: Ints
    trials: Reals
    hits: Reals
    prior: Reals
    weights: Reals
    shortest: int
    seed: int


class Bans(NamedTuple):
    """Tokens that cannot be drawn, and from which level on they can be [B]; allowed: see Commit, empty for all."""

    tokens: Ints
    ends: Ints
    allowed: npt.NDArray[np.uint8]


@kernel(error_model="numpy")
def _find_entry(ngrams, number, mixed, end):
    """Return the place at which the table has the n-gram of a length that ends before `end`, or the empty entry where it
    belongs.

    Args:
        number: of the length.
        mixed: the hash.
    """
    count, mask, n = ngrams.previous.shape[1], len(ngrams.table) - 1, ngrams.shortest + number
    # Open addressing: probe the next entry until one is empty or holds this n-gram.
    at = (mixed ^ (mixed >> 29)) & mask
    while ngrams.table[at]:
        # An entry is end * count + number of the length, so that one table serves all lengths; 0 is empty.
        place, i = ngrams.table[at] // count, 1
        if ngrams.table[at] - place * count == number:
            while i <= n and ngrams.text[place - i] == ngrams.text[end - i]:
                i += 1
            if i > n:
                break
        at = (at + 1) & mask
    return at


@kernel(error_model="numpy")
def extend_ngrams(ngrams, size, tokens):
    """Append tokens to a text of `size` tokens, see `CompiledIndex.extend`."""
    text, count = ngrams.text, ngrams.previous.shape[1]
    for token in tokens:
        # The longest match of the text so far, if there is one, is a trial of its length: did it foresee this token?
        for number in range(count - 1 if size else -1, -1, -1):
            place = ngrams.previous[size - 1, number]
            if place:
                ngrams.trials[number] += 1.0
                ngrams.hits[number] += 1.0 if text[place] == token else 0.0
                break
        text[size] = token
        size += 1
        mixed = ngrams.seed
        # Hashes grow to the left, token by token: the hash of n tokens is a step from that of n - 1.
        for n in range(1, min(ngrams.shortest + count - 1, size) + 1):
            mixed = (mixed ^ (text[size - n] + 1)) * MIX
            number = n - ngrams.shortest
            if number >= 0:
                at = _find_entry(ngrams, number, mixed, size)
                # The entry now names the newest occurrence; `previous` chains it to the one before.
                ngrams.previous[size - 1, number] = ngrams.table[at] // count
                ngrams.table[at] = size * count + number


@kernel(error_model="numpy")
def move_entries(ngrams, entries):
    """Put the entries of another table into an empty one."""
    count = ngrams.previous.shape[1]
    for entry in entries:
        if entry:
            place, number, mixed = entry // count, entry % count, ngrams.seed
            for n in range(1, ngrams.shortest + number + 1):
                mixed = (mixed ^ (ngrams.text[place - n] + 1)) * MIX
            ngrams.table[_find_entry(ngrams, number, mixed, place)] = entry


@kernel(error_model="numpy")
def _find_matches(ngrams, size, places, numbers):
    """Write the best matches of the last tokens, see `NgramIndex.occurrences`, to places and numbers [M].

    numbers: of their lengths. Returns how many there are.
    """
    count, shortest, text = ngrams.previous.shape[1], ngrams.shortest, ngrams.text
    hashes, longest, mixed, found = np.empty(count, np.int64), 0, ngrams.seed, 0
    for n in range(1, min(size, shortest + count - 1) + 1):
        mixed = (mixed ^ (text[size - n] + 1)) * MIX
        if n >= shortest:
            hashes[n - shortest] = mixed
            longest = n
    # The longest lengths first, and of each length the newest occurrence first, along the chain.
    for n in range(longest, shortest - 1, -1):
        number = n - shortest
        place = ngrams.table[_find_entry(ngrams, number, hashes[number], size)] // count
        while place and found < len(places):
            # A longer match that ends here was taken already. At `size` nothing follows.
            is_new = place < size
            for m in range(found):
                is_new &= places[m] != place
            if is_new:
                places[found], numbers[found] = place, number
                found += 1
            place = ngrams.previous[place - 1, number]
    return found


@kernel(error_model="numpy")
def _num_drawable(text, place, most, bans):
    """Return how many of the next `most` tokens from a place on the target can draw below the root."""
    # Only the first level has a mask of allowed tokens, one bit each; deeper levels have single bans.
    if len(bans.allowed) and most:
        token = text[place]
        if token >> 3 >= len(bans.allowed) or not bans.allowed[token >> 3] >> (token & 7) & 1:
            return 0
    for d in range(most):
        for b in range(len(bans.tokens)):
            if bans.tokens[b] == text[place + d] and bans.ends[b] > d:
                return d
    return most


@kernel(error_model="numpy")
def grow_tree(ngrams, size, bans, limit, levels, tokens, parents, scores):
    """Put what followed the last tokens below a root: its nodes in order [K], parents by number with the root as 0.

    Returns how many nodes there are.

    Args:
        limit, levels: most nodes and levels.
    """
    most, text = len(ngrams.weights), ngrams.text
    places, numbers, lengths = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    found = _find_matches(ngrams, size, places, numbers) if levels > 0 else 0
    if not found:
        return 0
    for m in range(found):
        lengths[m] = _num_drawable(text, places[m], min(size - places[m], levels), bans)
    # Log of the rate at which the longest match of a length was right so far, with a prior.
    log_rates = np.empty(len(ngrams.hits), np.float64)
    for n in range(len(log_rates)):
        log_rates[n] = math.log((ngrams.hits[n] + ngrams.prior[n]) / ngrams.trials[n])
    order, room = np.empty(found, np.int64), found * levels
    _sort_matches(text, places, lengths, order)
    own_tokens, own_parents, own_scores = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.float64)
    inputs = places, lengths, ngrams.weights, numbers, log_rates, order, levels
    num = _build_trie(text, *inputs, own_tokens, own_parents, own_scores)
    is_taken, names, count = np.empty(num, np.bool_), np.zeros(num + 1, np.int64), 0
    # Rounded as the plain way does, which keeps scores in float32: ties must fall the same way.
    for i in range(num):
        own_scores[i] = np.float64(np.float32(own_scores[i]))
    take_best(own_scores, num, limit, is_taken)
    # Parents come before children, so a taken node finds the number of its parent in `names`.
    for i in range(num):
        if is_taken[i]:
            tokens[count], parents[count], scores[count] = own_tokens[i], names[own_parents[i]], own_scores[i]
            count += 1
            names[i + 1] = count
    return count


@kernel(error_model="numpy")
def _sort_matches(text, places, lengths, order):
    """Sort the matches by the tokens from their places on, a shorter one first: to order [M]."""
    # Insertion sort by the tokens that follow; equal beginnings become neighbours, which the trie needs.
    for m in range(len(order)):
        place = m
        while place:
            other, d = order[place - 1], 0
            both = min(lengths[other], lengths[m])
            while d < both and text[places[other] + d] == text[places[m] + d]:
                d += 1
            if d == both and lengths[other] <= lengths[m]:
                break
            if d < both and text[places[other] + d] < text[places[m] + d]:
                break
            order[place] = other
            place -= 1
        order[place] = m


@kernel(error_model="numpy")
def _build_trie(text, places, lengths, weights, numbers, log_rates, order, levels, node_tokens, parents, scores):
    """Return the trie of some matches, level by level: tokens, parents (1 for the first node, 0 for the root) and scores.

    Returns the number of nodes.
    """
    count, num = len(order), 0
    above, here = np.zeros(count, np.int64), np.zeros(count, np.int64)  # of each match the node above and at the level
    differs = np.zeros(count, np.bool_)
    mass, family = np.empty(len(scores), np.float64), np.zeros(len(scores) + 1, np.float64)
    best = np.empty(len(scores), np.int64)
    for d in range(levels):
        first = num
        for i in range(count):
            m, before = order[i], order[i - 1]
            # Sorted matches with the same first d tokens are neighbours: a match opens a node at level d if it differs
            # from the one before there or above. Example: [a b], [a c], [d] give nodes a, d at level 0 and b, c at level 1.
            is_same = i > 0 and not differs[i] and lengths[before] > d
            is_same = is_same and text[places[before] + d] == text[places[m] + d]
            if lengths[m] <= d:
                differs[i] = True
                continue
            if not is_same:
                differs[i] = True
                node_tokens[num], parents[num], mass[num], best[num] = text[places[m] + d], above[i], 0.0, m
                num += 1
            here[i] = num
            mass[num - 1] += weights[m]
            best[num - 1] = min(best[num - 1], m)
        if num == first:
            break
        for node in range(first, num):
            family[parents[node]] += mass[node]
        for node in range(first, num):
            # log P(node) = log of its share among its siblings + log of the rate of its best match + that of its parent.
            rate = log_rates[min(numbers[best[node]] + d, len(log_rates) - 1)]
            step = math.log(mass[node]) - math.log(family[parents[node]]) + rate
            scores[node] = step + (scores[parents[node] - 1] if parents[node] else 0.0)
        above, here = here, above
    return num


@cache
def compile_kernels() -> None:
    """Compile the kernels of lookups, once for each installation; other processes and later ones load the result."""
    ids, reals = int64[::1], float64[::1]
    ngrams = types.NamedTuple([ids, int64[:, ::1], ids, reals, reals, reals, reals, int64, int64], Ngrams)
    bans = types.NamedTuple([ids, ids, uint8[::1]], Bans)
    compile_all(
        {
            extend_ngrams: (ngrams, int64, ids),
            move_entries: (ngrams, ids),
            grow_tree: (ngrams, int64, bans, int64, int64, ids, ids, reals),
        }
    )
