"""Settings of every part as frozen values; `load` reads them from YAML and --set, and says what does not validate.

A value out of range raises ConfigError wherever it is constructed; `load` adds the file and the key's path. The values know
nothing of files; only `load` imports pydantic and yaml.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from eyas.errors import ConfigError

ConfigT = TypeVar("ConfigT")
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TreeConfig:
    """Shape of a dynamic draft tree. nodes counts the root; depth are levels below it; width is the frontier of a level."""

    nodes: int = 24
    depth: int = 5
    width: int = 8

    def __post_init__(self) -> None:
        _at_least(1, nodes=self.nodes, width=self.width)
        _at_least(0, depth=self.depth)


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    num_slots: token slots of KV cache; a request needs prompt + max_tokens + tree nodes of them.
    max_running: most sequences in a step. max_waiting: most requests in the queue.
    step_tokens: most prompt tokens that one step prefills.
    context_length: most tokens of prompt and output together; 0 takes the model's own limit.
    tensor_parallel: processes that share the target's weights and KV cache; it must divide the model's heads.
    """

    num_slots: int = 16384
    max_running: int = 32
    max_waiting: int = 1024
    step_tokens: int = 512
    context_length: int = 0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        _at_least(1, num_slots=self.num_slots, max_running=self.max_running, step_tokens=self.step_tokens)
        _at_least(1, tensor_parallel=self.tensor_parallel)
        _at_least(0, max_waiting=self.max_waiting, context_length=self.context_length)


@dataclass(frozen=True)
class EagleConfig:
    """Settings of an EAGLE drafter.

    num_slots: token slots of draft KV for all sessions; the session unused for longest is forgotten when they run out.
    shared_noise: rank children by the draft law perturbed with the noise of the target's own draw (temperature > 0).
    noise_scale: softness s of the perturbed law.
    """

    num_slots: int = 65536
    shared_noise: bool = True
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        _at_least(1, num_slots=self.num_slots)
        _above_zero(noise_scale=self.noise_scale)


@dataclass(frozen=True)
class ServerConfig:
    """Where a service listens and how it tells others. port 0 takes a free one; advertise defaults to host.

    linger_seconds: how long a service that stops still takes calls after it has told others to send none.
    drain_seconds: how long running calls may go on after that.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    linger_seconds: float = 0.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port is {self.port}; it must lie in [0, 65535]")
        _at_least(0, linger_seconds=self.linger_seconds, drain_seconds=self.drain_seconds)


@dataclass(frozen=True)
class RegistryConfig:
    """Where leases are kept, and how long they live without a heartbeat, in seconds."""

    url: str = "redis://127.0.0.1:6379/0"
    ttl: float = 5.0
    heartbeat: float = 1.0

    def __post_init__(self) -> None:
        _require(0 < self.heartbeat < self.ttl, f"heartbeat is {self.heartbeat}; it must lie between 0 and ttl {self.ttl}")


@dataclass(frozen=True)
class DraftLinkConfig:
    """How long a verifier waits for drafts, in seconds.

    deadline: longest wait for the trees of one step; later ones are dropped and the rows decode plainly.
    max_failures: failed or late rounds in a row before the drafter is left alone.
    reset: how long the drafter is left alone at first; twice as long after each attempt that fails, up to 10 s.
    chunk_tokens: most feature rows in one message.
    """

    deadline: float = 0.1
    max_failures: int = 3
    reset: float = 0.5
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        _above_zero(deadline=self.deadline, reset=self.reset)
        _at_least(1, max_failures=self.max_failures)
        _at_least(2, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True)
class VerifierConfig:
    """The verifier service. head: the draft checkpoint whose fc fuses this target's features; empty sends none."""

    model: str
    target: str
    head: str = ""
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: DraftLinkConfig = field(default_factory=DraftLinkConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)

    def __post_init__(self) -> None:
        _at_least(0, threads=self.threads)


@dataclass(frozen=True)
class DraftConfig:
    """The draft service. target: where the target's embeddings and config are read from."""

    model: str
    target: str
    head: str
    drafter: str = "eagle3"
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = 0
    tree: TreeConfig = field(default_factory=TreeConfig)
    eagle: EagleConfig = field(default_factory=EagleConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)

    def __post_init__(self) -> None:
        _at_least(0, threads=self.threads)


