"""Keeps what transformers logs out of the log of a service."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers log errors only inside the block: what it reports of weights, errors of Eyas say in a line.

    Outside a terminal its progress bars stay off after the block.
    """
    from transformers.utils import logging as verbosity

    if not sys.stderr.isatty():
        verbosity.disable_progress_bar()  # type: ignore[no-untyped-call]  # in a log it is noise, and on a full disk it raises
    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        verbosity.set_verbosity(before)
