"""Arguments and results of kernels, in the form that the plain paths share. Nothing here needs numba or Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eyas.arrays import NO_ROWS, Bools, Floats, Ints
from eyas.protocol.commit import NoiseKey

if TYPE_CHECKING:
    from eyas.kernels.probabilities import Filters

# Applies temperature and filters, see `kernels.probabilities`, to logits [N, D]: probabilities of the same shape.
ProbsFunction: TypeAlias = "Callable[[Tensor, Filters], Tensor]"

MIN_TEMPERATURE = 1e-6
# A probability counts for top-p in units of 2**-MASS_BITS: sums of integers do not depend on their order.
MASS_BITS = 40
# Token of a row whose draw was left out, see `Draws.along`.
UNREACHED = -1


class Draws:
    """The inputs of rows' draws besides logits. Neighbouring rows share a key: a step has a thousand rows, and few keys.

    Args:
        keys: of each run of rows, [K].
        positions: absolute position of each row's token, [N].
        counts: rows of each run, [K]; one by default.

    Attributes:
        above, drafted: of rows that are nodes of draft trees, see `along`; else empty.
    """

    def __init__(
        self, keys: Sequence[NoiseKey], positions: Sequence[int] | Ints, counts: Sequence[int] | Ints | int = 1
    ) -> None:
        self.keys = keys
        self.positions: Ints = np.asarray(positions, np.int64)
        self._owners = np.repeat(np.arange(len(keys)), counts)
        self.above = self.drafted = NO_ROWS

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def keys_of_rows(self) -> list[NoiseKey]:
        """The key of each row [N]."""
        return [self.keys[owner] for owner in self._owners.tolist()]

    def by_row(self, values: Sequence[float], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return the value of each row's key [N], from one for each of `keys` [K]."""
        return np.array(values, dtype)[self._owners]

    def along(self, above: Ints, drafted: Ints) -> Draws:
        """Return these draws for nodes of draft trees whose accepted paths alone count.

        A kernel may leave out a node that the token drawn at its parent does not lead to, and return UNREACHED for it.

        Args:
            above: row of each node's parent, which comes before it; a root's own [N].
            drafted: token of each node [N].
        """
        found = copy(self)
        found.above, found.drafted = above, drafted
        return found

    def taken(self, rows: Sequence[int] | Ints) -> Draws:
        """Return the draws of some rows, in this order; each counts."""
        return Draws([self.keys[owner] for owner in self._owners[rows].tolist()], self.positions[rows])


def has_filters(key: NoiseKey) -> bool:
    """Return whether the key's draws leave tokens out."""
    return key.temperature > 0 and (key.top_k > 0 or key.top_p < 1 or key.min_p > 0)


class Scale(NamedTuple):
    """Inputs of a token's mass besides its logit: it is 2**MASS_BITS * exp((logit - largest) / temperature).

    Attributes:
        largest: float32 [N], over the whole vocabulary; infinity where the row holds NaN or infinity, so that no token has
            mass.
        temperature: float32 [N], above 0.
    """

    largest: Tensor
    temperature: Tensor


class Kept(NamedTuple):
    """Bounds of the tokens of a part that are kept, [N] each.

    Attributes:
        last: int64, bits of the last kept logit, see `ordered_bits`; all tokens above it are kept.
        before: int64, mass of all tokens before the part's first one at that logit.
        wanted: int64; a token at that logit is kept if the mass before it is lower.
        min_p: float32, share of the likeliest token's mass that a token must have.
    """

    last: Tensor
    before: Tensor
    wanted: Tensor
    min_p: Tensor


# Candidates up to which the kernels, which find one after the other, are faster than torch.topk.
MAX_KERNEL_K = 64


class Ranked(NamedTuple):
    """The k highest scores of each row, best first, and their ids."""

    scores: Tensor
    ids: Tensor


class Frontier(NamedTuple):
    """The nodes of a level that are expanded.

    Attributes:
        scores, tokens: [S, W].
        rows: of each one's parent within the frontier before, [S, W].
        parents: candidate number of each one, once for each of its children, [S, W * children].
    """

    scores: Tensor
    tokens: Tensor
    rows: Tensor
    parents: Tensor


# Filters of draft probabilities at lower temperatures would leave one token.
MIN_FILTER_TEMPERATURE = 0.1


class AttentionRule(NamedTuple):
    """How a layer weighs the keys that a row sees.

    Attributes:
        scaling: of the scores.
        window: of sliding-window attention, in tokens.
        softcap: limit of the scores, as in Gemma 2.
        sinks: of each query head [H], as in gpt-oss: the score of a key without a value, which no softcap or scale changes.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class KVScales(NamedTuple):
    """Divisors of the keys and values of a layer before they are rounded to 8 bits."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


# Keys from which on a tile is cut into more parts than filling the device takes: others would wait for one long prefix.
LONG_PART = 2048


NO_SLOTS, NO_MASK = np.zeros(0, np.int64), np.zeros(0, np.bool_)


