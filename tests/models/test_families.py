"""Every supported family: our packed forward equals transformers' own, and the engine's output equals `generate`."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.config import TreeConfig
from eyas.engine.build import assemble_engine
from eyas.models.inputs import Segment
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.tree import DraftTree
from tests.models.test_target import expected, make_kv_cache, run, segment
from tests.support import runs
from tests.support.bad_drafters import RandomDrafter
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.reference import load_reference
from tests.support.tiny import fixed_config

PROMPTS = [[5, 9, 11], np.random.default_rng(1).integers(3, 48, 37).tolist()]
TREE = TreeConfig(num_draft_tokens=8, num_steps=4, top_k=3)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    kind, settings = FAMILIES[request.param]
    return write_model(tmp_path_factory.mktemp(request.param), config_of(kind, **settings))


@pytest.fixture(scope="module")
def target(folder: str) -> TargetModel:
    return load_target(folder)


def tree_rows(tree: DraftTree, start: int, slots: Any, prefix: Any) -> Segment:
    positions = start + np.array(tree.depths)
    return Segment(np.array(tree.tokens), positions, slots, prefix, tree.ancestor_mask(), np.arange(len(tree)))


def test_chunks_and_trees_equal_transformers_own_forward(target: TargetModel, folder: str) -> None:
    kv_cache, slots = make_kv_cache(target), np.random.default_rng(0).permutation(400)
    prefix, short = PROMPTS[1], PROMPTS[0]
    tree = DraftTree.of((7, 8, 9, 10, 11, 12, 13), (0, 0, 0, 1, 3, 4, 2), (0.0,) * 7)
    first = run(target, [segment(prefix[:20], 0, slots[:20], slots[:0])], kv_cache)
    second = run(
        target, [segment(prefix[20:], 20, slots[20:37], slots[:20]), segment(short, 0, slots[50:53], slots[:0])], kv_cache
    )
    third = run(target, [tree_rows(tree, 37, slots[60:67], slots[:37])], kv_cache)
    whole = expected(folder, prefix)
    torch.testing.assert_close(torch.cat([first[0], second[0]]), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second[1], expected(folder, short), atol=1e-4, rtol=1e-4)
    for node in range(len(tree)):
        path = [tree.tokens[above] for above in tree.path(node)]
        torch.testing.assert_close(third[0][node], expected(folder, prefix + path)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafted", [False, True])
def test_the_engine_output_equals_generate(target: TargetModel, folder: str, drafted: bool) -> None:
    config = fixed_config(max_kv_tokens=512, max_prefill_tokens=16)
    engine = assemble_engine(target, None, config, TREE, RandomDrafter(48) if drafted else None)
    requests = [Request(f"{i}", tuple(prompt), SamplingParams(12, 0.0, seed=0)) for i, prompt in enumerate(PROMPTS)]
    outputs = runs.outputs_of(runs.run(engine, requests))
    assert outputs == {request.id: generated(folder, request.prompt_ids) for request in requests}


@cache
def generated(folder: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers itself generates."""
    reference: Any = load_reference(folder)
    found = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0]
    return list(found[len(prompt) :].tolist())
