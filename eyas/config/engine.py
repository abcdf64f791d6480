"""Engine configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from eyas.config.loader import at_least, require

Dtype = Literal["float32", "bfloat16", "float16"]
AcceptanceRule = Literal["match", "rejection"]
# YAML reads "off" as false.
HeadValidation = Literal["auto", "never"]
DraftBudgetPolicy = Literal["fixed", "adaptive"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    num_slots: token slots of KV cache; a request needs prompt + max_tokens of them at most. 0 takes what memory allows.
    memory_fraction: share of the free memory that num_slots 0 takes, once the weights are loaded.
    max_running: most sequences in a step. max_waiting: most requests in the queue besides those that may start at once.
    step_tokens: most prompt tokens that one step prefills.
    step_rows: most tree nodes that one step verifies; a sequence decodes plainly where its share would be less than two.
    context_length: most tokens of prompt and output together; 0 takes the model's own limit.
    deterministic: each sequence goes through the target by itself, in passes of exactly as many rows as a tree may have
    nodes, so that a token's logits depend on the tokens before it alone. Slow; see docs/equality.md.
    cuda_graphs: capture forward passes as CUDA graphs at start; without effect on other devices.
    rule: how drafts are accepted. "match" gives the tokens of plain decoding; "rejection" gives their law only, above
    temperature 0, and takes drafts that were drawn from the drafter's law.
    budget: how large draft trees are. "fixed" takes the largest that step_rows leaves each sequence; "adaptive" those with
    the most tokens a second, down to none, as far as measured steps tell. No output depends on it.
    prefix_cache: keep what finished requests computed for others that begin with the same tokens.
    session_seconds: how long a conversation's slots are kept before those of others after its last turn.
    ageing_seconds: how much waiting outweighs one step of priority.
    tensor_parallel: processes that share the target's weights and KV cache; it must divide the model's attention heads, and
    divide its key-value heads or be a multiple of them.
    """

    num_slots: int = 0
    memory_fraction: float = 0.85
    max_running: int = 32
    max_waiting: int = 1024
    step_tokens: int = 512
    step_rows: int = 1024
    context_length: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    rule: AcceptanceRule = "match"
    budget: DraftBudgetPolicy = "fixed"
    prefix_cache: bool = True
    session_seconds: float = 300.0
    ageing_seconds: float = 10.0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        require(
            self.rule in get_args(AcceptanceRule),
            f"rule is {self.rule!r}; it must be one of {', '.join(get_args(AcceptanceRule))}",
        )
        known = ", ".join(get_args(DraftBudgetPolicy))
        require(self.budget in get_args(DraftBudgetPolicy), f"budget is {self.budget!r}; it must be one of {known}")
        at_least(1, max_running=self.max_running, step_tokens=self.step_tokens, step_rows=self.step_rows)
        at_least(1, tensor_parallel=self.tensor_parallel)
        at_least(0, num_slots=self.num_slots, max_waiting=self.max_waiting, context_length=self.context_length)
        at_least(0, session_seconds=self.session_seconds, ageing_seconds=self.ageing_seconds)
        require(0 < self.memory_fraction <= 1, f"memory_fraction is {self.memory_fraction}; it must lie in (0, 1]")
