"""Malformed HTTP/1.1 requests on sockets, and HTTP/2 frames."""

import asyncio
import re
import struct
from collections.abc import Sequence
from contextlib import suppress

from tests.fuzz.bodies import Request
from tests.fuzz.calls import Answer
from tests.fuzz.servers import SECRET

# Seconds that a request which may be incomplete waits for an answer, and after that the server's side of the connection for
# its end. Complete requests must be answered within TIMEOUT_S.
PATIENCE_S, TIMEOUT_S = 0.5, 120.0
LARGE_BYTES, NO_ANSWER = 2**16, "no answer to a complete request"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
GRPC_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)  # a literal: the first status of a connection
STATUS_NAMES = {
    0: "OK", 1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND",
    8: "RESOURCE_EXHAUSTED", 12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE", 16: "UNAUTHENTICATED",
}  # fmt: skip


class HttpConnection:
    """A connection to an HTTP server that is kept while the server keeps it."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Request, cancels: bool = False) -> Answer:
        """Send a request; its status, "no answer" if the server closes or waits for more. cancels: close before that."""
        if not request.is_complete:
            return await incomplete_request(self._host, int(self._port), request.data)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(2):  # the server may have closed an idle connection
                is_new = self._streams is None
                reader, writer = self._streams or await asyncio.open_connection(self._host, int(self._port))
                self._streams = (reader, writer)
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    writer.write(request.data)
                    await writer.drain()
                    if not cancels:
                        return await self._answer(reader)
                await self.close()
                if cancels:
                    return Answer("cancelled by the client")
                if len(request.data) > LARGE_BYTES:
                    return Answer("closed while the body was sent")  # a refusal that unread bytes have overtaken
                if is_new:
                    break
        return Answer(NO_ANSWER)

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"\r\ntransfer-encoding: chunked" in head:
            body = b""
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                body = (await reader.readexactly(size + 2))[:1000]
            await reader.readline()
        else:
            length = re.search(rb"\r\ncontent-length: (\d+)", head)
            body = await (reader.readexactly(int(length[1])) if length else reader.read())
        if b"\r\nconnection: close" in head:
            await self.close()
        return http_answer(head, body)


def http_answer(head: bytes, body: bytes = b"") -> Answer:
    """The status of a response, with the beginning of its body."""
    return Answer(head.split(b" ", 2)[1].decode(), body[:300].decode(errors="replace"))


async def incomplete_request(host: str, port: int, request: bytes) -> Answer:
    """Send bytes that may be no complete request on a new connection; the server must close it once this side is closed."""
    head = await _exchange(host, port, request)
    return http_answer(head) if head.startswith(b"HTTP/1.1 ") else Answer("no answer")


async def exchange_frames(address: str, frames: Sequence[bytes]) -> Answer:
    """Send HTTP/2 frames of a call on a new connection; the call's status, or "no answer"."""
    host, _, port = address.rpartition(":")
    status = GRPC_STATUS.search(await _exchange(host, int(port), b"".join(frames)))
    return Answer(STATUS_NAMES.get(int(status[1]), status[1].decode()) if status else "no answer")


async def _exchange(host: str, port: int, data: bytes) -> bytes:
    """Send and receive for a while, then close; what came back. Raises TimeoutError if the server keeps the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    received = b""
    try:
        with suppress(OSError):
            writer.write(data)
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await writer.drain()
                    while chunk := await reader.read(65536):
                        received += chunk
                        if received.startswith(b"HTTP/1.1 ") or GRPC_STATUS.search(received):
                            break
            writer.write_eof()
            async with asyncio.timeout(TIMEOUT_S):
                while await reader.read(65536):
                    pass
    finally:
        writer.transport.abort()
    return received


def call_frames(address: str, path: bytes, message: bytes) -> list[bytes]:
    """The frames of a complete call: preface, settings, headers, and the message with gRPC's prefix."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": path.decode(errors="surrogateescape"), ":authority": address,
        "te": "trailers", "content-type": "application/grpc", "authorization": f"Bearer {SECRET}",
    }  # fmt: skip
    block = b"".join(_header(name.encode(), value.encode(errors="surrogateescape")) for name, value in headers.items())
    body = struct.pack(">BI", 0, len(message)) + message
    return [PREFACE, frame(SETTINGS, 0, 0), frame(HEADERS, END_HEADERS, 1, block), frame(DATA, END_STREAM, 1, body)]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A header field as a literal without indexing. Both are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
