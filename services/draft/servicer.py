"""The Draft service: protobuf streams of verifiers in and out, and the choice of the drafter for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from eyas.config import DraftQueueConfig
from eyas.errors import ConfigError, Overloaded, Unavailable, UnknownModel
from eyas.rpc import convert
from eyas.rpc.messages import NO_FEATURES, DrafterInfo, DraftResponse, ModelInfo, TargetInfo
from eyas.services.draft.streams import DraftStream
from eyas.services.draft.worker import DraftWorker
from eyas.v1 import draft_pb2, draft_pb2_grpc

T = TypeVar("T")
R = TypeVar("R")

# Messages with more commits or trees are large.
_MANY = 64
# A stream with more replies that its verifier does not read is ended.
MAX_UNREAD = 1024


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Servicer that answers every stream as soon as its worker does. Construct it inside the running event loop.

    Args:
        workers: one per drafter; no two of them fit the same verifiers.
    """

    def __init__(self, workers: Sequence[DraftWorker]) -> None:
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def Describe(self, request: draft_pb2.DescribeRequest, context: Any) -> draft_pb2.DescribeResponse:  # noqa: N802
        """Return the drafter for this verifier. Raises UnknownModel if there is none."""
        return convert.drafter_info_to_proto(choose_worker(self._workers, _target(request)).info)

    async def Speculate(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """Read and answer until either side ends the stream; then release its sessions.

        The first request names the target that the stream is for. Raises UnknownModel if no drafter fits it, InvalidRequest
        for a request with bad names of sessions, Overloaded for one with too many commits and for a verifier that does not
        read its replies, Unavailable after `close`.
        """
        if self._stopping:
            raise Unavailable("this drafter is stopping")
        replies: asyncio.Queue[DraftResponse | None] = asyncio.Queue()
        opened: list[tuple[DraftWorker, DraftStream]] = []

        def deliver(reply: DraftResponse | None) -> None:
            self._loop.call_soon_threadsafe(replies.put_nowait, reply)

        async def read() -> None:
            async for message in request_iterator:
                if not opened:
                    worker = choose_worker(self._workers, _target(message))
                    opened.append((worker, worker.open(deliver)))
                worker, stream = opened[0]
                _check_load(len(message.commits), replies.qsize(), worker.limits)
                worker.submit(stream, await _converted(convert.draft_request_from_proto, message, len(message.commits)))

        def end(reader: asyncio.Task[None]) -> None:
            for worker, stream in opened:
                worker.close(stream, abandon=reader.cancelled())  # delivers None once the queued requests are done
            if not opened:
                replies.put_nowait(None)

        reader = asyncio.create_task(read())
        reader.add_done_callback(end)
        self._readers.add(reader)
        try:
            while (reply := await replies.get()) is not None:
                yield await _converted(convert.draft_response_to_proto, reply, len(reply.trees))
            if not reader.cancelled():
                reader.result()
        finally:
            reader.cancel()
            self._readers.discard(reader)
            for worker, stream in opened:
                worker.close(stream, abandon=True)

    async def close(self) -> None:
        """End all streams and accept no more; their verifiers decode plainly."""
        self._stopping = True
        for reader in self._readers:
            reader.cancel()


async def _converted(convert_message: Callable[[T], R], message: T, size: int) -> R:
    """Convert a message here, or a large one in a thread, so that other streams go on."""
    return convert_message(message) if size <= _MANY else await asyncio.to_thread(convert_message, message)


def _target(message: draft_pb2.DescribeRequest | draft_pb2.SpeculateRequest) -> TargetInfo | None:
    return convert.target_info_from_proto(message.target) if message.HasField("target") else None


def _check_load(num_commits: int, num_unread: int, limits: DraftQueueConfig) -> None:
    """Raises Overloaded for a request with too many commits, or for too many replies that are not read."""
    if num_commits > limits.max_sessions:
        raise Overloaded(f"a request of {num_commits} commits; send at most {limits.max_sessions} (queue.max_sessions)")
    if num_unread > MAX_UNREAD:
        raise Overloaded(f"{num_unread} replies are not read; read them, or send fewer requests")


def choose_worker(workers: Sequence[DraftWorker], target: TargetInfo | None) -> DraftWorker:
    """Return the drafter that takes the verifier's features, else one that needs none; without `target`, the only one.

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
