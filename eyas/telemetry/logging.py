"""Log lines as text or JSON. Within `request_log` JSON lines carry the ids of the request and its trace.

What a peer sends may be part of a message. So characters that are not printable are escaped, and events that a peer can
repeat are counted.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span
from pythonjsonlogger.json import JsonFormatter

from eyas.config import LogFormat

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JSON_FIELDS = ["timestamp", "levelname", "name", "message"]
_JSON_NAMES = {"levelname": "level", "name": "logger"}
_LIBRARIES = ("asyncio", "grpc", "uvicorn")  # they log what peers cause
_ENDED_TWICE = "cannot reuse already awaited coroutine"  # of grpc.aio, when a call is cancelled as it ends


@dataclass
class LogContext:
    """Ids that log lines carry; the request id may be set later."""

    request_id: str
    trace_id: str = ""
    span_id: str = ""


_CONTEXT: ContextVar[LogContext | None] = ContextVar("log context", default=None)


def configure_logging(log_format: LogFormat = "text") -> None:
    """Log to stderr from INFO up, one line per event. JSON lines add trace_id, span_id and request_id if known."""
    handler = logging.StreamHandler()
    if log_format == "text":
        handler.setFormatter(_TextFormatter(_TEXT_FORMAT))
    else:
        handler.setFormatter(JsonFormatter(_JSON_FIELDS, rename_fields=_JSON_NAMES, timestamp=True))
    handler.addFilter(_add_context)
    handler.addFilter(_shorten)
    handler.addFilter(RateLimit(handler))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def escaped(text: str) -> str:
    r"""Return the text with control, bidirectional and other characters that are not printable as escapes, such as \n or
    \u202e.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class RateLimit:
    """A filter for events that a peer can repeat: `log.warning(message, extra={"rate_limited": True})`, and libraries' own.

    The first event of a kind is logged at once. Further ones give one line per interval, with their number. A kind is a
    logger and a message before its arguments are filled in.

    Args:
        handler: logs the lines with numbers.
        interval_s: seconds between two lines of a kind.
    """

    def __init__(self, handler: logging.Handler, interval_s: float = 60.0) -> None:
        self._handler = handler
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._last: dict[tuple[str, str], logging.LogRecord] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record now."""
        if not vars(record).pop("rate_limited", record.name.startswith(_LIBRARIES)):
            return True
        kind = (record.name, str(record.msg))
        with self._lock:
            if kind in self.counts:
                self.counts[kind] += 1
                self._last[kind] = record
                return False
            self._start_interval(kind)
        return True

    def _start_interval(self, kind: tuple[str, str]) -> None:
        self.counts[kind] = 0
        timer = threading.Timer(self._interval_s, self._end_interval, [kind])
        timer.daemon = True
        timer.start()

    def _end_interval(self, kind: tuple[str, str]) -> None:
        with self._lock:
            count, last = self.counts.pop(kind), self._last.pop(kind, None)
            if count:
                self._start_interval(kind)
        if last is not None:
            last = copy.copy(last)
            vars(last)["rate_limited"] = False
            last.msg, last.args = f"{last.getMessage()} ({count} more in {self._interval_s:g} s; this was the last)", ()
            self._handler.handle(last)


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


def _shorten(record: logging.LogRecord) -> bool:
    """Replace what gRPC logs with a traceback although it is no error here.

    Metadata that it cannot decode: the record holds it, a key included. A client that has gone before the end of its call:
    gRPC logs that, or asyncio for a task of gRPC's.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_of_grpc = record.name.startswith("grpc")
    if is_of_grpc and isinstance(error, UnicodeDecodeError):
        record.msg, record.args, record.exc_info = "a peer sent metadata that is not UTF-8", (), None
    elif type(error).__name__ == "ExecuteBatchError" or (is_of_grpc and str(error) == _ENDED_TWICE):
        record.msg, record.args, record.exc_info = "a client has gone before its call ended", (), None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        vars(record)["rate_limited"] = True
    return True


class _TextFormatter(logging.Formatter):
    """One escaped line per event. The lines of a traceback follow it, indented, so that none looks like an event."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_text = None  # another formatter may have left its text here
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


def _add_context(record: logging.LogRecord) -> bool:
    if (context := _CONTEXT.get()) is not None:
        known = {name: value for name, value in vars(context).items() if value and not hasattr(record, name)}
        vars(record).update(known)
    return True
