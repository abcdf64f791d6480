"""Malformed protobuf messages: valid ones that are changed field by field on the wire, as their descriptors allow.

Only a descriptor and valid examples are needed, so that new fields and messages are covered by themselves. Every function
draws from the generator that it is given: a seeded one in a storm, hypothesis' own in a property test.
"""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_DEPTH, MAX_CHANGES, MAX_FIELD = 6, 4, 2**29 - 1

INTS = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 128, 255, 256, 4095, 4096, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31), -(2**31) - 1, -(2**63),
)  # fmt: skip
REALS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 5e-324, 1e-308, 2.0, 100.0, -100.0, 100.1, 1e30, 1.7e308, -1.7e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    b"", b" ", b"\0", b"a", b"0", b"-1", b"none", b"eagle3", b"tiny", b"127.0.0.1:1", b"[::1]:1", b"unix:/x", b"..",
    "größe 漢字 😀".encode(), "\u202e\u2028\ufeff".encode(), b"id\n2026-01-01 00:00:00,000 INFO eyas: forged\r\x1b[2K",
    b"%s%n{}${x}{{ 7 * 7 }}", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"float32", b"bfloat16",
    b"int64", b"object", b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-ff", b"a" * 127, b"a" * 129, b"ab" * 4096,
)  # fmt: skip
COUNTS = (0, 1, 2, 3, 5, 8, 17, 64, 200)
HUGE_COUNTS = (1_000, 20_000, 100_000)
HUGE_RATIO = 0.001
MAX_REPEATED_BYTES = 2**24

_FIXED = {
    FieldDescriptor.TYPE_FIXED32: "<I", FieldDescriptor.TYPE_SFIXED32: "<i", FieldDescriptor.TYPE_FLOAT: "<f",
    FieldDescriptor.TYPE_FIXED64: "<Q", FieldDescriptor.TYPE_SFIXED64: "<q", FieldDescriptor.TYPE_DOUBLE: "<d",
}  # fmt: skip
_REAL = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


@dataclass(frozen=True)
class Chunk:
    """One field on the wire. data: its bytes after the tag; without the length for the wire type LENGTH."""

    number: int
    wire_type: int
    data: bytes

    def encoded(self) -> bytes:
        """The bytes of the field."""
        length = varint(len(self.data)) if self.wire_type == LENGTH else b""
        return varint(self.number << 3 | self.wire_type) + length + self.data


def malformed(examples: Sequence[bytes], descriptor: Descriptor) -> st.SearchStrategy[bytes]:
    """Changed copies of encoded examples of a message, for hypothesis."""
    generators = st.randoms(use_true_random=False)
    return st.builds(lambda example, rng: change(example, descriptor, rng), st.sampled_from(examples), generators)


def change(example: bytes, descriptor: Descriptor, rng: random.Random) -> bytes:
    """An encoded message with some of its fields changed; sometimes its bytes instead."""
    if rng.random() < 0.1:
        return _garbled(example, rng)
    data = example
    for _ in range(rng.randrange(1, MAX_CHANGES)):
        data = _changed(data, descriptor, rng, MAX_DEPTH)
    return _garbled(data, rng) if rng.random() < 0.05 else data