@dataclass(frozen=True)
class ServedModel:
    """A model that the router takes requests for. tokenizer: folder or hub id that holds its tokenizer.json."""

    name: str
    tokenizer: str


@dataclass(frozen=True)
class RouterConfig:
    """The router service. Times in seconds.

    request_timeout: longest life of a request without a deadline of its own.
    stall_timeout: longest silence of a verifier that has begun to answer, before the request moves to another.
    """

    models: tuple[ServedModel, ...]
    request_timeout: float = 600.0
    stall_timeout: float = 60.0
    server: ServerConfig = field(default_factory=ServerConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)

    def __post_init__(self) -> None:
        _above_zero(request_timeout=self.request_timeout, stall_timeout=self.stall_timeout)


def load(kind: type[ConfigT], file: Path | None, assignments: Iterable[str] = ()) -> ConfigT:
    """Read `kind` from a YAML file, then apply `key.sub=value` assignments (values are YAML).

    Raises ConfigError naming the file, the key and, for an unknown key, the nearest valid one.
    """
    import yaml
    from pydantic import TypeAdapter, ValidationError

    try:
        data = yaml.safe_load(file.read_text()) if file else {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read config {file}: {error}") from error
    if not isinstance(data or {}, dict):
        raise ConfigError(f"{file}: expected a mapping of settings, got {type(data).__name__}")
    data = data or {}
    for assignment in assignments:
        _assign(data, assignment)
    _check_keys(kind, data, "")
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        problems = "; ".join(_problem(e["loc"], e["msg"]) for e in error.errors())
        raise ConfigError(f"{file or 'settings'}: {problems}") from error


def describe(config: object, prefix: str = "") -> list[str]:
    """One `key = value` line per setting, with passwords inside URLs masked."""
    lines: list[str] = []
    for item in fields(cast(Any, config)):
        value = getattr(config, item.name)
        if is_dataclass(value):
            lines += describe(value, f"{prefix}{item.name}.")
        else:
            lines.append(f"{prefix}{item.name} = {masked(str(value))}")
    return lines


def masked(text: str) -> str:
    """The text without the user and the passwords of the URL that it may be."""
    scheme, found, rest = text.partition("://")
    if not found:
        return text
    rest = re.sub(r"(?<=[?&])((?:username|password)=)[^&]*", r"\1***", rest)
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}://{rest}"


def _problem(place: tuple[int | str, ...], message: str) -> str:
    """A part's own complaint begins with the name of its setting, any other with what is wrong."""
    path, own = ".".join(map(str, place)), message.removeprefix("Value error, ")
    joint = ": " if own == message else "."
    return f"{path}{joint}{own}" if path else own


def _assign(data: dict[str, Any], assignment: str) -> None:
    import yaml

    path, found, value = assignment.partition("=")
    if not found or not path:
        raise ConfigError(f"--set {assignment!r}: expected key=value, for instance server.port=7000")
    *parents, key = path.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {assignment!r}: {parent} is a value, not a group of settings")
    try:
        data[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment!r}: the value of {path} is not YAML") from error


def _check_keys(kind: Any, data: Mapping[str, Any], prefix: str) -> None:
    """Raises ConfigError for a key that `kind` does not have."""
    hints = get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), list(hints), n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {prefix}{key}; did you mean {prefix}{near[0]}? Known: {', '.join(hints)}")
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _check_keys(hints[key], value, f"{prefix}{key}.")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            kinds = [kind for kind in get_args(hints[key]) if is_dataclass(kind)]
            if kinds and isinstance(item, Mapping):
                _check_keys(kinds[0], item, f"{prefix}{key}.{index}.")


def _at_least(least: int, **settings: float) -> None:
    for name, value in settings.items():
        _require(value >= least, f"{name} is {value}; it must be at least {least}")


def _above_zero(**settings: float) -> None:
    for name, value in settings.items():
        _require(value > 0, f"{name} is {value}; it must be above 0")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
