"""Engine configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from eyas.config.loader import at_least, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AcceptanceRule = Literal["match", "rejection"]
# YAML reads "off" as false.
HeadValidation = Literal["auto", "never"]
DraftBudgetPolicy = Literal["fixed", "adaptive"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    max_kv_tokens: token slots of KV cache; a request needs prompt + max_tokens of them at most. 0 takes what memory allows.
    gpu_memory_utilization: share of the free memory that max_kv_tokens 0 takes, once the weights are loaded.
    max_num_seqs: most sequences in a step. max_queued_requests: most requests in the queue besides those that may start at once.
    max_prefill_tokens: most prompt tokens that one step prefills.
    max_verify_tokens: most tree nodes that one step verifies; a sequence decodes plainly where its share would be less than two.
    max_model_len: most tokens of prompt and output together; 0 takes the model's own limit.
    deterministic: each sequence goes through the target by itself, in passes of exactly as many rows as a tree may have
    nodes, so that a token's logits depend on the tokens before it alone. Slow; see docs/equality.md.
    cuda_graphs: capture forward passes as CUDA graphs at start; without effect on other devices.
    acceptance: how drafts are accepted. "match" gives the tokens of plain decoding; "rejection" gives their law only, above
    temperature 0, and takes drafts that were drawn from the drafter's law.
    draft_budget: how large draft trees are. "fixed" takes the largest that max_verify_tokens leaves each sequence; "adaptive" those with
    the most tokens a second, down to none, as far as measured steps tell. No output depends on it.
    prefix_cache: keep what finished requests computed for others that begin with the same tokens.
    session_cache_ttl_s: how long a conversation's slots are kept before those of others after its last turn.
    priority_aging_s: how much waiting outweighs one step of priority.
    tensor_parallel_size: processes that share the target's weights and KV cache; it must divide the model's attention heads, and
    divide its key-value heads or be a multiple of them.
    """

    max_kv_tokens: int = 0
    gpu_memory_utilization: float = 0.85
    max_num_seqs: int = 32
    max_queued_requests: int = 1024
    max_prefill_tokens: int = 512
    max_verify_tokens: int = 1024
    max_model_len: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    acceptance: AcceptanceRule = "match"
    draft_budget: DraftBudgetPolicy = "fixed"
    prefix_cache: bool = True
    session_cache_ttl_s: float = 300.0
    priority_aging_s: float = 10.0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        require(
            self.acceptance in get_args(AcceptanceRule),
            f"acceptance is {self.acceptance!r}; it must be one of {', '.join(get_args(AcceptanceRule))}",
        )
        known = ", ".join(get_args(DraftBudgetPolicy))
        require(
            self.draft_budget in get_args(DraftBudgetPolicy),
            f"draft_budget is {self.draft_budget!r}; it must be one of {known}",
        )
        at_least(
            1,
            max_num_seqs=self.max_num_seqs,
            max_prefill_tokens=self.max_prefill_tokens,
            max_verify_tokens=self.max_verify_tokens,
        )
        at_least(1, tensor_parallel_size=self.tensor_parallel_size)
        at_least(
            0,
            max_kv_tokens=self.max_kv_tokens,
            max_queued_requests=self.max_queued_requests,
            max_model_len=self.max_model_len,
        )
        at_least(0, session_cache_ttl_s=self.session_cache_ttl_s, priority_aging_s=self.priority_aging_s)
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]",
        )
