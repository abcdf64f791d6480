"""The lists of docs/configuration.md: every key of the services and of `eyas train run`, from the dataclasses.

A meaning is the field's line under "Attributes:" of its class; a section's first sentence is the class's own docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from textwrap import fill
from typing import Any, get_args, get_type_hints

from eyas.config import DraftConfig, RouterConfig, VerifierConfig
from eyas.train.config import HEAD_SETTINGS, LOSS_SETTINGS, TrainConfig

SERVICES: Mapping[str, type] = {"router": RouterConfig, "verifier": VerifierConfig, "draft": DraftConfig}
# Defaults that would fill a line.
DESCRIBED = {"methods.eagle1.tree_choices": "the published tree"}
# Methods that read a setting of `eyas train run`, by section.
READ_BY = {"head": HEAD_SETTINGS, "loss": LOSS_SETTINGS}
TRAINING = (
    "The YAML file of [`eyas train run`](training.md). Brackets hold the default, and the methods that\n"
    "read a setting where they differ; elsewhere it is an error."
)
CODE = re.compile(r"`[^`]*`")
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")


@dataclass(frozen=True)
class Key:
    """A setting: its dotted name, the class and field that hold it, and the services that read it."""

    name: str
    config: type
    field: Field[Any]
    services: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The part of the name before its first dot; empty for settings without a section."""
        first, dot, _ = self.name.partition(".")
        return first if dot and not first.endswith("[]") else ""

    @property
    def default(self) -> str:
        """The default as YAML, or in words."""
        return DESCRIBED.get(self.name) or shown(self.field)

    @property
    def meaning(self) -> str:
        """The meaning in one line. Raises KeyError for a field that its class does not explain."""
        for config in self.config.__mro__:
            if (found := meanings(config).get(self.field.name)) is not None:
                return found
        raise KeyError(f"{self.config.__name__}.{self.field.name} has no line under Attributes")


def alike(defaults: Sequence[str]) -> Sequence[str]:
    """Return the defaults of keys that share a row; one if they are equal."""
    return defaults if len(set(defaults)) > 1 else defaults[:1]


def shown(field: Field[Any]) -> str:
    """The default of a field as YAML, or in words."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return "required"
    if isinstance(value, bool | None):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple) and value:
        return f"`{list(value)}`"
    return f"`{value}`" if value not in ("", (), {}) else "empty"


def meanings(config: type) -> Mapping[str, str]:
    """Return what a class says of its fields under "Attributes:", each in one line."""
    found: dict[str, str] = {}
    names: Sequence[str] = ()
    text = inspect.getdoc(config) if "__doc__" in vars(config) else ""
    for line in (text or "").partition("Attributes:")[2].splitlines():
        if entry := ENTRY.match(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: meaning.removesuffix(".") for name, meaning in found.items()}


def keys(config: type, prefix: str = "") -> Iterator[Key]:
    """Yield the settings of a config; those of the entries of a list have its name and []."""
    types = get_type_hints(config)
    for field in fields(config):
        kind = types[field.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from keys(kind, f"{prefix}{field.name}.")
        else:
            yield Key(f"{prefix}{field.name}", config, field)
            entry = next((part for part in get_args(kind) if is_dataclass(part)), None)
            if isinstance(entry, type) and not issubclass(config, entry):  # an entry like the config itself has its keys
                yield from keys(entry, f"{prefix}{field.name}[].")


def service_keys() -> list[Key]:
    """Return the settings of all services; one that several read stands once."""
    found: dict[str, Key] = {}
    for service, config in SERVICES.items():
        for key in keys(config):
            services = (*found[key.name].services, service) if key.name in found else (service,)
            found[key.name] = Key(key.name, found[key.name].config if key.name in found else key.config, key.field, services)
    return list(found.values())


def service_lists() -> str:
    """Return a list for each section of the services' configuration."""
    lists = []
    for section, own in _by_section(service_keys()).items():
        read_by = [", ".join(key.services) for key in own]
        if section:
            config = get_type_hints(SERVICES[own[0].services[0]])[section]
            lists.append(_entries(f"## {section}", _intro(config), own, read_by))
        else:
            lists.append(_entries("## Models", "Settings without a section.", own, read_by))
    return "\n".join(lists)


def train_lists() -> str:
    """Return a list for each section of `eyas train run`'s configuration."""
    return "\n".join(
        _entries(f"### {section or 'Run'}", _intro(own[0].config), own, [_methods(key) for key in own])
        for section, own in _by_section(list(keys(TrainConfig))).items()
    )


def _by_section(own: Sequence[Key]) -> Mapping[str, Sequence[Key]]:
    """Return the keys of each section, the keys without one first."""
    order = ["", *dict.fromkeys(key.section for key in own if key.section)]
    return {section: [key for key in own if key.section == section] for section in order}


def _entries(title: str, intro: str, own: Sequence[Key], read_by: Sequence[str]) -> str:
    """Return a section with an entry for each meaning: keys, defaults, and their readers where the section has several."""
    entries: dict[tuple[str, str], list[Key]] = {}
    for key, readers in zip(own, read_by, strict=True):
        entries.setdefault((key.meaning, readers), []).append(key)
    is_same = len(set(read_by)) == 1
    above = f"{intro} Read by {read_by[0]}." if is_same and read_by[0] else intro
    lines = [
        f"- {', '.join(f'`{key.name}`' for key in group)} "
        f"({', '.join(alike([key.default for key in group]))}{'' if is_same else f'; {readers}'}): {meaning}"
        for (meaning, readers), group in entries.items()
    ]
    return "\n".join([title, "", filled(above), "", *(filled(line, "  ") for line in lines), ""])


def filled(text: str, indent: str = "") -> str:
    """Return the text in lines of at most 100 columns, unbroken within code."""
    held = CODE.sub(lambda code: code[0].replace(" ", "\0"), text)
    return fill(held, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _methods(key: Key) -> str:
    """Return the methods that read a setting, or the few that do not; empty if its section makes no difference."""
    if key.section not in READ_BY:
        return ""
    read = {method: key.field.name in names for method, names in READ_BY[key.section].items()}
    others = [method for method, does in read.items() if not does]
    if len(others) < len(read) / 2:
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(method for method, does in read.items() if does)


def _intro(config: type) -> str:
    """Return the first paragraph of a class in one line."""
    return " ".join((inspect.getdoc(config) or "").partition("Attributes:")[0].split())
