"""Kernels of experts over ranks: each computes its part of every expert, and the sum over ranks is the module's own.

Ranks are threads, and the kernels run in triton's interpreter, one at a time.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eyas.models.inputs import Segment
from eyas.models.layers import fused
from eyas.models.layers.attention import ATTENTION_NAME, register_attention
from eyas.models.layers.experts import RoutedExperts
from eyas.models.layers.fused import fuse_layers, unfuse_layers
from eyas.models.loading import load_target
from eyas.models.parallel.shards import Shard, shard_model
from eyas.models.supported import inspect_architecture
from eyas.models.target import TargetModel
from tests.models.layers.test_fused import GEMMA_4
from tests.support.devices.rank_threads import RankThreads
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.tiers import tiered

pytest.importorskip("triton", reason="triton is not installed")

NUM_RANKS, NUM_LAYERS, ROWS = 2, 3, np.arange(7)
SEGMENT = Segment(3 + ROWS * 7 % 40, ROWS, ROWS, ROWS[:0], None, ROWS)
MODELS = ("mixtral", "qwen-3-moe", "gemma-4")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of experts. Layers take kernels here, though attention does not."""
    from triton.runtime.interpreter import InterpretedFunction

    from eyas.kernels.cuda import experts as expert_kernels
    from eyas.kernels.cuda import layers as layer_kernels

    lock, run = threading.Lock(), InterpretedFunction.run

    def run_alone(*args: Any, **named: Any) -> None:
        with lock:
            run(*args, **named)

    monkeypatch.setattr(InterpretedFunction, "run", run_alone)
    monkeypatch.setattr(fused, "fused_kernels", lambda *_: layer_kernels)
    return expert_kernels


def write_family(name: str, folder: Path) -> str:
    kind, settings = FAMILIES[name]
    return write_model(folder, config_of(kind, **settings | (GEMMA_4["experts"] if name == "gemma-4" else {})))


def rank_of(folder: str, rank: int) -> TargetModel:
    """One rank's part of a fused target, without the exchanges of a load."""
    register_attention()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME)
    model.config.pad_token_id = None
    shard, architecture = Shard(rank, NUM_RANKS), inspect_architecture(model.config)
    shard_model(model, shard, [shape.num_heads for shape in architecture.kv_shapes])
    target = TargetModel(model, shard=shard, architecture=architecture)
    assert fuse_layers(model)
    return target


def logits_of(target: TargetModel) -> Tensor:
    """Of all rows; of a rank those of its part of the vocabulary."""
    return target.forward(target.pack([SEGMENT]), target.new_kv_cache(len(ROWS))).logits


def logits_over_ranks(targets: Sequence[TargetModel], run: Callable[[TargetModel], Tensor] = logits_of) -> Tensor:
    return torch.cat(RankThreads(NUM_RANKS).run(lambda rank: run(targets[rank])), -1)


@pytest.mark.parametrize("name", tiered(MODELS, ("gemma-4",)))
def test_ranks_with_kernels_equal_the_whole_model(
    name: str, tmp_path: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exchanges of the modules, in their order; a rank without memory counts on that."""
    folder, routed, route = write_family(name, tmp_path), list[Tensor](), kernels.route
    targets = [rank_of(folder, rank) for rank in range(NUM_RANKS)]
    monkeypatch.setattr(kernels, "route", lambda *args: (routed.append(args[0]), route(*args))[1])
    found = logits_over_ranks(targets)
    assert len(routed) == NUM_RANKS * NUM_LAYERS
    exchanges = targets[0].model.exchanges.known
    for target in targets:
        unfuse_layers(target.model)
    torch.testing.assert_close(found, logits_over_ranks(targets), rtol=1e-4, atol=1e-4)
    assert targets[0].model.exchanges.known == exchanges
    assert len(exchanges) == NUM_LAYERS * (3 if name == "gemma-4" else 2)
    whole = load_target(folder)
    unfuse_layers(whole.model)
    torch.testing.assert_close(found, logits_of(whole), rtol=1e-4, atol=1e-4)


def test_a_rank_without_memory_in_its_experts_sums_zeros(
    tmp_path: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank ends its pass, and the next one is right."""
    folder, short_rank = write_family("gemma-4", tmp_path), threading.local()
    targets = [rank_of(folder, rank) for rank in range(NUM_RANKS)]
    expected, combine = logits_over_ranks(targets), kernels.combine

    def combine_if_it_fits(*args: Any) -> Tensor:
        if hasattr(short_rank, "exchanges"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return combine(*args)

    def run(target: TargetModel) -> Tensor:
        if target is targets[0]:
            return logits_of(target)
        short_rank.exchanges = exchanges = target.model.exchanges
        with pytest.raises(torch.OutOfMemoryError):
            logits_of(target)
        assert exchanges.can_finish
        exchanges.finish(target.device)
        return torch.zeros(0)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "combine", combine_if_it_fits)
        RankThreads(NUM_RANKS).run(lambda rank: run(targets[rank]))
    assert torch.equal(logits_over_ranks(targets), expected)


def test_only_the_sum_over_ranks_is_taken_for_it(tmp_path: Path) -> None:
    """With any other hook on the experts their own module runs, which calls it."""
    model: Any = AutoModelForCausalLM.from_pretrained(write_family("mixtral", tmp_path))
    block = model.model.layers[0].mlp
    whole = RoutedExperts.of_block(block, "silu")
    hook = block.experts.register_forward_hook(lambda module, args, output: 2 * output)
    assert whole is not None
    assert whole.sum_ranks is None
    assert RoutedExperts.of_block(block, "silu") is None
    hook.remove()
    shard_model(model, Shard(0, NUM_RANKS), [shape.num_heads for shape in inspect_architecture(model.config).kv_shapes])
    sharded = RoutedExperts.of_block(block, "silu")
    assert sharded is not None
    assert sharded.sum_ranks == model.exchanges.sum
