"""Hidden states that a pass collects: by hooks, or in the KV cache's slots by the kernel of all layers."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eyas.models.backends.cpu import CpuLayer
from eyas.models.backends.packed_weights import has_fbgemm
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.tiers import tiered

FUSED = ("llama-3", "rope-yarn", "qwen-2", "qwen-3", "phi-3", "gemma-2", "gemma-3")
ROWS = 20


@pytest.fixture(autouse=True)
def kernels() -> None:
    pytest.importorskip("numba")
    if not has_fbgemm():
        pytest.skip("this torch was built without FBGEMM")


@pytest.mark.parametrize("name", tiered(FUSED, ("llama-3", "qwen-3", "phi-3", "gemma-3")))
def test_a_pass_keeps_states_beside_its_keys(name: str, tmp_path: Path) -> None:
    """In the slots of the rows, whatever their order, as hooks see them."""
    kind, settings = FAMILIES[name]
    layers = (3, 0, FINAL_NORM_OUTPUT, 2)
    folder = write_model(tmp_path, config_of(kind, **settings | {"attention_bias": False}), torch.bfloat16)
    target = load_target(folder, aux_hidden_state_layers=(*layers, len(load_target(folder).kv_shapes)))
    none, rows, slots = np.zeros(0, np.int64), np.arange(ROWS), np.random.default_rng(0).permutation(ROWS + 3)[:ROWS]
    packed = target.pack([Segment(3 + rows * 7 % 40, rows, slots, none, None, rows)])
    expected = target.forward(packed, target.new_kv_cache(ROWS + 3)).aux_hidden_states
    assert expected is not None
    keeping = target.new_kv_cache(ROWS + 3, expected.shape[1])
    keeping.state_layers = target.aux_hidden_state_layers
    assert target.forward(packed, keeping).aux_hidden_states is None
    assert torch.equal(keeping.features[slots], expected)
    others = np.setdiff1d(np.arange(len(keeping.features)), slots)
    assert not keeping.features[others].any()
    decoder = target.model.get_decoder().forward.__self__
    decoder.share(3)
    keeping.features.zero_()
    target.forward(packed, keeping)
    assert torch.equal(keeping.features[slots], expected)
    decoder.stack = None
    assert torch.equal(target.forward(packed, keeping).aux_hidden_states, expected)


@pytest.mark.parametrize("before", ["failed", "other"])
def test_a_pass_has_no_states_of_another(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that failed behind some layers, or ran for another target on the same weights."""
    target = load_target("models/demo/target", aux_hidden_state_layers=(0, 2))
    keeping = target.new_kv_cache(100, 2 * target.config.hidden_size)
    keeping.state_layers = target.aux_hidden_state_layers
    none, rows = np.zeros(0, np.int64), np.arange(65)
    long = target.pack([Segment(rows % 7, rows, rows, none, None, rows)])
    short = target.pack([Segment(rows[:1], rows[:1], rows[:1], none, None, rows[:1])])
    if before == "other":
        other = target.with_features((1,))
        assert other.forward(long, other.new_kv_cache(100)).aux_hidden_states is not None
    else:
        decoder = target.model.get_decoder().forward.__self__
        monkeypatch.setattr(decoder, "stack", None)
        monkeypatch.setattr(CpuLayer, "finish", Mock(side_effect=[None, None, None, RuntimeError("no memory")]))
        with pytest.raises(RuntimeError, match="no memory"):
            target.forward(long, keeping)
    monkeypatch.undo()
    assert target.forward(short, keeping).aux_hidden_states is None
    found = target.forward(long, target.new_kv_cache(100)).aux_hidden_states
    assert found is not None
    assert found.shape[1] == 2 * target.config.hidden_size
