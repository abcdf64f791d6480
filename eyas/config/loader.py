"""Reads configuration from YAML files and --set assignments.

pydantic and yaml are imported only by the functions that read.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from eyas.config.checks import require
from eyas.errors import ConfigError

ConfigT = TypeVar("ConfigT")
VARIABLE = re.compile(r"\$\{env:(\w+)\}")


def load(
    kind: type[ConfigT], file: Path | None, assignments: Iterable[str] = (), origins: Mapping[str, str] | None = None
) -> ConfigT:
    """Read a configuration class from a YAML file, then apply `key.sub=value` assignments (values are YAML).

    `${env:NAME}` in a string becomes the value of that environment variable, so that neither file nor command line holds a
    password.

    origins: where an assignment comes from, by its key, in the words that errors have for it; by default `--set key`.

    Raises ConfigError that names the file or the assignment, the key and, for an unknown key, the most similar valid one.
    """
    data = read_yaml(file) if file else {}
    assigned = []
    for assignment in assignments:
        _assign(data, assignment)
        assigned.append(assignment.partition("=")[0])

    def source(key: str) -> str:  # without the value, which may be a password
        own = [name for name in assigned if f"{key}.".startswith(f"{name}.")]
        return (origins or {}).get(own[-1], f"--set {own[-1]}") if own else str(file or "settings")

    return validated(kind, _with_environment(data, ""), source)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError for a file that cannot be read, or holds something else."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read config {file}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping of settings, got {type(data).__name__}")
    return data


def validated(kind: type[ConfigT], data: Mapping[str, Any], origin: str | Callable[[str], str]) -> ConfigT:
    """Build a configuration class from plain data. origin: name of the data in errors, or the name for a key.

    Raises ConfigError as `load` does.
    """
    from pydantic import TypeAdapter, ValidationError

    source = origin if callable(origin) else lambda key: str(origin)
    _check_keys(kind, data, "", source)
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(e["loc"], e["msg"], source) for e in error.errors())) from error


def describe(config: object, prefix: str = "") -> list[str]:
    """Return one `key = value` line per setting, with user and password of URLs masked."""
    lines: list[str] = []
    for item in fields(cast(Any, config)):
        value = getattr(config, item.name)
        if is_dataclass(value):
            lines += describe(value, f"{prefix}{item.name}.")
        else:
            lines.append(f"{prefix}{item.name} = {masked(str(value))}")
    return lines


def masked(text: str) -> str:
    """Return the text; if it is a URL, without user and password."""
    scheme, found, rest = text.partition("://")
    if not found:
        return text
    rest = re.sub(r"(?<=[?&])((?:\w+_)?(?:username|password)=)[^&]*", r"\1***", rest)
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}://{rest}"


def _problem(location: tuple[int | str, ...], message: str, source: Callable[[str], str]) -> str:
    """Join the source and the location of a pydantic error, and its message.

    A message of `__post_init__` begins with the name of its setting: "tree" and "top_k is 0" give "tree.top_k is 0".
    """
    path, own = ".".join(map(str, location)), message.removeprefix("Value error, ")
    if own == message:
        return f"{source(path)}: {path}: {own}" if path else f"{source(path)}: {own}"
    text = f"{path}.{own}" if path else own
    return f"{source(text.split()[0])}: {text}"


def _assign(data: Any, assignment: str) -> None:
    import yaml

    path, found, value = assignment.partition("=")
    if not found or not path:
        raise ConfigError(f"--set {assignment!r}: expected key=value, for instance server.port=7000")
    *parents, key = path.split(".")
    for parent in parents:
        if isinstance(data, list) and parent.isdigit() and int(parent) < len(data):
            data = data[int(parent)]
        elif isinstance(data, dict):
            if data.get(parent) is None:  # an empty section of YAML
                data[parent] = {}
            data = data[parent]
        if not isinstance(data, dict | list):
            raise ConfigError(f"--set {assignment!r}: {parent} is a value, not a group of settings")
    if not isinstance(data, dict):
        raise ConfigError(f"--set {assignment!r}: {parents[-1]} is a list; name an entry by its number from 0")
    try:
        data[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment!r}: the value of {path} is not YAML") from error


def _with_environment(node: Any, path: str) -> Any:
    """Return plain data with the environment variables that its strings name. path: of the node, for errors."""
    if isinstance(node, dict):
        return {key: _with_environment(value, f"{path}.{key}" if path else str(key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_environment(value, f"{path}.{index}") for index, value in enumerate(node)]
    for name in VARIABLE.findall(node) if isinstance(node, str) else ():
        require(name in os.environ, f"{path} names the environment variable {name}, which is not set")
    return VARIABLE.sub(lambda found: os.environ[found[1]], node) if isinstance(node, str) else node


def _check_keys(kind: Any, data: Mapping[str, Any], prefix: str, source: Callable[[str], str]) -> None:
    """Raise ConfigError for a key that `kind` does not have."""
    hints = get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), list(hints), n=1, cutoff=0.0)
            known = f"did you mean {prefix}{near[0]}? Known: {', '.join(hints)}"
            raise ConfigError(f"{source(f'{prefix}{key}')}: unknown setting {prefix}{key}; {known}")
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _check_keys(hints[key], value, f"{prefix}{key}.", source)
        for index, item in enumerate(value if isinstance(value, list) else ()):
            kinds = [kind for kind in get_args(hints[key]) if is_dataclass(kind)]
            if kinds and isinstance(item, Mapping):
                _check_keys(kinds[0], item, f"{prefix}{key}.{index}.", source)
