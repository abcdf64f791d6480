"""Every served family of transformers equals its own forward and `generate`, at every node of a tree."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.api.request import Request, SamplingParams
from eyas.cache.states import START, StateStep
from eyas.config import TreeConfig
from eyas.engine.build import assemble_engine
from eyas.errors import CheckpointError
from eyas.models.checkpoint import EMBEDDING_NAMES, LM_HEAD_NAMES, Checkpoint
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.models.inputs import Segment
from eyas.models.layers.attention import ATTENTION_NAME, register_attention, set_windows
from eyas.models.layers.mixers import use_pools
from eyas.models.layers.relay import relay_arguments
from eyas.models.loading import load_target, read_model_config
from eyas.models.parallel.shards import Shard, shard_model
from eyas.models.supported import inspect_architecture
from eyas.models.target import PASS_ARGUMENTS, TargetModel
from eyas.models.text_part import auto_class, drop_padding
from eyas.protocol.tree import DraftTree
from tests.models.test_target import expected, make_kv_cache, run, segment
from tests.support import runs
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.rank_threads import RankThreads
from tests.support.families import config_of, write_model, write_wrapped
from tests.support.family_configs import FAMILIES, HYBRIDS, MORE_FAMILIES, NO_FEATURES, NOT_OVER_RANKS, WRAPPED
from tests.support.reference import generated, load_reference
from tests.support.tiers import tiered
from tests.support.tiny import fixed_config

PROMPTS = [[5, 9, 11], np.random.default_rng(1).integers(3, 48, 37).tolist()]
PREFIX = PROMPTS[1]
TREE = TreeConfig(num_draft_tokens=8, num_steps=4, top_k=3)
SLOTS = np.random.default_rng(0).permutation(400)
# Two children of the root, and a deep path under the second: 3 is a child of 2, not of 1.
NODES = DraftTree.of((7, 8, 9, 10, 11, 12, 13), (0, 0, 0, 2, 3, 4, 1), (0.0,) * 7)
# Model type and settings of every family, of the commonest with several settings.
CASES = FAMILIES | {kind: (kind, settings) for kind, settings in (MORE_FAMILIES | HYBRIDS).items()}
# The commonest, and one of each kind that attention, experts, norms, scales and rotary tables make; the others run nightly.
DAILY = (
    *FAMILIES,
    "afmoe", "cohere", "cohere2_moe", "dots1", "exaone4", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox",
    "gpt_oss", "granite_swa", "laguna", "longcat_flash", "mimo_v2_flash", "ministral3", "modernbert-decoder", "nemotron",
    "olmo", "opt", "phimoe", "qwen2_moe", "smollm3", "stablelm", "vaultgemma",
)  # fmt: skip
DAILY_DRAFTED = (
    "gemma-4-e2b", "gpt-2", "gpt_oss", "laguna", "mimo_v2_flash", "nemotron",
)  # fmt: skip
DAILY_WRAPPED = ("gemma3", "mistral3", "qwen3_5", "qwen3_vl", "step3p7")
DAILY_RANKS = ("cohere", "gemma3n_text", "glm4_moe", "gpt_oss", "mimo_v2_flash", "nemotron")


def write(name: str, folder: Path) -> str:
    kind, settings = CASES[name]
    return write_model(folder, config_of(kind, **settings))


def tree_segment(visible: Any = None) -> Segment:
    count = len(NODES)
    mask = NODES.ancestor_mask() if visible is None else visible
    depths = len(PREFIX) + np.array(NODES.depths)
    rows = np.arange(count)
    states = StateStep(2, 3, stash=5)
    return Segment(np.array(NODES.tokens), depths, SLOTS[60 : 60 + count], SLOTS[: len(PREFIX)], mask, rows, states=states)


def check_exact(target: TargetModel, folder: str) -> None:
    """Chunks, ragged rows and each node of a tree equal transformers' own forward over the same tokens."""
    kv_cache = make_kv_cache(target)
    first = run(target, [segment(PREFIX[:20], 0, SLOTS[:20], SLOTS[:0], StateStep(START, 1))], kv_cache)
    second_half = segment(PREFIX[20:], 20, SLOTS[20:37], SLOTS[:20], StateStep(1, 2))
    rest = [second_half, segment(PROMPTS[0], 0, SLOTS[50:53], SLOTS[:0])]
    second = run(target, rest, kv_cache)
    (nodes,) = run(target, [tree_segment()], kv_cache)
    torch.testing.assert_close(torch.cat([first[0], second[0]]), expected(folder, PREFIX), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second[1], expected(folder, PROMPTS[0]), atol=1e-4, rtol=1e-4)
    for node in (5, 6):  # every other node is on one of their paths
        above = NODES.path(node)
        whole = expected(folder, PREFIX + [NODES.tokens[one] for one in above])[-len(above) :]
        torch.testing.assert_close(nodes[list(above)], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", tiered(CASES, DAILY))
def test_chunks_trees_and_states_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path)
    target = load_target(folder)
    check_exact(target, folder)
    if CASES[name][0] in NO_FEATURES:
        with pytest.raises(CheckpointError, match="take a draft model or lookups"):
            states_of(target)
        return
    torch.testing.assert_close(states_of(target), reference_states(folder), atol=1e-4, rtol=1e-4)
    check_vocabulary(target, folder)


@pytest.mark.parametrize("name", tiered(CASES, ("glm_moe_dsa", "jamba")))
def test_half_weights_move_logits_little(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path)
    target = load_target(folder, dtype="bfloat16")
    (found,) = run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], make_kv_cache(target))
    whole = expected(folder, PREFIX)
    assert float((found - whole).abs().mean()) < 0.2 * float(whole.abs().mean())


