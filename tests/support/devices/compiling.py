"""Compiles the kernels that a GPU would launch, for GPUs that are not there."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.cache.state_pools import StatePools, StateShape
from eyas.cache.states import StateSizes, StateStep
from eyas.kernels.arguments import AttentionRule, RecurrentInputs
from eyas.models.backends.attention_metadata import FIXED_PART, Tiling, bucket_shape, max_words, tight_shape, view
from eyas.models.inputs import MetadataShape, Segment, Segments
from eyas.models.recurrent_rows import RecurrentRows
from tests.support.devices.launches import META, Launch, recorded

# KiB of shared memory that a program may have. sm_89 stands for Ada, on which drafters run.
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
# Kinds of GPU for which all variants of layers' and sampling's kernels are compiled; for the others the commonest are.
WHOLE = (80, 90)
# The kind of GPU for which attention is compiled for all layouts of heads; for the others those that spill most easily.
ALL_LAYOUTS = 90
# Kinds of GPU for which the product with a weight of 8 bits is compiled; sm_80 has no such numbers.
FLOAT8_LINEAR = (89, 90, 100)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch. shared: bytes of shared memory. residents: programs that a processor holds, by
    registers and shared memory. matrix: kind of matrix instructions, or ''. loads_ahead: whether keys and values are loaded
    while earlier ones are used. slots_ahead: loads of int32 slots that are under way as well. load_bytes: of the widest load
    ahead, 16 at most. conversions: of layouts in loops, but those between layouts of matrix instructions, which stay in
    registers. products: kinds of matrix products in the loops, with their shapes.
    """

    name: str
    sm: int
    registers: int
    spilled: int
    shared: int
    residents: int
    matrix: str
    loads_ahead: bool
    slots_ahead: int
    load_bytes: int
    conversions: int
    products: list[str]


def as_source(launch: Launch) -> Any:
    """What Triton compiles when it meets the arguments of a launch for the first time."""
    from triton.compiler import ASTSource

    function = launch.function
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    signature: dict[str, str] = {}
    for place, parameter in enumerate(function.params):
        value = launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialised):
            constants[(place,)], signature[parameter.name] = value, "constexpr"
        elif isinstance(value, Tensor):
            # torch aligns to 512 bytes, and views of words to 64
            signature[parameter.name] = f"*{_kind(value.dtype)}"
            if not parameter.do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and specialised:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, attributes)


def compiled(source: Any, options: dict[str, Any], sm: int) -> Compiled:
    """Compile a source of `as_source` with a launch's options."""
    import triton
    from triton.backends.compiler import GPUTarget

    said = io.StringIO()
    with redirect_stdout(said), triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    ptx, log = made.asm["ptx"], said.getvalue()
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    matrix = next((kind for kind in ("wgmma", "tcgen05.mma", "mma.sync") if kind in ptx), "")
    shared, warps = made.metadata.shared, made.metadata.num_warps
    residents = min(65536 // (-(-registers // 8) * 256 * warps), (SHARED_KIB[sm] + 1) * 1024 // (shared + 1024))
    slots = len(re.findall(r"async_copy_global_to_local .*tensor<\d+x!tt\.ptr<i32>", made.asm["ttgir"]))
    widths = [int(width, 16) for width in re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)]
    loops = _loops(made.asm["ttgir"])
    layouts = re.findall(r"convert_layout .*?tensor<[^,>]*, (.*?)>* -> tensor<[^,>]*, (.*?)> loc", loops)
    conversions = sum(not all("#mma" in layout for layout in pair) for pair in layouts)
    dots = re.findall(r"(warp_group_dot|tc_gen5_mma|tt\.dot) .*: (.*?) loc", loops)
    products = sorted({re.sub(r", mutable|#\w+", "", f"{name} {kinds}") for name, kinds in dots})
    return Compiled(
        source.fn.__name__, sm, registers, spilled, shared, residents, matrix, "cp.async" in ptx, slots,
        max(widths, default=0), conversions, products,
    )  # fmt: skip


def _loops(ttgir: str) -> str:
    """The lines inside loops."""
    inside, ends = list[str](), list[str]()
    for line in ttgir.splitlines():
        if ends and line.startswith(ends[-1]):
            ends.pop()
        if ends:
            inside.append(line)
        if "scf.for" in line:
            ends.append(line[: len(line) - len(line.lstrip())] + "}")
    return "\n".join(inside)


