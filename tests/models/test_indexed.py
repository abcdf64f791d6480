"""Attention with indexers: dense and equal in contexts of as many tokens as an indexer chooses, refused beyond them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.api.request import Request, SamplingParams
from eyas.engine.build import assemble_engine
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.models.layers.indexed import NoIndexer
from eyas.models.loading import load_target, target_of
from eyas.models.supported import inspect_architecture
from tests.models.test_more_families import PREFIX, SLOTS, TREE, check_exact, rank_of, tree_segment, write
from tests.models.test_target import expected, run, segment
from tests.support.bad_drafters import RandomDrafter
from tests.support.corpora import write_datastore
from tests.support.devices.rank_threads import RankThreads
from tests.support.families import config_of, write_model, write_wrapped
from tests.support.family_configs import INDEXED, WRAPPED
from tests.support.methods import KINDS_OF_DRAFTS, Case
from tests.support.reference import generated, load_reference
from tests.support.runs import outputs_of, stats_of
from tests.support.runs import run as run_engine
from tests.support.tiers import nightly, tiered
from tests.support.tiny import change_config, change_tensors, fixed_config, shared_target

# An indexer in each layer, and layers that share the choice of one.
KINDS = ("deepseek_v32", "glm_moe_dsa")
CHOSEN = 96
PROMPTS = [np.random.default_rng(length).integers(3, 48, length).tolist() for length in (3, 37, 70)]
DAILY_METHODS = ("eagle3", "prompt_lookup")
# The tiny head of Hydra with a layer has the widths of other heads than these.
METHODS = [name for name in KINDS_OF_DRAFTS if name != "hydra-prefix"]


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_end_with_the_keys_that_are_chosen(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(kind, tmp_path)
    target = load_target(folder)
    assert target.max_model_len == CHOSEN
    assert f"contexts end at {CHOSEN} tokens instead of 256, as index_topk in its config.json says" in caplog.text
    engine = assemble_engine(target, None, fixed_config(max_kv_tokens=256), TREE, None)
    whole = Request("whole", tuple(PROMPTS[2]), SamplingParams(CHOSEN - 70, ignore_eos=True, seed=0))
    assert len(outputs_of(run_engine(engine, [whole]))["whole"]) == CHOSEN - 70
    with pytest.raises(InvalidRequest, match=f"context length {CHOSEN}"):
        engine.submit(Request("beyond", tuple(PROMPTS[2]), SamplingParams(CHOSEN - 69, seed=0)))


def test_a_longer_context_is_refused_before_weights_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write("deepseek_v32", tmp_path)
    assert load_target(folder, max_model_len=50).max_model_len
    assert not caplog.text, "it says nothing of a context that is shorter anyway"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"max_model_len is 97, but Eyas serves .* with {CHOSEN} tokens \(index_topk in"):
        load_target(folder, max_model_len=97)


def test_dense_attention_would_differ_beyond_the_chosen_keys(tmp_path: Path) -> None:
    """So that the limit is needed, and the comparisons with transformers see an indexer that chooses."""
    folder = write("glm_moe_dsa", tmp_path / "whole")
    (found,) = run(load_target(folder), [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], load_target(folder).new_kv_cache(400))
    change_config(folder, index_topk=8)
    few = expected(str(tmp_path / "whole" / "."), PREFIX)
    torch.testing.assert_close(found[:8], few[:8], atol=1e-4, rtol=1e-4)
    assert float((found - few)[8:].abs().amax(1).median()) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_indexers_are_not_read(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor missed, nor named as unused."""
    folder = write(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = [name for name in tensors if ".indexer." in name]
    assert own
    change_tensors(folder, **dict.fromkeys(own[1:]))
    target = load_target(folder)
    assert not [name for name, _ in target.model.named_parameters() if "indexer" in name]
    assert "not used" not in caplog.text
    change_tensors(folder, **tensors)
    check_exact(target, folder)


def test_a_loaded_model_keeps_its_own_indexers(tmp_path: Path) -> None:
    folder = write("glm_moe_dsa", tmp_path)
    model = load_reference(folder)
    target = target_of(model)
    assert target.max_model_len == CHOSEN
    check_exact(target, folder)
    assert not any(isinstance(module, NoIndexer) for module in model.modules())


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with as many layers as heads of `tiny_head` read."""
    settings = {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2}
    return write_model(tmp_path_factory.mktemp("deep"), config_of("glm_moe_dsa", **settings))


@pytest.mark.parametrize("name", tiered(METHODS, DAILY_METHODS))
def test_every_method_drafts_for_an_indexed_target(name: str, deep: str, tiny_head: str) -> None:
    store = Path(deep, "outputs")
    if name == "rest":
        write_datastore(Path(deep), [generated(deep, tuple(prompt)) for prompt in PROMPTS], store)
    case = Case(name, deep, tiny_head, store)
    fuser = case.fuser()
    target = shared_target(deep, fuser.aux_hidden_state_layers if fuser else ())
    config = fixed_config(max_kv_tokens=512, max_prefill_tokens=16, max_num_seqs=4)
    asked = [Request(f"{t}-{i}", tuple(p), SamplingParams(12, t, seed=i)) for t in (0.0, 0.8) for i, p in enumerate(PROMPTS)]
    chunks = run_engine(assemble_engine(target, fuser, config, TREE, case.drafter(TREE)), asked)
    assert outputs_of(chunks) == outputs_of(run_engine(assemble_engine(target, None, config, TREE, None), asked))
    assert stats_of(chunks).num_drafted, "it drafts"
    for i, prompt in enumerate(PROMPTS):
        assert outputs_of(chunks)[f"0.0-{i}"] == generated(deep, tuple(prompt))


def test_preempted_sequences_equal_generate(deep: str) -> None:
    asked = [Request("first", tuple(PROMPTS[2]), SamplingParams(12, 0.0, seed=0))]
    urgent = [Request("urgent", tuple(PROMPTS[1]), SamplingParams(12, 0.0, seed=0), priority=5)]
    config = fixed_config(max_kv_tokens=104, max_prefill_tokens=16, max_num_seqs=4)
    engine = assemble_engine(shared_target(deep), None, config, TREE, RandomDrafter(48))
    chunks = run_engine(engine, asked, {8: urgent})
    assert outputs_of(chunks) == {r.id: generated(deep, r.prompt_ids) for r in [*asked, *urgent]}
    assert engine.scheduler.num_preemptions


@pytest.mark.parametrize("kind", ["mistral_large4", nightly("glm5_next")])
def test_ranks_share_the_heads_of_a_wrapped_model(kind: str, tmp_path: Path) -> None:
    folder = write_wrapped(kind, tmp_path)
    targets = [rank_of(folder, rank) for rank in range(2)]
    rows = segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])
    parts = RankThreads(2).run(lambda rank: run(targets[rank], [rows], targets[rank].new_kv_cache(400))[0])
    found = torch.cat(parts, -1) if targets[0].shared_vocabulary else parts[0]
    torch.testing.assert_close(found, expected(folder, PREFIX), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [nightly("mistral_large4"), "glm5_next"])
def test_drafts_for_a_wrapped_model_equal_generate(kind: str, tmp_path: Path) -> None:
    """Also behind cached prefixes, and of delta layers behind their states."""
    folder = write_wrapped(kind, tmp_path)
    config = fixed_config(max_kv_tokens=256, max_prefill_tokens=16, max_num_seqs=2)
    twice = [*PROMPTS, *PROMPTS]
    asked = [Request(f"{i}", tuple(prompt), SamplingParams(12, 0.0, seed=0)) for i, prompt in enumerate(twice)]
    chunks = run_engine(assemble_engine(load_target(folder), None, config, TREE, RandomDrafter(48)), asked)
    assert outputs_of(chunks) == {r.id: generated(folder, r.prompt_ids) for r in asked}


def test_layers_read_the_latents_that_others_keep(tmp_path: Path) -> None:
    target = load_target(write_wrapped("mistral_large4", tmp_path))
    kv_cache = target.new_kv_cache(400)
    run(target, [segment(PREFIX, 0, SLOTS[:37], SLOTS[:0])], kv_cache)
    assert [keys.data_ptr() == kv_cache.keys[0].data_ptr() for keys in kv_cache.keys] == [True, True, False, True]
    assert len(run(target, [tree_segment()], kv_cache)[0]) == 7


def test_indexers_that_leave_out_the_last_tokens_are_refused() -> None:
    text, settings, _ = WRAPPED["glm5_next"]
    config = config_of(text, **settings, index_kpool_always_select_tail=False)
    with pytest.raises(CheckpointError, match=r"leave out the last tokens .* Eyas would need its indexers"):
        inspect_architecture(config)
