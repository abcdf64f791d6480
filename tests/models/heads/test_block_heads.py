"""Block heads: training rows equal cached rows, and checkpoints of every dialect are read strictly and written back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.errors import CheckpointError
from eyas.kernels.arguments import Projected
from eyas.kernels.plain import layers as plain
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads import block_layers
from eyas.models.heads.block import (
    BlockHead,
    attend_blocks,
    attend_blocks_apart,
    block_masks,
    block_tensors,
    load_block_fuser,
    load_block_head,
    new_block_head,
    serve,
    write_block_head,
)
from eyas.models.heads.block_config import BlockHeadConfig, Dialect, read_block_config
from eyas.models.heads.eagle_config import HeadWiring
from tests.support.tiny import change_config, write_target
from tests.support.tiny_block import DFLASH, DSPARK, KINDS, random_block_head, tiny_block_head

LENGTH = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("block") / "target"))


def cached_states(head: BlockHead, states: torch.Tensor, token: int, at: int) -> torch.Tensor:
    """One block at position `at` [G, H], with context that was projected once and in pieces."""
    c, pieces = head.config, (range(3), range(3, at)) if at > 3 else (range(at),)
    context = [
        [head.project_context(layer, head.fuse(states[list(piece)]), torch.tensor(list(piece))) for piece in pieces]
        for layer in range(c.num_layers)
    ]
    places = torch.arange(at, at + c.block_size)

    def attention(layer: int, rows: Projected) -> torch.Tensor:
        keys, values = (torch.cat([*(getattr(p, x) for p in context[layer]), getattr(rows, x)]) for x in ("key", "value"))
        window = c.windows[layer]
        key_places = torch.cat([torch.arange(at), places])
        behind = places[:, None] - key_places
        seen = torch.ones(c.block_size, at + c.block_size, dtype=torch.bool)
        if window is not None:
            seen = (behind < window) & ((behind >= 0) | (torch.tensor(not c.causal_windows)))
        q, k, v = (x.transpose(0, 1)[None] for x in (rows.query, keys, values))
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1)

    rows = head.run(head.block_tokens(torch.tensor(token)), places, attention)
    return head.drafted_rows(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_equal_cached_logits(kind: str, target: str) -> None:
    head, generator = random_block_head(kind, target), torch.Generator().manual_seed(1)
    states = torch.randn(2, LENGTH, 64, generator=generator)
    tokens = torch.randint(48, (2, LENGTH + 8), generator=generator)
    anchors = torch.tensor([[4, 9, 15], [1, 10, 18]])
    found = head(states, tokens[:, :LENGTH], anchors)
    for n in range(2):
        for a, at in enumerate(anchors[n].tolist()):
            cached = cached_states(head, states[n], int(tokens[n, at]), at)
            previous = tokens[n, at : at + head.config.num_drafted]
            expected = head.block_logits(cached, previous)
            torch.testing.assert_close(head.block_logits(found[n, a], previous), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-reduced"])
def test_joined_logits_are_those_of_the_steps(kind: str, target: str) -> None:
    head = random_block_head(kind, target)
    generator = torch.Generator().manual_seed(5)
    states, previous = torch.randn(3, 4, 32, generator=generator), torch.randint(0, 48, (3, 4), generator=generator)
    expected, _ = head.step(head.backbone_logits(states), states, previous, head.initial_state(3, 4))
    torch.testing.assert_close(head.block_logits(states, previous), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn"])
def test_zeroed_markov_head_equals_dflash(kind: str, target: str) -> None:
    head = random_block_head(kind, target)
    assert head.markov_head is not None
    torch.nn.init.zeros_(head.markov_head.markov_w2.weight)
    states, previous = torch.randn(3, head.config.num_drafted, 32), torch.randint(48, (3, head.config.num_drafted))
    torch.testing.assert_close(head.block_logits(states, previous), head.backbone_logits(states))


def test_new_head_adds_nothing_to_its_backbone(target: str) -> None:
    head = new_block_head(DSPARK, target)
    states, previous = torch.randn(3, 4, 32), torch.randint(48, (3, 4))
    torch.testing.assert_close(head.block_logits(states, previous), head.backbone_logits(states))
    assert not head.confidence_logits(states, previous).any()
    assert {n for n, p in head.named_parameters() if not p.requires_grad} == {"embed_tokens.weight", "lm_head.weight"}


def test_rows_see_neither_anchor_feature_nor_other_documents() -> None:
    seen, own = block_masks(torch.tensor([[1, 3]]), 5, 2, documents=torch.tensor([[0, 0, 1, 1, 1]]))
    assert seen[0].int().tolist() == [[1, 0, 0, 0, 0]] * 2 + [[0, 0, 1, 0, 0]] * 2
    assert own.tolist() == [[[[True, True], [True, True]]]]


def test_window_counts_from_each_row() -> None:
    seen, own = block_masks(torch.tensor([[4]]), 5, 3, window=3, is_causal=True)
    assert seen[0].int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert own.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]


@pytest.mark.parametrize("window", [None, 3])
def test_blocks_attend_apart_as_under_one_mask(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8)]
    anchors = torch.randint(1, 9, (2, 4), generator=generator)
    masks = block_masks(anchors, 9, 3, window, window is not None)
    found = []
    for attend in (attend_blocks, attend_blocks_apart):
        inputs = [torch.randn(s, generator=generator.manual_seed(n)).requires_grad_() for n, s in enumerate(shapes)]
        query, key, value, *known = inputs
        out = attend(query, (known[0], key), (known[1], value), masks)
        (out * torch.arange(8)).sum().backward()
        found.append([out, *(x.grad for x in inputs)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", ["author", "specforge", "speculators"])
def test_round_trip_changes_nothing(kind: str, dialect: Dialect, target: str, tmp_path: Path) -> None:
    head = random_block_head(kind, target)
    write_block_head(tmp_path, head.config, block_tensors(head), dialect)
    loaded = load_block_head(str(tmp_path), target)
    assert loaded.config == head.config
    assert torch.equal(loaded.draft_ids, head.draft_ids)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    fuser = load_block_fuser(str(tmp_path), target)
    states = torch.randn(5, 64)
    torch.testing.assert_close(fuser(states), head.fuse(states))
    assert fuser.aux_hidden_state_layers == (2, 3)


def written(tmp_path: Path, target: str, kind: str = "dspark", dialect: Dialect = "author", **settings: object) -> str:
    """A head whose config.json has other settings; null removes one."""
    head = random_block_head(kind, target)
    write_block_head(tmp_path, head.config, block_tensors(head), dialect)
    change_config(tmp_path, **settings)
    return str(tmp_path)


def test_layer_ids_count_outputs_except_in_speculators(target: str, tmp_path: Path) -> None:
    author = json.loads((Path(written(tmp_path / "a", target)) / "config.json").read_text())
    other = json.loads((Path(written(tmp_path / "b", target, dialect="speculators")) / "config.json").read_text())
    assert author["target_layer_ids"] == [1, 2]
    assert other["aux_hidden_state_layer_ids"] == [2, 3]


@pytest.mark.parametrize("dialect", ["author", "specforge", "speculators"])
@pytest.mark.parametrize(("base", "expected"), [(DSPARK, True), (DFLASH, False)])
def test_unstated_anchor_convention_follows_kind(
    base: BlockHeadConfig, expected: bool, dialect: Dialect, target: str, tmp_path: Path
) -> None:
    folder = Path(written(tmp_path, target, base.kind, dialect))
    config = json.loads((folder / "config.json").read_text())
    for settings in (config, config.get("dflash_config", {})):
        settings.pop("sample_from_anchor", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_block_head(str(folder), target).config.wiring.sample_from_anchor is expected


def test_recorded_wiring_takes_precedence(target: str, tmp_path: Path) -> None:
    record = {
        "aux_hidden_state_layers": [1, 2],
        "norm_before_residual": False,
        "output": "state",
        "sample_from_anchor": False,
    }
    head = load_block_head(written(tmp_path, target, eyas=record), target)
    assert head.config.wiring == HeadWiring((1, 2))
    assert head.config.num_drafted == 3


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "more layers than tensors": ({"num_hidden_layers": 3, "layer_types": None}, "missing layers.2.input_layernorm.weight"),
    "another rank": ({"markov_rank": 6}, r"markov_head.markov_w1.weight has shape \[48, 8\], expected \[48, 6\]"),
    "another kind of Markov head": ({"markov_head_type": "gated"}, "missing markov_head.gate_proj.bias"),
    "an unknown Markov head": ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'; it must be one of vanilla"),
    "more features than fc": ({"target_layer_ids": [0, 1, 2]}, r"fc.weight has shape \[32, 64\], expected \[32, 96\]"),
    "no layer ids": ({"target_layer_ids": None}, "target_layer_ids is None; it must be a list of layer numbers"),
    "layers beyond the target": ({"target_layer_ids": [1, 4]}, r"target_layer_ids is \[1, 4\]"),
    "another target": ({"num_target_layers": 6}, "num_target_layers is 6, but this target has 4 layers"),
    "another vocabulary": ({"vocab_size": 50}, "made for a target of vocabulary size 50, but this target has 48"),
    "a mask beyond the vocabulary": ({"mask_token_id": 48}, "mask_token_id 48 is not below the vocabulary size 48"),
    "no mask": ({"mask_token_id": None}, "mask_token_id is left out"),
    "no block size": ({"block_size": None}, "block_size is left out; it must be a whole number from 1 to 4096"),
    "a flag in words": ({"sample_from_anchor": "yes"}, "sample_from_anchor is 'yes'; it must be true or false"),
    "an unknown kind of layer": ({"layer_types": ["mamba", "mamba"]}, "layer_types is"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; Eyas supports silu only"),
    "Domino": ({"architectures": ["DominoDraftModel"]}, "holds a Domino head"),
    "no block head": ({"architectures": ["LlamaForCausalLM"]}, "does not hold a block head"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(fault: str, target: str, tmp_path: Path) -> None:
    settings, message = FAULTS[fault]
    with pytest.raises(CheckpointError, match=message):
        load_block_head(written(tmp_path, target, eyas=None, **settings), target)  # a recorded wiring would precede


def test_writer_refuses_tensors_of_another_config(target: str, tmp_path: Path) -> None:
    head = random_block_head("dspark", target)
    with pytest.raises(CheckpointError, match="unexpected markov_head"):
        write_block_head(tmp_path, replace(head.config, markov_rank=0, confidence_with_markov=False), block_tensors(head))


@pytest.mark.parametrize(("kind", "causal"), [("dspark-rnn", False), ("dflash-window", True), ("dflash2", False)])
def test_sliding_layers_see_the_block_as_their_authors_do(kind: str, causal: bool, tiny_target: str, tmp_path: Path) -> None:
    """A config that does not say so leaves DFlash's sliding layers causal within the block, and no others."""
    folder = Path(shutil.copytree(tiny_block_head(kind, tiny_target), tmp_path / "head"))
    raw = json.loads((folder / "config.json").read_text())
    assert raw.pop("sliding_window_non_causal") is not KINDS[kind].causal_windows
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_block_config(Checkpoint(folder), Checkpoint(tiny_target).config).causal_windows is causal


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_kernel_projections_are_the_plain_ones(kind: str, tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values of rows, and keys and values of context; without a GPU in Triton's interpreter."""
    kernels = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = serve(load_block_head(tiny_block_head(kind, tiny_target), tiny_target, "float32", device))
    rows = torch.randn(7, 32, generator=torch.Generator().manual_seed(4)).to(device)
    layer, rotary = head.layers[1].self_attn, head.rotary[torch.tensor([3, 0, 9, 200, 5, 5, 1], device=device)]
    with torch.inference_mode():
        found = []
        for ours in (plain, kernels):
            monkeypatch.setattr(block_layers, "layer_kernels", lambda x, ours=ours: ours)
            found.append((layer.project(rows, rotary), layer.project_context(rows, rotary)))
    assert found[0][0].query.shape == (7, 4, 8)
    assert not any(context.query.numel() for _, context in found)
    for own, fused in zip(*found, strict=True):
        for name in ("query", "key", "value", "residual") if own.query.numel() else ("key", "value", "residual"):
            torch.testing.assert_close(getattr(fused, name), getattr(own, name), atol=1e-5, rtol=1e-5)


def test_the_kernel_of_convolutions_equals_plain_operations(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, more taps than one block has rows, and more columns than a program has."""
    layer_kernels = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
    monkeypatch.setattr(layer_kernels, "GATE_BLOCK", 32)
    config = replace(random_block_head("dflash2", target).config, hidden=48, block_size=3, conv_kernel=4, conv_group=8)
    generator = torch.Generator().manual_seed(0)
    convolution = block_layers.BlockConvolution(config)
    for parameter in convolution.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    rows, results = torch.randn(9, 48, generator=generator), []
    for kernels in (plain, layer_kernels):
        monkeypatch.setattr(block_layers, "layer_kernels", lambda x, kernels=kernels: kernels)
        with torch.inference_mode():
            before, deltas = convolution.before(rows)
            results.append([before, convolution.after(before, deltas)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
