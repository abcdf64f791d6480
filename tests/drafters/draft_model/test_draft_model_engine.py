"""A small draft model in the engine: the target drafts for itself without error; models that do not fit are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.config import AcceptanceRule, DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError
from tests.support.runs import assert_plain, run, stats_of
from tests.support.tiny import build_engine, fixed_config, write_target

HOT = SamplingParams(17, 0.9, seed=5, ignore_eos=True)
SAMPLINGS = {"greedy": replace(HOT, temperature=0.0), "hot": HOT, "filtered": replace(HOT, top_k=20, top_p=0.9)}


def speculated(target: str, tree: TreeConfig, sampling: SamplingParams, rule: AcceptanceRule) -> GenerationStats:
    """Statistics of four requests whose drafter is the target itself."""
    drafter = DraftHead(target, "sps").build_drafter(target, "float32", "cpu", tree, DraftingConfig(2048))
    engine = build_engine(target, None, "float32", "cpu", fixed_config(max_kv_tokens=512, acceptance=rule), tree, drafter)
    requests = [Request(f"{i}", (7, 8, 9 + i), replace(sampling, seed=5 + i)) for i in range(3)]
    chunks = run(engine, requests)
    if rule == "match":
        assert_plain(target, requests, chunks)
    return stats_of(chunks)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_as_its_own_draft_model_the_target_accepts_every_level(kind: str, tiny_target: str) -> None:
    """16 tokens after the prefill's, depth + 1 in each step; above temperature 0 because of the shared noise."""
    assert speculated(tiny_target, TreeConfig(16, 3, 1), SAMPLINGS[kind], "match").acceptance_length == 4


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_wide_tree_of_the_target_always_hits_its_first_level(kind: str, tiny_target: str) -> None:
    stats = speculated(tiny_target, TreeConfig(16, 3, 3), SAMPLINGS[kind], "match")
    assert stats.accepted_by_depth[0] == stats.offered_by_depth[0] > 0
    assert stats.acceptance_length > 3


@pytest.mark.parametrize("kind", ["hot", "filtered"])
def test_chains_sampled_from_the_target_are_never_rejected(kind: str, tiny_target: str) -> None:
    stats = speculated(tiny_target, TreeConfig(16, 3, 2), SAMPLINGS[kind], "rejection")
    assert stats.acceptance_length == 4


def test_a_model_with_another_vocabulary_is_refused(tiny_target: str, tmp_path: Path) -> None:
    other = str(write_target(tmp_path / "other", vocab_size=50))
    with pytest.raises(CheckpointError, match=r"has a vocabulary of 50, the target .* one of 48; take a draft model"):
        DraftHead(other, "sps").build_drafter(tiny_target, "float32", "cpu", TreeConfig(), DraftingConfig())


def with_tokenizer(folder: Path, words: str) -> str:
    write_target(folder, layers=1)
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    one, same, other = (with_tokenizer(tmp_path / words, words) for words in ("abc", "abc", "acb"))
    DraftHead(same, "sps").build_drafter(one, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(64))
    with pytest.raises(CheckpointError, match=r"another tokenizer than the target .* 2 tokens differ, such as 'b'"):
        DraftHead(other, "sps").build_drafter(one, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(64))
    (tmp_path / "acb" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        DraftHead(other, "sps").build_drafter(one, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(64))


def test_a_draft_model_must_be_named(tiny_target: str) -> None:
    with pytest.raises(ConfigError, match="drafter 'sps' needs a causal LM with the target's vocabulary; none was named"):
        DraftHead("", "sps").build_drafter(tiny_target, "float32", "cpu", TreeConfig(), DraftingConfig())