def check_vocabulary(target: TargetModel, folder: str) -> None:
    """Heads find the target's embedding and output head in its files."""
    shape = target.vocab_size, target.config.hidden_size
    for names in (EMBEDDING_NAMES, LM_HEAD_NAMES):
        assert Checkpoint(folder).vocabulary(names, shape).any()


@torch.inference_mode()
def reference_states(folder: str) -> Tensor:
    """The input of the second layer and the output of the decoder, side by side, as transformers computes them."""
    reference: Any = load_reference(folder)
    decoder = reference.get_decoder()
    states = list[Tensor]()
    hook = decoder.layers[1].register_forward_pre_hook(lambda layer, args: states.append(args[0][0]))
    last = decoder(input_ids=torch.tensor([PREFIX])).last_hidden_state[0]
    hook.remove()
    return torch.cat([*states, last], -1)


def states_of(target: TargetModel) -> Tensor:
    """The input of the second layer and the output of the final norm, side by side."""
    target.set_aux_hidden_state_layers((1, FINAL_NORM_OUTPUT))
    packed = target.pack([segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])])
    states = target.forward(packed, make_kv_cache(target)).aux_hidden_states
    assert states is not None
    return states


@pytest.mark.parametrize("name", tiered(CASES, DAILY_DRAFTED))
def test_drafted_output_equals_generate(name: str, tmp_path: Path) -> None:
    """And plain output with temperature; also with cached prefixes, and with so few slots that a sequence waits."""
    folder = write(name, tmp_path)
    target, config = load_target(folder), fixed_config(max_kv_tokens=80, max_prefill_tokens=16)
    prompts = {f"{turn}-{i}": tuple(prompt) for turn in range(2) for i, prompt in enumerate(PROMPTS)}

    def outputs(temperature: float, drafter: RandomDrafter | None) -> dict[str, list[int]]:
        requests = [Request(name, prompt, SamplingParams(12, temperature, seed=0)) for name, prompt in prompts.items()]
        return runs.outputs_of(runs.run(assemble_engine(target, None, config, TREE, drafter), requests))

    assert outputs(0.0, RandomDrafter(48)) == {name: generated(folder, prompt) for name, prompt in prompts.items()}
    assert outputs(0.8, RandomDrafter(48)) == outputs(0.8, None)


@pytest.mark.parametrize("kind", ["laguna", "qwen2_moe"])
def test_wrong_masks_and_windows_show_in_logits(kind: str, tmp_path: Path) -> None:
    """The tests above would see a wrong parent, and a window that is left out."""
    folder = write(kind, tmp_path)
    target = load_target(folder)
    kv_cache = make_kv_cache(target)
    run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0], StateStep(START, 2))], kv_cache)
    (right,) = run(target, [tree_segment()], kv_cache)
    mutant = np.array(NODES.ancestor_mask())
    mutant[3, [1, 2]] = mutant[3, [2, 1]]  # node 3 sees its parent's sibling
    assert not torch.allclose(run(target, [tree_segment(mutant)], kv_cache)[0][3], right[3], atol=1e-2)
    set_windows(target.model, dict.fromkeys(range(3)))
    assert not torch.allclose(run(target, [tree_segment()], kv_cache)[0], right, atol=1e-2)


@pytest.mark.parametrize("kind", tiered(WRAPPED, DAILY_WRAPPED))
def test_a_text_part_equals_its_whole_model(kind: str, tmp_path: Path) -> None:
    folder = write_wrapped(kind, tmp_path)
    target = load_target(folder)
    check_exact(target, folder)
    check_vocabulary(target, folder)


@pytest.mark.parametrize("name", tiered(CASES, DAILY_RANKS))
def test_two_ranks_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    """Or are refused, with the reason."""
    folder = write(name, tmp_path)
    rows = segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])
    if (kind := CASES[name][0]) in NOT_OVER_RANKS:
        with pytest.raises(CheckpointError, match=NOT_OVER_RANKS[kind]):
            rank_of(folder, 0)
        return
    targets = [rank_of(folder, rank) for rank in range(2)]
    parts = RankThreads(2).run(lambda rank: run(targets[rank], [rows], targets[rank].new_kv_cache(400))[0])
    found = torch.cat(parts, -1) if targets[0].shared_vocabulary else parts[0]
    torch.testing.assert_close(found, expected(folder, PREFIX), atol=1e-4, rtol=1e-4)


def test_ranks_share_projections_that_are_gathered(tmp_path: Path) -> None:
    """A recurrent layer has whole states, and a plan may still split its work."""
    folder = write("qwen3_5_text", tmp_path)
    model = load_target(folder).model
    name = next(name for name, _ in model.named_modules() if name.endswith("linear_attn.in_proj_qkv"))
    part = rank_of(folder, 1).model.get_submodule(name)
    assert len(part.weight) == len(model.get_submodule(name).weight) // 2


def rank_of(folder: str, rank: int) -> TargetModel:
    """One rank's part of a target, without the exchanges of a load: transformers loads in one thread at a time."""
    register_attention()
    config = read_model_config(folder)
    model: Any = auto_class(config).from_pretrained(folder, config=config, attn_implementation=ATTENTION_NAME)
    use_pools(model)
    architecture, shard = inspect_architecture(config), Shard(rank, 2)
    set_windows(model, architecture.windows)
    if architecture.needs_relay:
        relay_arguments(model, PASS_ARGUMENTS)
    shard_model(model, shard, [shape.num_heads for shape in architecture.kv_shapes])
    drop_padding(model.config)
    return TargetModel(model, shard=shard, architecture=architecture)
