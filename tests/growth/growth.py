"""How the work of a function grows with the size of a client's input, in processor time of its thread.

Every function that reads a client's text, schema, grammar, template, image part or tool definition has a `Reader` in one of
the files beside this one.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError
from tests.support.tiers import nightly

# Seconds that an input of the largest size may keep the event loop.
LOOP_SECONDS = 0.05
# Turns of a loop, and how long they take on a fast machine: on a slower one an input may take longer by as much.
YARDSTICK_TURNS = 200_000
YARDSTICK_SECONDS = 0.008
MAX_SLOWNESS = 4.0
# n log n at these sizes is below 1.15; caches that overflow add up to .4 on a busy machine. Quadratic work gives 2.
MAX_EXPONENT = 1.6
# Noise only ever adds time. A reader fails if its least times of this many rounds are still too long.
MAX_ROUNDS = 6
# Shapes of each reader that are tried daily.
DAILY_SHAPES = 1
# Below this a time is as much noise as work, and does no harm.
NOISE_SECONDS = 0.01


@dataclass(frozen=True)
class Reader:
    """One function that reads what a client sends.

    Attributes:
        name: dotted path of the function.
        call: calls it with an input. An EyasError is an answer; any other error fails the test.
        shapes: hostile inputs by name; each makes an input of n units, most often bytes.
        limit: the largest n that can reach the function.
        on_loop: the event loop of a service calls it, so that the largest input may take at most `LOOP_SECONDS`.
    """

    name: str
    call: Callable[[Any], object]
    shapes: Mapping[str, Callable[[int], Any]]
    limit: int
    on_loop: bool = False


@dataclass(frozen=True)
class Growth:
    """Seconds for inputs of an eighth, a quarter, a half, and the whole of a reader's limit.

    Attributes:
        slowness: how many times as long as on a fast machine Python took next to them, from 1 to MAX_SLOWNESS; 1 unless
            they are long.
    """

    seconds: tuple[float, ...]
    slowness: float = 1.0

    @property
    def exponent(self) -> float:
        """The power of n that the work grows with; 0 where it is too short to measure."""
        return math.log(self.seconds[-1] / self.seconds[0], 8) if self.seconds[-1] > NOISE_SECONDS else 0.0


def pairs(readers: Sequence[Reader]) -> list[Any]:
    """Every reader with each of its shapes, for `parametrize`. About one shape of a reader is tried daily, others nightly.

    Readers that share shapes take different ones, so that daily each shape meets a reader.
    """
    found = list[Any]()
    for number, reader in enumerate(readers):
        turns = -(-len(reader.shapes) // DAILY_SHAPES)
        for place, shape in enumerate(reader.shapes):
            is_daily = place % turns == number % turns
            found.append((reader, shape) if is_daily else nightly(reader, shape))
    return found


def label(value: object) -> str:
    """The name of a reader or shape in a test's id."""
    return value.name if isinstance(value, Reader) else str(value)


def growth(reader: Reader, shape: str) -> Growth:
    """Measure a reader with inputs of one shape, again while it seems too slow. Stops early where the work is too much."""
    values = [reader.shapes[shape](reader.limit // part) for part in (8, 4, 2, 1)]
    least = Growth(())
    for _ in range(MAX_ROUNDS):
        seconds = list[float]()
        for value in values:
            seconds.append(_least_seconds(reader, value))
            if seconds[-1] > 5 and seconds[-1] > 10 * seconds[0]:
                return Growth(tuple(seconds))
        is_long = reader.on_loop and seconds[-1] >= LOOP_SECONDS
        slowness = min([_slowness() for _ in range(3)]) if is_long else 1.0
        least = Growth(tuple(map(min, seconds, least.seconds or seconds)), slowness)
        if not is_too_slow(reader, least):
            break
    return least


def is_too_slow(reader: Reader, found: Growth) -> bool:
    """Return whether the work grows faster than n log n, or keeps the event loop too long."""
    return found.exponent >= MAX_EXPONENT or (reader.on_loop and found.seconds[-1] >= LOOP_SECONDS * found.slowness)


def _slowness() -> float:
    total = 0
    began = time.thread_time()
    for number in range(YARDSTICK_TURNS):
        total += number
    return min(max((time.thread_time() - began) / YARDSTICK_SECONDS, 1.0), MAX_SLOWNESS)


def check_growth(reader: Reader, shape: str) -> None:
    """Fail if the work grows faster than n log n, or keeps the event loop too long."""
    found = growth(reader, shape)
    shown = f"{reader.name}, {shape}: {', '.join(f'{1000 * one:.1f}' for one in found.seconds)} ms"
    assert len(found.seconds) == 4, shown
    place = (
        f" on the event loop; Python took {found.slowness:.1f} times as long as on a fast machine" if reader.on_loop else ""
    )
    assert not is_too_slow(reader, found), f"{shown}{place}"


def _least_seconds(reader: Reader, value: Any) -> float:
    """Processor time of the quickest of up to three calls."""
    least = math.inf
    gc.disable()
    try:
        for _ in range(3):
            start = time.thread_time()
            with suppress(EyasError):
                reader.call(value)
            least = min(least, time.thread_time() - start)
            if least > 1:
                break
    finally:
        gc.enable()
    return max(least, 1e-6)
