"""Captured draft trees on a GPU: capture at real sizes, and how often a draft waits for the device."""

from functools import partial

import pytest
import torch

from benchmarks.gpu.drafts import Session, make_head
from benchmarks.gpu.measuring import llama_head
from eyas.api.request import Request, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.trees.cuda_graphs import TreeGraphs
from eyas.models.backends.cuda_graphs import CudaCapture
from eyas.models.heads.eagle import EagleHead
from eyas.protocol.tree import DraftTree
from tests.support.devices.emulated_graphs import METHODS
from tests.support.devices.waits import recorded_waits
from tests.support.runs import assert_plain, run
from tests.support.tiny import build_engine, fixed_config, write_small
from tests.support.tiny_block import tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import tiny_heads
from tests.support.tiny_mtp import tiny_mtp_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE = TreeConfig(num_draft_tokens=60, num_steps=8, top_k=10)
CONFIG = DraftingConfig(max_kv_tokens=20000)


@pytest.fixture(scope="module")
def head() -> EagleHead:
    """A small head with the vocabularies of a large one; float32, in which padding does not change the order of tokens."""
    return make_head(llama_head(1024, 2816, 8), torch.device("cuda")).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graph_trees_equal_the_plain_trees(head: EagleHead, temperature: float) -> None:
    drafters = [EagleDrafter(head, SHAPE, CONFIG, capture=capture) for capture in (CudaCapture(torch.device("cuda")), None)]
    sessions = [Session(row, temperature, SHAPE, head) for row in range(5)]
    for counts in ((3, 900, 40, 130, 1400), (1, 2, 3, 4, 5), (200, 1, 90, 1, 1)):
        contexts = [session.commit(count) for session, count in zip(sessions, counts, strict=True)]
        for ours, theirs in zip(*(drafter.propose(contexts) for drafter in drafters), strict=True):
            assert isinstance(ours, DraftTree)
            assert isinstance(theirs, DraftTree)
            assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)


def test_a_cuda_graph_round_syncs_with_the_device_once(head: EagleHead) -> None:
    drafter = EagleDrafter(head, SHAPE, CONFIG, capture=CudaCapture(torch.device("cuda")))
    contexts = [Session(row, 1.0, SHAPE, head).commit(50) for row in range(3)]
    drafter.propose(contexts)
    captured, states = drafter.graphs, [drafter.sessions[context.session].state for context in contexts]
    assert isinstance(captured, TreeGraphs)
    stacked, slots = torch.stack([state for state in states if state is not None]), drafter._prefix_slots(contexts)
    with recorded_waits() as waits, torch.inference_mode():
        assert captured.grow(contexts, slots, stacked, drafter._scratch(contexts))
    assert len(waits) == 1


@pytest.mark.parametrize("method", METHODS)
def test_outputs_equal_the_plain_cpu_loop(method: str, tiny_target: str, tiny_head: str) -> None:
    name, folder = method.partition("-")[0], folder_of(method, tiny_target, tiny_head)
    tree, config = TreeConfig(12, 4, 4), DraftingConfig(max_kv_tokens=2048, cuda_graph_max_batch=4)
    drafter = DraftHead(folder, name).build_drafter(tiny_target, "float32", "cuda", tree, config)
    fuser = DraftHead(folder, name).build_fuser(tiny_target, "float32", "cuda")
    engine = build_engine(tiny_target, fuser, "float32", "cuda", fixed_config(max_kv_tokens=1024), tree, drafter)
    requests = [Request(f"{i}", (7, 8, 9 + i), SamplingParams(20, 0.45 * i, seed=i, ignore_eos=True)) for i in range(3)]
    assert_plain(tiny_target, requests, run(engine, requests))


def folder_of(method: str, target: str, head: str) -> str:
    """A tiny head of a method."""
    if method.startswith("eagle"):
        return head if method == "eagle3" else f"{head}/eagle1"
    if method.startswith(("dspark", "dflash")):
        return tiny_block_head(method, target)
    own = {
        "peagle": partial(tiny_peagle_head, head),
        "mtp": partial(tiny_mtp_module, target),
        "sps": partial(write_small, target),
    }
    return own.get(method, partial(tiny_heads, method.removesuffix("-dynamic"), head))()
