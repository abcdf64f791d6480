"""Configuration of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from eyas.config.checks import WHITESPACE_PATTERN_RULE, at_least, is_whitespace_pattern, one_of, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AcceptanceRule = Literal["match", "rejection"]
# The quantization that rounds plain weights as they are loaded.
INT8: Final = "int8"
# Metadata of settings that decide which tokens a request gets: a verifier that continues it must have the same.
DECIDES_OUTPUTS = MappingProxyType({"decides_outputs": True})
# "never", because YAML reads "off" as false.
HeadValidation = Literal["auto", "never"]
DraftBudgetPolicy = Literal["auto", "fixed", "adaptive"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits and modes of one engine.

    Attributes:
        max_kv_tokens: capacity of the KV cache. 0 takes as many as gpu_memory_utilization allows.
        gpu_memory_utilization: share, in (0, 1], of the memory left after loading the weights that the KV cache takes if
            max_kv_tokens is 0. On CUDA, memory of forward passes and CUDA graphs is subtracted first.
        kv_cache_dtype: type of keys and values. "auto" is the model's; "fp8", which is "fp8_e4m3", and "fp8_e5m2" take 8
            bits.
        max_num_seqs: most sequences in a step.
        max_queued_requests: most waiting requests, besides those that can start at once.
        max_prefill_tokens: most prompt tokens in a step; longer prompts are prefilled in chunks.
        max_verify_tokens: most tree nodes in a step. With a share below 2 a sequence decodes plainly.
        max_model_len: most tokens of prompt and output together. 0 takes the model's own limit; more is refused.
        deterministic: logits depend only on the tokens before them, not on the batch. Unless kernels give that, every
            sequence runs by itself.
        cuda_graphs: capture forward passes as CUDA graphs at startup.
        acceptance: "match" accepts a draft token if it equals the target's own sample. "rejection" is rejection sampling
            above temperature 0; it needs a drafter that samples.
        draft_budget: size of draft trees. "auto", or "adaptive", takes the size, possibly none, with the most tokens per
            second by measured costs and acceptance, "fixed" the largest that max_verify_tokens allows. `tree` limits both.
            The output is the same; under "rejection" its distribution is, and a seed repeats tokens only with "fixed".
        prefix_cache: keep the KV cache of finished requests for later ones with the same prefix.
        session_cache_ttl_s: time after its last request for which the prefix cache prefers a conversation's tokens.
        priority_aging_s: waiting time that counts as one step of priority.
        emulated_device: cost table of a device to emulate on the CPU: a JSON file, or a preset MODEL@GPU.
        tensor_parallel_size: processes that share the target's weights and KV cache. It must divide the attention heads, and
            divide the key-value heads or be a multiple of their number.
        quantization: how the checkpoint's weights are quantised; another checkpoint is refused. "int8" rounds plain weights
            to 8 bits on a CPU, with a scale for each 16 inputs. Empty takes any.
        json_whitespace_pattern: regular expression of the whitespace between the parts of JSON, for structured outputs that
            name none. Empty makes JSON compact, "[ \\t\\r\\n]*" sets no limit.
        layer_threads: threads that share a pass of several rows on the CPU, where kernels run its layers (torch has one
            thread, and numba is installed). Set it to the cores that are free; no more run than the process has cores. The
            output is the same, bit for bit.
    """

    max_kv_tokens: int = 0
    gpu_memory_utilization: float = 0.85
    kv_cache_dtype: KVCacheDtype = field(default="auto", metadata=DECIDES_OUTPUTS)
    max_num_seqs: int = 32
    max_queued_requests: int = 1024
    max_prefill_tokens: int = 512
    max_verify_tokens: int = 1024
    max_model_len: int = 0
    deterministic: bool = field(default=False, metadata=DECIDES_OUTPUTS)
    cuda_graphs: bool = True
    acceptance: AcceptanceRule = field(default="match", metadata=DECIDES_OUTPUTS)
    draft_budget: DraftBudgetPolicy = "auto"
    prefix_cache: bool = True
    session_cache_ttl_s: float = 300.0
    priority_aging_s: float = 10.0
    emulated_device: str = ""
    tensor_parallel_size: int = field(default=1, metadata=DECIDES_OUTPUTS)
    quantization: str = field(default="", metadata=DECIDES_OUTPUTS)
    json_whitespace_pattern: str = field(default=r"(\r?\n[ \t]{0,20})? ?", metadata=DECIDES_OUTPUTS)
    layer_threads: int = 1

    @property
    def output_settings(self) -> dict[str, Any]:
        """The settings that decide outputs, by name. What means the same has one value."""
        found = {own.name: getattr(self, own.name) for own in fields(self) if own.metadata.get("decides_outputs")}
        if self.kv_cache_dtype == "fp8":
            found["kv_cache_dtype"] = "fp8_e4m3"
        if self.quantization != INT8:
            found["quantization"] = ""  # others name what the checkpoint is
        return found

    def __post_init__(self) -> None:
        one_of(AcceptanceRule, acceptance=self.acceptance)
        one_of(DraftBudgetPolicy, draft_budget=self.draft_budget)
        one_of(KVCacheDtype, kv_cache_dtype=self.kv_cache_dtype)
        at_least(1, max_num_seqs=self.max_num_seqs, max_prefill_tokens=self.max_prefill_tokens)
        at_least(1, max_verify_tokens=self.max_verify_tokens, tensor_parallel_size=self.tensor_parallel_size)
        at_least(1, layer_threads=self.layer_threads)
        at_least(0, max_kv_tokens=self.max_kv_tokens, max_queued_requests=self.max_queued_requests)
        at_least(0, max_model_len=self.max_model_len, session_cache_ttl_s=self.session_cache_ttl_s)
        at_least(0, priority_aging_s=self.priority_aging_s)
        pattern = self.json_whitespace_pattern
        require(is_whitespace_pattern(pattern), f"json_whitespace_pattern is {pattern!r}; {WHITESPACE_PATTERN_RULE}")
        utilization = self.gpu_memory_utilization
        require(0 < utilization <= 1, f"gpu_memory_utilization is {utilization}; it must lie in (0, 1]")
        require(
            not self.deterministic or self.tensor_parallel_size == 1,
            "deterministic is set; it needs tensor_parallel_size 1, as sums over ranks have no fixed order",
        )
        require(
            self.quantization != INT8 or self.tensor_parallel_size == 1,
            "quantization is 'int8'; it needs tensor_parallel_size 1, as ranks do not round weights",
        )
        require(
            not self.deterministic or not self.emulated_device,
            "deterministic is set, which runs each sequence by itself; leave emulated_device empty",
        )
