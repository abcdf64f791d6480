"""Log lines as text or JSON. Within `request_log` JSON lines carry the ids of the request and its trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.trace import Span
from pythonjsonlogger.json import JsonFormatter

from eyas.config import LogFormat

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JSON_FIELDS = ["timestamp", "levelname", "name", "message"]
_JSON_NAMES = {"levelname": "level", "name": "logger"}


@dataclass
class LogContext:
    """Ids that log lines carry; the request id may be set later."""

    request_id: str
    trace_id: str = ""
    span_id: str = ""


_CONTEXT: ContextVar[LogContext | None] = ContextVar("log context", default=None)


def configure_logging(log_format: LogFormat = "text") -> None:
    """Log to stderr from INFO up, one line per event. JSON lines add trace_id, span_id and request_id if known."""
    formatter = (
        logging.Formatter(_TEXT_FORMAT)
        if log_format == "text"
        else JsonFormatter(_JSON_FIELDS, rename_fields=_JSON_NAMES, timestamp=True)
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.addFilter(_add_context)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@contextmanager
def request_log(request_id: str, span: Span) -> Iterator[LogContext]:
    """Attach the ids of a request to the log lines of the body and of the tasks that it starts."""
    span_context = span.get_span_context()
    ids = (f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}") if span_context.is_valid else ()
    context = LogContext(request_id, *ids)
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        with suppress(ValueError):  # another task may close a generator than the one that started it
            _CONTEXT.reset(token)


def _add_context(record: logging.LogRecord) -> bool:
    context = _CONTEXT.get()
    if context is not None:
        known = {name: value for name, value in vars(context).items() if value and not hasattr(record, name)}
        vars(record).update(known)
    return True
