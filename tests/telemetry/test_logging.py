"""Log lines: nothing that a peer sends can forge one, and nothing that it repeats floods them."""

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from grpc._cython.cygrpc import ExecuteBatchError

from eyas.telemetry.logging import RateLimit, escaped
from tests.support.logs import caught_log

FORGED = "id\n2026-01-01 00:00:00,000 INFO eyas: all is well\r\x1b[2K\u202e\u2028\x00"
log = logging.getLogger("eyas.somewhere")


@pytest.fixture(params=["text", "json"])
def out(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """What a process that logs in this format has written."""
    with caught_log(request.param) as written:
        yield written.getvalue


def test_no_part_of_a_message_forges_a_line(out: Callable[[], str]) -> None:
    log.warning("request %s: failed", FORGED, extra={"field": FORGED})
    logging.getLogger(FORGED).warning(FORGED)
    lines = out().removesuffix("\n").split("\n")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_a_lone_surrogate_is_escaped() -> None:
    """Not through a logger: it would stop pytest's report."""
    assert escaped("id \ud800") == "id \\ud800"


def test_a_traceback_forges_no_line(out: Callable[[], str]) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed")
    first, *others = out().removesuffix("\n").split("\n")
    assert "failed" in first
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_metadata_that_grpc_cannot_decode_is_not_logged(out: Callable[[], str]) -> None:
    key = b"Bearer a-secret-\xf3-key"
    try:
        key.decode()
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", key)
    (line,) = out().removesuffix("\n").split("\n")
    assert "metadata that is not UTF-8" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("logger", "error"),
    [
        ("grpc._cython.cygrpc", ExecuteBatchError("Failed")),
        ("grpc._cython.cygrpc", RuntimeError("cannot reuse already awaited coroutine")),
        ("asyncio", ExecuteBatchError("Failed")),
    ],
)
def test_clients_that_have_gone_give_one_line(out: Callable[[], str], logger: str, error: Exception) -> None:
    """As grpc.aio logs them; other errors of its calls keep their tracebacks."""
    for method in "abc":
        logging.getLogger(logger).error("raised in core by servicer method [%s]", method, exc_info=error)
    (line,) = out().removesuffix("\n").split("\n")
    assert "a client has gone before its call ended" in line
    logging.getLogger(logger).error("raised in core", exc_info=RuntimeError("another"))
    assert "another" in out()


def test_printable_text_is_logged_as_it_is(out: Callable[[], str]) -> None:
    log.warning("größe 漢字 %s", "😀 \\n")
    line = out()
    assert "größe 漢字 😀 \\n" in (json.loads(line)["message"] if line.startswith("{") else line)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Timer]:
    """The timers that have been started. A test ends their time."""
    started: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: started.append(timer))
    return started


def test_repeated_events_give_a_line_and_then_a_count(timers: list[threading.Timer]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RateLimit(handler, interval_s=0.3))
    own = logging.Logger("own")
    own.addHandler(handler)
    for number in range(192):
        own.warning("tree %d is invalid", number, extra={"rate_limited": True})
    own.warning("tree %d is unusual", 0, extra={"rate_limited": True})
    own.warning("tree %d is invalid", 7)
    invalid, unusual = timers
    for timer in (invalid, unusual):
        timer.function(*timer.args)
    assert stream.getvalue().splitlines() == [
        "tree 0 is invalid",
        "tree 0 is unusual",
        "tree 7 is invalid",
        "tree 191 is invalid (191 more in 0.3 s; this was the last)",
    ]


def test_the_count_of_a_librarys_events_is_no_event_of_its_own(timers: list[threading.Timer]) -> None:
    handler = logging.StreamHandler(io.StringIO())
    limit = RateLimit(handler, interval_s=0.1)
    handler.addFilter(limit)
    library = logging.Logger("uvicorn.error")
    library.addHandler(handler)
    library.warning("invalid request")
    library.warning("invalid request")
    [timer] = timers
    timer.function(*timer.args)
    assert "1 more" in handler.stream.getvalue()
    assert set(limit.counts) == {("uvicorn.error", "invalid request")}
