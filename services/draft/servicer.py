"""The Draft service: protobuf streams of verifiers in and out, and the choice of the drafter for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eyas.errors import ConfigError, Unavailable, UnknownModel
from eyas.rpc import convert
from eyas.rpc.messages import NO_FEATURES, DrafterInfo, DraftResponse, ModelInfo, TargetInfo
from eyas.services.draft.worker import DraftStream, DraftWorker
from eyas.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Answers every stream as soon as its worker does. Construct it inside the running event loop."""

    def __init__(self, workers: Sequence[DraftWorker]) -> None:
        """workers: one per drafter; no two of them fit the same verifiers."""
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()
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
        replies: asyncio.Queue[DraftResponse | None] = asyncio.Queue()
        opened: list[tuple[DraftWorker, DraftStream]] = []

        def deliver(reply: DraftResponse | None) -> None:
            self._loop.call_soon_threadsafe(replies.put_nowait, reply)

        async def read() -> None:
            async for message in request_iterator:
                request = convert.draft_request_from_proto(message)
                if not opened:
                    worker = choose_worker(self._workers, request.target)
                    opened.append((worker, worker.open(deliver)))
                worker, stream = opened[0]
                worker.submit(stream, request)

        def end(reader: asyncio.Task[None]) -> None:
            for worker, stream in opened:
                worker.close(stream)  # delivers None once the queued requests are done
            if not opened:
                replies.put_nowait(None)

        reader = asyncio.create_task(read())
        reader.add_done_callback(end)
        self._readers.add(reader)
        try:
            while (reply := await replies.get()) is not None:
                yield convert.draft_response_to_proto(reply)
            if not reader.cancelled():
                reader.result()
        finally:
            reader.cancel()
            self._readers.discard(reader)

    async def close(self) -> None:
        """End all streams and accept no more; their verifiers decode plainly."""
        self._stopping = True
        for reader in self._readers:
            reader.cancel()


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
