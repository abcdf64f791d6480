"""The completions of one request side by side: a stream of chunks for each in, one stream for the client out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import copy_context

from eyas.request import Chunk
from eyas.rpc.messages import TextChunk
from services.router.answer import Answer


async def completion(answer: Answer, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[TextChunk, None]:
    """What the client sees of one completion. Ends its chunks early at a stop string: the verifier would go on."""
    async with aclosing(chunks):
        async for chunk in chunks:
            shown = answer.add(chunk)
            yield shown
            if shown.chunk.finish_reason != chunk.finish_reason:
                return


async def merged(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[TextChunk, None]:
    """The chunks of all streams as they come. Leaving early, or an error of one stream, ends all.

    Each stream keeps one context for its life: what it logs is about its own request to the end.
    """
    contexts = [copy_context() for _ in streams]
    waiting = {
        asyncio.create_task(_next(stream), context=context): (stream, context)
        for stream, context in zip(streams, contexts, strict=True)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream, context = waiting.pop(task)
                chunk = task.result()
                if chunk is not None:
                    yield chunk
                    waiting[asyncio.create_task(_next(stream), context=context)] = stream, context
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[TextChunk, None]) -> TextChunk | None:
    return await anext(stream, None)