def varint(value: int) -> bytes:
    """A whole number as the wire has it; a negative one takes ten bytes."""
    value &= 2**64 - 1
    groups = bytearray()
    while value >= 128:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def chunks_of(data: bytes) -> list[Chunk]:
    """The fields of a message; what cannot be split is left out."""
    found, at = [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire_type, start = tag >> 3, tag & 7, at
        if wire_type == VARINT:
            _, at = _read_varint(data, at)
        elif wire_type == LENGTH:
            length, start = _read_varint(data, at)
            at = start + length
        else:
            at += {FIXED64: 8, FIXED32: 4}.get(wire_type, len(data))
        if at <= len(data) and number:
            found.append(Chunk(number, wire_type, data[start:at]))
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            break
    return value, at


def _changed(data: bytes, descriptor: Descriptor, rng: random.Random, depth: int) -> bytes:
    """Drop, repeat, reorder, replace or add one field, or add one that is unknown."""
    chunks = chunks_of(data)
    what = rng.random()
    if chunks and what < 0.1:
        chunks.pop(rng.randrange(len(chunks)))
    elif chunks and what < 0.2:
        chunk = rng.choice(chunks)
        chunks += [chunk] * _count(rng, len(chunk.data))
    elif chunks and what < 0.25:
        place = rng.randrange(len(chunks))
        chunks[place] = replace(chunks[place], wire_type=rng.choice((VARINT, FIXED64, LENGTH, 3, 4, FIXED32, 6, 7)))
    elif what < 0.3 or not descriptor.fields:
        chunks.append(_unknown(rng))
    else:
        field = rng.choice(descriptor.fields)
        chunks = _with_field(chunks, field, rng, depth)
    encoded = {id(chunk): chunk for chunk in chunks}  # one chunk may be there 100,000 times
    parts = {key: chunk.encoded() for key, chunk in encoded.items()}
    return b"".join([parts[id(chunk)] for chunk in chunks])


def _with_field(chunks: list[Chunk], field: FieldDescriptor, rng: random.Random, depth: int) -> list[Chunk]:
    """The chunks with another value of a field, in place of one that it has or behind all."""
    places = [place for place, chunk in enumerate(chunks) if chunk.number == field.number]
    place = rng.choice(places) if places else None
    old = chunks[place].data if place is not None else b""
    if field.message_type is not None:
        inner = _changed(old, field.message_type, rng, depth - 1) if depth else b""
        count = _count(rng, len(inner)) if field.is_repeated and rng.random() < 0.2 else 1
        new = [Chunk(field.number, LENGTH, inner)] * count
    elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        new = [_numbers(field, old, rng)]
    else:
        new = _scalars(field, _count(rng) if field.is_repeated else 1, rng)
    return [*chunks, *new] if place is None else [*chunks[:place], *new, *chunks[place + 1 :]]


def _numbers(field: FieldDescriptor, old: bytes, rng: random.Random) -> Chunk:
    """Packed numbers: the old ones with some behind, or only new ones."""
    kinds = [_scalar(field, rng).data for _ in range(3)]
    count = _count(rng)
    new = kinds[0] * count if count > 8 else b"".join(rng.choice(kinds) for _ in range(count))
    return Chunk(field.number, LENGTH, old + new if rng.random() < 0.5 else new)


def _scalars(field: FieldDescriptor, count: int, rng: random.Random) -> list[Chunk]:
    """As many values as asked for, or as few as are MAX_REPEATED_BYTES."""
    chunks, size = list[Chunk](), 0
    while len(chunks) < count and size < MAX_REPEATED_BYTES:
        chunks.append(_scalar(field, rng))
        size += len(chunks[-1].data)
    return chunks


def _scalar(field: FieldDescriptor, rng: random.Random) -> Chunk:
    if field.type in _FIXED:
        pattern = _FIXED[field.type]
        packed = _real(pattern, rng) if field.type in _REAL else _fixed(rng, struct.calcsize(pattern))
        return Chunk(field.number, FIXED64 if len(packed) == 8 else FIXED32, packed)
    if field.type == FieldDescriptor.TYPE_STRING:
        return Chunk(field.number, LENGTH, _text(rng))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return Chunk(field.number, LENGTH, rng.randbytes(rng.choice((0, 1, 3, 4, 31, 32, 128, 1000))))
    return Chunk(field.number, VARINT, varint(_int(rng)))


def _int(rng: random.Random) -> int:
    return rng.choice(INTS) if rng.random() < 0.7 else rng.randrange(10)


def _fixed(rng: random.Random, size: int) -> bytes:
    return (_int(rng) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _real(pattern: str, rng: random.Random) -> bytes:
    value = rng.choice(REALS)
    return struct.pack(pattern, value if pattern == "<d" or abs(value) < 3e38 or value != value else float("inf"))


def _text(rng: random.Random) -> bytes:
    text = rng.choice(TEXTS)
    return (
        text * min(rng.choice(HUGE_COUNTS), MAX_REPEATED_BYTES // max(len(text), 1)) if rng.random() < HUGE_RATIO else text
    )


def _count(rng: random.Random, size: int = 0) -> int:
    """How often something of `size` bytes is repeated."""
    count = rng.choice(HUGE_COUNTS if rng.random() < HUGE_RATIO else COUNTS)
    return min(count, MAX_REPEATED_BYTES // max(size, 1))


def _unknown(rng: random.Random) -> Chunk:
    number = rng.choice((15, 99, 1000, 19_000, MAX_FIELD))
    return Chunk(number, LENGTH, _text(rng)) if rng.random() < 0.5 else Chunk(number, VARINT, varint(_int(rng)))


def _garbled(data: bytes, rng: random.Random) -> bytes:
    """Bytes that may not be a message: cut, flipped, with some inserted, doubled, or random ones."""
    place = rng.randrange(len(data) + 1)
    what = rng.randrange(6)
    if what == 0:
        return data[:place]
    if what == 1 and data:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if what == 2:
        return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
    if what == 3:
        return data + data
    if what == 4:
        return data[:place] + bytes(rng.randrange(1, 9)) + data[place:]
    return rng.randbytes(rng.randrange(64))
