"""An OpenTelemetry collector of the tests: OTLP over gRPC in, what came in as plain values out."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def plain(attributes: Any) -> dict[str, Any]:
    """The attributes with the values that they hold."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@dataclass(frozen=True)
class Received:
    """A span and the service that sent it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.span.attributes)


@dataclass
class Collector:
    """What came in so far. Its own threads write, the test reads."""

    spans: list[Received] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace."""
        return [received for received in self.spans if received.span.trace_id.hex() == trace_id]

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self.changed:
            for resource in request.resource_spans:
                service = plain(resource.resource.attributes)["service.name"]
                self.spans += [Received(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting(port: int) -> Iterator[Collector]:
    """A collector that listens on a localhost port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