def _kind(dtype: torch.dtype) -> str:
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    kinds |= {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
    return kinds.get(dtype) or f"i{8 * dtype.itemsize}"


def narrow_type(sm: int) -> torch.dtype:
    """A type of 8 bits that a GPU has."""
    return torch.float8_e4m3fn if sm >= 89 else torch.float8_e5m2


def attend(
    query: Tensor, keys: Tensor, tiling: Tiling, rule: AttentionRule, values: Tensor | None = None,
    shape: MetadataShape | None = None,
) -> None:  # fmt: skip
    """Launch attention over a pass, of trees if no shape is given."""
    from eyas.kernels.cuda import attention as kernel

    shape = shape or bucket_shape(len(query), 32, tiling)
    packed = view(zeros(max_words(shape), dtype=torch.int32), shape, shape.logits)
    kernel.attend(query, keys, keys if values is None else values, packed, rule)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=META)


def attention_calls(sm: int) -> None:
    """The attention of a plain step and of a tree: Llama 3.1 8B, and where shared memory is least wide float32 heads."""
    rule, tiling = AttentionRule(128**-0.5), Tiling(4, 8, 132)
    query, keys = zeros(64, 32, 128), zeros(1024, 8, 128)
    for rows in (1, 64):
        attend(query[:rows], keys, tiling, rule)
    if sm == 90:
        attend(query, keys.to(narrow_type(sm)), tiling, rule)
    attend(query, keys, replace(tiling, longest=8192, fixed_part=FIXED_PART), rule)
    for rows in (1, 64) if sm == min(SHARED_KIB, key=SHARED_KIB.get) else ():
        wide_keys = zeros(1024, 8, 256, dtype=torch.float32)
        wide_rule = AttentionRule(256**-0.5, 4096, 50.0)
        attend(zeros(rows, 16, 256, dtype=torch.float32), wide_keys, Tiling(2, 8, 132, 16), wide_rule)


def layout_calls(sm: int) -> None:
    """The attention of a tree over other layouts of heads, and over keys of 8 bits: all of them on one kind of GPU."""
    wanted = [(width, group, 8, False) for width in (64, 96, 128, 256) for group in (1, 4, 8, 16)]
    wanted += [(width, 4, 8, True) for width in (64, 96, 256)]
    if sm != ALL_LAYOUTS:
        wanted = [(128, 1, 8, False), (64, 4, 8, True)]
        wanted += [(width, group, 8, True) for width in (96, 128) for group in (8, 16)] if sm == 80 else []
        wanted += [(128, group, 2, False) for group in (1, 8)] if sm == 100 else []
    # wide heads of Gemma 4, whose tiles are planned for two query heads for each key-value head
    wanted += [(512, 8, 2, False), (512, 8, 2, True)]
    wanted += [(512, group, 2, False) for group in (1, 4, 16, 32)] if sm == ALL_LAYOUTS else []
    calls = [(*each, 64, 0) for each in wanted] + [(512, 8, 2, False, 1, 0), (512, 8, 2, True, 1, 0)]
    calls += [(256, 1, 2, False, 64, FIXED_PART)] if sm in WHOLE else []
    calls += [(512, group, 2, False, 64, FIXED_PART) for group in (1, 8)]
    for width, group, num_kv, is_narrow, rows, fixed_part in calls:
        planned = min(group, 2) if width == 512 and rows > 1 else group
        tiling = Tiling(planned, num_kv, 132, longest=8192 if fixed_part else 1 << 30, fixed_part=fixed_part)
        keys = zeros(1024, num_kv, width, dtype=narrow_type(sm) if is_narrow else torch.bfloat16)
        attend(zeros(rows, num_kv * group, width), keys, tiling, AttentionRule(width**-0.5))


def sink_calls(sm: int) -> None:
    """The attention of a step and of a tree with sinks: gpt-oss, and MiMo's layers, whose values are narrower than keys."""
    for width, value_width in ((64, 64), (192, 128)):
        rule = AttentionRule(width**-0.5, 128, None, zeros(64))
        # keys in parts, whole keys, and parts at fixed positions
        wanted = (132, 1 << 30, 0), (1, 256, 0), (132, 8192, FIXED_PART)
        for processors, longest, fixed_part in wanted[: 3 if sm in WHOLE else 1]:
            tiling = Tiling(8, 8, processors, longest=longest, fixed_part=fixed_part)
            attend(zeros(64, 64, width), zeros(1024, 8, width), tiling, rule, zeros(1024, 8, value_width))


