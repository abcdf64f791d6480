"""Deterministic mode on CUDA: a row gets the same bits alone, in a batch, in a tree, in chunks and in a padded graph.

Where there is no GPU the kernels run in triton's interpreter.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.engine.deterministic import BatchInvariantRunner
from eyas.errors import ConfigError
from eyas.models import loading
from eyas.models.backends.attention_metadata import Tiling, bucket_shape, count_parts, has_room
from eyas.models.backends.cuda import FixedProducts, KernelBackend, check_batch_invariance, check_kernels
from eyas.models.backends.cuda_graphs import CaptureLimits, GraphBackend
from eyas.models.heads.layers import Float8Linear
from eyas.models.inputs import Segment, Segments
from eyas.models.layers import fused
from eyas.models.target import TargetModel
from tests.support.devices.interpreter import fixed_products, run_again
from tests.support.devices.random_passes import make_pass
from tests.support.tiny import write_target

layer_kernels = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
kernel = pytest.importorskip("eyas.kernels.cuda.attention")

TILING = Tiling(heads_per_kv=2, num_kv=2, num_processors=4, max_rows=16, longest=128, fixed_part=32)
LENGTH = 44  # of the prompt: a part, and a block that the tree goes on with
NONE = np.zeros(0, dtype=np.int64)
# A tree of ten nodes, two tiles; nodes 0, 2, 5, 7 and 9 are a path across the end of a part.
PARENTS = (0, 0, 0, 1, 1, 2, 3, 5, 5, 7)
PATH = (0, 2, 5, 7, 9)


@pytest.fixture(scope="module")
def target_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    """A target whose layers run as they do on CUDA, kernel by kernel, on the CPU."""
    folder = write_target(tmp_path_factory.mktemp("shallow"), layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "optimize_for_cpu", lambda *_: None)  # products are those of torch
        patch.setattr(kernel, "keys_per_block", lambda row_bytes: 16)
        patch.setattr("eyas.models.backends.cuda.CHECKED_PROMPT", 20)
        fixed_products(patch)
        yield loading.load_target(str(folder))


@pytest.fixture
def launched(target_model: TargetModel) -> KernelBackend:
    return KernelBackend(target_model, TILING, 400)


def tokens_at(positions: np.ndarray) -> np.ndarray:
    return 3 + positions * 7 % 40


def causal(start: int, end: int, slots: np.ndarray) -> Segment:
    """Rows of the sequence that has `slots`; the logits of the last one are asked for."""
    rows = np.arange(start, end)
    return Segment(tokens_at(rows), rows, slots[start:end], slots[:start], None, np.array([end - start - 1]))


def tree_of(slots: np.ndarray) -> Segment:
    """The tree behind the prompt. Along PATH it has the tokens of the sequence."""
    visible = np.eye(len(PARENTS), dtype=np.bool_)
    for node, parent in enumerate(PARENTS):
        visible[node] |= visible[parent]
    depths = visible.sum(1) - 1
    tokens = 3 + np.arange(len(PARENTS))
    tokens[list(PATH)] = tokens_at(LENGTH + np.arange(len(PATH)))
    own = slots[LENGTH : LENGTH + len(PARENTS)]
    return Segment(tokens, LENGTH + depths, own, slots[:LENGTH], visible, np.arange(len(PARENTS)))


def test_a_tree_in_a_batch_has_the_bits_of_plain_decoding(launched: KernelBackend) -> None:
    """Prompt as a whole, then a tree; against a prompt in chunks, then row by row, beside others and in padded graphs."""
    model, slots = launched.target, np.random.default_rng(0).permutation(400)
    alone, batch = model.new_kv_cache(400), model.new_kv_cache(400)
    mine, theirs, others = slots[:100], slots[100:200], slots[200:]
    runner = BatchInvariantRunner(model, alone, None, 1, launched)
    assert runner.keeps_batches
    whole = runner.forward([causal(0, LENGTH, mine)]).logits
    drafted = runner.forward([tree_of(mine)]).logits
    graphs = GraphBackend(launched, batch, CaptureLimits(4, 3, 400), run_again)
    batched = BatchInvariantRunner(model, batch, None, 1, graphs)
    for start, end in ((0, 9), (9, LENGTH)):
        logits = batched.forward([causal(start, start + 3, others), causal(start, end, theirs)]).logits
    assert torch.equal(logits[-1], whole[-1])
    for place, node in enumerate(PATH):
        row = causal(LENGTH + place, LENGTH + place + 1, theirs)
        logits = batched.forward([row, causal(place, place + 2, others)]).logits
        assert torch.equal(logits[0], drafted[node]), node


def test_the_kernels_are_checked_against_plain_operations(launched: KernelBackend) -> None:
    check_kernels(launched)
    check_batch_invariance(launched)


def test_kernels_that_depend_on_the_batch_are_refused(launched: KernelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.attend_by_position
    monkeypatch.setattr(kernel, "attend_by_position", lambda q, *rest: right(q, *rest) * (1 + 1e-6 * (len(q) == 4)))
    with pytest.raises(ConfigError, match=r"differ in their bits .* engine\.deterministic to false"):
        check_batch_invariance(launched)


@pytest.mark.parametrize("bias", [False, True])
def test_fixed_products_equal_those_of_torch(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(40, 70, bias=bias)
    rows = torch.randn(1, 19, 40, generator=generator)
    with torch.inference_mode():
        expected, wanted = layer(rows), torch.mm(rows[0], layer.weight.T)
        with FixedProducts():
            found, product = layer(rows), torch.mm(rows[0], layer.weight.T)
            single = layer(rows[:, 5:6])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(product, wanted)
    assert torch.equal(found[:, 5:6], single)


def test_a_weight_of_8_bits_is_multiplied_as_its_numbers() -> None:
    layer = torch.nn.Linear(40, 70)
    narrow, rows = Float8Linear(layer), torch.randn(2, 19, 40)
    with torch.inference_mode():
        found = layer_kernels.linear(rows, narrow.weight, narrow.bias, rows.dtype, scales=narrow.scales)
        torch.testing.assert_close(found, narrow(rows))
        torch.testing.assert_close(found, layer(rows), atol=0.1, rtol=0.1)


def test_a_pass_of_many_parts_leaves_the_graph() -> None:
    """A graph has room for few long prefixes; passes with more are launched kernel by kernel."""
    segments = make_pass([(True, 6, 400)] * 3)
    tiling = Tiling(2, 2, 4, max_rows=16, longest=1024, fixed_part=2)
    shape = bucket_shape(24, 3, tiling)
    needs = count_parts(segments, shape.tile_rows, 2)
    assert needs.tiles > shape.tiles
    assert not has_room(shape, segments)
    assert has_room(shape, Segments.of(segments[:1]))


def test_layers_that_are_not_fused_run_one_by_one(target_model: TargetModel, tmp_path: Path) -> None:
    class OnCuda:
        """The same model, as if it were on a GPU."""

        device = torch.device("cuda")

        def __init__(self, layers: list[object]) -> None:
            self.layers = layers

        def modules(self) -> Iterator[torch.nn.Module]:
            return target_model.model.modules()

        def get_decoder(self) -> "OnCuda":
            return self

    layers = target_model.model.get_decoder().layers
    assert fused.is_batch_invariant(OnCuda(layers))
    assert not fused.is_batch_invariant(OnCuda([torch.nn.Identity()]))
    assert not fused.is_batch_invariant(OnCuda([]))
