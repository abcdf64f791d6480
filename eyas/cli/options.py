"""The options that several commands share, and the settings that they stand for: each is defined here once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from eyas.config import SpecialTokensInContent, TreeConfig
from eyas.config.engine import EngineConfig, HeadValidation
from eyas.config.router import ReasoningParser, ToolCallParser
from eyas.config.serving import DraftPlacement, GenerationDefaults
from eyas.errors import ConfigError

# The settings behind an option of `eyas serve`, each with the service that has it. An option without a value sets nothing.
SERVICE_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("verifier.model", "draft.model", "router.models.0.tokenizer"),
    "draft_model": ("verifier.draft_model", "draft.draft_model"),
    "method": ("verifier.method", "draft.method"),
    "served_model_name": ("verifier.served_model_name", "draft.served_model_name", "router.models.0.name"),
    "aliases": ("router.models.0.aliases",),  # all but the first of --served-model-name
    "dtype": ("verifier.dtype", "draft.dtype"),
    "device": ("verifier.device", "draft.device"),
    "num_draft_tokens": ("verifier.tree.num_draft_tokens", "draft.tree.num_draft_tokens"),
    "num_steps": ("verifier.tree.num_steps", "draft.tree.num_steps"),
    "top_k": ("verifier.tree.top_k", "draft.tree.top_k"),
    "draft_placement": ("verifier.draft_placement",),
    "validate_head": ("verifier.validate_head",),
    "generation_config": ("verifier.generation_config",),
    "max_model_len": ("verifier.engine.max_model_len",),
    "max_num_seqs": ("verifier.engine.max_num_seqs",),
    "gpu_memory_utilization": ("verifier.engine.gpu_memory_utilization",),
    "tensor_parallel_size": ("verifier.engine.tensor_parallel_size",),
    "quantization": ("verifier.engine.quantization",),
    "tokenizer": ("router.models.0.tokenizer",),  # after that of "model"
    "chat_template": ("router.models.0.chat_template",),
    "tool_call_parser": ("router.models.0.tool_call_parser",),
    "reasoning_parser": ("router.models.0.reasoning_parser",),
    "special_tokens_in_content": ("router.models.0.special_tokens_in_content",),
}
# The same options where a model runs in this process: the arguments of `LLM` have their names.
LLM_ARGUMENTS = (
    *("dtype", "device", "validate_head", "max_model_len", "max_num_seqs", "gpu_memory_utilization"),
    *("tensor_parallel_size", "quantization", "tokenizer", "chat_template"),
)
# In a context's meta: the settings of services that a file of options holds, as service.key=value.
FILE_SETTINGS = "eyas.cli.options.file_settings"
# Keys of a file of options that hold the settings of a service instead, as in its own config file.
SECTIONS = ("router", "verifier", "draft")


class Setting(NamedTuple):
    """A setting of a service.

    Attributes:
        text: service.key=value.
        is_option: an option stands for it, whether or not the service runs.
        origin: what the user wrote: an option, or a file and its key; empty for --set.
    """

    text: str
    is_option: bool = False
    origin: str = ""

    @property
    def service(self) -> str:
        """The name of the service."""
        return self.text.partition(".")[0]


def llm_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` that a command's options name."""
    return {name: options[name] for name in LLM_ARGUMENTS if options.get(name) not in (None, "")}


def service_settings(options: Mapping[str, Any], file: Path | None = None, from_file: Container[str] = ()) -> list[Setting]:
    """Return the settings that the options of `eyas serve` stand for. from_file: options that a file sets, for errors."""
    name, *aliases = options.get("served_model_name") or [None]
    values = {**options, "served_model_name": name, "aliases": aliases if name else None}
    return [
        Setting(f"{key}={json.dumps(values[option])}", True, _words(option, file if option in from_file else None))
        for option, keys in SERVICE_KEYS.items()
        for key in keys
        if values.get(option) not in (None, "")
    ]


def _words(option: str, file: Path | None) -> str:
    """Return an option as the command line or a file of options has it."""
    name = "served-model-name" if option == "aliases" else option.replace("_", "-")
    return f"{file}: {name}" if file else f"--{name}"


def asked_settings(context: typer.Context) -> list[Setting]:
    """Return the settings that a command asks for; of equal keys, the last counts.

    Defaults of options come first, then the sections of the file, then options that somebody gave, then --set. So an option
    goes before a section that a file sets as a whole.
    """
    options = {name: value for name, value in context.params.items() if _is_given(context, name)}
    sources = {name: context.get_parameter_source(name) for name in options}
    from_file = {name for name, source in sources.items() if source is not None and source.name == "DEFAULT_MAP"}
    given = service_settings(options, context.params.get("config"), from_file)
    return [*service_settings(context.params), *_file_settings(context), *given, *_set_settings(context)]


def direct_settings(context: typer.Context) -> list[Setting]:
    """Return the settings that a command asks for by the names of services: those of the file, then --set."""
    return [*_file_settings(context), *_set_settings(context)]


def _file_settings(context: typer.Context) -> list[Setting]:
    file = context.params.get("config")
    return [Setting(text, origin=f"{file}: {text.partition('=')[0]}") for text in context.meta.get(FILE_SETTINGS, ())]


