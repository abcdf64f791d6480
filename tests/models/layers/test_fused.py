"""Fused layers compute what transformers' modules define, on the CPU and in the kernels of CUDA."""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.cache.kv_cache import bytes_per_slot
from eyas.device import host as process
from eyas.kernels.arguments import FLOATS, HALVES
from eyas.kernels.plain import layers as plain_layers
from eyas.models.backends import cpu as cpu_decoder
from eyas.models.backends.cpu import share_layers
from eyas.models.backends.packed_weights import has_fbgemm, in_blocks
from eyas.models.heads.layers import DraftLayer, LayerSizes, layer_shapes, rms_norm
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.models.inputs import Segment
from eyas.models.layers import fused
from eyas.models.layers.attention import kv_sources
from eyas.models.layers.fused import KINDS, LayerKind, unfuse_layers
from eyas.models.layers.norms import HeadLayout, RMSNorm
from eyas.models.loading import load_target
from eyas.models.target import TargetModel, TargetOutput
from tests.support.families import FAMILIES, GEMMA_4_ROPE, config_of, write_model
from tests.support.tiers import nightly, tiered
from tests.support.tiny import change_tensors, write_target

FUSED = ("llama-3", "llama-tied", "rope-yarn", "mistral", "qwen-2", "qwen-3", "phi-3", "gemma-2", "gemma-3")
ROUTED = ("mixtral", "qwen-3-moe")  # no kernel of the CPU runs their layers
ROWS = 20  # more than the sliding windows


DAILY = ("llama-3", "qwen-3", "phi-3", "gemma-3")  # the others' parts are in these too


needs_fbgemm = pytest.mark.skipif(
    not (find_spec("numba") and has_fbgemm()), reason="numba is not installed, or this torch was built without FBGEMM"
)


@pytest.fixture
def layer_kernels() -> Any:
    """Those of Triton; without a GPU they run in its interpreter."""
    return pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")


@pytest.fixture
def sharing() -> Any:
    return pytest.importorskip("eyas.kernels.cpu.sharing", reason="numba is not installed")


@pytest.fixture(params=tiered(FUSED, DAILY))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> TargetModel:
    kind, settings = FAMILIES[request.param]
    return load_target(
        write_model(tmp_path, config_of(kind, **settings)), aux_hidden_state_layers=(0, 2, 3, FINAL_NORM_OUTPUT)
    )


def run(target: TargetModel) -> TargetOutput:
    """Two sequences of different lengths, all logits."""
    none, segments = np.zeros(0, dtype=np.int64), []
    for start, count in ((0, ROWS), (ROWS, 3)):
        rows = np.arange(count)
        segments.append(Segment(3 + (rows * 7 + start) % 40, rows, start + rows, none, None, rows))
    return run_segments(target, segments)


def run_segments(target: TargetModel, segments: list[Segment]) -> TargetOutput:
    num_slots = 1 + max(int(segment.slots.max()) for segment in segments)
    return target.forward(target.pack(segments), target.new_kv_cache(num_slots))


def is_fused(target: TargetModel) -> bool:
    return "forward" in vars(target.model.get_decoder().layers[0])


def use_torch(target: TargetModel) -> None:
    """Run fused layers by operations of torch instead of the kernels of the CPU."""
    target.model.get_decoder().__dict__.pop("forward", None)


