"""The Draft service over DraftWorkers: protobuf streams in and out. Knows neither how nor what is drafted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eyas.errors import Unavailable
from eyas.rpc import convert
from eyas.rpc.messages import DraftRequest, DraftResponse
from eyas.services.draft.worker import DraftStream, DraftWorker, choose
from eyas.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Answers every stream as soon as its worker does. Construct it inside the running event loop."""

    def __init__(self, workers: Sequence[DraftWorker]) -> None:
        """workers: one for each drafter, no two of them for the same verifiers."""
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._reading: set[asyncio.Task[Any]] = set()
        self._stopping = False

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeResponse:  # noqa: N802
        """What the drafter for this verifier drafts for and with. Raises UnknownModel where there is none."""
        verified = convert.target_info_from_proto(request.target) if request.HasField("target") else None
        return convert.drafter_info_to_proto(choose(self._workers, verified).info)

    async def Speculate(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """Read and answer at once; the stream's end, whoever ends it, forgets its sessions.

        The first request says which drafter the stream is for. Raises UnknownModel where there is none for it,
        InvalidRequest for a request that names a session twice, Unavailable after `close`.
        """
        if self._stopping:
            raise Unavailable("this drafter is stopping")
        opening = await self._opening(request_iterator)
        if opening is None:
            return
        worker = choose(self._workers, opening.target)
        replies: asyncio.Queue[DraftResponse | None] = asyncio.Queue()

        def deliver(reply: DraftResponse | None) -> None:
            self._loop.call_soon_threadsafe(replies.put_nowait, reply)

        stream = worker.open(deliver)
        reading = asyncio.create_task(_read(worker, stream, opening, request_iterator))
        reading.add_done_callback(lambda _: worker.close(stream))
        self._reading.add(reading)
        try:
            while (reply := await replies.get()) is not None:
                yield convert.draft_response_to_proto(reply)
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            self._reading.discard(reading)

    async def _opening(self, requests: AsyncIterator[draft_pb2.SpeculateRequest]) -> DraftRequest | None:
        """The first request; None if the stream or the service ends before it."""
        reading = asyncio.create_task(_first(requests))
        self._reading.add(reading)
        try:
            await asyncio.wait([reading])
            return None if reading.cancelled() else reading.result()
        finally:
            reading.cancel()
            self._reading.discard(reading)

    async def close(self) -> None:
        """End all streams and open no more; their verifiers decode plainly."""
        self._stopping = True
        for reading in self._reading:
            reading.cancel()


async def _first(requests: AsyncIterator[draft_pb2.SpeculateRequest]) -> DraftRequest | None:
    async for message in requests:
        return convert.draft_request_from_proto(message)
    return None


async def _read(
    worker: DraftWorker, stream: DraftStream, opening: DraftRequest, requests: AsyncIterator[draft_pb2.SpeculateRequest]
) -> None:
    worker.submit(stream, opening)
    async for message in requests:
        worker.submit(stream, convert.draft_request_from_proto(message))
