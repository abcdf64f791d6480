"""Passes padded to buckets give the same logits, and the engine the same tokens.

Capturing is CUDA's; without it a captured pass runs again from the same closure, on the current static inputs.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache, KVShape, SlotMemory
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError
from eyas.models.backends.attention_metadata import Tiling, build_words
from eyas.models.backends.base import ForwardBackend
from eyas.models.backends.cuda import KernelBackend, check_kernels, why_no_kernel, why_no_kernel_for
from eyas.models.backends.cuda_graphs import CaptureLimits, CudaCapture, GraphBackend, without_collection
from eyas.models.inputs import Segment, Segments
from eyas.models.layers.numerics import Float32Head
from eyas.models.loading import load_target
from eyas.models.target import TargetModel, TargetOutput
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.interpreter import run_again
from tests.support.devices.random_passes import make_pass
from tests.support.runs import assert_plain, run
from tests.support.tiers import nightly
from tests.support.tiny import write_target

TILING = Tiling(heads_per_kv=2, num_kv=2, num_processors=2)
LIMITS = CaptureLimits(rows=32, segments=4, prefix=400)
NUM_SLOTS = 200

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("shallow"), layers=2))


@pytest.fixture(scope="module")
def target(folder: str) -> TargetModel:
    return load_target(folder, device=DEVICE, aux_hidden_state_layers=(0, 2))


def filled_kv_cache(target: TargetModel) -> KVCache:
    """Random contents in all slots."""
    kv_cache = KVCache(NUM_SLOTS, target.kv_shapes, 0, target.dtype, target.device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor[:NUM_SLOTS] = torch.randn(tensor[:NUM_SLOTS].shape, generator=generator).to(DEVICE)
    return kv_cache


@pytest.fixture(scope="module")
def kv_cache(target: TargetModel) -> KVCache:
    return filled_kv_cache(target)


@pytest.fixture(scope="module", params=["memory", nightly("whole prefixes")])
def backend(request: pytest.FixtureRequest, target: TargetModel, kv_cache: KVCache) -> GraphBackend:
    """With and without a memory of prefixes, which has no room for the longest ones."""
    capture = CudaCapture(target.device) if DEVICE == "cuda" else run_again
    memory = SlotMemory(3, 45, target.device) if request.param == "memory" else None
    return GraphBackend(KernelBackend(target, TILING, kv_cache.scratch, memory), kv_cache, LIMITS, capture)


def check_passes(target: TargetModel, backend: ForwardBackend, kv_cache: KVCache, forests: Sequence[list[Segment]]) -> None:
    """Run all passes in turn and compare each with the plain path on a KV cache of its own."""
    for segments in forests:
        plain_kv_cache = filled_kv_cache(target)
        for ours, theirs in zip(
            (*kv_cache.keys, *kv_cache.values), (*plain_kv_cache.keys, *plain_kv_cache.values), strict=True
        ):
            theirs.copy_(ours)
        expected = target.forward(target.pack(segments), plain_kv_cache)
        got = backend.forward(backend.pack(segments), kv_cache)
        torch.testing.assert_close(got.logits, expected.logits, atol=2e-5, rtol=2e-5)
        assert got.aux_hidden_states is not None
        assert expected.aux_hidden_states is not None
        torch.testing.assert_close(
            got.aux_hidden_states[: len(expected.aux_hidden_states)], expected.aux_hidden_states, atol=2e-5, rtol=2e-5
        )
        for ours, theirs in zip(
            (*kv_cache.keys, *kv_cache.values), (*plain_kv_cache.keys, *plain_kv_cache.values), strict=True
        ):
            torch.testing.assert_close(ours[:NUM_SLOTS], theirs[:NUM_SLOTS], atol=2e-5, rtol=2e-5)


def test_every_row_count_between_buckets_gives_the_plain_logits(
    target: TargetModel, backend: GraphBackend, kv_cache: KVCache
) -> None:
    check_passes(target, backend, kv_cache, [make_pass([(True, rows, 9)], seed=rows) for rows in (1, 3, 9, 32)])


def test_graphs_write_their_logits_to_one_buffer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, written = load_target(folder, "float16", device=DEVICE), list[torch.Tensor]()
    packed = target.model.get_output_embeddings()
    if not isinstance(packed, Float32Head):  # a CPU has packed it
        head = Float32Head(packed.in_features, packed.out_features, bias=False, dtype=torch.float16)
        head.weight.data.copy_(packed.weight)
        target.model.set_output_embeddings(head)
    inner = Float32Head.forward

    def forward(head: Float32Head, rows: torch.Tensor) -> torch.Tensor:
        written.append(inner(head, rows))
        return written[-1]

    monkeypatch.setattr(Float32Head, "forward", forward)
    kv_cache = target.new_kv_cache(NUM_SLOTS)
    capture = CudaCapture(target.device) if DEVICE == "cuda" else run_again
    backend = GraphBackend(KernelBackend(target, TILING, kv_cache.scratch), kv_cache, LIMITS, capture)
    assert backend.output is not None
    largest = backend.output.logits
    assert [x.shape[-2] for x in written if x.data_ptr() == largest.data_ptr()][1:] == [24, 16, 8, 4, 2, 1]
    segments = make_pass([(True, 5, 9)])
    got = backend.forward(backend.pack(segments), kv_cache).logits
    assert got.data_ptr() == largest.data_ptr()
    expected = target.forward(target.pack(segments), kv_cache).logits
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_batches_shrink_and_grow_across_buckets(target: TargetModel, backend: GraphBackend, kv_cache: KVCache) -> None:
    sizes = [
        [(True, 1, 30), (True, 1, 3), (True, 1, 11)],
        [(True, 9, 31), (True, 6, 4), (False, 5, 0), (True, 2, 12)],
        [(False, 20, 0), (True, 1, 40)],
        [(True, 1, 50)],
    ]
    check_passes(target, backend, kv_cache, [make_pass(s, seed=i) for i, s in enumerate(sizes)])


def test_tables_grow_on_the_device_from_pass_to_pass(target: TargetModel, backend: GraphBackend, kv_cache: KVCache) -> None:
    """Four sequences for three rows, so that some are forgotten; one pass has too many segments, one too long a prefix."""
    slots = np.random.default_rng(0).permutation(NUM_SLOTS).reshape(4, 50)
    forests = []
    for step, chosen in enumerate([(0, 1), (1, 2, 0), (3, 0), (0, 1, 2, 3), (2,), (0, 3)]):
        lengths = [8 * step + number for number in chosen]
        made = make_pass([(number % 2 == 0, 2, 0) for number in chosen], seed=step)
        forests.append([
            s._replace(
                prefix=slots[n, :length], slots=slots[n, length : length + 2], positions=s.positions + length, table=(n, 0)
            )
            for s, n, length in zip(made, chosen, lengths, strict=True)
        ])  # fmt: skip
    check_passes(target, backend, kv_cache, forests)


def test_a_pass_that_cannot_be_uploaded_leaves_nothing_believed(
    target: TargetModel, kv_cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SlotMemory(4, 100, target.device)
    backend = KernelBackend(target, TILING, kv_cache.scratch, memory)
    segments = [s._replace(table=(1, 0)) for s in make_pass([(True, 3, 30)])]

    def fail(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("eyas.models.backends.attention_metadata.upload", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            backend.pack(segments)
    backend.pack(segments)
    found = memory.words.cpu().numpy()
    assert np.array_equal(found[found.nonzero()], segments[0].prefix[segments[0].prefix != 0])


def test_a_pass_that_no_graph_holds_is_launched(target: TargetModel, backend: GraphBackend, kv_cache: KVCache) -> None:
    check_passes(target, backend, kv_cache, [make_pass([(False, 30, 7), (True, 3, 2)])])


@pytest.mark.filterwarnings("ignore:.*(ttention|backend|kernel)")  # of torch, that CPUs have no fused kernel for it
def test_a_library_attends_for_long_prompts_of_a_pass(target: TargetModel, kv_cache: KVCache) -> None:
    backend = KernelBackend(target, replace(TILING, library_rows=20), kv_cache.scratch)
    forests = [make_pass([(True, 3, 2), (False, 30, 7), (False, 20, 0)]), make_pass([(False, 30, 7)])]
    assert [len(backend.pack(segments).prompts) for segments in forests] == [2, 1]
    check_passes(target, backend, kv_cache, forests)


def test_a_model_that_cannot_be_captured_is_refused_by_name(target: TargetModel, kv_cache: KVCache) -> None:
    def fail(run: Callable[[], TargetOutput]) -> Callable[[], TargetOutput]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be captured .* engine\.cuda_graphs to false"):
        GraphBackend(KernelBackend(target, TILING, kv_cache.scratch), kv_cache, LIMITS, fail)


def test_the_kernel_names_unsupported_head_sizes(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not why_no_kernel(target)
    for shapes, reason in (
        ([KVShape(2, 8, 8), KVShape(2, 520, 520)], "heads are 520 wide, the kernel takes 512 at most"),
        ([KVShape(2, 8, 8), KVShape(1, 512, 512)], "heads are 512 wide, the kernel takes 256 at most in float32"),
    ):
        monkeypatch.setitem(target.__dict__, "kv_shapes", shapes)
        assert why_no_kernel(target) == reason
    assert not why_no_kernel_for(512, 32, torch.bfloat16)
    assert "33 query heads 512 wide" in why_no_kernel_for(512, 33, torch.bfloat16)


def test_padded_passes_do_not_change_the_output(
    folder: str, target: TargetModel, backend: GraphBackend, kv_cache: KVCache
) -> None:
    passes = ModelRunner(target, kv_cache, None, backend)
    scheduler = Scheduler(EngineConfig(max_kv_tokens=NUM_SLOTS, max_prefill_tokens=8), TreeConfig(7, 4, 4), frozenset())
    engine = Engine(scheduler, DraftManager(RandomDrafter(48), passes, "match"), passes, 256)
    sampling = [SamplingParams(max_tokens=5, temperature=t, seed=n, ignore_eos=True) for t, n in ((0.0, 11), (0.9, 1))]
    requests = [Request(f"{i}", tuple(range(3, 3 + params.seed)), params) for i, params in enumerate(sampling)]
    assert_plain(folder, requests, run(engine, requests))


def test_no_garbage_is_collected_during_a_capture() -> None:
    """Nor is the collector started that somebody has stopped."""
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            with without_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()


def test_all_graphs_leave_their_output_in_the_same_memory(backend: GraphBackend) -> None:
    """One buffer of logits, as large as the largest graph's."""
    outputs = []
    for shape, replay in list(backend.replays.items())[::2]:
        padding = build_words(Segments.of(()), shape, NUM_SLOTS)  # what earlier passes left is laid out for other buckets
        backend.words[: len(padding)].copy_(torch.from_numpy(padding))
        outputs.append(replay())
    kept = {o.logits.untyped_storage().data_ptr() for o in outputs}
    assert len(outputs) > 3
    assert len(kept) == 1
    assert len({o.aux_hidden_states.untyped_storage().data_ptr() for o in outputs if o.aux_hidden_states is not None}) == 1


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_kernels_that_compute_something_else_are_refused(
    factor: float, target: TargetModel, kv_cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = pytest.importorskip("eyas.kernels.cuda.attention", reason="triton is not installed")
    launched, right = KernelBackend(target, TILING, kv_cache.scratch), kernel.attend
    check_kernels(launched)
    monkeypatch.setattr(kernel, "attend", lambda *args: factor * right(*args))
    with pytest.raises(ConfigError, match=r"kernels give logits that differ by .* constraints\.txt"):
        check_kernels(launched)
