"""Protos: generated stubs are fresh, and every message, field, method and value has a comment."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tests.support.repository import GENERATED, ROOT

PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*_pb2*")}


def test_stubs_are_fresh(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    command = ["make", "-s", "-o", ".venv/.ready", "protos", f"BIN={tools}", f"STUBS={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh, committed = stubs(tmp_path / "eyas" / "v1"), stubs(GENERATED)
    stale = sorted(file for file in fresh.keys() | committed.keys() if fresh.get(file) != committed.get(file))
    assert not stale, "run: make protos"


def described(proto: Path, folder: Path) -> FileDescriptorProto:
    """The compiled proto with its comments."""
    out = folder / "descriptor"
    arguments = ["-I", "protos", "--include_source_info", f"--descriptor_set_out={out}", str(proto.relative_to(ROOT))]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=ROOT, check=True)
    return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def definitions(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and source path of everything that needs a comment; the numbers are those of descriptor.proto."""
    yield "syntax", (12,)
    for i, message in enumerate(file.message_type):
        assert not message.nested_type, f"{message.name}: messages stand side by side, not inside one another"
        yield message.name, (4, i)
        yield from ((f"{message.name}.{field.name}", (4, i, 2, j)) for j, field in enumerate(message.field))
        oneofs = [oneof.name for oneof in message.oneof_decl if not oneof.name.startswith("_")]  # _x is `optional x`
        yield from ((f"{message.name}.{oneof}", (4, i, 8, j)) for j, oneof in enumerate(oneofs))
    for i, enum in enumerate(file.enum_type):
        yield enum.name, (5, i)
        yield from ((f"{enum.name}.{value.name}", (5, i, 2, j)) for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield service.name, (6, i)
        yield from ((f"{service.name}.{method.name}", (6, i, 2, j)) for j, method in enumerate(service.method))


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_everything_that_crosses_the_wire_is_explained(proto: Path, tmp_path: Path) -> None:
    file = described(proto, tmp_path)
    explained = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    assert not [what for what, path in definitions(file) if path not in explained]
