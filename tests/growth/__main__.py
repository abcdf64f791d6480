"""Prints how the work of every function that reads a client's input grows, the worst first."""

import importlib
from pathlib import Path

from tests.growth.growth import growth

if __name__ == "__main__":
    found = list[tuple[float, float, str]]()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        readers = importlib.import_module(f"tests.growth.{path.stem}").READERS
        for reader, shape in ((one, shape) for one in readers for shape in one.shapes):
            measured = growth(reader, shape)
            found.append((measured.exponent, measured.seconds[-1], f"{reader.name}, {shape}"))
    for exponent, seconds, title in sorted(found, reverse=True):
        print(f"{exponent:5.2f} {1000 * seconds:9.1f} ms  {title}")
