"""`EaModel`, the class of the EAGLE authors' repository, over Eyas: their scripts run unchanged.

    python -m eyas.ea_model SCRIPT ARGUMENTS...

runs a script that imports `eagle.model.ea_model`. `from eyas.ea_model import EaModel` does the same in new code.
Greedy ids equal plain decoding; above temperature 0 they are draws of the target with a seed from `torch.manual_seed`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.api.request import SamplingParams
from eyas.config import EngineConfig, TreeConfig
from eyas.errors import ConfigError, InvalidRequest
from eyas.llm import LLM

# What total_token = -1 starts from; engine.draft_budget then measures which size pays.
MAX_TOTAL_TOKEN = 60
GREEDY_BELOW = 1e-5
LLAMA3_END = "<|eot_id|>"
# Arguments of transformers that Eyas does not need, with the values that change nothing here.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "low_cpu_mem_usage": (True, False, None),
    "load_in_4bit": (False, None),
    "load_in_8bit": (False, None),
    "trust_remote_code": (False, None),
    "use_safetensors": (True, False, None),
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", None),
    "max_memory": (None,),
    "quantization_config": (None,),
}


class EaModel(torch.nn.Module):
    """A target with its EAGLE head. Make it with `from_pretrained`; it serves one prompt at a time, as the original.

    Attributes:
        tokenizer: of transformers, from the target's folder.
        base_model: the target's module, for its device, dtype and weights; the engine runs it. config: its config.
        llm: the LLM that generates.
    """

    def __init__(self, llm: LLM, base_model_path: str, use_eagle3: bool, total_token: int) -> None:
        super().__init__()
        target = llm.llm_engine.target
        self.llm = llm
        self.base_model = target.model
        self.base_model_name_or_path = base_model_path
        self.config = target.config
        self.hidden_size = int(target.config.hidden_size)
        self.vocab_size = target.vocab_size
        self.use_eagle3 = use_eagle3
        self.total_token = total_token
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_model_path)
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        use_eagle3: bool = True,
        base_model_path: str | None = None,
        ea_model_path: str | None = None,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        threshold: float = 1.0,
        **kwargs: Any,
    ) -> Self:
        """Load target and head.

        Args:
            use_eagle3: whether the head is an EAGLE-3 head; else it is one of EAGLE-1, which grows EAGLE-2's trees.
            base_model_path: folder or hub id of the target.
            ea_model_path: folder or hub id of the head.
            total_token: nodes of a draft tree with its root; -1 measures which size pays.
            depth: levels of a tree below the children of its root.
            top_k: nodes that each level expands.
            threshold: has no effect, as in the original.
            kwargs: torch_dtype or dtype, device_map, and the arguments of `EngineConfig`.

        Raises:
            ConfigError: an argument is missing, or Eyas does not have it.
            CheckpointError: weights do not load or fit.
        """
        if not base_model_path or not ea_model_path:
            raise ConfigError("base_model_path and ea_model_path name the target and its head; give both")
        dtype = kwargs.pop("torch_dtype", None) or kwargs.pop("dtype", None) or "auto"
        device = _device(kwargs.pop("device_map", None))
        engine: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in _IGNORED:
                engine[name] = value
            elif value not in _IGNORED[name]:
                raise ConfigError(f"{name}={value!r} is not supported; Eyas takes weights as the checkpoint has them")
        size = total_token if total_token > 0 else MAX_TOTAL_TOKEN
        llm = LLM(
            base_model_path,
            draft_model=ea_model_path,
            method="eagle3" if use_eagle3 else "eagle2",
            dtype=dtype,
            device=device,
            tree=TreeConfig(num_draft_tokens=size, num_steps=depth + 1, top_k=top_k),
            engine=EngineConfig(draft_budget="fixed" if total_token > 0 else "auto"),
            **engine,
        )
        return cls(llm, base_model_path, use_eagle3, size)

    def get_tokenizer(self) -> Any:
        """Return the target's tokenizer."""
        return self.tokenizer

    def eagenerate(  # noqa: PLR0913  # the authors' arguments, and `draft`
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        draft: bool = True,
    ) -> Any:
        """Continue a prompt.

        Args:
            input_ids: token ids, shape (1, tokens).
            temperature: 0 is greedy.
            top_p: 0 keeps all tokens.
            top_k: 0 keeps all tokens.
            max_new_tokens: most new tokens.
            max_length: most tokens of prompt and output together.
            log: whether to return counts too.
            is_llama3: whether <|eot_id|> ends the output, besides the tokenizer's end-of-sequence token.
            draft: whether to draft; the tokens are the same.

        Returns:
            Prompt and output, shape (1, tokens). With `log`, (ids, number of new tokens, index of the last verify step).

        Raises:
            InvalidRequest: several prompts, a prompt that is too long, or a value out of range.
        """
        sampling = self._sampling(input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3)
        return self._generate(input_ids, sampling, log, draft)

    def naivegenerate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same without drafts: plain decoding. Takes the arguments of `eagenerate`."""
        return self.eagenerate(*args, **kwargs, draft=False)

    def ea_generate(  # noqa: PLR0913  # as `eagenerate`
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        draft: bool = True,
    ) -> Any:
        """Yield prompt and output after each verify step, shape (1, tokens). Otherwise as `eagenerate`.

        With `log` the result is that of `eagenerate`, as some of the authors' scripts expect.
        """
        sampling = self._sampling(input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3)
        if log:
            return self._generate(input_ids, sampling, log=True, draft=draft)
        return self._stream(input_ids, sampling, draft)

    def naive_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Yield prompt and output after each token of plain decoding. Takes the arguments of `ea_generate`."""
        return self.ea_generate(*args, **kwargs, draft=False)

    def _generate(self, input_ids: Tensor, sampling: SamplingParams, log: bool, draft: bool) -> Any:
        (request,) = self.llm.generate([input_ids[0].tolist()], sampling, use_tqdm=False, draft=draft)
        output = request.outputs[0]
        ids = torch.cat([input_ids, input_ids.new_tensor([output.token_ids])], dim=1)
        return (ids, len(output.token_ids), max(output.stats.num_verify_steps - 1, 0)) if log else ids

    def _stream(self, input_ids: Tensor, sampling: SamplingParams, draft: bool) -> Iterator[Tensor]:
        ids = input_ids
        for request in self.llm.stream([input_ids[0].tolist()], sampling, draft=draft):
            ids = torch.cat([ids, ids.new_tensor([request.outputs[0].token_ids])], dim=1)
            yield ids

    def _sampling(
        self,
        input_ids: Tensor,
        temperature: float,
        top_p: float,
        top_k: float,
        max_new_tokens: int,
        max_length: int,
        is_llama3: bool,
    ) -> SamplingParams:
        """Return the parameters that mean the same. The seed comes from torch's generator, which scripts seed."""
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise InvalidRequest(f"input_ids has the shape {tuple(input_ids.shape)}; give one prompt, of shape (1, tokens)")
        most = min(max_length, self.llm.llm_engine.max_model_len) - input_ids.shape[1]
        if most < 1:
            raise InvalidRequest(f"a prompt of {input_ids.shape[1]} tokens leaves no room below {max_length}; shorten it")
        ends = [self.tokenizer.eos_token_id]
        if is_llama3:
            ends.append(self.tokenizer.convert_tokens_to_ids(LLAMA3_END))
        return SamplingParams(
            max_tokens=min(max_new_tokens, most),
            temperature=temperature if temperature > GREEDY_BELOW else 0.0,
            top_p=top_p or 1.0,
            top_k=int(top_k),
            seed=int(torch.randint(2**63 - 1, ())),
            ignore_eos=True,
            stop_token_ids=tuple(end for end in ends if isinstance(end, int)),
        )


