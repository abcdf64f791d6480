"""The way to a router's gRPC door: options of the command in, models and chunks out. Knows no screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from eyas.rpc.certificates import Certificates, channel_credentials
from eyas.rpc.channel import Line, open_sync_channel
from eyas.rpc.messages import GenerateCall, ModelInfo, TextChunk
from eyas.rpc.wire import call_to_message, chunk_from_message, models_from_message
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub

LIST_SECONDS = 10.0


@dataclass(frozen=True)
class Door:
    """Where a router listens and how it is spoken to. address: host:port. api_key: empty for a router that asks for none."""

    address: str
    line: Line
    api_key: str = field(default="", repr=False)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that can be asked for now. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.line) as channel:
            stub = GenerationStub(channel)
            answer = stub.ListModels(ListModelsRequest(), timeout=LIST_SECONDS, metadata=self._metadata)
            return tuple(models_from_message(answer))

    def stream(self, call: GenerateCall) -> Iterator[TextChunk]:
        """Chunks of a call; leaving early cancels it. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.line) as channel:
            answers = GenerationStub(channel).Generate(call_to_message(call), metadata=self._metadata)
            try:
                yield from map(chunk_from_message, answers)
            finally:
                answers.cancel()  # type: ignore[no-untyped-call]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def tls_line(ca: str, name: str) -> Line:
    """TLS to a router. ca: PEM file of those who sign its certificate; empty trusts whom this machine trusts. name: whom the
    certificate is for; empty takes the host dialled. Raises ConfigError for a file that cannot be used."""
    return Line(credentials=channel_credentials(Certificates("--ca", authority=ca).pem), name=name)