def assert_equal_to_unfused(target: TargetModel, *others: TargetOutput) -> None:
    """others: what it gave before, in other ways."""
    assert is_fused(target)
    found = run(target)
    unfuse_layers(target.model)
    expected = run(target)
    for each in (found, *others):
        torch.testing.assert_close(each.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(each.aux_hidden_states, expected.aux_hidden_states, rtol=1e-4, atol=1e-4)


def test_fused_layers_equal_those_of_transformers(target: TargetModel) -> None:
    """By kernels and without numba. Kernels are compiled when a target is loaded, not later."""
    kernels = pytest.importorskip("eyas.kernels.cpu.layers", reason="numba is not installed")
    names = ("norm", "add_norm", "gate", "rotate", "store", "attend", "rank_rows", "draw_each", "run_layers")
    compiled = [getattr(kernels, name) for name in (*names, "multiply_weight")]
    signatures = [list(kernel.signatures) for kernel in compiled]
    assert all(signatures)
    by_kernels = run(target)
    assert [list(kernel.signatures) for kernel in compiled] == signatures
    check_rotary_tables(target)
    use_torch(target)
    assert_equal_to_unfused(target, by_kernels)


@pytest.mark.parametrize("settings", [{}, {"decoder_sparse_step": 2}])
@pytest.mark.parametrize("name", ROUTED)
def test_attention_beside_experts_is_fused(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Also where dense layers stand between those with experts."""
    kind, own = FAMILIES[name]
    folder = write_model(tmp_path, config_of(kind, **own, **(settings if name == "qwen-3-moe" else {})))
    target = load_target(folder, aux_hidden_state_layers=(0, 2, 3, FINAL_NORM_OUTPUT))
    assert "forward" not in vars(target.model)
    assert_equal_to_unfused(target)


GEMMA_4: dict[str, dict[str, Any]] = {
    "dense": {"attention_k_eq_v": True, **GEMMA_4_ROPE},
    "e2b": FAMILIES["gemma-4-e2b"][1],
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}


def gemma_4(variant: str, folder: Path) -> TargetModel:
    """Layers are multiplied by numbers other than 1, as in published checkpoints."""
    kind, settings = FAMILIES["gemma-4"]
    write_model(folder, config_of(kind, **settings | GEMMA_4[variant]))
    scalars = [name for name in load_file(folder / "model.safetensors") if name.endswith("layer_scalar")]
    assert scalars
    change_tensors(folder, **{name: torch.tensor([0.5 + 0.3 * place]) for place, name in enumerate(scalars)})
    return load_target(str(folder), aux_hidden_state_layers=(0, 2, 3, FINAL_NORM_OUTPUT))


@pytest.mark.parametrize("variant", GEMMA_4)
def test_gemma_4_is_fused_with_its_own_parts(variant: str, tmp_path: Path) -> None:
    """Values without a projection, layers that read the keys of others, their own inputs, and experts beside the MLP."""
    assert_equal_to_unfused(gemma_4(variant, tmp_path))


def test_layers_that_share_keys_take_memory_once(tmp_path: Path) -> None:
    target = gemma_4("e2b", tmp_path)
    kv_cache, sources = target.new_kv_cache(4), kv_sources(target.config)
    assert sources == [0, 1, 2, 3, 2, 3]
    assert [keys is kv_cache.keys[source] for keys, source in zip(kv_cache.keys, sources, strict=True)] == [True] * 6
    assert len({keys.data_ptr() for keys in kv_cache.keys}) == 4
    whole = bytes_per_slot(target.kv_shapes, 0, torch.float32)
    assert bytes_per_slot(target.kv_shapes, 0, torch.float32, None, sources) == whole - 2 * 4 * (2 * 8 + 2 * 16)


def test_a_part_of_a_head_that_is_rotated_is_not_fused(tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    assert not is_fused(load_target(write_model(tmp_path, config_of("phi3", **rope))))


def test_processes_take_turns_to_compile_kernels() -> None:
    kernels = pytest.importorskip("eyas.kernels.cpu.layers", reason="numba is not installed")
    fcntl = pytest.importorskip("fcntl")
    from eyas.kernels.cpu.compiling import LOCK

    with open(Path(kernels.norm.stats.cache_path, LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=kernels.compile_kernels.__wrapped__)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join()


@needs_fbgemm
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, "half") if name in DAILY else nightly(name, "half") for name in FUSED),
        ("llama-3", "float"),
        ("qwen-3", "mixed"),
    ],
)
def test_layers_in_one_kernel_equal_those_run_apart(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weights: as they are stored. Of mixed ones, every other product has float32."""
    kind, settings = FAMILIES[name]  # no bias of an output projection, which no kernel adds
    folder = write_model(tmp_path, config_of(kind, **settings | {"attention_bias": False}), torch.bfloat16)
    is_half = itertools.cycle([weights == "half", weights != "float"])
    monkeypatch.setattr("eyas.models.backends.packed_weights.has_fbgemm", lambda: next(is_half))
    target = load_target(folder, aux_hidden_state_layers=(0, 2, 3, FINAL_NORM_OUTPUT))
    decoder = target.model.get_decoder().forward.__self__
    stack = decoder.stack
    assert stack is not None
    assert set(stack.stack.stored.flat) == {"half": {HALVES}, "float": {FLOATS}, "mixed": {FLOATS, HALVES}}[weights]
    together = run(target)
    decoder.stack = None
    apart = run(target)
    decoder.stack = stack
    decoder.share(3)
    shared = run(target)
    for output in (apart, shared):
        assert torch.equal(together.logits, output.logits)
        assert torch.equal(together.aux_hidden_states, output.aux_hidden_states)


def check_rotary_tables(target: TargetModel) -> None:
    """They grow with the context."""
    model = target.model.get_decoder()
    decoder, embedded = model.forward.__self__, model.embed_tokens(torch.tensor([[3]]))
    for positions in ([0], [5, 2], [3, 40, 17]):
        for kind in decoder.rotary_kinds:
            found = decoder.rotary_tables(embedded, np.array(positions), kind)
            expected = model.rotary_emb(embedded, torch.tensor([positions]), *([kind] if kind else []))
            assert all(torch.equal(torch.from_numpy(one)[None], other) for one, other in zip(found, expected, strict=True))


class LateHelpers:
    """Helpers that begin when the pass is done: what they find must be taken, and they must change nothing."""

    num_threads = 4

    def run(self, kernel: Callable[..., object], *arguments: object, tickets: np.ndarray) -> None:
        kernel(*arguments, tickets, self.num_threads)
        kernel(*arguments, tickets, self.num_threads)


@needs_fbgemm
def test_threads_that_come_late_change_nothing() -> None:
    target = load_target("models/demo/target", aux_hidden_state_layers=(0, 5))
    decoder = target.model.get_decoder().forward.__self__
    alone = run(target)
    decoder.helpers = decoder._head.product.helpers = LateHelpers()
    late = run(target)
    assert torch.equal(alone.logits, late.logits)
    assert torch.equal(alone.aux_hidden_states, late.aux_hidden_states)


def test_threads_end_with_what_they_help(sharing: Any) -> None:
    before = set(threading.enumerate())
    helpers = sharing.Helpers(2)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del helpers
    for thread in mine:
        thread.join()


def test_a_helper_that_does_not_come_keeps_one_call(sharing: Any) -> None:
    helpers, caller, arrays = sharing.Helpers(1), threading.current_thread(), list[weakref.ref[np.ndarray]]()
    has_come, may_go = threading.Event(), threading.Event()

    def hold(array: np.ndarray, tickets: np.ndarray, num_threads: int) -> None:
        if threading.current_thread() is not caller:
            has_come.set()
            may_go.wait()

    helpers.run(hold, np.zeros(1), tickets=np.zeros(1, np.int64))
    has_come.wait()
    for _ in range(5):
        array = np.zeros(1)
        arrays.append(weakref.ref(array))
        helpers.run(hold, array, tickets=np.zeros(1, np.int64))
        del array
    assert [array() is not None for array in arrays] == [False] * 4 + [True]
    may_go.set()


@pytest.mark.parametrize("fails_here", [False, True])
def test_a_thread_that_fails_ends_the_pass_of_all(sharing: Any, fails_here: bool) -> None:
    """Both threads take a part, one fails with it, and the other one waits for both parts."""
    helpers, caller, both = sharing.Helpers(1), threading.current_thread(), threading.Barrier(2)
    passed, tickets = list[int](), np.zeros(2 * sharing.PHASE_SIZE, np.int64)

    def fail(tickets: np.ndarray, num_threads: int) -> None:
        sharing.next_part(tickets, 0)
        both.wait()
        if (threading.current_thread() is caller) is fails_here:
            raise MemoryError("no room")
        sharing.finish_part(tickets, 0)
        sharing.wait_for_parts(tickets, 0, 2)
        passed.append(sharing.next_part(tickets, 1))

    with pytest.raises(MemoryError, match="no room"):
        helpers.run(fail, tickets=tickets)
    assert passed == [sharing.FAILED]  # the other thread has ended, and finds no part in later phases
    rows, weight = torch.randn(4, 32), in_blocks(torch.randn(32, 32).half()).contiguous()
    expected, out = np.empty((4, 32), np.float32), np.empty((4, 32), np.float32)
    arguments = rows.numpy(), weight.data_ptr(), HALVES
    products = pytest.importorskip("eyas.kernels.cpu.products")
    products.multiply_weight(*arguments, expected)
    helpers.run(products.multiply_together, *arguments, out, tickets=np.zeros(sharing.PHASE_SIZE, np.int64))
    assert np.array_equal(out, expected)


def test_threads_that_no_kernel_uses_are_named(tiny_target: str, caplog: pytest.LogCaptureFixture) -> None:
    target = load_target(tiny_target)
    unfuse_layers(target.model)
    with caplog.at_level(logging.WARNING):
        share_layers(target.model, 1)
        assert not caplog.records
        share_layers(target.model, 2)
    assert "engine.layer_threads is 2" in caplog.text
    assert "they are not fused" in caplog.text or "numba (pip install" in caplog.text


def test_layers_that_threads_cannot_share_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu_decoder, "num_cores", lambda: 2)
    with caplog.at_level(logging.WARNING):
        stacked = load_target("models/demo/target").model
        share_layers(stacked, 2)
        assert not caplog.records
        share_layers(stacked, 2, is_narrow=True)
        assert "engine.kv_cache_dtype" in caplog.messages[-1]
        share_layers(load_target(str(write_target(tmp_path, hidden=24))).model, 2)
        assert "no multiple of 16" in caplog.messages[-1]
        share_layers(stacked, 1000)
        assert "may use 2 cores" in caplog.messages[-1]
    assert stacked.get_decoder().forward.__self__.helpers.num_threads == 2
    share_layers(stacked, 1)


@pytest.mark.parametrize(("quota", "most"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1)])
def test_cores_are_at_most_the_quota(quota: str, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CPU_QUOTA", tmp_path / "missing")
    allowed = process.num_cores()
    monkeypatch.setattr(process, "CPU_QUOTA", tmp_path / "cpu.max")
    process.CPU_QUOTA.write_text(quota + "\n")
    assert process.num_cores() == (allowed if most is None else min(allowed, most))


@needs_fbgemm
def test_a_tree_gets_the_bits_of_plain_decoding() -> None:
    target, tokens, length = load_target("models/demo/target"), 5 + np.arange(40) * 37 % 900, 30
    kv_cache, rows, none = target.new_kv_cache(64), np.arange(40), np.zeros(0, dtype=np.int64)
    prompt = Segment(tokens[:length], rows[:length], rows[:length], none, None, none)
    target.forward(target.pack([prompt]), kv_cache)
    path = rows[length : length + 4]
    plain = []
    for row in path:
        step = Segment(tokens[[row]], rows[[row]], rows[[row]], rows[:row], None, rows[:1])
        plain.append(target.forward(target.pack([step]), kv_cache).logits[0])
    parents = [0, 0, 0, 1, 1, 3, 3, 5]  # the path is nodes 0, 1, 3, 5
    visible = np.eye(8, dtype=np.bool_)
    for node, parent in enumerate(parents):
        visible[node] |= visible[parent]
    words = np.array([*tokens[path[:2]], 7, tokens[path[2]], 8, tokens[path[3]], 9, 10])
    tree = Segment(words, length + visible.sum(1) - 1, 50 + rows[:8], rows[:length], visible, rows[:8])
    other = Segment(tokens[:3], rows[:3], 60 + rows[:3], none, None, rows[:1])
    together = target.forward(target.pack([other, tree]), kv_cache).logits[1:]
    assert torch.equal(together[[0, 1, 3, 5]], torch.stack(plain))


@needs_fbgemm
def test_a_neighbours_prompt_changes_no_bits() -> None:
    target, none = load_target("models/demo/target"), np.zeros(0, dtype=np.int64)
    step, prompt, other = (
        Segment(5 + rows * 37 % 900, rows, start + rows, none, None, rows)
        for start, rows in ((0, np.arange(3)), (100, np.arange(65)), (200, np.arange(73)))
    )
    apart = [run_segments(target, [segment]).logits for segment in (step, prompt, other)]
    together = run_segments(target, [prompt, step, other]).logits
    assert torch.equal(together, torch.cat([apart[1], apart[0], apart[2]]))


DAILY_ON_GPUS = ("qwen-3", "mixtral", "gemma-2", "e2b")  # the others' parts are in these too


@pytest.mark.parametrize(
    "name", tiered((*DAILY_ON_GPUS, "qwen-2", "phi-3", "qwen-3-moe", "dense", "experts"), DAILY_ON_GPUS)
)
def test_layers_with_kernels_equal_those_of_transformers(
    layer_kernels: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.models.loading.optimize_for_cpu", lambda *_: None)  # weights stay plain, as on a GPU
    if name in GEMMA_4:
        target = gemma_4(name, tmp_path)
    else:
        kind, settings = FAMILIES[name]
        target = load_target(write_model(tmp_path, config_of(kind, **settings)), aux_hidden_state_layers=(0, 3))
    use_torch(target)
    monkeypatch.setattr(fused, "fused_kernels", lambda *_: layer_kernels)
    expert_kernels, by_kernels = import_module("eyas.kernels.cuda.experts"), list[Any]()
    route = expert_kernels.route
    monkeypatch.setattr(expert_kernels, "route", lambda *args: (by_kernels.append(args), route(*args))[1])
    assert_equal_to_unfused(target)
    assert bool(by_kernels) == target.is_mixture_of_experts


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("width", [96, 2048])
def test_the_norm_kernel_equals_plain_operations(layer_kernels: Any, width: int, adds_one: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, delta = torch.randn(2, 1, 3, width, generator=generator)
    norm, inner = (RMSNorm(torch.randn(width, generator=generator), 1e-5, adds_one) for _ in range(2))
    for delta_norm in (None, inner):
        found = layer_kernels.add_norm(hidden, delta, norm, delta_norm)
        torch.testing.assert_close(
            found, plain_layers.add_norm(hidden, delta.clone(), norm, delta_norm), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", ["llama-3", "rope-yarn", "gemma-3", "gemma-4-e2b"])
def test_the_kernel_of_rotary_tables_equals_transformers(name: str, tmp_path: Path) -> None:
    """Also far from the start, with a factor, and where kinds of layers have tables of their own."""
    layer_kernels = pytest.importorskip("eyas.kernels.cuda.layers", reason="triton is not installed")
    kind, settings = FAMILIES[name]
    module = load_target(write_model(tmp_path, config_of(kind, **settings))).model.get_decoder().rotary_emb
    positions, x = torch.tensor([[0, 5, 5, 131_071]]), torch.zeros(1, 4, 32)
    kinds = dict.fromkeys(settings.get("layer_types", ()) if name.startswith("gemma") else [None])
    for each in (*kinds,):
        options = () if each is None else (each,)
        expected = module(x, positions, *options)
        torch.testing.assert_close(
            layer_kernels.rotary_tables(module, x, positions, *options), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("has_norm", [False, True])
def test_the_rotary_kernel_equals_plain_operations(layer_kernels: Any, has_norm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 80, generator=generator)
    heads = HeadLayout(4, 2, 80, RMSNorm(weight, 1e-5, False) if has_norm else None)
    qkv, cos, sin = torch.randn(3, 8, 80, generator=generator), *torch.randn(2, 1, 3, 80, generator=generator)
    caches = [torch.zeros(2, 9, 2, 80) for _ in range(2)]
    slots = torch.tensor([7, 0, 3])
    found = layer_kernels.rotate_and_store(qkv, heads, (cos, sin), *caches[0], slots)
    torch.testing.assert_close(
        found, plain_layers.rotate_and_store(qkv, heads, (cos, sin), *caches[1], slots), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-5, atol=1e-5)


def test_a_draft_layer_with_kernels_equals_plain_operations(layer_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, generator = LayerSizes(32, 48, 4, 2, 8, 1e-5), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in layer_shapes(sizes, 64).items()}
    layer, inputs = DraftLayer(sizes, weights), torch.randn(3, 64, generator=generator)
    residual, rotary = torch.randn(3, 32, generator=generator), torch.randn(3, 2, 8, generator=generator)
    results = []
    for kernels in (plain_layers, layer_kernels):
        monkeypatch.setattr("eyas.models.heads.layers.layer_kernels", lambda x, kernels=kernels: kernels)
        with torch.inference_mode():
            rows = layer.project(inputs, residual, rotary)
            normed = rms_norm(residual, weights["post_attention_layernorm.weight"], 1e-5)
            results.append([rows.query, rows.key, rows.value, normed, layer.finish(rows.query, residual)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_kernel_equals_plain_operations(layer_kernels: Any, activation: str) -> None:
    gate_up = 3 * torch.randn(1, 2, 2 * 1500, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        layer_kernels.gate(gate_up, activation), plain_layers.gate(gate_up.clone(), activation), rtol=1e-5, atol=1e-5
    )


def test_layers_of_another_arithmetic_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a new version of transformers changed a layer's code."""
    folder = write_model(tmp_path, config_of("llama"))
    monkeypatch.setitem(KINDS, "LlamaDecoderLayer", LayerKind(adds_one=True))
    with caplog.at_level(logging.WARNING):
        target = load_target(folder)
    assert not is_fused(target)
    assert "run unfused" in caplog.text


def test_unknown_layers_stay_as_they_are(tmp_path: Path) -> None:
    kind, settings = FAMILIES["hunyuan-moe"]
    assert not is_fused(load_target(write_model(tmp_path, config_of(kind, **settings))))


def test_a_norm_equals_its_definition_in_narrow_types() -> None:
    x, weight = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x[None]
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module: Any = LlamaRMSNorm(64, 1e-5).bfloat16()
    module.weight.data = weight[0]
    assert torch.equal(RMSNorm.of(module, adds_one=False)(x), module(x).detach())
