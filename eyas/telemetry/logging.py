"""Log lines, as text or as JSON, that say which request they are about. Knows no service.

Within `request_log` every line of the task, and of tasks that it starts, carries the request's id and trace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.trace import Span
from pythonjsonlogger.json import JsonFormatter

from eyas.config import LogFormat

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = ["timestamp", "levelname", "name", "message"]
_NAMES = {"levelname": "level", "name": "logger"}


@dataclass
class About:
    """The request that lines are about; its id may become known later."""

    request_id: str
    trace_id: str = ""
    span_id: str = ""


_ABOUT: ContextVar[About | None] = ContextVar("request", default=None)


def configure_logging(form: LogFormat = "text") -> None:
    """One line per event on stderr, from INFO up; json adds trace_id, span_id and request_id where they are known."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_TEXT) if form == "text" else _json())
    handler.addFilter(_tell)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@contextmanager
def request_log(request_id: str, span: Span) -> Iterator[About]:
    """What the body logs is about this request; gives what its lines will bear."""
    context = span.get_span_context()
    traced = (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else ()
    about = About(request_id, *traced)
    token = _ABOUT.set(about)
    try:
        yield about
    finally:
        with suppress(ValueError):  # a generator may be closed by another task than the one that began it
            _ABOUT.reset(token)


def _json() -> logging.Formatter:
    return JsonFormatter(_FIELDS, rename_fields=_NAMES, timestamp=True)


def _tell(record: logging.LogRecord) -> bool:
    about = _ABOUT.get()
    if about is not None:
        known = {name: value for name, value in vars(about).items() if value and not hasattr(record, name)}
        vars(record).update(known)
    return True
