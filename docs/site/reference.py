"""Pages of reference that are generated from code: the schema of the HTTP API, the protos, the command line.

`make chart` writes metrics to docs/telemetry.md, fields of requests to docs/http.md and the keys of the configuration to
docs/configuration.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from eyas.cli.main import SUBCOMMANDS, LazyCommand, load_command
from eyas.services.router.http.app import build_app

# Numbers of the fields of FileDescriptorProto, DescriptorProto and so on, which make up the paths of comments.
MESSAGES, ENUMS, SERVICES, FIELDS, ONEOFS, SYNTAX = 4, 5, 6, 2, 8, 12
TYPE = FieldDescriptorProto.Type
Comments = Mapping[tuple[int, ...], str]


def http_page() -> str:
    """Return the page of the routes of the HTTP API and their bodies."""
    unused = cast(Any, None)  # the schema needs the routes, which use the services only when they answer
    schema = build_app(unused, unused, unused, unused).openapi()
    routes = [
        f"| `{method.upper()} {path}` | {_body_link(route)} | {_cell(route['description'])} |"
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    bodies = schema["components"]["schemas"]
    sections = [line for name, body in bodies.items() if "Validation" not in name for line in _body_section(name, body)]
    return "\n".join(
        [
            "# Schema of the HTTP API",
            "",
            "Generated from the OpenAPI schema that a router serves as `/openapi.json`.",
            "[HTTP API](http.md) explains the fields.",
            "",
            "| route | body | what it does |",
            "|---|---|---|",
            *routes,
            *sections,
            "",
        ]
    )


def _body_link(route: Mapping[str, Any]) -> str:
    if "requestBody" not in route:
        return ""
    return _type_name(route["requestBody"]["content"]["application/json"]["schema"])


def _body_section(name: str, body: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"## {name}", "", *body.get("description", "").splitlines(), "")
    yield from ("| field | type | default |", "|---|---|---|")
    required = body.get("required", ())
    for field, kind in body.get("properties", {}).items():
        fallback = f"`{json.dumps(kind['default'])}`" if "default" in kind else ""
        yield f"| `{field}` | {_type_name(kind)} | {'required' if field in required else fallback} |"


def _type_name(schema: Mapping[str, Any]) -> str:
    """Return a type in words, with links to bodies."""
    if "$ref" in schema:
        name = schema["$ref"].split("/")[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type_name(kind) for kind in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_type_name(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def command_line_page() -> str:
    """Return the page of all commands and their options."""
    lines = ["# Command line", "", "Generated from the commands; `--help` shows the same.", ""]
    for path, command in sorted(commands()):
        lines += [f"## {path}", "", *_plain(command.help), ""]
        parameters = [parameter for parameter in command.params if parameter.name != "help"]
        if parameters:
            lines += ["| option | default | meaning |", "|---|---|---|", *map(_parameter_row, parameters), ""]
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command by its words."""
    for name in SUBCOMMANDS:
        command = load_command(name)
        inner = getattr(command, "commands", {"": command})
        leaves = {word: leaf for word, leaf in inner.items() if not isinstance(leaf, LazyCommand)}
        yield from ((f"eyas {name} {word}".strip(), leaf) for word, leaf in leaves.items())


def _plain(text: str | None) -> list[str]:
    return [line.strip() for line in (text or "").replace("\b", "").splitlines()]


def _parameter_row(parameter: click.Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    name = f"`{parameter.human_readable_name.upper()}`" if isinstance(parameter, click.Argument) else names
    default = parameter.default
    shown = (
        "required" if parameter.required else "" if default in (None, "", [], ()) or callable(default) else f"`{default}`"
    )
    return f"| {name} | {shown} | {_cell(getattr(parameter, 'help', None) or '')} |"


def protos_page(root: Path) -> str:
    """Return the page of all services and messages. root: the folder that imports of the protos start from."""
    lines = ["# Protos", "", "Generated from the comments of the protos, package `eyas.v1`.", ""]
    for file in _described(root):
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        lines += [f"## {file.name.removeprefix('eyas/v1/')}", "", _text(comments, (SYNTAX,)), ""]
        lines += _services(file, comments)
        for i, message in enumerate(file.message_type):
            lines += _message(message, (MESSAGES, i), comments)
        for i, enum in enumerate(file.enum_type):
            lines += [
                f"### {enum.name}",
                "",
                _text(comments, (ENUMS, i)),
                "",
                "| value | number | meaning |",
                "|---|---|---|",
            ]
            for j, value in enumerate(enum.value):
                lines.append(f"| `{value.name}` | {value.number} | {_text(comments, (ENUMS, i, FIELDS, j))} |")
            lines.append("")
    return "\n".join(lines)


def _described(root: Path) -> Sequence[FileDescriptorProto]:
    """Compile the protos with their comments."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        arguments = ["-I", str(root), "--include_source_info", f"--descriptor_set_out={out}", *names]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
        return FileDescriptorSet.FromString(out.read_bytes()).file


def _services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for i, service in enumerate(file.service):
        yield from (f"### Service {service.name}", "", _text(comments, (SERVICES, i)), "")
        yield from ("| method | request | response | meaning |", "|---|---|---|---|")
        for j, method in enumerate(service.method):
            request = ("stream of " if method.client_streaming else "") + _message_link(method.input_type)
            response = ("stream of " if method.server_streaming else "") + _message_link(method.output_type)
            yield f"| `{method.name}` | {request} | {response} | {_text(comments, (SERVICES, i, FIELDS, j))} |"
        yield ""


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield from (f"### {message.name}", "", _text(comments, path), "")
    if message.field:
        yield from ("| field | number | type | meaning |", "|---|---|---|---|")
    for j, field in enumerate(message.field):
        meaning = _text(comments, (*path, FIELDS, j))
        if field.HasField("oneof_index") and not field.proto3_optional:
            meaning += f" One of `{message.oneof_decl[field.oneof_index].name}`."
        yield f"| `{field.name}` | {field.number} | {_field_type(field)} | {meaning} |"
    yield ""


def _field_type(field: FieldDescriptorProto) -> str:
    plain = TYPE.Name(field.type).removeprefix("TYPE_").lower()
    name = _message_link(field.type_name) if field.type_name else f"`{plain}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def _message_link(type_name: str) -> str:
    name = type_name.split(".")[-1]
    return f"[{name}](#{name.lower()})" if type_name.startswith(".eyas.") else f"`{type_name.lstrip('.')}`"


def _text(comments: Comments, path: tuple[int, ...]) -> str:
    return _cell(comments.get(path, "").strip())


def _cell(text: str) -> str:
    """Return text as one line that a table can hold."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
