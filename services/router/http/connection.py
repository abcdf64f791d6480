"""One HTTP connection: what its client may send, how long that may take, and how it ends.

httptools parses, so that each byte of a client costs little, in header lines, chunks and trailers too. A request is answered
before the next one is read, and nothing is parsed any more once a request was refused.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eyas.config import LimitsConfig
from eyas.config.file_values import shown
from eyas.rpc.admission import address_of
from eyas.services.router.dispatch.generation import STOPPING
from eyas.services.router.http.errors import error_bytes
from eyas.services.router.http.turns import Turns

READ_BYTES = 4 * 2**10
BODY_READ_BYTES = 64 * 2**10
MAX_HEADER_LINES = 256
# Bytes of a body for each byte of its framing, which is chunk sizes, chunk extensions and trailers, beyond max_header_bytes.
BODY_BYTES_PER_FRAMING = 64
# Seconds for which a client that still sends may read its answer.
LINGER_S = 30.0
# Seconds between two reads of bytes that are dropped, of all connections together.
DROP_INTERVAL_S = 0.002
# Bytes that are dropped at most, in multiples of max_request_bytes: many clients read no answer before they have sent all.
MAX_DROPPED = 16
MAX_QUOTED = 200

log = logging.getLogger(__name__)


class HttpConnection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection of uvicorn's httptools server that bounds what a client may hold, and the work that it may cause.

    An answer that comes before the end of its request closes the connection: what the client still sends is dropped unread.
    """

    def __init__(self, *arguments: Any, limits: LimitsConfig, turns: Turns, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._turns = turns
        self.url = b""
        self._awaits: Literal["headers", "body", ""] = "headers"
        self._drops_input = False
        self._keeps_alive = False
        self._refusal = 400, ""
        self._num_read, self._num_body, self._num_framing, self._num_dropped = 0, 0, 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._timed = ""
        self._buffer = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        # Without TLS, a write that the socket does not take at once pauses the stream, so its next events are joined; with
        # TLS that begins 64 KiB later. With 0, TLS would never resume.
        transport.set_write_buffer_limits(high=1, low=0)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._start_timer("", 0)
        self._turns.num_dropping -= self._drops_input
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory of the next read. A view, because asyncio's TLS writes into slices of it.

        Little at once where each few bytes cost a call: headers, and bodies in chunks.
        """
        is_cheap = self._drops_input or (self._awaits == "body" and not self._is_chunked)
        self._buffer = memoryview(bytearray(BODY_READ_BYTES if is_cheap else READ_BYTES))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what has been read, or drop it."""
        data, self._buffer = self._buffer[:nbytes], memoryview(b"")
        if self._drops_input:
            self._drop(nbytes)
        elif not self.transport.is_closing():
            self.data_received(bytes(data))

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request."""
        self._unset_keepalive_if_required()
        self._num_read = len(data)
        self._num_framing += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse_input(error)
            return
        if not self._drops_input:
            self._check_framing()
            self._update_timer()

    def on_message_begin(self) -> None:
        """Begin a request. Raises ValueError before the last one is answered: the client may send it again."""
        if not self._is_answered:
            self.cycle.keep_alive = False
            self._start_dropping()
            raise ValueError("the last request is not answered yet")
        super().on_message_begin()
        self._awaits = "headers"
        self._num_body, self._num_framing = 0, self._num_read

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer is dropped. Raises ValueError for too many."""
        if self._awaits == "headers":
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADER_LINES:
                self._refuse(431, f"the request has more than {MAX_HEADER_LINES} header lines; send fewer")

    def on_headers_complete(self) -> None:
        """Start to respond. Raises ValueError for headers that contradict each other."""
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            self._refuse(400, f"the request has {names.count(b'host')} Host headers; send one")
        if self.parser.should_upgrade():
            return
        self._is_chunked = b"transfer-encoding" in names
        if self._is_chunked and version == "1.0":
            self._refuse(400, "a request of HTTP/1.0 has no Transfer-Encoding; send Content-Length")
        coding = b", ".join(value for name, value in self.headers if name == b"content-encoding")
        if coding.strip().lower() not in (b"", b"identity"):
            said = shown(coding.decode("latin-1"))
            self._refuse(415, f"the body has the Content-Encoding {said}, which is not decoded; send it as it is")
        super().on_headers_complete()
        self._awaits = "body"
        cycle: Any = self.cycle
        cycle.transport = _Answer(self)
        self._keeps_alive, cycle.keep_alive = cycle.keep_alive, False  # until the whole request is here
        self.flow.pause_reading()  # until the application asks for the body, or has answered without it

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body."""
        self._num_body += len(body)
        self._num_framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Let the connection stay open for the next request."""
        if self._awaits == "headers":  # of an offer to upgrade
            return
        self._awaits = ""
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self._drops_input:
            self._awaits = "headers"
            self._update_timer()

    def shutdown(self) -> None:
        """Close the connection, or let it end with the request that is running."""
        self._keeps_alive = False
        if self._drops_input:  # its client still reads an answer
            return
        if self._timed == "headers" and self._num_framing:
            self._respond(503, STOPPING)
        else:
            super().shutdown()

    def end_request(self, has_body: bool) -> None:
        """Refuse a request whose answer has not begun, because the server stops. has_body: also one whose body is here."""
        is_open = self.cycle is not None and not self.cycle.response_started
        if is_open and (has_body or self._awaits == "body"):
            self._respond(503, STOPPING)

    def close_after_answer(self) -> None:
        """Close the connection once the client has read its answer.

        The system would reset a connection with unread bytes, and the client could lose its answer.
        """
        is_read = self._awaits != "body" and not self._drops_input
        if is_read or self.transport.is_closing():
            self.transport.close()
            return
        self._start_dropping()
        if self.transport.can_write_eof():
            with suppress(OSError):  # a client that has gone
                self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer("end", LINGER_S)

    @property
    def is_ending(self) -> bool:
        """Return whether the connection only waits until its client has read the answer."""
        return self._drops_input

    @property
    def _is_answered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse a request that offers another protocol, such as HTTP/2, without its offer.

        httptools would take its body for bytes of that protocol. rest: the bytes after its headers.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._respond(400, "this server is no proxy; send a request of another method")
            return
        headers = (name + b": " + value for name, value in self.headers if name != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join((method + b" " + self.url + b" HTTP/1.1", *headers, b"", rest)))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the application when it is the turn of the client's address."""
        start = super()._start_asgi_task
        self._turns.add(address_of(self.client[0]) if self.client else "", lambda: cycle.disconnected or start(cycle, app))

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would look through the headers for each chunk

    def _refuse(self, status: int, reason: str) -> None:
        """Leave a parser's callback with an answer. Raises ValueError."""
        self._refusal = status, reason
        raise ValueError(reason)

    def _refuse_input(self, error: httptools.HttpParserError) -> None:
        """Answer bytes that are no request; the parser does not continue after an error."""
        if self._drops_input:  # it began before the last request was answered
            self.flow.resume_reading()
            return
        status, reason = self._refusal
        if not reason:
            reason = f"the request is not HTTP/1.1: {str(error)[:MAX_QUOTED]}"
            log.warning("refused what is no HTTP request: %r", str(error)[:MAX_QUOTED], extra={"rate_limited": True})
        self._respond(status, reason)

    def _start_dropping(self) -> None:
        self._turns.num_dropping += not self._drops_input
        self._drops_input = True

    def _drop(self, num_bytes: int) -> None:
        """Drop what has been read, and read on a little later: a client can finish, and many cost next to nothing."""
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED * self._limits.max_request_bytes:
            self.transport.abort()
            return
        self.flow.pause_reading()
        self.loop.call_later(DROP_INTERVAL_S * self._turns.num_dropping, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _check_framing(self) -> None:
        """Refuse a request of too many bytes that are not its body."""
        most = self._limits.max_header_bytes
        if self._num_framing <= most + self._num_body // BODY_BYTES_PER_FRAMING:
            return
        if self._awaits == "headers":
            self._respond(431, f"the headers are longer than {most} bytes; send less")
        elif self._awaits == "body":
            self._respond(
                400, "the body comes in chunks that are too small, or with too long extensions; send larger chunks"
            )

    def _update_timer(self) -> None:
        if self._drops_input:
            return
        if self._awaits == "body":
            self._start_timer("body", self._limits.body_timeout_s)
        elif self._awaits == "headers" and self.timeout_keep_alive_task is None:
            self._start_timer("headers", self._limits.header_timeout_s)
        else:
            self._start_timer("", 0)  # for the response; or for the next request, with uvicorn's own timer

    def _start_timer(self, what: str, seconds: float) -> None:
        """Start the timer of what has to happen next; nothing stops it."""
        if what == self._timed:
            return
        if self._timer:
            self._timer.cancel()
        self._timed, self._timer = what, None
        if what and not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self._timed == "end":
            self.transport.abort()
        else:
            self._respond(408, f"the {self._timed} did not arrive in time")

    def _respond(self, status: int, reason: str) -> None:
        """Answer without the application, which ends, and close. An answer that has begun is cut."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            has_begun, cycle.disconnected = cycle.response_started, True
            cycle.message_event.set()
            if has_begun:
                self.transport.abort()
                return
        self.transport.write(error_bytes(status, reason, self.url.decode("latin-1")))
        self._start_dropping()
        self.close_after_answer()


class _Answer:
    """The transport of a response: closing it waits until the client has read it."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.write = connection.transport.write

    def is_closing(self) -> bool:
        return self._connection.is_ending or self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_after_answer()
