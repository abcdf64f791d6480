"""Targets that draft with their own modules give the tokens of a plain loop, and the more of them the better these guess."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.engine.engine import Engine
from tests.support.runs import assert_plain, run, stats_of
from tests.support.tiers import nightly, tiered
from tests.support.tiny import build_engine, fixed_config
from tests.support.tiny_mtp import FAMILIES, MtpFolders, write_mtp

GREEDY = SamplingParams(16, 0.0, ignore_eos=True)
SAMPLINGS = (GREEDY, replace(GREEDY, temperature=0.8), replace(GREEDY, temperature=1.1, top_k=12, top_p=0.85))
TREE, CHAIN = TreeConfig(16, 4, 3), TreeConfig(4, 3, 1)
DAILY = ("glm4_moe", "deepseek_v3", "mellum")
EACH = tiered(FAMILIES, DAILY[1:])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return MtpFolders(tmp_path_factory.mktemp("mtp"))


def engine_of(folder: str, tree: TreeConfig = TREE, **limits: Any) -> Engine:
    head = DraftHead("", "mtp", folder)
    drafter = head.build_drafter(folder, "float32", "cpu", tree, DraftingConfig(max_kv_tokens=2048))
    config = fixed_config(**{"max_kv_tokens": 1024, "max_prefill_tokens": 16, **limits})
    return build_engine(folder, head.build_fuser(folder, "float32", "cpu"), "float32", "cpu", config, tree, drafter)


def requests(count: int, length: int = 9, num_tokens: int = 16) -> list[Request]:
    prompts = [[3 + (7 * i + 5 * k) % 45 for k in range(length + 6 * i)] for i in range(count)]
    each = (replace(sampling, max_tokens=num_tokens) for sampling in cycle(SAMPLINGS))
    return [Request(f"r{i}", tuple(p), replace(s, seed=i)) for i, (p, s) in enumerate(zip(prompts, each, strict=False))]


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("tree", [TREE, nightly(CHAIN)], ids=["tree", "chain"])
def test_batches_in_chunks_equal_the_plain_loop(family: str, tree: TreeConfig, folders: dict[str, str]) -> None:
    """Prompts of more rows than a pass takes, and arrivals while others decode."""
    asked = requests(5)
    chunks = run(engine_of(folders[family], tree, max_num_seqs=4), asked[:2], {3: asked[2:]})
    assert stats_of(chunks).num_drafted > 0
    assert_plain(folders[family], asked, chunks)


@pytest.mark.parametrize("family", tiered(FAMILIES, DAILY[:1]))
def test_a_prefix_hit_fills_the_modules_keys_too(family: str, folders: dict[str, str]) -> None:
    engine = engine_of(folders[family])
    first, *others = requests(3, length=40)
    same = [replace(first, id=f"again {i}", sampling=replace(SAMPLINGS[i], seed=i)) for i in range(2)]
    chunks = run(engine, [first]) | run(engine, [*same, *others])
    assert engine.load.num_cached_tokens > 0
    assert_plain(folders[family], [first, *same, *others], chunks)


def test_preempted_requests_equal_the_plain_loop(folders: dict[str, str]) -> None:
    engine = engine_of(folders["glm4_moe"], max_kv_tokens=120, max_num_seqs=4)
    asked = requests(4, length=12, num_tokens=40)
    chunks = run(engine, asked)
    assert engine.scheduler.num_preemptions > 0
    assert_plain(folders["glm4_moe"], asked, chunks)


def test_several_modules_change_no_token(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "three", "glm4_moe", count=3)
    asked = requests(4)
    chunks = run(engine_of(folder, max_num_seqs=3), asked[:1], {2: asked[1:]})
    assert stats_of(chunks).num_drafted > 0
    assert_plain(folder, asked, chunks)


@pytest.mark.parametrize("family", tiered(FAMILIES, DAILY[1:2]))
def test_a_module_that_agrees_makes_steps_long(family: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / family, family, agrees=True)
    asked = requests(2, num_tokens=24)
    chunks = run(engine_of(folder, CHAIN), asked)
    assert stats_of(chunks).acceptance_length > 3.5
    assert_plain(folder, asked, chunks)