def _set_settings(context: typer.Context) -> list[Setting]:
    return list(map(Setting, context.params["assignments"] or ()))


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ConfigError if the command line has an option that would do nothing.

    Variables of the environment and files of options may serve several commands, so they may hold more than one reads.

    Args:
        context: of the command.
        names: of parameters that it does not read in this form.
        why: a clause that says so.
    """
    sources = {name: context.get_parameter_source(name) for name in names if name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        flags = ", ".join("--set" if name == "assignments" else f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"leave out {flags}: {why}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether the value of a parameter is from the command line, the environment or the file of options."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")


def read_options(context: typer.Context, file: Path | None) -> Path | None:
    """Take the options that the command line leaves out from a YAML file.

    Names are those of the options, with - or _; `model` is the MODEL. The sections router, verifier and draft hold settings
    of these services, where the command has --set. Raises ConfigError for a file that cannot be read and a name that the
    command does not have.
    """
    if file is None:
        return None
    from eyas.config.checks import require
    from eyas.config.loader import read_yaml

    repeatable = {param.name or "": getattr(param, "multiple", False) for param in context.command.params}
    known = repeatable.keys() - {"config", "help"}
    sections = SECTIONS if "assignments" in known else ()
    found: dict[str, Any] = {}
    settings: list[str] = context.meta.setdefault(FILE_SETTINGS, [])
    for key, value in read_yaml(file).items():
        name = "assignments" if key == "set" else str(key).replace("-", "_")
        if name in sections:
            require(isinstance(value, dict | None), f"{file}: {key} is {value!r}; it must hold settings of this service")
            settings.extend(_assignments(name, value or {}))
        elif name not in known:
            near = difflib.get_close_matches(name, [*known, *sections], n=1, cutoff=0.0)[0].replace("_", "-")
            raise ConfigError(f"{file}: {context.info_name} has no option {key}; did you mean {near}?")
        elif name == "assignments":
            settings.extend(map(str, value if isinstance(value, list) else [value]))
        else:
            found[name] = [value] if repeatable[name] and not isinstance(value, list | None) else value
    context.default_map = found
    return file


def _assignments(path: str, value: Any) -> Iterator[str]:
    """Yield nested settings as assignments of one key each. An empty mapping sets nothing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _assignments(f"{path}.{key}", inner)
    else:
        yield f"{path}={json.dumps(value)}"


def _names(choices: Any) -> str:
    return ", ".join(filter(None, get_args(choices)))


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", is_eager=True, callback=read_options, help="YAML file of these options; the command line goes first."
    ),
]
DraftModel = Annotated[str, typer.Option(help="Folder or hub id of the draft head or draft model.")]
Method = Annotated[
    str,
    typer.Option(
        help="Drafting method (see `eyas drafters`); by default that of the draft model, or of the model's own MTP module."
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(help=f"Most nodes of a draft tree, the root included; by default {TreeConfig.num_draft_tokens}."),
]
NumSteps = Annotated[int | None, typer.Option(help="Levels of a draft tree; by default those of the method.")]
TopK = Annotated[
    int | None, typer.Option(help=f"Nodes that each level of a draft tree expands; by default {TreeConfig.top_k}.")
]
Dtype = Annotated[str, typer.Option(help="Type of the weights: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda or cuda:N.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and output together; by default as many as the model takes.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help=f"Most sequences that are decoded at once; by default {EngineConfig.max_num_seqs}.")
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        help="Share of the memory beside the weights that the KV cache takes, in (0, 1]; by default "
        f"{EngineConfig.gpu_memory_utilization}."
    ),
]
TensorParallelSize = Annotated[
    int | None, typer.Option(help="Processes that share the weights, one on each GPU; by default one.")
]
Quantization = Annotated[
    str,
    typer.Option(
        help="How the checkpoint's weights are quantised, such as awq; another checkpoint is refused. int8 rounds plain "
        "weights on a CPU."
    ),
]
ValidateHead = Annotated[
    str, typer.Option(help=f"Test at start that the draft head guesses better than chance: {_names(HeadValidation)}.")
]
DraftsAt = Annotated[
    str,
    typer.Option(
        help=f"Where drafting runs: {_names(DraftPlacement)}; auto runs lookups, which have no model, in the verifier."
    ),
]
TokenizerOf = Annotated[
    str, typer.Option(help="Folder or hub id that the tokenizer is taken from; by default that of MODEL.")
]
Template = Annotated[str, typer.Option(help="File with a Jinja chat template, for a model without one.")]
ToolParser = Annotated[str, typer.Option(help=f"How the model writes tool calls: {_names(ToolCallParser)}.")]
ThinkingParser = Annotated[str, typer.Option(help=f"How the model writes reasoning: {_names(ReasoningParser)}.")]
SamplingDefaults = Annotated[
    str,
    typer.Option(
        help=f"Sampling defaults: {_names(GenerationDefaults)}; auto takes those of generation_config.json, the others none."
    ),
]
SpecialTokens = Annotated[
    str,
    typer.Option(
        help=f"What names of special tokens in messages become: {_names(SpecialTokensInContent)}, which are the tokens "
        "themselves and ordinary text."
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="EYAS_API_KEY", help="API key, if the server requires one.")]
