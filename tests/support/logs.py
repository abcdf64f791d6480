"""The log of a process, caught as it is written."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from eyas.telemetry.logging import LogFormat, configure_logging


@contextmanager
def caught_log(log_format: LogFormat) -> Iterator[io.StringIO]:
    """Configure the log in this format; yields what is written, and puts the log back as it was."""
    out, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", out)
        configure_logging(log_format)
        try:
            yield out
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
