"""How Prometheus gets the metrics: a registry in, an HTTP endpoint out. Knows no metric."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from eyas.errors import ConfigError

log = logging.getLogger(__name__)

_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True)
class Exposition:
    """All metrics as the body of an HTTP answer."""

    content_type: str
    body: bytes


def exposition(accept: str, registry: CollectorRegistry) -> Exposition:
    """The metrics for a client that sends this Accept header: OpenMetrics, with exemplars, for those who know it.

    Names go out as they are: prometheus_client by itself writes vllm_ for vllm: in OpenMetrics.
    """
    if _OPENMETRICS in accept:
        body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Exposition(f"{_OPENMETRICS}; version=1.0.0; charset=utf-8", body)
    return Exposition(CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))


@contextmanager
def serving_metrics(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Answer GET /metrics on a thread; gives the port, a free one for 0. Raises ConfigError for a port that is taken."""
    try:
        server = ThreadingHTTPServer((host, port), partial(_Door, registry))
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}; set telemetry.metrics_port") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics endpoint", daemon=True)
    thread.start()
    log.info("metrics are served on http://%s:%d/metrics", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Door(BaseHTTPRequestHandler):
    """One request of a scraper."""

    timeout = 10

    def __init__(self, registry: CollectorRegistry, *connection: object) -> None:
        self._registry = registry
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """The metrics, at /metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        answer = exposition(self.headers.get("Accept", ""), self._registry)
        self.send_response(200)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Say nothing: scrapes come every few seconds."""
