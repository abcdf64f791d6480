"""Processes that share a target give the output of one process, and notice when one of them dies."""

import json
import math
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache, KVShape
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine, gather_ranks
from eyas.engine.engine import Engine
from eyas.errors import CheckpointError, ConfigError, Unavailable
from eyas.llm import LLM
from eyas.models.backends.base import BackendKind, BackendPlan
from eyas.models.backends.cuda_graphs import CaptureLimits
from eyas.models.checkpoint import Checkpoint, WeightFiles
from eyas.models.heads.eagle import load_fuser
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.inputs import Segment, pack
from eyas.models.loading import load_target, read_model_config
from eyas.models.parallel.commands import InitKVCache
from eyas.models.parallel.shards import Shard, load_shard, shard_model, weightless_model
from eyas.models.parallel.workers import RankInfo, TargetWorkers
from eyas.models.target import TargetModel
from tests.support.bad_drafters import RandomDrafter
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.runs import assert_plain, run
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, write_head

TREE = TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
PLAN = BackendPlan(BackendKind.PLAIN, CaptureLimits(0, 0, 0))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target: two ranks share its key-value heads, four hold copies, and four cannot share its vocabulary."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("shared")
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_head(tmp_path_factory.mktemp("head"), vocab_size=50))


@dataclass(frozen=True)
class Shared:
    """A target as rank 0 has it."""

    ranks: TargetWorkers
    model: TargetModel
    fuser: FeatureFuser


@contextmanager
def shared(size: int, target: str, head: str) -> Iterator[Shared]:
    ranks = gather_ranks(RankInfo(0, size, "cpu"), target, "float32")
    try:
        fuser = load_fuser(head, target)
        yield Shared(
            ranks, load_target(target, aux_hidden_state_layers=fuser.aux_hidden_state_layers, shard=Shard(0, size)), fuser
        )
    finally:
        ranks.close()


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    kinds = [
        SamplingParams(16, 0.0, ignore_eos=True),
        SamplingParams(16, 0.8, ignore_eos=True),
        SamplingParams(16, 1.1, top_k=12, top_p=0.85),
        SamplingParams(16, 1.0, logprobs=2),
        SamplingParams(16, 1.0, top_p=0.9, ignore_eos=True),
        SamplingParams(16, 1.2, top_p=0.95, min_p=0.02, ignore_eos=True),
        SamplingParams(16, 1.1, min_p=0.05, ignore_eos=True),
    ]
    prompts = [tuple(rng.integers(3, 50, int(rng.integers(1, 40))).tolist()) for _ in kinds]
    return [Request(f"r{i}", prompt, replace(kinds[i], seed=i)) for i, prompt in enumerate(prompts)]


def engine_of(parts: Shared, target: str, head: str, drafter: str) -> Engine:
    config = fixed_config(max_kv_tokens=1024, max_prefill_tokens=16, max_num_seqs=4, tensor_parallel_size=parts.ranks.size)
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "eagle3": lambda: DraftHead(head, "eagle3").build_drafter(target, "float32", "cpu", TREE, DraftingConfig()),
        "random": lambda: RandomDrafter(50),
        "none": lambda: None,
    }
    return assemble_engine(parts.model, parts.fuser, config, TREE, drafters[drafter](), parts.ranks)


