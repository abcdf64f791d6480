"""Attention sinks and values narrower than keys: in kernels, in deterministic mode, behind a draft head, and left out."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, EngineConfig
from eyas.drafters.eagle import EagleDrafter
from eyas.engine.build import assemble_engine
from eyas.engine.deterministic import BatchInvariantRunner
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import KernelBackend, why_no_kernel
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from tests.models.test_more_families import NODES, PREFIX, PROMPTS, SLOTS, TREE, check_exact, tree_segment, write
from tests.models.test_target import segment
from tests.support.runs import outputs_of
from tests.support.runs import run as run_engine
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, write_head

# All layers with sinks; and some without, with keys wider than values and other numbers of heads in sliding layers.
KINDS = ("gpt_oss", "mimo_v2_flash")
TILING = Tiling(heads_per_kv=2, num_kv=2, num_processors=4, max_rows=16, longest=128)


def logits_of(way: ForwardBackend, target: TargetModel) -> Tensor:
    """Logits of a prompt in two chunks, and of a tree behind it."""
    kv_cache = target.new_kv_cache(400)
    prompt = segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])
    passes = [prompt.part(0, 20), prompt.part(20, 37), tree_segment()]
    return torch.cat([way.forward(way.pack([each]), kv_cache).logits for each in passes])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixed_part", [nightly(0), 32])
def test_kernels_equal_plain_attention(kind: str, fixed_part: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    target = load_target(write(kind, tmp_path))
    launched = KernelBackend(target, replace(TILING, fixed_part=fixed_part), 400)
    assert not why_no_kernel(target)
    torch.testing.assert_close(logits_of(launched, target), logits_of(target, target), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_that_is_left_out_shows_in_logits(kind: str, tmp_path: Path) -> None:
    """And one that counts twice, as it would in each of two parts: the tests of families would see both."""
    folder = write(kind, tmp_path)
    target = load_target(folder)
    check_exact(target, folder)
    right = logits_of(target, target)
    sinks = [weight for name, weight in target.model.named_parameters() if name.endswith("sinks")]
    for mutant in (-torch.inf, float(np.log(2))):
        kept = [weight.data for weight in sinks]
        for weight in sinks:
            weight.data = weight.data + mutant
        assert not torch.allclose(logits_of(target, target), right, atol=1e-2)
        for weight, before in zip(sinks, kept, strict=True):
            weight.data = before
    assert torch.equal(logits_of(target, target), right)


def test_scores_are_computed_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(write("gpt_oss", tmp_path))
    whole = logits_of(target, target)
    monkeypatch.setattr("eyas.models.layers.attention.MOST_SCORES", 300)
    torch.testing.assert_close(logits_of(target, target), whole, atol=1e-4, rtol=1e-4)


def test_a_tree_has_the_bits_of_plain_decoding(tmp_path: Path) -> None:
    """In deterministic mode, whatever chunks the prompt came in."""
    target = load_target(write("granite_swa", tmp_path))
    found = []
    for cuts in ((0, 37), (0, 5, 21, 37)):
        runner = BatchInvariantRunner(target, target.new_kv_cache(400), None, 8)
        prompt = segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])
        for start, end in pairwise(cuts):
            logits = runner.forward([prompt.part(start, end)]).logits[-1:]
        found.append(torch.cat([logits, runner.forward([tree_segment()]).logits]))
    assert torch.equal(*found)
    path = segment([NODES.tokens[0], NODES.tokens[2]], 37, SLOTS[90:92], SLOTS[:37])
    assert torch.equal(runner.forward([path]).logits[-1], found[1][3])


@pytest.mark.parametrize(("kind", "temperature"), [("gpt_oss", 0.0), ("mimo_v2_flash", 0.8)])
def test_a_head_behind_a_target_with_sinks_is_lossless(kind: str, temperature: float, tmp_path: Path) -> None:
    folder = write(kind, tmp_path / "target")
    head = str(write_head(tmp_path / "head"))
    fuser = load_fuser(head, folder)
    target = load_target(folder, aux_hidden_state_layers=fuser.aux_hidden_state_layers)
    requests = [
        Request(f"{i}", tuple(prompt), SamplingParams(16, temperature, seed=i, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = []
    for drafter in (None, EagleDrafter(load_head(head, folder), TREE, DraftingConfig(max_kv_tokens=256))):
        config: EngineConfig = fixed_config(max_kv_tokens=256, max_prefill_tokens=16)
        outputs.append(outputs_of(run_engine(assemble_engine(target, fuser, config, TREE, drafter), requests)))
    assert outputs[0] == outputs[1]
