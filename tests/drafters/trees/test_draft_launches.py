"""What drafting would launch and move on a GPU, counted on the `meta` device. The figures are ratchets: they may only fall.

Sizes are those of Llama 3.1 8B; trees have 8 levels of width 10 where the heads reach as far.
"""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.trees.rows import GrownRows
from eyas.drafters.trees.scoring import ScorerKind
from eyas.models.heads.layers import quantise_head

pytest.importorskip("triton", reason="triton is not installed")

from tests.support import weightless
from tests.support.devices.launches import META, Launches
from tests.support.weightless import HIDDEN, METHODS, NUM_HEADS, commits, drafter_of

# Of a round of one session: trees by kind of noise, and sampled chains.
ROUNDS = {
    "eagle1": (161, 162, 172, 85),
    "eagle2": (198, 199, 215, 145),
    "eagle3": (179, 180, 196, 132),
    "peagle": (146, 147, 163, 91),
    "dspark": (176, 177, 193, 135),
    "dspark-rnn": (248, 249, 265, 207),
    "dflash": (143, 144, 160, 88),
    "dflash2": (250, 251, 267, 209),
    "medusa": (84, 85, 93, 19),
    "medusa-dynamic": (66, 67, 75, 19),
    "hydra": (113, 114, 122, 48),
    "sps": (266, 267, 283, 219),
}
# Of a commit's new rows.
EXTENSIONS = {
    "eagle1": 25, "eagle2": 25, "eagle3": 26, "peagle": 62, "dspark": 30, "dspark-rnn": 30, "dflash": 30, "dflash2": 30,
    "medusa": 3, "medusa-dynamic": 3, "hydra": 3, "sps": 30,
}  # fmt: skip
# Of a pass over rows of trees that grow ahead.
ROWS_AHEAD = {"eagle1": 26, "eagle2": 26, "eagle3": 28}


@cache
def drafter(method: str) -> NeuralDrafter[Any]:
    return drafter_of(method)


def draft_round(method: str, kind: ScorerKind, sessions: int = 1, num_levels: int | None = None) -> Launches:
    """A captured round of trees behind prefixes of any length."""
    graphs = drafter(method).graphs
    assert graphs is not None
    with torch.inference_mode(), Launches() as found:
        graphs.rounds[kind].stages(sessions).run(num_levels)
    return found


def chain_round(method: str, sessions: int = 1) -> Launches:
    """A captured round of sampled chains."""
    graphs = drafter(method).chain_graphs
    assert graphs is not None
    with torch.inference_mode(), Launches() as found:
        graphs.rounds.stages(sessions).run()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_round_of_trees_launches_few_kernels(method: str) -> None:
    kinds: tuple[ScorerKind, ...] = ("plain", "noised", "filtered")
    for kind, most in zip(kinds, ROUNDS[method], strict=False):
        found = draft_round(method, kind)
        assert found.num <= most, found.by_name


@pytest.mark.parametrize("method", [method for method in METHODS if method != "sps"])
def test_a_head_of_8_bits_reads_half_of_its_weights(method: str) -> None:
    """In as many launches, but for Medusa: its heads share products otherwise."""
    make = "eagle_head" if "eagle" in method else "multi_head" if method.startswith(("medusa", "hydra")) else "block_head"
    head: Any = copy.deepcopy(getattr(weightless, make)(method.removesuffix("-dynamic")))
    head.quantise(META, "fp8") if method.startswith("medusa") else quantise_head(head, META, "fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weightless, make, lambda method: head)
        narrow = drafter_of(method)
    assert narrow.graphs is not None
    with torch.inference_mode(), Launches() as found:
        narrow.graphs.rounds["plain"].stages(1).run(None)
    whole = draft_round(method, "plain")
    assert found.num <= whole.num + (4 * NUM_HEADS if "medusa" in method else 0), found.by_name
    assert found.product_bytes < 0.52 * whole.product_bytes


@pytest.mark.parametrize("method", METHODS)
def test_a_round_of_chains_launches_few_kernels(method: str) -> None:
    found = chain_round(method)
    assert found.num <= ROUNDS[method][3], found.by_name


@pytest.mark.parametrize("method", METHODS)
def test_new_rows_launch_few_kernels_for_any_sessions(method: str) -> None:
    counts = []
    for sessions in (1, 16):
        contexts = commits(drafter(method), range(500, 500 + sessions), 3)
        with torch.inference_mode(), Launches() as found:
            drafter(method)._extend(contexts)
        drafter(method).release([context.session for context in contexts])
        counts.append(found.num)
    assert counts[0] == counts[1] <= EXTENSIONS[method], found.by_name


@pytest.mark.parametrize("method", ROWS_AHEAD)
def test_rows_ahead_launch_few_kernels_for_any_sessions(method: str) -> None:
    own, counts = drafter(method), []
    assert isinstance(own, EagleDrafter)
    for sessions in (1, 4):
        contexts = commits(own, range(500, 500 + sessions), 3)
        with torch.inference_mode(), Launches() as found:
            own.run_rows(contexts, [rows_below_root(32)] * sessions, 32)
        own.release([context.session for context in contexts])
        counts.append(found.num)
    assert counts[0] == counts[1] <= ROWS_AHEAD[method], found.by_name


def rows_below_root(count: int) -> GrownRows:
    """New nodes behind the root."""
    tokens, ones = np.arange(count), np.ones(count, np.int64)
    states = torch.empty(count, HIDDEN, dtype=torch.bfloat16, device=META)
    return GrownRows(tokens, ones, states, tokens, 1 + tokens, 0 * ones, ones > 0, ones[:0], np.eye(count, dtype=np.bool_))


def test_a_round_of_small_trees_launches_fewer_levels() -> None:
    counts = [draft_round("eagle3", "plain", 1, num_levels).num for num_levels in (1, 2, 4, 8)]
    assert all(count <= most for count, most in zip(counts, (46, 64, 103, 179), strict=True)), counts


@pytest.mark.parametrize(("kind", "most"), [("plain", 1.55e9), ("filtered", 2.01e9)])
def test_draft_rounds_of_many_sessions_move_few_bytes(kind: ScorerKind, most: float) -> None:
    found = draft_round("eagle3", kind, 64)
    assert found.other_bytes <= most, found.bytes_by_name
