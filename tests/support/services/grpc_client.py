"""A gRPC client for tests."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from eyas.api.outputs import TextChunk
from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.rpc import convert
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import GenerateCall
from eyas.rpc.status import status_error
from eyas.v1 import generation_pb2_grpc


@dataclass
class Generated:
    """All chunks of one request. begun is set at the first chunk."""

    chunks: list[TextChunk] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].chunk.finish_reason

    @property
    def stats(self) -> GenerationStats:
        stats = GenerationStats()
        for chunk in self.chunks:
            stats.add(chunk.chunk)
        return stats


def generate(
    address: str,
    prompt: Sequence[int] | str,
    sampling: SamplingParams,
    drafter: str = "",
    enough: Callable[[Generated], object] = lambda out: False,
    into: Generated | None = None,
    session: str = "",
) -> Generated:
    """Run one request to its end, or cancel it once `enough` of it, asked after every chunk. Raises the EyasError of the
    status."""
    out = into or Generated()
    text = prompt if isinstance(prompt, str) else None
    ids = () if isinstance(prompt, str) else tuple(prompt)
    call = GenerateCall(Request("", ids, sampling, session), prompt_text=text, drafter=drafter)
    with open_sync_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        try:
            for message in (answers := stub.Generate(convert.generate_call_to_proto(call), timeout=250)):
                out.chunks.append(convert.text_chunk_from_proto(message))
                out.begun.set()
                if enough(out):
                    answers.cancel()
                    break
        except grpc.RpcError as error:
            raise status_error(error) from error
    return out


def generate_staggered(
    address: str, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], drafter: str = ""
) -> list[Generated]:
    """Each request starts when the one before has its first chunk, so that they join a running batch one by one."""
    outs = [Generated() for _ in prompts]
    threads = []
    for prompt, params, out in zip(prompts, sampling, outs, strict=True):
        threads.append(threading.Thread(target=generate, args=(address, prompt, params, drafter), kwargs={"into": out}))
        threads[-1].start()
        assert out.begun.wait(250), "no first chunk"
    for thread in threads:
        thread.join()
    return outs
