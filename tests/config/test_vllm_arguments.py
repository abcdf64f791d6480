"""vLLM's arguments are mapped, or refused by name with what to do instead."""

import pytest

from eyas.config import EngineConfig, MethodsConfig, TreeConfig
from eyas.config.vllm_arguments import engine_config, speculation
from eyas.errors import ConfigError


def test_arguments_of_vllm_become_engine_settings() -> None:
    arguments = {
        "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_model_len": 100, "enable_prefix_caching": False,
        "max_num_seqs": 7, "max_num_batched_tokens": 64, "enforce_eager": True, "trust_remote_code": False,
        "quantization": None, "disable_log_stats": True, "swap_space": 0, "max_kv_tokens": 512,
    }  # fmt: skip
    assert engine_config(arguments, EngineConfig(acceptance="rejection")) == EngineConfig(
        tensor_parallel_size=2, gpu_memory_utilization=0.5, max_model_len=100, prefix_cache=False, max_num_seqs=7,
        max_prefill_tokens=64, cuda_graphs=False, max_kv_tokens=512, acceptance="rejection",
    )  # fmt: skip
    assert engine_config({"max_model_len": None}, EngineConfig()) == EngineConfig()
    compact = {"backend": "auto", "disable_any_whitespace": True}
    assert engine_config({"structured_outputs_config": compact}, EngineConfig()).json_whitespace_pattern == ""
    own = EngineConfig(json_whitespace_pattern=" ?")
    assert engine_config({"structured_outputs_config": {"backend": "auto"}}, own) == own


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported: Eyas runs no code of a checkpoint"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"speculative_model": "m"}, "use speculative_config, or draft_model"),
        ({"max_num_seq": 4}, "max_num_seq is no argument that Eyas knows; did you mean max_num_seqs?"),
        ({"qwertyuiop": 4}, "qwertyuiop is no argument that Eyas knows; leave it out"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": "many"}, "wrong type"),
        ({"structured_outputs_config": "xgrammar"}, "structured_outputs_config is 'xgrammar'; it must be a mapping"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")):
        engine_config(arguments, EngineConfig())


@pytest.mark.parametrize(
    ("config", "method", "draft_model", "num_steps"),
    [
        ({"method": "eagle3", "model": "h", "num_speculative_tokens": 3}, "eagle3", "h", 3),
        ({"method": "eagle", "model": "h", "quantization": "fp8"}, "eagle2", "h", None),
        ({"method": "eagle3", "model": "h", "quantization": "int8"}, "eagle3", "h", None),
        ({"method": "mtp"}, "mtp", "", None),
        ({"method": "deepseek_mtp"}, "mtp", "", None),
        ({"method": "ngram", "num_speculative_tokens": 5}, "prompt_lookup", "", 5),
        ({"method": "suffix", "num_speculative_tokens": 8}, "suffix", "", 8),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, "prompt_lookup", "", 5),
        ({"model": "some/EAGLE3-head", "draft_tensor_parallel_size": 1}, "", "some/EAGLE3-head", None),
        ({"method": "draft_model", "model": "small/llama", "num_speculative_tokens": 4}, "sps", "small/llama", 4),
        ({"method": "lookahead"}, "lookahead", "", None),
    ],
)
def test_a_speculative_config_names_method_and_chain(
    config: dict, method: str, draft_model: str, num_steps: int | None
) -> None:
    found = speculation(config, MethodsConfig())
    assert found.quantization == config.get("quantization", "")
    tree = num_steps and TreeConfig(num_draft_tokens=num_steps + 1, num_steps=num_steps, top_k=1)
    assert (found.method, found.draft_model, found.tree) == (method, draft_model, tree)


def test_ngram_lengths_are_those_of_prompt_lookup() -> None:
    both = speculation({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, MethodsConfig())
    assert (both.methods.prompt_lookup.max_ngram, both.methods.prompt_lookup.min_ngram) == (4, 2)
    one = speculation({"method": "ngram", "prompt_lookup_max": 4}, MethodsConfig())
    assert (one.methods.prompt_lookup.max_ngram, one.methods.prompt_lookup.min_ngram) == (4, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_speculative_token": 3}, "num_speculative_token is no key of speculative_config .* did you mean num_spec"),
        ({"disable_by_batch_size": 8}, 'leave draft_budget at "auto"'),
        ({"draft_tensor_parallel_size": 2}, "a drafter has one process"),
        ({"method": "mlp_speculator"}, "the method 'mlp_speculator', which Eyas does not have"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    ],
)
def test_other_keys_of_a_speculative_config_are_refused(config: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        speculation(config, MethodsConfig())


@pytest.mark.parametrize("pattern", ["(", ")", "*", " {3,1}", " ?)("])
def test_a_whitespace_pattern_that_is_no_regex_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="json_whitespace_pattern is"):
        EngineConfig(json_whitespace_pattern=pattern)
