"""Tensor-parallel plans of transformers, and our own for families that it has none for.

A plan gives paths of modules and parameters, with `*` for the number of a layer, a style: see `shards`.
"""

from __future__ import annotations

from typing import Any

from eyas.models.layers.latent import latent_projection
from eyas.models.layers.recurrent import is_recurrent

# Styles whose parts of an output are put together again.
GATHERED = frozenset({"colwise_rep", "colwise_gather_output"})
# By class, below the decoder. Experts of gpt-oss hold their weights transposed, gate_up [E, C, 2 I] and down [E, I, C].
# Gates and ups take turns in gate_up: a contiguous part of it holds whole pairs, where halves would part them.
OWN_PLANS: dict[str, dict[str, str]] = {
    "GptOssForCausalLM": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts.gate_up_proj": "last_dimension",
        "layers.*.mlp.experts.gate_up_proj_bias": "last_dimension",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "first_rank",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}


# Latent attention by heads, which some plans leave whole. Every rank has all latents.
LATENT_PLAN = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "g_proj": "colwise",
    "softmax_scaling": "colwise",
    "o_proj": "rowwise",
}


def plan_of(model: Any) -> dict[str, str]:
    """Return the tensor-parallel plan of a causal LM; empty if there is none."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    for path, style in OWN_PLANS.get(type(model).__name__, {}).items():
        plan.setdefault(f"{model.base_model_prefix}.{path}", style)
    if plan:
        latent = [path for path, module in model.named_modules() if latent_projection(module)]
        plan |= {f"{path}.{name}": style for path in latent for name, style in LATENT_PLAN.items()}
        # A mixer has all states, so it needs whole outputs. Where a plan gathers them, ranks share the work.
        parts = [f"{path}.{name}" for path, m in model.named_modules() if is_recurrent(m) for name, _ in m.named_children()]
        plan |= {part: "replicate" for part in parts if style_of(plan, part) not in GATHERED}
    return plan


def style_of(plan: dict[str, str], path: str) -> str | None:
    """Return how a plan splits a module. It may write `*` for the number of a layer; a whole path goes first."""
    return plan.get(path) or plan.get(".".join("*" if part.isdigit() else part for part in path.split(".")))
