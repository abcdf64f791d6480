"""Ranks that pad their passes to captured buckets agree on every bucket, and give the output of one process.

Capturing is CUDA's; here a captured pass runs again from the same closure. The kernel runs in triton's interpreter.
"""

import multiprocessing
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eyas.api.request import Request, SamplingParams
from eyas.cache.kv_cache import KVCache, KVShape
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.build import assemble_engine, run_worker
from eyas.engine.draft_manager import DraftManager
from eyas.engine.engine import Engine
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.errors import ConfigError, Unavailable
from eyas.kernels.arguments import AttentionRule
from eyas.models import loading as loading_module
from eyas.models.backends.attention_metadata import Tiling, pack_with_metadata, tight_shape
from eyas.models.backends.base import BackendKind, BackendPlan, ForwardBackend
from eyas.models.backends.cuda import KernelBackend, build_backend, plan_backend, release_backend
from eyas.models.backends.cuda_graphs import CaptureLimits, Out
from eyas.models.inputs import PackedInputs, Segments, pack
from eyas.models.layers.attention import attend
from eyas.models.loading import load_target
from eyas.models.parallel.commands import CommandDecoder, CommandEncoder, InitKVCache
from eyas.models.parallel.shards import Exchanges, Shard, weightless
from eyas.models.parallel.workers import RankInfo, TargetWorkers, start_workers
from eyas.models.target import TargetModel, TargetOutput
from tests.engine.test_out_of_memory import no_memory
from tests.support.bad_drafters import RandomDrafter
from tests.support.devices.random_passes import Heads, make_kv_cache, passes, scaling_of
from tests.support.runs import assert_plain, run
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, write_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = BackendPlan(BackendKind.GRAPHS, CaptureLimits(rows=12, segments=2, prefix=100))
NUM_SLOTS = 100


