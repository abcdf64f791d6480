"""Calls that freeze an interpreter."""

import re
import time


def hold_the_lock(*_: object) -> None:
    """Match in exponential time; the engine of `re` never gives the interpreter's lock away."""
    re.match(r"(a*)*b", "a" * 60)


def block_the_loop(*_: object) -> None:
    """Sleep in the thread of the event loop."""
    time.sleep(600)
