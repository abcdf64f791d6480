"""A small server of OpenAI's API for tests of clients: it streams words, answers whole, and fails where asked to."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_WORDS = 4
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 8,
    "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        return

    def do_GET(self) -> None:
        server: Any = self.server
        self._send(200, server.listed or {"data": [{"id": "words", "owned_by": server.owner}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.bodies.append((self.path, self.headers.get("Authorization"), body))
        if server.failures:
            self._send(server.failures.pop(0), {"error": {"message": "not now", "code": "busy"}}, {"Retry-After": "0"})
        elif "page" in json.dumps(body):
            self._send(200, "<html>")
        elif "elsewhere" in json.dumps(body):
            self._send(307, {}, {"Location": "/v2"})
        elif "bad" in json.dumps(body):
            self._send(400, {"error": {"message": "bad prompt", "code": "invalid"}})
        elif body.get("stream"):
            self._stream("chat" in self.path)
        else:
            self._send(200, {"id": "x", "choices": [{"text": "word"}], "usage": USAGE}, {"X-Request-Id": "r-1"})

    def _send(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        word = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
        stats = {"num_spec_steps": 4, "mean_acceptance_length": 2.0}
        events: list[Any] = [{"choices": [word]}] * NUM_WORDS
        events.append({"choices": [], "usage": USAGE, "metrics": {"speculative_decoding": stats}})
        server: Any = self.server
        time.sleep(server.wait_s)
        for event in server.events or events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


@contextmanager
def openai_server(
    owner: str = "somebody",
    failures: tuple[int, ...] = (),
    *,
    listed: object = None,
    events: tuple[object, ...] = (),
    wait_s: float = 0.0,
) -> Iterator[Any]:
    """The running server. url: its address. bodies: path, key and body of each request. failures: of the first ones.

    listed, events: the list of models and the events of a stream, in place of its own. wait_s: seconds before a stream.
    """
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.owner, server.failures, server.bodies = owner, list(failures), []
    server.listed, server.events, server.wait_s = listed, events, wait_s
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