class NotingCapture:
    """A stand-in for capturing that writes down what is captured, replayed and freed, one line each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}"

    def __call__(self, run: Callable[[], Out]) -> Callable[[], Out]:
        rows = len(run().logits)  # type: ignore[attr-defined]
        self._note(f"captured {rows}")

        def replay() -> Out:
            self._note(f"replayed {rows}")
            return run()

        weakref.finalize(replay, self._note_end, rows)
        return replay

    def _note_end(self, rows: int) -> None:
        self._note(f"freed {rows} {'in' if dist.is_initialized() else 'behind'} the group")

    def _note(self, line: str) -> None:
        with self._file.open("a") as file:
            print(line, file=file)


def build_with_notes(folder: Path, plan: BackendPlan, target: TargetModel, kv_cache: KVCache) -> ForwardBackend:
    return build_backend(plan, target, kv_cache, capture_on=lambda device: NotingCapture(folder))


def make_engine(ranks: TargetWorkers, target: TargetModel, notes: Path) -> Engine:
    """As assemble_engine builds it on CUDA."""
    with ranks.init_kv_cache(InitKVCache(NUM_SLOTS, PLAN)):
        kv_cache = KVCache(NUM_SLOTS, target.kv_shapes, 0, target.dtype, target.device)
        backend = build_with_notes(notes, PLAN, target, kv_cache)
    ranks.before_close(partial(release_backend, backend))
    runner = ModelRunner(target, kv_cache, None, backend, ranks)
    scheduler = Scheduler(EngineConfig(max_kv_tokens=NUM_SLOTS, max_prefill_tokens=16), TreeConfig(5, 3, 2), frozenset())
    return Engine(scheduler, DraftManager(RandomDrafter(48), runner, "match"), runner, 256)


def test_ranks_agree_on_buckets_and_equal_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.models.parallel.workers.STOP_SECONDS", 100)
    folder, notes = str(write_target(tmp_path / "target", layers=1)), tmp_path / "notes"
    notes.mkdir()
    ranks = start_workers(
        RankInfo(0, 2, "cpu"), partial(run_worker, folder, "float32", 0, build=partial(build_with_notes, notes))
    )
    (process,) = multiprocessing.active_children()
    try:
        engine = make_engine(ranks, load_target(folder, shard=Shard(0, 2)), notes)
        requests = [
            Request(f"{n}", tuple(range(3, 3 + n)), SamplingParams(4, 0.9, seed=n, ignore_eos=True)) for n in (1, 20)
        ]
        chunks = run(engine, requests)
    finally:
        ranks.close()
    assert process.exitcode == 0, "parted by itself"
    assert_plain(folder, requests, chunks)
    check_notes(*(file.read_text().splitlines() for file in notes.iterdir()))


def check_notes(ours: list[str], theirs: list[str]) -> None:
    assert ours == theirs
    assert ours[:5] == ["captured 12", "captured 8", "captured 4", "captured 2", "captured 1"]
    assert len(set(ours[5:-5])) > 1, "passes of several sizes were replayed"
    assert all(line.startswith("replayed") for line in ours[5:-5])
    assert all(line.startswith("freed") and line.endswith("in the group") for line in ours[-5:])


FITTING_ROWS = 12
_sum = Exchanges.sum


def sum_if_it_fits(exchanges: Exchanges, output: torch.Tensor) -> torch.Tensor:
    """Run out of memory in the middle of a pass of more than FITTING_ROWS rows, when other ranks wait for the sum."""
    if exchanges.num_rows > FITTING_ROWS and len(exchanges.own) == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
    return _sum(exchanges, output)


@pytest.mark.parametrize("gathers", [True, False])
def test_an_exchange_without_memory_is_made_up_for(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it: memory may be missing for what a rank gathers into, before it takes part."""
    calls, exchanges, rows = list[str](), Exchanges(Shard(0, 2)), torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr(dist, "all_reduce", lambda given: calls.append(f"sum of {given.numel()}"))
    monkeypatch.setattr(dist, "all_gather", lambda parts, given: calls.append(f"gather {given.numel()}"))
    exchanges.start(rows)
    exchanges.sum(torch.zeros(4, 3))
    exchanges.gather(torch.zeros(4, 2))
    assert not exchanges.can_finish
    exchanges.end()
    whole = calls.copy()
    exchanges.start(rows)
    calls.clear()
    if gathers:
        exchanges.sum(torch.zeros(4, 3))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        patch.setattr(dist, "all_reduce", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            (exchanges.gather if gathers else exchanges.sum)(torch.zeros(4, 2 if gathers else 3))
    assert exchanges.can_finish
    exchanges.finish(torch.device("cpu"))
    assert calls == whole


@pytest.mark.parametrize("is_known", [True, False])
def test_ranks_that_cannot_end_a_pass_fail_at_once(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first pass it is not known what is left, and zeros take memory too. Rank 0 would wait for ever."""
    runner, exchanges = ModelRunner.__new__(ModelRunner), Exchanges(Shard(1, 2))
    model, device = SimpleNamespace(exchanges=exchanges), torch.device("cpu")
    runner.target = SimpleNamespace(model=model, device=device, shared_vocabulary=None)  # type: ignore[assignment]
    exchanges.known = [(False, 3, torch.float32)] if is_known else []
    exchanges.start(torch.zeros(4))
    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(Unavailable, match="no memory to end a pass" if is_known else "no memory beside its layers"):
        runner._finish_exchanges([], "a reason")


def be_a_short_rank(folder: str, info: RankInfo) -> None:
    """A rank with less memory than the other."""
    Exchanges.sum = sum_if_it_fits  # type: ignore[method-assign]
    run_worker(folder, "float32", 0, info)


@pytest.mark.parametrize("short_rank", [nightly(0), 1])
def test_without_memory_on_a_rank_only_what_fails_alone_ends(
    short_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.models.parallel.workers.STOP_SECONDS", 100)
    folder = str(write_target(tmp_path / "target", layers=2))
    ranks = start_workers(RankInfo(0, 2, "cpu"), partial(be_a_short_rank if short_rank else run_worker_of, folder))
    (process,) = multiprocessing.active_children()
    try:
        target = load_target(folder, shard=Shard(0, 2))
        if short_rank == 0:
            monkeypatch.setattr(Exchanges, "sum", sum_if_it_fits)
        config = fixed_config(max_kv_tokens=512, max_prefill_tokens=16, max_num_seqs=8, tensor_parallel_size=2)
        engine = assemble_engine(target, None, config, TreeConfig(4, 3, 2), RandomDrafter(48), ranks)
        sampled = SamplingParams(8, 0.9, ignore_eos=True)
        requests = [
            Request(
                f"{n}", tuple(range(3 + n, 8 + n)), replace(sampled, seed=n, top_k=(0, 9)[n % 2], top_p=(1.0, 0.9)[n > 1])
            )
            for n in range(5)
        ]
        chunks = run(engine, [*requests, Request("long", tuple(range(3, 40)), replace(sampled, seed=9))])
        requests.append(replace(requests[0], id="after"))
        chunks |= run(engine, requests[-1:])
    finally:
        ranks.close()
    assert process.exitcode == 0, "parted by itself"
    assert chunks.pop("long")[-1].finish_reason == "error"
    assert {own[-1].finish_reason for own in chunks.values()} == {"length"}
    assert_plain(folder, requests, chunks)


def run_worker_of(folder: str, info: RankInfo) -> None:
    run_worker(folder, "float32", 0, info)


def be_a_wrong_rank(folder: str, info: RankInfo) -> None:
    """A rank that cannot fuse layers, and whose kernels give other logits in its part of the vocabulary."""
    loading_module.fuse_layers = lambda model: False  # type: ignore[attr-defined]
    right = KernelBackend.forward

    def doubled(backend: KernelBackend, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        out = right(backend, packed, kv_cache)
        return TargetOutput(2 * out.logits, out.aux_hidden_states)

    KernelBackend.forward = doubled  # type: ignore[method-assign]
    run_worker(folder, "float32", 0, info)


def test_ranks_give_up_fused_layers_and_kernels_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 by itself would keep both: it sees no difference in its own part of the vocabulary."""
    folder = str(write_target(tmp_path / "target", layers=1))
    ranks = start_workers(RankInfo(0, 2, "cpu"), partial(be_a_wrong_rank, folder))
    plan = replace(PLAN, kind=BackendKind.KERNEL)
    try:
        target = load_target(folder, shard=Shard(0, 2))
        assert "forward" not in vars(target.model.get_decoder().layers[0]), "not fused"
        command = InitKVCache(NUM_SLOTS, plan)
        with pytest.raises(ConfigError, match="another rank differs by more"), ranks.init_kv_cache(command):
            build_backend(plan, target, target.new_kv_cache(NUM_SLOTS))
    finally:
        ranks.close()


@settings(max_examples=8)
@given(
    segments=passes(max_segments=3, max_rows=8),
    heads=st.sampled_from([Heads(8, 4, 16), Heads(8, 2, 16), Heads(4, 1, 24)]),
    window=st.sampled_from([None, 5]),
    size=st.sampled_from([2, 4]),
)
def test_the_kernel_on_sharded_heads_equals_plain_attention(
    segments: Segments, heads: Heads, window: int | None, size: int
) -> None:
    scratch, rows = sum(len(s.tokens) + len(s.prefix) for s in segments), sum(len(s.tokens) for s in segments)
    kv_cache = make_kv_cache(scratch, heads, 0, torch.float32)
    keys, values = (tensor.float().to(DEVICE) for tensor in (kv_cache.keys, kv_cache.values))
    query = torch.randn(rows, heads.query, heads.width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rule = AttentionRule(scaling_of(heads), window)
    whole = attend(query, keys, values, pack(segments, DEVICE), rule)
    for share in (Shard(rank, size) for rank in range(size)):
        own, ours = share.of_heads(heads.kv), share.cut(query, 1)
        num_kv = own.cut(keys, 1).shape[1]
        shape = tight_shape(segments, Tiling(ours.shape[1] // num_kv, num_kv, 6))
        tables = pack_with_metadata(segments, shape, scratch, DEVICE)
        got = attend(ours, own.cut(keys, 1), own.cut(values, 1), tables, rule)
        torch.testing.assert_close(got, share.cut(whole, 1), atol=2e-6, rtol=2e-6)


def test_the_largest_plan_fits_into_a_command(tiny_target: str) -> None:
    engine = EngineConfig(max_kv_tokens=8, max_num_seqs=4096, kv_cache_dtype="fp8_e5m2")
    plan = plan_backend(load_target(tiny_target), engine, TreeConfig(), 1 << 24)
    assert CommandDecoder().decode(CommandEncoder().encode(InitKVCache(8, plan))) == InitKVCache(8, plan)


def test_modules_of_another_thread_keep_their_weights() -> None:
    with weightless(), ThreadPoolExecutor(1) as pool:
        own, other = nn.Linear(2, 3), pool.submit(nn.Linear, 2, 3).result()
        own.register_buffer("kept", torch.ones(2))
    assert own.weight.is_meta
    assert own.kept.tolist() == [1, 1]
    assert not other.weight.is_meta
    assert not nn.Linear(2, 3).weight.is_meta


def test_a_rank_without_the_buckets_of_rank_0_reports_it(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(tiny_target)
    monkeypatch.setitem(target.__dict__, "kv_shapes", [KVShape(2, 512, 512)])
    kv_cache = KVCache(8, [KVShape(2, 8, 8)], 0, target.dtype, target.device)
    with pytest.raises(ConfigError, match="rank 0 takes the kernel for attention, but here heads are 512 wide"):
        build_backend(BackendPlan(BackendKind.KERNEL, PLAN.limits), target, kv_cache)
