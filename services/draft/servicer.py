"""The Draft service: protobuf streams of verifiers in and out, and the choice of the drafter for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from eyas.errors import ConfigError, Unavailable, UnknownModel
from eyas.rpc import convert
from eyas.rpc.messages import NO_FEATURES, DrafterInfo, DraftRequest, DraftResponse, ModelInfo, TargetInfo
from eyas.services.draft.worker import DraftStream, DraftWorker
from eyas.v1 import draft_pb2, draft_pb2_grpc

ResultT = TypeVar("ResultT")


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Answers every stream as soon as its worker does. Construct it inside the running event loop."""

    def __init__(self, workers: Sequence[DraftWorker]) -> None:
        """workers: one per drafter; no two of them fit the same verifiers."""
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[Any]] = set()
        self._stopping = False

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeResponse:  # noqa: N802
        """The drafter for this verifier. Raises UnknownModel if there is none."""
        target = convert.target_info_from_proto(request.target) if request.HasField("target") else None
        return convert.drafter_info_to_proto(choose_worker(self._workers, target).info)

    async def Speculate(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """Read and answer until either side ends the stream; then release its sessions.

        The first request names the target that the stream is for. Raises UnknownModel if no drafter fits it, InvalidRequest
        for a request that names a session twice, Unavailable after `close`.
        """
        if self._stopping:
            raise Unavailable("this drafter is stopping")
        first = await self._first_request(request_iterator)
        if first is None:
            return
        worker = choose_worker(self._workers, first.target)
        replies: asyncio.Queue[DraftResponse | None] = asyncio.Queue()

        def deliver(reply: DraftResponse | None) -> None:
            self._loop.call_soon_threadsafe(replies.put_nowait, reply)

        stream = worker.open(deliver)
        reader = self._start_reader(_submit_all(worker, stream, first, request_iterator))
        reader.add_done_callback(lambda _: worker.close(stream))
        try:
            while (reply := await replies.get()) is not None:
                yield convert.draft_response_to_proto(reply)
            if not reader.cancelled():
                reader.result()
        finally:
            self._end_reader(reader)

    async def close(self) -> None:
        """End all streams and accept no more; their verifiers decode plainly."""
        self._stopping = True
        for reader in self._readers:
            reader.cancel()

    async def _first_request(self, requests: AsyncIterator[draft_pb2.SpeculateRequest]) -> DraftRequest | None:
        """The first request; None if the stream or the service ends before it."""
        reader = self._start_reader(_read_one(requests))
        try:
            await asyncio.wait([reader])
            return None if reader.cancelled() else reader.result()
        finally:
            self._end_reader(reader)

    def _start_reader(self, body: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        reader = asyncio.create_task(body)
        self._readers.add(reader)
        return reader

    def _end_reader(self, reader: asyncio.Task[Any]) -> None:
        reader.cancel()
        self._readers.discard(reader)


async def _read_one(requests: AsyncIterator[draft_pb2.SpeculateRequest]) -> DraftRequest | None:
    async for message in requests:
        return convert.draft_request_from_proto(message)
    return None


async def _submit_all(
    worker: DraftWorker, stream: DraftStream, first: DraftRequest, requests: AsyncIterator[draft_pb2.SpeculateRequest]
) -> None:
    worker.submit(stream, first)
    async for message in requests:
        worker.submit(stream, convert.draft_request_from_proto(message))


def choose_worker(workers: Sequence[DraftWorker], target: TargetInfo | None) -> DraftWorker:
    """The drafter that takes the verifier's features, else one that needs none; without `target`, the only one.

    Raises UnknownModel with a list of the drafters here.
    """
    if target is None and len(workers) == 1:
        return workers[0]
    fitting = [worker for worker in workers if target and target.is_drafted_by(worker.info.model)]
    if not fitting:
        available = "; ".join(f"{worker.info.method} for {_describe_model(worker.info.model)}" for worker in workers)
        if target is None:
            raise UnknownModel(f"this service has several drafters, and the verifier names no target; there is {available}")
        raise UnknownModel(
            f"no drafter here for target {target.target_fingerprint[:12]} with features {target.features_fingerprint[:12]}; "
            f"there is {available}"
        )
    return min(fitting, key=lambda worker: worker.info.model.features_fingerprint == NO_FEATURES)


def check_distinct(drafters: Sequence[DrafterInfo]) -> None:
    """Raises ConfigError for two drafters that fit the same verifiers."""
    seen: dict[tuple[str, str], DrafterInfo] = {}
    for info in drafters:
        key = (info.model.fingerprint, info.model.features_fingerprint)
        if key in seen:
            raise ConfigError(
                f"drafters {seen[key].method} and {info.method} are both for {_describe_model(info.model)}, so verifiers "
                "cannot choose between them. Remove one, or run it in a service of its own"
            )
        seen[key] = info


def _describe_model(model: ModelInfo) -> str:
    return f"{model.name} (target {model.fingerprint[:12]}, features {model.features_fingerprint[:12] or 'unknown'})"