@pytest.mark.parametrize(("size", "drafters"), [(2, ("eagle3",)), nightly(2, ("random", "none")), nightly(4, ("eagle3",))])
def test_sharded_targets_equal_the_plain_loop(size: int, drafters: tuple[str, ...], target: str, head: str) -> None:
    with shared(size, target, head) as parts:
        assert parts.model.kv_shapes == [KVShape(max(1, 2 // size), 4, 4)] * 4
        assert (parts.model.shared_vocabulary is not None) == (size == 2)
        for drafter in drafters:
            assert_plain(target, requests(), run(engine_of(parts, target, head, drafter), requests()))
        check_features(parts, target)


def check_features(parts: Shared, target: str) -> None:
    """Rank 0 collects the hidden states of the whole model."""
    segment = Segment(np.arange(5, 12), np.arange(7), np.arange(7), np.arange(0), None, np.arange(7))
    outputs = []
    for ranks, model in (
        (TargetWorkers(), load_target(target, aux_hidden_state_layers=parts.fuser.aux_hidden_state_layers)),
        (parts.ranks, parts.model),
    ):
        with ranks.init_kv_cache(InitKVCache(16, PLAN)):
            kv_cache = KVCache(16, model.kv_shapes, 0, torch.float32, model.device)
        with ranks.forward([segment]):
            out, shared = model.forward(pack([segment], model.device), kv_cache), model.shared_vocabulary
            outputs.append(replace(out, logits=shared.collect([segment], out.logits).logits) if shared else out)
    torch.testing.assert_close(outputs[0].aux_hidden_states, outputs[1].aux_hidden_states)
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)


def test_a_dead_rank_is_noticed_while_idle_and_fails_every_step(target: str, head: str) -> None:
    with shared(2, target, head) as parts:
        reasons: SimpleQueue[str] = SimpleQueue()
        parts.ranks.register_failure_callback(reasons.put)
        engine = engine_of(parts, target, head, "none")
        engine.submit(requests()[0])
        engine.step()
        (process,) = multiprocessing.active_children()
        process.kill()
        assert "rank 1 of 2 is gone" in reasons.get(timeout=30)
        with pytest.raises(Unavailable, match="rank 1 of 2 is gone"):
            engine.step()


def test_a_step_that_rank_0_does_not_finish_fails_the_ranks(target: str, head: str) -> None:
    with shared(2, target, head) as parts:
        reasons: SimpleQueue[str] = SimpleQueue()
        with parts.ranks.init_kv_cache(InitKVCache(16, PLAN)):
            pass
        segment = Segment(np.arange(5), np.arange(5), np.arange(5), np.arange(0), None, np.arange(1))
        with pytest.raises(ZeroDivisionError), parts.ranks.forward([segment]):
            raise ZeroDivisionError
        parts.ranks.register_failure_callback(reasons.put)
        assert "out of step" in reasons.get(timeout=30)
        with pytest.raises(Unavailable, match="out of step"), parts.ranks.init_kv_cache(InitKVCache(16, PLAN)):
            pass
        (process,) = multiprocessing.active_children()
        with socket.fromfd(parts.ranks._connections[1].fileno(), socket.AF_INET, socket.SOCK_STREAM) as link:
            link.shutdown(socket.SHUT_RDWR)
        process.join(60)
        assert process.exitcode == -signal.SIGALRM, "a rank that is caught in a sum does not outlive its link"


def test_an_llm_over_two_processes_equals_one_process() -> None:
    results = []
    for size in (1, 2):
        config = fixed_config(max_kv_tokens=512, tensor_parallel_size=size)
        llm = LLM("models/demo/target", "models/demo/eagle3", engine=config, validate_head="never")
        results.append(llm.generate(["def main():", "import "], SamplingParams(12, 0.8, seed=5)))
        llm.close()
    assert [r.outputs[0].token_ids for r in results[0]] == [r.outputs[0].token_ids for r in results[1]]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (12, 6, 4), (12, 4, 6)])
def test_ranks_that_cannot_share_the_heads_are_refused(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=f"{size} ranks cannot share {heads} attention heads over {kv_heads} key-value"
    ):
        gather_ranks(RankInfo(0, size, "cpu"), str(tmp_path), "float32")


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 3))
def test_every_rank_has_the_kv_heads_of_its_query_heads(size: int, kv_heads: int, more: int) -> None:
    group = more * size // math.gcd(size, kv_heads)
    heads = torch.arange(kv_heads).repeat_interleave(group)  # what each query head reads
    for rank in range(size):
        share = Shard(rank, size)
        if kv_heads % size and size % kv_heads:
            with pytest.raises(CheckpointError, match=f"{size} ranks cannot share {kv_heads} key-value heads"):
                share.of_heads(kv_heads)
        else:
            own = share.of_heads(kv_heads).cut(torch.arange(kv_heads), 0)
            read = share.cut(heads, 0)
            assert read.tolist() == own.repeat_interleave(len(read) // len(own)).tolist()


def test_an_engine_of_another_number_of_ranks_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but the target is loaded for 1"):
        assemble_engine(load_target(target), None, fixed_config(tensor_parallel_size=2), TREE, None)


@pytest.mark.parametrize(("rank", "size", "is_tied"), [(1, 2, False), (0, 2, True), (3, 4, True)])
def test_a_rank_reads_its_own_weights_only(rank: int, size: int, is_tied: bool, target: str, tmp_path: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(target)
    if is_tied:
        whole.config.tie_word_embeddings = True
        whole.tie_weights()
    whole.save_pretrained(tmp_path)
    files = WeightFiles(Checkpoint(tmp_path), torch.float32, "cpu")
    config = read_model_config(tmp_path)
    part = load_shard(lambda: LlamaForCausalLM(config), files, torch.device("cpu"), Shard(rank, size), [2] * 4)
    assert part is not None
    shard_model(whole, Shard(rank, size), [2] * 4)
    own = dict(part.named_parameters(remove_duplicate=False))
    for name, expected in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(own[name], expected), name
    for name, expected_buffer in whole.named_buffers():
        assert torch.equal(part.get_buffer(name), expected_buffer), name
    assert files.bytes_read <= sum(weight.nbytes for weight in own.values())


def test_weights_that_are_buffers_are_not_left_out(tmp_path: Path) -> None:
    """Gemma 4 stores a scale of each layer so. Parts are parameters only, so its weights are read as a whole."""
    kind, settings = FAMILIES["gemma-4"]
    write_model(tmp_path, config_of(kind, **settings))
    make_model = partial(AutoModelForCausalLM.from_config, read_model_config(tmp_path))
    assert weightless_model(make_model, WeightFiles(Checkpoint(tmp_path), torch.float32, "cpu")) is None


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no tensor-parallel plan"):
        shard_model(torch.nn.Linear(2, 2), Shard(0, 2), [])
