"""Chunks become outputs."""

import time

from eyas.api.outputs import OutputBuilder, TextChunk
from eyas.api.request import Chunk


def test_a_long_output_takes_linear_time() -> None:
    """Text that grew chunk by chunk took 17 s of 131,072 chunks."""
    builder = OutputBuilder("a", None, ())
    chunk = TextChunk(Chunk("a"), "abcd")
    began = time.process_time()
    for _ in range(1 << 17):
        builder.add(chunk)
    assert builder.output().outputs[0].text == "abcd" * (1 << 17)
    assert time.process_time() - began < 3


def test_deltas_and_whole_outputs_have_their_texts() -> None:
    builder = OutputBuilder("a", None, (), num_running=2)
    parts = [TextChunk(Chunk("a", index=index), text) for index, text in ((0, "ab"), (1, "x"), (0, "c"))]
    for part in parts:
        builder.add(part)
        builder.output()
    assert [own.text for own in builder.output().outputs] == ["abc", "x"]
    builder.add(parts[1])
    assert [(own.index, own.text) for own in builder.delta().outputs] == [(1, "xx")]
    builder.add(parts[1])
    assert [(own.index, own.text) for own in builder.delta().outputs] == [(1, "x")]
