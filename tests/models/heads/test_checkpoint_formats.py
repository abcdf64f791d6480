"""A head is equal in every checkpoint format, and every option of its config takes effect."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.eagle import EagleDrafter
from eyas.models.checkpoint import Checkpoint
from eyas.models.fingerprints import head_fingerprint
from eyas.models.heads.eagle import load_fuser, load_head, write_head
from eyas.models.heads.eagle_config import EagleHeadConfig, HeadWiring, read_head_config
from eyas.models.heads.layers import default_rotary_table, rotary_table
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.checkpoint_formats import CHECKPOINT_FORMATS, TINY, TINY_EAGLE1, random_tensors, specforge, vllm
from tests.support.naive_eagle import NaiveEagle, best_tree, linear, rms
from tests.support.tiers import nightly
from tests.support.tiny import write_checkpoint

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
OPTIONS = {
    "plain": TINY,
    "normed residual": replace(TINY, wiring=HeadWiring((2, 2, 1), norm_before_residual=True)),
    "norm before fc": replace(TINY, input_norms="joint"),
    "EAGLE-3.1": replace(TINY, input_norms="each", wiring=HeadWiring((2, 2, 1), output="normed")),
    "wide heads": replace(TINY, head_dim=12),
    "narrower than the target": replace(TINY, hidden=24, head_dim=6),
    "two layers": replace(TINY, num_layers=2),
    "three layers": replace(TINY, num_layers=3),
    "full vocabulary": replace(TINY, draft_vocab_size=48),
    "biases": replace(TINY, qkv_bias=True, out_bias=True, fc_bias=True),
    "another base": replace(TINY, rotary={"rope_theta": 500.0, "rope_type": "default"}),
    "four layers, the last boundary among them": replace(TINY, wiring=HeadWiring((0, 1, 3, 4))),
}  # fmt: skip
LLAMA3 = {"rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def shipped(config: EagleHeadConfig) -> tuple[str, ...]:
    return ("norm.weight",) if config.draft_vocab_size == config.vocab_size else ("d2t", "t2d", "norm.weight")


def write(folder: Path, config: EagleHeadConfig) -> str:
    write_head(folder, config, random_tensors(config, shipped=shipped(config)))
    return str(folder)


def features_of(config: EagleHeadConfig, count: int) -> torch.Tensor:
    return torch.randn(
        count, len(config.aux_hidden_state_layers) * config.target_hidden, generator=torch.Generator().manual_seed(5)
    )


def trees(head: str, target: str, config: EagleHeadConfig) -> list[DraftTree]:
    """Trees of two sessions; the second session commits its tokens in two parts."""
    fused = load_fuser(head, target)(features_of(config, 20))
    tokens = torch.randint(3, 48, (21,), generator=torch.Generator().manual_seed(6)).tolist()
    drafter = EagleDrafter(load_head(head, target), SHAPE, DraftingConfig(max_kv_tokens=256, ranking_temperature=1.0))

    def commit(name: str, base: int, end: int) -> Commit:
        new = fused[max(base - 1, 0) : end - 1]
        return Commit(name, 0, base, tuple(tokens[base:end]), new, NoiseKey(0), TreeBudget(14, 4))

    drafter.propose([commit("b", 0, 7)])
    drafts = drafter.propose([commit("a", 0, 21), commit("b", 7, 12)])
    drafter.sessions.check()
    return [draft for draft in drafts if isinstance(draft, DraftTree)]


def formats_and_options() -> Iterator[Any]:
    """Each option with each format nightly, and daily with one of them in turn."""
    for (number, option), (turn, checkpoint_format) in product(enumerate(OPTIONS), enumerate(CHECKPOINT_FORMATS)):
        is_daily = number % len(CHECKPOINT_FORMATS) == turn
        yield (checkpoint_format, option) if is_daily else nightly(checkpoint_format, option)


@pytest.mark.parametrize(("checkpoint_format", "option"), [*formats_and_options()])
@pytest.mark.usefixtures("unpacked")
def test_a_head_is_equal_in_every_checkpoint_format(
    checkpoint_format: str, option: str, tiny_target: str, tmp_path: Path
) -> None:
    config = OPTIONS[option]
    tensors = random_tensors(config, shipped=shipped(config))
    head = write_checkpoint(tmp_path / "head", *CHECKPOINT_FORMATS[checkpoint_format](config, tensors))
    plain = write(tmp_path / "plain", config)
    assert read_head_config(Checkpoint(head), Checkpoint(tiny_target).text_config) == config
    one, other = load_head(head, tiny_target).state_dict(), load_head(plain, tiny_target).state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert trees(head, tiny_target, config) == trees(plain, tiny_target, config)


def test_the_rotary_table_is_the_one_of_transformers() -> None:
    llama = LlamaConfig(head_dim=24, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert torch.equal(default_rotary_table(500.0, 24, 300), rotary_table(llama, 300))


@pytest.mark.parametrize("option", OPTIONS)
def test_trees_equal_the_naive_ones_with_every_option(option: str, tiny_target: str, tmp_path: Path) -> None:
    config = OPTIONS[option]
    head = write(tmp_path, config)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = load_file(Path(tiny_target, "model.safetensors"))["model.embed_tokens.weight"]
    wiring = config.wiring
    naive = NaiveEagle(
        weights, embedding, config.num_heads, config.num_kv_heads, wiring.norm_before_residual, wiring.output,
        config.num_layers, config.rotary["rope_theta"],
    )  # fmt: skip
    fused = naive_fuse(config, weights, features_of(config, 20))
    tokens = torch.randint(3, 48, (21,), generator=torch.Generator().manual_seed(6)).tolist()
    for tree, end in zip(trees(head, tiny_target, config), (21, 12), strict=True):
        expected = best_tree(naive.candidates(tokens[:end], fused[: end - 1], NoiseKey(0), SHAPE), 13)
        assert tree.tokens == (tokens[end - 1], *(node.token for node in expected))
        assert list(tree.depths[1:]) == [node.depth for node in expected]


def naive_fuse(config: EagleHeadConfig, weights: dict[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    if config.input_norms == "joint":
        states = rms(states, weights["input_norm.weight"])
    if config.input_norms == "each":
        parts = states.split(config.target_hidden, dim=-1)
        states = torch.cat([rms(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    return linear(states, weights, "fc")


@pytest.mark.parametrize("option", ["normed residual", "EAGLE-3.1"])
def test_ignoring_the_wiring_changes_the_states(option: str, tiny_target: str, tmp_path: Path) -> None:
    """A control: without it, equal trees would prove nothing about settings that no tensor shows."""
    config = OPTIONS[option]
    head = write(tmp_path, config)
    features = load_fuser(head, tiny_target)(features_of(config, 6))
    read, ignored = (load_head(head, tiny_target, wiring=wiring) for wiring in (None, TINY.wiring))
    pairs = features, torch.arange(3, 9), torch.arange(6)
    assert not torch.allclose(*(head.run(*pairs, lambda _, rows: rows.query) for head in (read, ignored)))


def test_the_meaning_of_norm_output_depends_on_the_format(tiny_target: str, tmp_path: Path) -> None:
    target = Checkpoint(tiny_target).text_config
    each = replace(TINY, input_norms="each")
    outputs = {}
    for name, config, checkpoint_format, value in (
        ("specforge true", TINY, specforge, True), ("specforge false", TINY, specforge, False),
        ("specforge beside fc_norm", each, specforge, True), ("vllm true", TINY, vllm, True),
        ("vllm false", TINY, vllm, False),
    ):  # fmt: skip
        written, tensors = checkpoint_format(config, random_tensors(config))
        head = write_checkpoint(tmp_path / name, written | {"norm_output": value}, tensors)
        outputs[name] = read_head_config(Checkpoint(head), target).wiring.output
    assert outputs == {
        "specforge true": "state", "specforge false": "bare", "specforge beside fc_norm": "normed",
        "vllm true": "normed", "vllm false": "state",
    }  # fmt: skip


@pytest.mark.parametrize("config", [
    TINY_EAGLE1, replace(TINY_EAGLE1, fc_bias=False, qkv_bias=True), replace(TINY, rotary=LLAMA3),
    replace(TINY, wiring=HeadWiring((2, 2, 1), output="bare")),
])  # fmt: skip
def test_a_written_head_reads_back(config: EagleHeadConfig, tiny_target: str, tmp_path: Path) -> None:
    tensors = random_tensors(config, shipped=shipped(config))
    write_head(tmp_path, config, tensors)
    assert read_head_config(Checkpoint(tmp_path), Checkpoint(tiny_target).text_config, config.kind) == config
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    load_head(str(tmp_path), tiny_target, kind=config.kind)


def test_the_fingerprint_of_features_covers_norms_before_fc(tmp_path: Path) -> None:
    config = replace(TINY, input_norms="each")
    tensors = random_tensors(config)
    digests = set()
    for name in ("none", "fc.weight", "fc_norm.1.weight", "lm_head.weight"):
        changed = {key: tensor + 1 if key == name else tensor for key, tensor in tensors.items()}
        write_head(tmp_path / name, config, changed)
        digests.add(head_fingerprint(str(tmp_path / name)))
    assert len(digests) == 3, "lm_head makes no features"
