"""One contender as a process: reads requests as lines of JSON, writes how many tokens it generated.

Runs as a file in the interpreter that has the contender's library, so it imports nothing else of this project.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

Prompts = list[list[int]]
# Prompts and how many tokens each is continued by; returns how many it was. Greedy, and no end of text ends it.
Decode = Callable[[Prompts, int], list[int]]
Precision = Literal["float32", "bfloat16", "int8"]
# Room for all sequences of a batch, and for the longest prompt.
MAX_TOKENS = 8192
MAX_BATCH = 16
# Drafted in a step of prompt lookup, and matched before: the same for all that have these settings.
LOOKUP_TOKENS = 10
LOOKUP_NGRAM = 3


def eyas(path: str, precision: Precision, threads: int, lookup: bool) -> Decode:
    """Return Eyas. Its threads share the layers of passes: compiled kernels run where torch has one."""
    from eyas.api.request import SamplingParams
    from eyas.config import EngineConfig
    from eyas.llm import LLM

    rounding, dtype = ("int8", "float32") if precision == "int8" else ("", precision)
    engine = EngineConfig(max_kv_tokens=MAX_TOKENS, prefix_cache=False, layer_threads=threads, quantization=rounding)
    llm = LLM(path, method="prompt_lookup" if lookup else None, dtype=dtype, engine=engine, threads=1)

    def decode(prompts: Prompts, num_tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return [len(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]

    return decode


def transformers(path: str, precision: Precision, threads: int, lookup: bool) -> Decode:
    """Return transformers' `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, precision)).eval()
    more = {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "max_matching_ngram_size": LOOKUP_NGRAM} if lookup else {}

    def decode(prompts: Prompts, num_tokens: int) -> list[int]:
        ids = torch.tensor(prompts)
        sizes = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes, **more)
        return [len(row) for row in found[:, ids.shape[1] :]]

    return decode


def openvino(path: str, precision: Precision, threads: int, lookup: bool) -> Decode:
    """Return OpenVINO GenAI's pipeline with continuous batching, as `LLMPipeline` takes it on a processor."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = MAX_BATCH
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if lookup else {})}
    if precision == "float32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)

    def decode(prompts: Prompts, num_tokens: int) -> list[int]:
        config = genai.GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        config.ignore_eos = True
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        found = pipeline.generate([ov.Tensor(np.array([prompt])) for prompt in prompts], [config] * len(prompts))
        return [len(result.m_generation_ids[0]) for result in found]

    return decode


def llama_cpp(path: str, precision: Precision, threads: int, lookup: bool) -> Decode:
    """Return the server of llama.cpp, in this process, on the quantised weights of the GGUF file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = MAX_TOKENS
    params.n_parallel = MAX_BATCH
    params.kv_unified = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = params.warmup = False
    params.cache_ram_mib = 0
    if lookup:
        params.speculative.ngram_simple.size_n = LOOKUP_NGRAM
        params.speculative.ngram_simple.size_m = LOOKUP_TOKENS
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    common = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}

    def decode(prompts: Prompts, num_tokens: int) -> list[int]:
        bodies = [common | {"prompt": prompt, "n_predict": num_tokens} for prompt in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            return [answer["usage"]["completion_tokens"] for answer in pool.map(server.handle_completions, bodies)]

    return decode


LOADERS: dict[str, Callable[[str, Any, int, bool], Decode]] = {
    "eyas": eyas, "transformers": transformers, "openvino": openvino, "llama_cpp": llama_cpp,
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Load, say so, and answer until the input ends. What libraries print goes to stderr."""
    loader, path, precision, threads, mode = arguments
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    decode = LOADERS[loader](path, precision, int(threads), mode == "lookup")
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        lengths = decode(request["prompts"], request["num_tokens"])
        print(json.dumps({"lengths": lengths}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