def prepare_logits_processor(
    temperature: float = 0.0, repetition_penalty: float = 0.0, top_p: float = 0.0, top_k: int = 0
) -> LogitsProcessorList:
    """Return the processors of transformers for these values, for scripts that make them beside the model."""
    processors = LogitsProcessorList()
    if temperature > GREEDY_BELOW:
        processors += [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
        processors += [RepetitionPenaltyLogitsProcessor(repetition_penalty)] if repetition_penalty > 1.0 else []
        processors += [TopPLogitsWarper(top_p)] if 0.0 < top_p < 1.0 else []
        processors += [TopKLogitsWarper(int(top_k))] if top_k > 0 else []
    return processors


def initialize_past_key_values(*_: Any, **__: Any) -> None:
    """Raises ConfigError: scripts import this name, but an EaModel of Eyas keeps the KV cache itself."""
    raise ConfigError("EaModel keeps its KV cache itself; call eagenerate or naivegenerate")


def install() -> None:
    """Let `eagle.model.ea_model` and its neighbours be imported from here in this process."""
    names: dict[str, dict[str, Any]] = {
        "ea_model": {"EaModel": EaModel},
        "kv_cache": {"initialize_past_key_values": initialize_past_key_values},
        "utils": {"torch": torch, "prepare_logits_processor": prepare_logits_processor},
    }
    package, model = ModuleType("eagle"), ModuleType("eagle.model")
    package.__path__, model.__path__ = [], []
    sys.modules |= {"eagle": package, "eagle.model": model}
    for name, content in names.items():
        module = ModuleType(f"eagle.model.{name}")
        vars(module).update(content)
        sys.modules[module.__name__] = module


def _device(device_map: Any) -> str:
    """Return the device of a device_map; several devices need tensor_parallel_size instead. Raises ConfigError."""
    if isinstance(device_map, dict):
        devices = set(map(str, device_map.values()))
        if len(devices) > 1:
            names = ", ".join(sorted(devices))
            raise ConfigError(f"device_map names the devices {names}; give one, or tensor_parallel_size")
        device_map = next(iter(devices), None)
    name = "auto" if device_map in (None, "balanced", "sequential") else str(device_map)
    return f"cuda:{name}" if name.isdigit() else name


if __name__ == "__main__":
    from eyas import ea_model as compat

    if len(sys.argv) < 2:
        sys.exit("usage: python -m eyas.ea_model SCRIPT ARGUMENTS...")
    compat.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as `python SCRIPT` does
    runpy.run_path(sys.argv[0], run_name="__main__")
