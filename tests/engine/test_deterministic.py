"""Deterministic mode: logits of a token depend on the tokens before it alone, bit for bit, also in bfloat16."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.base import Drafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.engine.deterministic import BatchInvariantRunner
from eyas.engine.runner import ModelRunner, drawn_rows, step_segments
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.errors import ConfigError
from eyas.models.heads.eagle import load_fuser
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree
from tests.support.bad_drafters import RandomDrafter
from tests.support.families import FAMILIES, VOCAB, config_of, write_model
from tests.support.runs import outputs_of, run
from tests.support.tiers import nightly
from tests.support.tiny import DEMO, fixed_config

ROWS = 8
TREE = DraftTree.of((7, 8, 9, 10, 11, 12), (0, 0, 1, 0, 2, 4), (0.0,) * 6)
PROMPT = np.random.default_rng(0).integers(3, 48, 21).tolist()


def load_family(folder: Path, name: str, dtype: str) -> TargetModel:
    kind, settings = FAMILIES[name]
    return load_target(write_model(folder, config_of(kind, **settings), getattr(torch, dtype)), dtype)


def runner_of(target: TargetModel) -> BatchInvariantRunner:
    return BatchInvariantRunner(target, KVCache(400, target.kv_shapes, 0, target.dtype, target.device), None, ROWS)


def new_sequence(tokens: list[int]) -> Sequence:
    return Sequence(
        Request("a", tuple(tokens), SamplingParams(seed=0)), QueueKey(0.0, 0), list(tokens), np.empty(len(tokens), np.int64)
    )


def segments_of(*batch: ScheduledSequence) -> Seq[Segment]:
    return step_segments(batch, drawn_rows(batch))


def prefill(runner: ModelRunner, tokens: list[int], slots: np.ndarray, cuts: tuple[int, ...]) -> torch.Tensor:
    """Logits after the last token, prefilled in chunks."""
    sequence = new_sequence(tokens)
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        logits = runner.forward(segments_of(ScheduledSequence(sequence, slots[start:end], start))).logits
        sequence.extend(slots[start:end])
    return logits[-1]


def tree_logits(runner: ModelRunner, tree: DraftTree, prefix: list[int], slots: np.ndarray) -> torch.Tensor:
    own = np.empty(len(prefix), np.int64)
    sequence = Sequence(
        Request("b", tuple(prefix), SamplingParams(seed=0)), QueueKey(0.0, 0), [*prefix, tree.tokens[0]], own
    )
    sequence.extend(slots[: len(prefix)])
    scheduled = ScheduledSequence(sequence, slots[len(prefix) : len(prefix) + len(tree)], len(prefix), tree)
    return runner.forward(segments_of(scheduled)).logits


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", nightly("phi-3")])
def test_chunks_and_trees_change_no_bit(name: str, tmp_path: Path) -> None:
    """In passes of bfloat16; others are tested below."""
    target = load_family(tmp_path, name, "bfloat16")
    runner, slots = runner_of(target), np.random.default_rng(1).permutation(400)
    whole = prefill(runner, PROMPT, slots[:21], ())
    assert torch.equal(whole, prefill(runner, PROMPT, slots[30:51], (5, 6, 19)))
    in_tree = tree_logits(runner, TREE, PROMPT, slots[30:])
    for node in range(len(TREE)):
        path = [TREE.tokens[above] for above in TREE.path(node)]
        assert torch.equal(in_tree[node], prefill(runner, PROMPT + path, slots[200:], (3,)))


@pytest.mark.parametrize(
    ("num_threads", "reason"),
    [(3, "torch has 3 threads; set OMP_NUM_THREADS=1, and more threads by engine.layer_threads"), (1, "")],
)
def test_a_mode_without_batches_says_why(
    num_threads: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    target = load_family(tmp_path, "llama-3", "float32")
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert runner_of(target).keeps_batches == (not reason)
    slow = f"deterministic mode runs each sequence by itself, in passes of {ROWS} rows, which is slow: {reason}"
    assert caplog.messages[-1:] == [slow] * bool(reason)


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float32", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", ["llama-3", "gemma-2", nightly("phi-3")])
def test_the_cpu_keeps_batches_and_bits(
    name: str, stored: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that float16 holds and others; a vocabulary that is no multiple of a block."""
    pytest.importorskip("numba", reason="numba is not installed")
    kind, settings = FAMILIES[name]
    config = config_of(kind, **settings | {"vocab_size": VOCAB + 3})
    target = load_target(write_model(tmp_path, config, getattr(torch, stored)), dtype, passes="float32")
    runner, slots = runner_of(target), np.random.default_rng(1).permutation(400)
    assert runner.keeps_batches
    prompt = np.random.default_rng(0).integers(3, 48, 80).tolist()
    whole = prefill(runner, prompt, slots[:80], ())
    assert torch.equal(whole, prefill(runner, prompt, slots[80:160], (5, 71)))
    in_tree = tree_logits(runner, TREE, prompt, slots[80:])
    for node in (0, 3, 5):
        path = [TREE.tokens[above] for above in TREE.path(node)]
        assert torch.equal(in_tree[node], prefill(runner, prompt + path, slots[200:], (3,)))
    passes = []
    monkeypatch.setattr(target, "forward", lambda *args: passes.append(args) or type(target).forward(target, *args))
    both = [
        ScheduledSequence(new_sequence(tokens), slots[at : at + len(tokens)], 0)
        for tokens, at in ((PROMPT, 300), (prompt, 200))
    ]
    assert torch.equal(runner.forward(segments_of(*both)).logits[-1], whole)
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", nightly("phi-3")])
def test_the_fixed_runner_agrees_with_the_fast_one(name: str, tmp_path: Path) -> None:
    target, slots = load_family(tmp_path, name, "float32"), np.random.default_rng(1).permutation(400)
    fast = ModelRunner(target, KVCache(400, target.kv_shapes, 0, target.dtype, target.device), None)
    for runner in (fixed := runner_of(target), fast):
        prefill(runner, PROMPT, slots[:21], (5,))
    expected = tree_logits(fast, TREE, PROMPT, slots)
    torch.testing.assert_close(tree_logits(fixed, TREE, PROMPT, slots), expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    """The mode computes what a checkpoint of such weights gives in float32, and keeps them in two bytes."""
    pytest.importorskip("numba", reason="numba is not installed")
    kind, settings = FAMILIES["llama-3"]
    config = config_of(kind, **settings)
    folder = write_model(tmp_path / "own", config, torch.float32)
    narrow = load_target(folder, "bfloat16", passes="float32")
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "rounded")
    wide = load_target(str(tmp_path / "rounded"), "float32")
    whole = tmp_path / "whole"  # files that are not read in parts
    whole.mkdir()
    (whole / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    torch.save(load_file(Path(folder) / "model.safetensors"), whole / "pytorch_model.bin")
    unparted = load_target(str(whole), "bfloat16", passes="float32")
    slots = np.random.default_rng(1).permutation(400)
    expected = prefill(runner_of(wide), PROMPT, slots, ())
    for each in (narrow, unparted):
        assert torch.equal(prefill(runner_of(each), PROMPT, slots, ()), expected)
        assert sum(sizes_of(each.model)) == sum(sizes_of(wide.model))
    assert sum(sizes_of(narrow.model)) < 0.6 * sum(sizes_of(load_target(folder, "float32").model))


def sizes_of(model: nn.Module) -> list[int]:
    return [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.slow
def test_a_bfloat16_batch_is_equal_with_and_without_drafter() -> None:
    """Greedy and sampled requests in turn, in passes of bfloat16, as a model on CUDA without fused layers has them."""
    target_folder, head = str(DEMO / "target"), str(DEMO / "eagle3")
    fuser, tree = load_fuser(head, target_folder, "bfloat16"), TreeConfig(num_draft_tokens=12, num_steps=4, top_k=4)
    target = load_target(target_folder, "bfloat16", aux_hidden_state_layers=fuser.aux_hidden_state_layers)
    config = fixed_config(max_kv_tokens=1024, max_prefill_tokens=40, deterministic=True)
    eagle = DraftHead(head, "eagle3").build_drafter(target_folder, "bfloat16", "cpu", tree, DraftingConfig())
    drafters: dict[str, Drafter | None] = {"plain": None, "eagle3": eagle, "random": RandomDrafter(4096)}
    prompts = [np.random.default_rng(seed).integers(3, 4096, length).tolist() for seed, length in enumerate((3, 30))]
    requests = [
        Request(f"{seed}", tuple(prompt), SamplingParams(6, 0.8 * (seed % 2), seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(prompts)
    ]
    outputs = dict[str, dict[str, list[int]]]()
    for name, drafter in drafters.items():
        own = replace(config, draft_budget="adaptive") if name == "random" else config
        engine = assemble_engine(target, fuser, own, tree, drafter)
        outputs[name] = outputs_of(run(engine, requests))
    assert outputs["plain"] == outputs["eagle3"] == outputs["random"]


def test_a_target_that_routes_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixtral, which routes rows to experts"):
        runner_of(load_family(tmp_path, "mixtral", "float32"))


def test_several_ranks_and_emulation_are_refused() -> None:
    for settings in ({"tensor_parallel_size": 2}, {"emulated_device": "60ms"}):
        with pytest.raises(ConfigError, match="deterministic is set"):
            EngineConfig(deterministic=True, **settings)  # type: ignore[arg-type]
