"""Errors name what a head's config and tensors disagree on; heads of other generations are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError
from eyas.models.heads.eagle import load_fuser, load_head
from eyas.models.heads.eagle_config import Kind
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.checkpoint_formats import (
    TINY,
    TINY_EAGLE1,
    Tensors,
    Written,
    random_tensors,
    safeailab,
    speculators,
    without,
)
from tests.support.tiny import write_checkpoint

EAGLE3, EAGLE1 = safeailab(TINY, random_tensors(TINY)), safeailab(TINY_EAGLE1, random_tensors(TINY_EAGLE1))
JOINT = replace(TINY, input_norms="joint")


def lacking(written: Written, name: str) -> Written:
    config, tensors = written
    return config, {key: tensor for key, tensor in tensors.items() if key != name}


def having(written: Written, tensors: Tensors | None = None, **settings: object) -> Written:
    return written[0] | settings, written[1] | (tensors or {})


FAULTS: dict[str, tuple[Written, Kind, str]] = {
    "a tensor that is nearly known": (
        having(EAGLE3, {"midlayer.hidden_norms.weight": torch.ones(32)}), "eagle3",
        r"unexpected midlayer.hidden_norms.weight \(nearest is midlayer.hidden_norm.weight\)",
    ),
    "one layer too few": (having(EAGLE3, num_hidden_layers=2), "eagle3", "missing layers.1.input_layernorm.weight"),
    "a bias that is announced": (lacking(EAGLE1, "fc.bias"), "eagle", "missing fc.bias"),
    "biases of attention that are announced": (having(EAGLE3, attention_bias=True), "eagle3", "missing .*k_proj.bias"),
    "a norm that is announced": (having(EAGLE3, norm_before_fc=True), "eagle3", "missing input_norm.weight"),
    "both kinds of norms": (
        having(safeailab(JOINT, random_tensors(JOINT)), fc_norm=True), "eagle3", "norm_before_fc and for fc_norm"
    ),
    "a map that is needed": (lacking(EAGLE3, "d2t"), "eagle3", "missing d2t"),
    "an EAGLE-3 head as EAGLE-1": (EAGLE3, "eagle", "does not fit its config"),
    "an EAGLE-1 head as EAGLE-3": (EAGLE1, "eagle3", "does not fit its config"),
    "another activation": (having(EAGLE3, hidden_act="gelu"), "eagle3", "activation 'gelu'"),
    "all levels in one pass": (having(EAGLE3, parallel_drafting=True), "eagle3", "a P-EAGLE head, .* in one pass"),
    "a state for masked positions": (having(EAGLE3, {"mask_hidden": torch.ones(1, 1, 96)}), "eagle3", "a P-EAGLE head"),
    "block diffusion": (
        having(EAGLE3, architectures=["DFlashDraftModel"], dflash_config={"mask_token_id": 5}), "eagle3", "dflash, dflash2"
    ),
    "block diffusion by its name": (having(EAGLE3, architectures=["Qwen3DSparkModel"]), "eagle3", "a block diffusion head"),
    "norms of queries and keys": (
        having(EAGLE3, {f"midlayer.self_attn.{p}_norm.weight": torch.ones(8) for p in "qk"}), "eagle3",
        "a head with norms of queries and keys; Eyas knows the heads of EAGLE-1, EAGLE-2 and EAGLE-3"
    ),
    "HASS with norms": (
        having(EAGLE1, {"embedding_layernorm.weight": torch.ones(32), "hidden_states_layernorm.weight": torch.ones(32)}),
        "eagle", "a HASS head with norms of its own over embeddings and features; those without load as eagle2"
    ),
    "HASS with norms, announced": (having(EAGLE1, speculators_model_type="eagle", layernorms=True), "eagle", "a HASS head"),
    "a norm before lm_head": (
        having(EAGLE1, {"pre_lm_head_layernorm.weight": torch.ones(32)}), "eagle", "a norm of its own before lm_head"
    ),
    "layers that are not numbers": (
        having(EAGLE3, eagle_aux_hidden_state_layer_ids=["a"]), "eagle3", r"eagle_aux_hidden_state_layer_ids is \['a'\]"
    ),
    "a layer before the first": (
        having(EAGLE3, eagle_aux_hidden_state_layer_ids=[-1, 1, 2]), "eagle3", r"is \[-1, 1, 2\]; .* from 0 to"
    ),
    "a layer behind the last": (having(EAGLE3, eagle_aux_hidden_state_layer_ids=[1, 2, 99]), "eagle3", "from 0 to"),
    "a nested config that is a list": (having(EAGLE3, eagle_config=[1]), "eagle3", r"eagle_config is \[1\]"),
    "an unknown RoPE": (having(EAGLE3, rope_scaling={"rope_type": "wat"}), "eagle3", "RoPE is .*'wat'"),
    "a RoPE without its factor": (having(EAGLE3, rope_scaling={"rope_type": "linear"}), "eagle3", "'factor'"),
    "a record of no numbers": (
        having(EAGLE3, eyas={"aux_hidden_state_layers": ["a"], "norm_before_residual": False, "output": "state"}), "eagle3",
        "run `eyas check head --write`",
    ),
    "a flag that is a string": (having(EAGLE3, norm_before_residual="no"), "eagle3", "norm_before_residual is 'no'"),
    "a record that is damaged": (
        having(EAGLE3, eyas={"aux_hidden_state_layers": [1]}), "eagle3", "remove it, and run `eyas check head --write`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, tiny_target: str, tmp_path: Path) -> None:
    written, kind, message = FAULTS[fault]
    head = write_checkpoint(tmp_path, *written)
    with pytest.raises(CheckpointError, match=message):
        load_head(head, tiny_target, kind=kind)


def test_the_first_of_many_missing_tensors_are_named(tiny_target: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing layers\.1\..* and \d+ more"):
        load_head(write_checkpoint(tmp_path, *having(EAGLE3, num_hidden_layers=9)), tiny_target)


@pytest.mark.parametrize("load", [load_head, load_fuser])
def test_a_fuser_is_as_strict_as_the_head(load: Callable[[str, str], object], tiny_target: str, tmp_path: Path) -> None:
    head = write_checkpoint(tmp_path, *lacking(safeailab(JOINT, random_tensors(JOINT)), "fc.weight"))
    with pytest.raises(CheckpointError, match=r"missing fc\.weight"):
        load(head, tiny_target)


def test_unexpected_weights_are_reported_by_checkpoint_name(tiny_target: str, tmp_path: Path) -> None:
    head = write_checkpoint(
        tmp_path, *having(speculators(TINY, random_tensors(TINY)), {"layers.0.extra.weight": torch.ones(2)})
    )
    with pytest.raises(CheckpointError, match=r"unexpected layers.0.extra.weight"):
        load_head(head, tiny_target)


def test_an_embedding_in_the_head_replaces_the_targets(tiny_target: str, tmp_path: Path) -> None:
    own = random_tensors(TINY, shipped=("d2t", "t2d", "norm.weight", "embed_tokens.weight"))
    with_own = load_head(write_checkpoint(tmp_path / "own", *safeailab(TINY, own)), tiny_target)
    without = load_head(write_checkpoint(tmp_path / "none", *EAGLE3), tiny_target)
    assert torch.equal(with_own.embedding, own["embed_tokens.weight"])
    assert not torch.equal(with_own.embedding, without.embedding)


def test_a_hass_head_loads_as_eagle2(tiny_target: str, tmp_path: Path) -> None:
    """As published: trained otherwise, written as EAGLE-2 is, in torch's own format and with the embedding beside it."""
    config = replace(TINY_EAGLE1, fc_bias=False)
    written = without(safeailab(config, random_tensors(config, shipped=("embed_tokens.weight",)))[0], "head_dim", "bias")
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": ["LlamaForCausalLM"]}))
    torch.save(random_tensors(config, shipped=("embed_tokens.weight",)), tmp_path / "pytorch_model.bin")
    tree = TreeConfig(8, 3, 2)
    drafter = DraftHead(str(tmp_path), "eagle2").build_drafter(tiny_target, "float32", "cpu", tree, DraftingConfig(64))
    commit = Commit("a", 0, 0, (5, 6, 7), torch.ones(2, 32), NoiseKey(0), TreeBudget(8, 3))
    (draft,) = drafter.propose([commit])
    assert isinstance(draft, DraftTree)
    assert len(draft) == 8
