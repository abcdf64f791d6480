"""The Draft service over a DraftWorker: protobuf streams in and out. Knows neither how nor what is drafted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from eyas.errors import Unavailable
from eyas.rpc import draft_wire
from eyas.rpc.messages import DrafterInfo, DraftReply
from eyas.v1 import draft_pb2, draft_pb2_grpc
from services.draft.worker import DraftStream, DraftWorker


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Answers every stream as soon as the worker does. Construct it inside the running event loop."""

    def __init__(self, worker: DraftWorker, info: DrafterInfo) -> None:
        self._worker = worker
        self._info = info
        self._loop = asyncio.get_running_loop()
        self._reading: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeReply:  # noqa: N802
        """What this drafter drafts for and with."""
        return draft_wire.drafter_info_to_message(self._info)

    async def Speculate(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateReply]:
        """Read and answer at once; the stream's end, whoever ends it, forgets its sessions.

        Raises InvalidRequest for a request that names a session twice, Unavailable after `close`.
        """
        if self._stopping:
            raise Unavailable("this drafter is stopping")
        replies: asyncio.Queue[DraftReply | None] = asyncio.Queue()

        def deliver(reply: DraftReply | None) -> None:
            self._loop.call_soon_threadsafe(replies.put_nowait, reply)

        stream = self._worker.open(deliver)
        reading = asyncio.create_task(self._read(request_iterator, stream))
        reading.add_done_callback(lambda _: self._worker.close(stream))
        self._reading.add(reading)
        try:
            while (reply := await replies.get()) is not None:
                yield draft_wire.draft_reply_to_message(reply)
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            self._reading.discard(reading)

    async def close(self) -> None:
        """End all streams and open no more; their verifiers decode plainly."""
        self._stopping = True
        for reading in self._reading:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[draft_pb2.SpeculateRequest], stream: DraftStream) -> None:
        async for message in requests:
            self._worker.submit(stream, draft_wire.draft_request_from_message(message))