class KeptStates(NamedTuple):
    """Buffers in which a compiled pass keeps the residual stream before some layers.

    Attributes:
        layers: which. Their number stands for the state behind the last one, -1 for its norm.
        states: of each row of memory, one layer beside the other [., len(layers) * C].
        rows: of these, for each row of the pass [R].
    """

    layers: Ints
    states: Floats
    rows: Ints

    def of(self, number: int) -> Floats:
        """Return the states before one of the layers, by its place among them [., C]; a view."""
        width = self.states.shape[1] // len(self.layers)
        return self.states[:, number * width : (number + 1) * width]


NOTHING_KEPT = KeptStates(np.zeros(0, np.int64), np.zeros((0, 0), np.float32), np.zeros(0, np.int64))


class RowKeys(NamedTuple):
    """Keys that the rows of some segments of a pass see, in the order in which `attend` of the CPU's kernels takes it.

    Attributes:
        starts, ends: of each segment's rows among those of the pass [B].
        prefix: slots of all prefixes [P].
        prefix_ends: where each ends [B].
        causal: whether a row sees its whole prefix and the rows up to itself, which have consecutive positions [B].
        num_masked: the last slots of each prefix that `visible` names too [B].
        visible: flat masks [n, num_masked + n] of the other segments, one after the other.
        positions: of the rows [R].
    """

    starts: Ints
    ends: Ints
    prefix: Ints
    prefix_ends: Ints
    causal: Bools
    num_masked: Ints
    visible: Bools
    positions: Ints


# Outputs in a block of a weight that the kernels of the CPU multiply by.
BLOCK_OUTPUTS = 16
# How such a weight is stored: as float32, as float16, as integers of 8 bits that are multiplied in float32 or, in words
# of QUAD_INPUTS, by rows that are rounded to 8 bits; or as bfloat16, in pairs of inputs, by rows that are rounded to it.
FLOATS, HALVES, BYTES, DOTS, PAIRS = range(5)
QUAD_INPUTS = 4
# Inputs that a matrix unit takes at a time; of pairs, a weight has whole steps.
STEP_INPUTS = 32
# Inputs of an output that share a scale, of 8-bit integers; and rows of a block behind these inputs, which hold the
# outputs' float32 scales.
GROUP_INPUTS, SCALE_INPUTS = 16, 4
# Rows and columns of a weight that a kernel multiplies at once, at most: one scale must cover them.
SCALED_TILE = 64


class Routing(NamedTuple):
    """Choice of experts by rows.

    Attributes:
        shares: of the K experts of each row, likeliest first, [R, K].
        pairs: of each expert the rows that chose it, [E, R] int32, as row * K + k for the k-th expert of a row.
        counts: how many these are, [E] int32; what is behind them has no meaning.
    """

    shares: Tensor
    pairs: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Projected:
    """Projections of a layer's rows that attention needs: query [R, heads, d], key and value [R, kv heads, d], residual
    [R, H].

    is_cached: whether key and value are in their slots of the KV cache already.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor
    is_cached: bool = False


@dataclass(frozen=True)
class LayerSlots:
    """Keys and values of a layer in the KV cache, [S, J, d], and the slots of a pass's rows [R]."""

    keys: Tensor
    values: Tensor
    slots: Tensor


class NormWeight(NamedTuple):
    """A root-mean-square norm, as kernels take one. adds_one: multiply by 1 + weight."""

    weight: Tensor
    eps: float
    adds_one: bool = False


class RecurrentInputs(NamedTuple):
    """Rows of a recurrent layer, in any float type.

    Attributes:
        queries, keys: [R, J, K], each for H / J heads of values.
        values: [R, H, V].
        gates: logarithms of decays [R, H], or [R, H, K] with one for each channel of keys.
        betas: factors of what a row adds [R, H].
        is_delta: whether that follows the gated delta rule, which takes queries and keys of length 1; else it is
            beta_i k_i v_i, as in Mamba-2 (arXiv 2405.21060) with its steps as betas.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor
    betas: Tensor
    is_delta: bool


# Added to the square of a key's length before its root.
LENGTH_EPSILON = 1e-6
# Rows that a program of the recurrent kernel computes at once, at most; and the words that say what it computes.
BLOCK_ROWS = 16
SEGMENT_WORDS, BLOCK_WORDS = 11, 3


class ScanTables(NamedTuple):
    """Rows of a pass as the recurrent kernel reads them, int64.

    Attributes:
        segments: SEGMENT_WORDS for each: its first block and the one behind its last; its first row and its number of rows;
            rows of the pools to read and to write; its first word in `pending` and how many it has; the row of the stash
            for its first row or -1; its first cell in `visible`, or -1 for a chain; and 1 if its state stays before it.
        blocks: BLOCK_WORDS for each: its first row, the row behind its last, and the row of the pools for the state behind
            it or -1.
        pending: rows of the stash.
        visible: masks of trees [n, n], one after the other, bool.
        num_spare: segments without a sequence, which write to states of their own: -1 is the row of the first.
    """

    segments: Tensor
    blocks: Tensor
    pending: Tensor
    visible: Tensor
    num_spare: int