def prefill_calls(sm: int) -> None:
    """The attention of long prompts that torch does not serve, over whole keys, and once over parts of them."""
    wanted = [(128, 4, False, None), (128, 1, False, None)]
    if sm == ALL_LAYOUTS:
        wanted += [(width, group, False, None) for width in (64, 96, 128) for group in (1, 4, 8, 16)]
        wanted += [(128, 8, True, None), (128, 4, False, 4096)]
    for (width, group, is_narrow, window), rows in [(wanted[0], 2048), *((each, 8192) for each in wanted)]:
        own, tiling = np.arange(rows), Tiling(group, 8, 132)
        shape = tight_shape(Segments.of([Segment(own, own, own, own[:0], None, own[-1:])]), tiling)
        keys = zeros(1024, 8, width, dtype=narrow_type(sm) if is_narrow else torch.bfloat16)
        attend(zeros(rows, 8 * group, width), keys, tiling, AttentionRule(width**-0.5, window), shape=shape)


def layer_calls(sm: int) -> None:
    """The kernels of a fused layer: Llama 3.1 8B; on two kinds of GPU Gemma 2 9B, and the widest rows in float32 too."""
    from eyas.kernels.cuda import layers as layer_kernels
    from eyas.kernels.cuda.layers import WIDE_OUTPUTS
    from eyas.models.layers.norms import HeadLayout, RMSNorm

    shapes = ((torch.bfloat16, 4096, False), (torch.bfloat16, 3584, True), (torch.float32, 16384, False))
    for dtype, width, adds_one in shapes if sm in WHOLE else shapes[:1]:
        x = torch.zeros(1, 64, width, dtype=dtype, device=META)
        norm, head_norm = (RMSNorm(torch.zeros(n, dtype=dtype, device=META), 1e-5, adds_one) for n in (width, 128))
        layer_kernels.add_norm(x, x, norm, norm if adds_one else None)
        if adds_one:  # Gemma 4 has its norms' weights in float32
            wide = RMSNorm(norm.weight.float(), 1e-5, True)
            layer_kernels.add_norm(x, x, wide, wide, wide.weight[:1])
        layer_kernels.rms_norm(x, norm.weight, 1e-5, adds_one)
        table = SimpleNamespace(inv_freq=torch.zeros(64, device=META), attention_scaling=1.0)
        layer_kernels.rotary_tables(table, x, torch.zeros(1, 64, dtype=torch.int64, device=META))
        heads = HeadLayout(32, 8, 128, head_norm if adds_one else None)
        qkv, pool = (torch.zeros(64, count, 128, dtype=dtype, device=META) for count in (48, 8))
        rotary = torch.zeros(2, 1, 64, 128, dtype=dtype, device=META)
        slots = torch.zeros(64, dtype=torch.int64, device=META)
        layer_kernels.rotate_and_store(qkv, heads, (rotary[0], rotary[1]), pool, pool, slots)
        if adds_one:
            value_norms = RMSNorm(torch.zeros(48, 128, device=META), 1e-5, True)
            shared = qkv[:, :40].contiguous()  # values are the keys
            layer_kernels.rotate_and_store(
                shared, replace(heads, norms=value_norms), (rotary[0], rotary[1]), pool, pool, slots
            )
        keys_alone = HeadLayout(0, 8, 128, head_norm)  # of context features
        layer_kernels.rotate_and_store(qkv[:, :16].contiguous(), keys_alone, (rotary[0], rotary[1]), pool, pool, None)
        layer_kernels.gate(torch.zeros(1, 64, 4 * width, dtype=dtype, device=META), "gelu_tanh" if adds_one else "silu")
        if dtype == torch.float32:  # the rest is compiled for bfloat16 alone
            continue
        if not adds_one:
            narrow = pool.to(narrow_type(sm))
            layer_kernels.rotate_and_store(qkv, heads, (rotary[0], rotary[1]), narrow, narrow, slots)
        layer_kernels.convolve(x[0], x[0, :4], torch.zeros(64, 2, 4, width // 128, dtype=dtype, device=META), 1, 8)
        weight = torch.zeros(WIDE_OUTPUTS if adds_one else 4096, width, dtype=dtype, device=META)
        layer_kernels.linear(x, weight, weight[0] if adds_one else None, dtype)
        if sm in FLOAT8_LINEAR:
            scales = torch.zeros(len(weight), device=META)
            layer_kernels.linear(x, weight.to(narrow_type(sm)), None, dtype, scales=scales)


def expert_calls(sm: int) -> None:
    """The experts of a Gemma 4 in bfloat16, whole and an eighth of each.

    Also with weights of 8 bits; on two kinds of GPU Mixtral's, and 160 experts in float32.
    """
    from eyas.kernels.cuda import experts as expert_kernels
    from eyas.kernels.cuda import layers as layer_kernels
    from eyas.models.layers.experts import ExpertNorms, ExpertOutputs, RoutedExperts, WeightScales
    from eyas.models.layers.norms import RMSNorm

    shapes = [(torch.bfloat16, 2816, 704, 128, 8), (torch.bfloat16, 2816, 88, 128, 8)]
    shapes += [(torch.bfloat16, 4096, 14336, 8, 2), (torch.float32, 4096, 768, 160, 8)] if sm in WHOLE else []
    for dtype, hidden, inner, num_experts, top_k in shapes:
        norm = RMSNorm(torch.zeros(hidden, device=META), 1e-6, True)
        weight, rows = torch.zeros(hidden, dtype=dtype, device=META), torch.zeros(64, hidden, dtype=dtype, device=META)
        gate_up = torch.zeros(num_experts, 2 * inner, hidden, dtype=dtype, device=META)
        routed = RoutedExperts(
            gate_up[:, 0], gate_up, torch.zeros(num_experts, hidden, inner, dtype=dtype, device=META), top_k,
            "gelu_tanh" if num_experts == 128 else "silu", rounds_weights=num_experts == 160,
            scales=torch.zeros(num_experts, dtype=dtype, device=META) if num_experts == 128 else None,
            norms=ExpertNorms(weight, 0.02, norm, (norm, norm)),
        )  # fmt: skip
        routing = expert_kernels.route(torch.zeros(64, num_experts, dtype=dtype, device=META), routed)
        outputs, shares = expert_kernels.expert_outputs(rows, routing, routed), routing.shares
        if num_experts == 128:
            assert routed.norms is not None
            expert_kernels.add_norms(routed.norms, rows, rows, norm, norm)
            beside = ExpertOutputs(outputs, shares, rows, routed.norms.outputs)
            for found in (beside, beside._replace(outputs=rows, shares=None)):  # also behind a sum over ranks
                layer_kernels.add_norm(rows, found, norm, norm, norm.weight[:1])
        else:
            layer_kernels.add_norm(rows, ExpertOutputs(outputs, shares, None, None), norm, None)
        expert_kernels.combine(outputs, shares)
        if sm in FLOAT8_LINEAR and num_experts == 128:
            gate_up, down = (weight.to(narrow_type(sm)) for weight in (routed.gate_up, routed.down))
            scales = WeightScales(norm.weight, norm.weight, (64, 128))
            narrow = replace(routed, gate_up=gate_up, down=down, weight_scales=scales)
            expert_kernels.expert_outputs(rows, routing, narrow)


def sampling_calls(sm: int) -> None:
    """The draw of a few rows over the vocabulary of Llama 3, and the ranking of a level's children."""
    from eyas.kernels.arguments import Draws
    from eyas.kernels.cuda.sampling import draw_rows, race, top_k
    from eyas.protocol.commit import NoiseKey
    from eyas.sampling.sharded import warm_up_search

    keys = NoiseKey(0, 1.0), NoiseKey(0, 1.0, top_k=50, top_p=0.9)
    draws = [Draws([key], [0] * 64, 64) for key in keys]
    draw_rows(torch.zeros(64, 128256, device=META), draws[0])
    if sm == min(SHARED_KIB):
        for size in (32000, 128256, 151936):  # lists of other sizes
            draw_rows(torch.zeros(64, size, device=META), draws[1])
    race(torch.zeros(64, 32064, device=META), draws[0], 32064, 128256)
    warm_up_search(torch.zeros(64, 32064, device=META))
    top_k(torch.zeros(10, 32000, device=META), 10)


def drafting_calls(sm: int) -> None:
    """The children of a level of an EAGLE-3 head of Llama 3, the noise of a round, and a level of chains."""
    from eyas.kernels.cuda.drafting import best_children, draw_children, find_frontier, shared_noise
    from eyas.kernels.cuda.layers import pair_inputs
    from eyas.kernels.probabilities import filtered_probs

    words, draft_ids = (torch.zeros(shape, dtype=torch.int64, device=META) for shape in ((8, 2), (32000,)))
    noise = shared_noise(words, draft_ids, 8)
    best = torch.zeros(2, 10, device=META)
    logits = torch.zeros(2, 10, 32000, dtype=torch.bfloat16, device=META)
    for probs in (None, filtered_probs):
        best_children(logits, words, noise, 1, 10, best, probs)
    children = torch.zeros(2, 100, dtype=torch.int64, device=META)
    drawn = torch.zeros(2, 8, 257, dtype=torch.float64, device=META)
    draw_children(logits[:, :1], words[:, :2].contiguous(), 1, draft_ids, drawn, filtered_probs)
    if sm == min(SHARED_KIB):
        for size in (2000, 128256, 151936):  # lists of other sizes
            whole = torch.zeros(2, 1, size, device=META)
            draw_children(whole, words, 1, draft_ids, drawn, filtered_probs)
    find_frontier(torch.zeros(2, 100, device=META), children, 10, 10, 10, True)
    states, embedding = (torch.zeros(shape, dtype=torch.bfloat16, device=META) for shape in ((2, 10, 4096), (128256, 4096)))
    norms = embedding[0], embedding[1]
    pair_inputs(states, children[:, :10], children[:, :10], draft_ids, embedding, norms, 1e-5)


def recurrent_calls(sm: int) -> None:
    """A tree in layers of Qwen3.5 9B and of a Mamba-2; on two kinds of GPU also float32, and wider keys."""
    from eyas.kernels.cuda.recurrent import convolve, scan

    tree = np.arange(64)
    segment = Segment(tree, tree, tree, tree[:0], np.tri(64, dtype=np.bool_), tree, states=StateStep(0, 1, stash=0))
    rows = RecurrentRows([segment], 3, META)
    channels = StatePools({0: StateShape(0, 0, 0, 1, 8192, 4)}, StateSizes(3, 64), torch.bfloat16, META).layers[0]
    for bias in (None, torch.zeros(8192, dtype=torch.bfloat16, device=META)):
        weight = torch.zeros(8192, 4, dtype=torch.bfloat16, device=META)
        convolve(torch.zeros(64, 8192, dtype=torch.bfloat16, device=META), weight, bias, channels, rows)
    layers = [(16, 32, 128, 128, True, torch.bfloat16), (8, 64, 128, 64, False, torch.bfloat16)]
    if sm in WHOLE:
        layers += [(*layer[:5], torch.float32) for layer in layers] + [(1, 24, 256, 64, False, torch.bfloat16)]
    for key_heads, heads, key, value, is_delta, dtype in layers:
        queries, values = (torch.zeros(64, *shape, dtype=dtype, device=META) for shape in ((key_heads, key), (heads, value)))
        gates = torch.zeros(64, heads, device=META)
        shape = StateShape(heads, key, value, 1, 4, 4)
        pools = StatePools({0: shape}, StateSizes(3, 64), dtype, META).layers[0]
        scan(RecurrentInputs(queries, queries, values, gates, gates.to(dtype), is_delta), pools, rows)


KERNEL_CALLS: tuple[Callable[[int], None], ...] = (
    attention_calls, layout_calls, sink_calls, prefill_calls, layer_calls, expert_calls, sampling_calls, drafting_calls,
    recurrent_calls,
)  # fmt: skip


def launches_of(calls: Iterable[Callable[[int], None]], sm: int) -> list[Launch]:
    """What these functions launch on one kind of GPU."""
    launches = list[Launch]()
    with recorded(launches.append):
        for call in calls:
            call(sm)
    return launches


def compiled_kernels(sm: int, most: int | None = None) -> list[Compiled]:
    """Compile what KERNEL_CALLS launch on one kind of GPU, each variant once.

    most: variants of each kernel, the first that are launched, and of attention one more, which a tree has; None takes
    all.
    """
    found, counts = dict[str, Compiled](), Counter[str]()
    for launch in launches_of(KERNEL_CALLS, sm):
        source = as_source(launch)
        name, variant = source.fn.__name__, f"{source.hash()} {sorted(launch.options.items())}"
        if variant not in found and (most is None or counts[name] < most + (name == "_attend_parts")):
            counts[name] += 1
            found[variant] = compiled(source, launch.options, sm)
    return list(found.values())
