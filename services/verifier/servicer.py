"""The Generation service of a verifier: token ids in, chunks of token ids out."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from typing import Any

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Request
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.engine import EngineLoad
from eyas.errors import InvalidRequest, Unavailable, UnknownDrafter, UnknownModel
from eyas.rpc import convert
from eyas.rpc.messages import NO_DRAFTER, GenerateCall, Lease, Load, ModelInfo
from eyas.services.verifier.chunk_feeds import ChunkFeeds
from eyas.services.verifier.draft_pool import DraftPool
from eyas.services.verifier.telemetry import VerifierTelemetry
from eyas.telemetry.tracing import trace_pairs
from eyas.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Servicer of one model.

    Args:
        pool: assigns requests to the drafter that the router picked; None if no drafts are taken.
        drafters: the drafters that discovery knows now; no other is dialled.
        feeds: take chunks of the calls that name one of them; None leaves all to the calls' own streams.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model: ModelInfo,
        pool: DraftPool | None,
        telemetry: VerifierTelemetry | None = None,
        drafters: Callable[[], Iterable[Lease]] = tuple,
        feeds: ChunkFeeds | None = None,
    ) -> None:
        self._drafters = drafters
        self._feeds = feeds or ChunkFeeds()
        self._telemetry = telemetry or VerifierTelemetry()
        self._engine = engine
        self._model = model
        self._pool = pool
        self._numbers = itertools.count()

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes is cancelled at once
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream the chunks; a call that ends early cancels its request.

        Raises InvalidRequest, UnknownDrafter, UnknownModel, Unavailable or Overloaded before the first chunk.
        """
        call = convert.generate_call_from_proto(request)
        own = self._numbered(call.request)
        if call.drafter == NO_DRAFTER:
            own = replace(own, num_draft_tokens=1)
        trace = trace_pairs(context.invocation_metadata() or ())
        with self._telemetry.request(own, trace), self._assigned(own, call.drafter):
            self._check(call)
            num_output, num_cached, seed, totals = 0, 0, own.sampling.seed, None
            with self._feeds.call(call, context) as write:
                async with aclosing(self._engine.generate(own)) as chunks:
                    async for chunk in chunks:
                        num_output += len(chunk.token_ids)
                        num_cached += chunk.num_cached
                        if chunk.finish_reason:
                            totals = Totals(len(own.prompt_ids), num_output, None, num_cached)
                        await write(TextChunk(chunk, seed=seed, totals=totals))
                        seed = None  # the first chunk has it

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """Return the one model that this verifier serves."""
        return convert.models_to_proto((self._model,))

    def _check(self, call: GenerateCall) -> None:
        if call.model not in ("", self._model.name):
            raise UnknownModel(f"model {call.model!r} is not served here; known: {self._model.name}")
        if call.prompt_text is not None:
            raise InvalidRequest("the prompt is text; a verifier takes token ids, ask the router to encode it")
        if not self._model.continues(call.target_fingerprint):
            raise Unavailable(
                "this verifier has another target than the one that was asked for, or computes in another way (dtype, "
                "kv_cache_dtype, acceptance, deterministic); it may have been replaced"
            )

    def _numbered(self, request: Request) -> Request:
        """Return the request as the engine gets it: with an id that is unique here, whatever the client
        chose, and a seed.
        """
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        return replace(request, id=f"{request.id}#{next(self._numbers)}", sampling=sampling)

    @contextmanager
    def _assigned(self, request: Request, drafter: str) -> Iterator[None]:
        if self._pool is None or drafter == NO_DRAFTER:
            yield
            return
        if drafter and all(lease.address != drafter for lease in self._drafters()):
            raise UnknownDrafter(
                f"drafter {drafter} is not known to the discovery of this verifier; name one that is, or leave it empty"
            )
        self._pool.assign(request.id, drafter)
        try:
            yield
        finally:
            self._pool.unassign(request.id)


def announced_load(load: EngineLoad) -> Load:
    """Return what a verifier's lease says about its engine."""
    return Load(**{item.name: getattr(load, item.name) for item in fields(Load)})
