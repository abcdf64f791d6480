"""Malformed calls of every gRPC method: what is sent, and which status comes back."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from eyas.rpc.channel import MAX_MESSAGE_BYTES
from eyas.v1 import draft_pb2, generation_pb2, types_pb2, worker_pb2
from tests.fuzz.messages import change
from tests.fuzz.servers import SECRET, Services

Metadata = tuple[tuple[str, str], ...]

FILES = (generation_pb2, draft_pb2, worker_pb2, health_pb2, reflection_pb2)
TIMEOUT_S = 120.0
PING_STEP, MAX_STREAM_MESSAGES = 2**60, 40
CANCEL_RATIO = 0.03
OPTIONS = (("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
# What a service may answer to a malformed message. UNAVAILABLE: a verifier that has another target than the message names.
REFUSALS = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED",
    "FAILED_PRECONDITION", "OUT_OF_RANGE", "cancelled by the client", "ended while written to",
}  # fmt: skip
OTHER_TARGET = "another target"
METADATA_RATIO = 0.04
AUTHORIZED: Metadata = (("authorization", f"Bearer {SECRET}"),)
NAMES = ("authorization", "traceparent", "tracestate", "grpc-accept-encoding", "x-request-id", "user-agent", "a" * 300)
VALUES = (
    "",
    " ",
    "Bearer",
    f"bearer  {SECRET} ",
    f"Bearer {SECRET}x",
    "Basic Og==",
    "00-" + "f" * 70,
    "00-0-0-0",
    "~" * 2000,
    "zip,,",
)
# grpc.aio's own status for a write into a stream that the server has ended; the server's status is lost then.
LOST_STATUS = "Internal error from Core"


@dataclass(frozen=True)
class Method:
    """A gRPC method of one service. role: of the service. examples: valid messages, encoded."""

    role: str
    path: str
    request: Descriptor
    is_stream: bool
    never_ends: bool
    examples: tuple[bytes, ...]

    @property
    def label(self) -> str:
        """Its name in a report."""
        return f"{self.role} {self.path.rpartition('.')[2]}"


@dataclass(frozen=True)
class Answer:
    """What came back for one malformed message. status: of gRPC or HTTP. details: the error's text."""

    status: str
    details: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether a service that keeps its promises may answer so."""
        return self.status in REFUSALS or (self.status == "UNAVAILABLE" and OTHER_TARGET in self.details)


async def implemented_methods(services: Services, channels: Mapping[str, grpc.aio.Channel]) -> list[Method]:
    """Every method of every gRPC service that a process has."""
    found, examples = [], await _examples(services, channels)
    for role in services.all:
        for service in (service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()):
            for name, method in service.methods_by_name.items():
                path = f"/{service.full_name}/{name}"
                given = examples.get((role, path), (b"",))
                never_ends = name == "Watch"
                found.append(Method(role, path, method.input_type, method.client_streaming, never_ends, given))
    probes = [call(channels[method.role], method, method.examples[0]) for method in found]
    answers = await asyncio.gather(*probes)
    return [method for method, answer in zip(found, answers, strict=True) if answer.status != "UNIMPLEMENTED"]


async def malformed_call(channel: grpc.aio.Channel, method: Method, rng: random.Random) -> list[Answer]:
    """Send a malformed message, or several in one stream; the answer to each."""
    if method.is_stream and method.request is draft_pb2.SpeculateRequest.DESCRIPTOR:
        messages = [change(rng.choice(method.examples), method.request, rng) for _ in range(MAX_STREAM_MESSAGES)]
        return await drafting_stream(channel, method, messages)
    message = change(rng.choice(method.examples), method.request, rng)
    metadata = AUTHORIZED if rng.random() > METADATA_RATIO else malformed_metadata(rng)
    return [await call(channel, method, message, rng.random() < CANCEL_RATIO, metadata)]


def malformed_metadata(rng: random.Random) -> Metadata:
    """Metadata that may lack the token, or hold what the services read in another form."""
    pairs = [(rng.choice(NAMES), rng.choice(VALUES)) for _ in range(rng.choice((0, 1, 2, 30)))]
    return (*(AUTHORIZED if rng.random() < 0.5 else ()), *pairs)


async def call(
    channel: grpc.aio.Channel, method: Method, message: bytes, cancels: bool = False, metadata: Metadata = AUTHORIZED
) -> Answer:
    """Send one message and return the status. cancels: give up as soon as it is sent. metadata: with it."""
    # on the wire a stream of one message is the same as a single one
    started: Any = channel.unary_stream(method.path)(message, timeout=TIMEOUT_S, metadata=metadata)  # type: ignore[call-arg]
    try:
        if cancels:
            await asyncio.sleep(0)
            started.cancel()
        async for _ in started:
            if method.never_ends:
                started.cancel()
        return Answer("OK")
    except grpc.aio.AioRpcError as error:
        return Answer(error.code().name, error.details() or "")
    except asyncio.CancelledError:
        if not started.cancelled() or not (cancels or method.never_ends):
            raise
        return Answer("OK" if method.never_ends else "cancelled by the client")


async def drafting_stream(channel: grpc.aio.Channel, method: Method, messages: Sequence[bytes]) -> list[Answer]:
    """Send messages in one stream until it ends. After each, a request that must be answered shows that it was handled."""
    answers: list[Answer] = []
    stream: Any = channel.stream_stream(method.path)(timeout=TIMEOUT_S, metadata=AUTHORIZED)  # type: ignore[call-arg]
    try:
        for number, message in enumerate(messages):
            ping = draft_pb2.SpeculateRequest(step=PING_STEP + number, commits=[draft_pb2.Commit(session="ping")])
            await stream.write(message)
            await stream.write(ping.SerializeToString())
            while (reply := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if draft_pb2.SpeculateResponse.FromString(reply).step == PING_STEP + number:
                    break
            else:
                raise asyncio.InvalidStateError
            answers.append(Answer("OK"))
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        code = await stream.code()
        details = await stream.details() or ""
        ended = "ended without an error" if code is grpc.StatusCode.OK else code.name
        answers.append(Answer("ended while written to" if details == LOST_STATUS else ended, details))
    return answers


async def _examples(
    services: Services, channels: Mapping[str, grpc.aio.Channel]
) -> dict[tuple[str, str], tuple[bytes, ...]]:
    """Valid messages by role and path; what is left out is empty."""
    status: Any = channels["verifier"].unary_unary(  # type: ignore[call-arg]
        "/eyas.v1.Worker/Status", response_deserializer=worker_pb2.WorkerStatus.FromString
    )
    model = (await status(b"", timeout=TIMEOUT_S, metadata=AUTHORIZED)).model
    target = draft_pb2.TargetInfo(target_fingerprint=model.fingerprint, features_fingerprint=model.features_fingerprint)
    describe: Any = channels["draft"].unary_unary(  # type: ignore[call-arg]
        "/eyas.v1.Draft/Describe", response_deserializer=draft_pb2.DescribeResponse.FromString
    )
    width = (await describe(b"", timeout=TIMEOUT_S, metadata=AUTHORIZED)).feature_size
    generate, speculate = "/eyas.v1.Generation/Generate", "/eyas.v1.Draft/Speculate"
    asked = draft_pb2.DescribeRequest(target=target)
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    found: dict[tuple[str, str], Sequence[Message]] = {
        ("router", generate): [generate_request(text="def f(x):"), generate_request(tokens=[5, 6, 7], n=2)],
        ("verifier", generate): [
            generate_request(tokens=[5, 6, 7]),
            generate_request(tokens=list(range(9, 30)), rich=False),
        ],
        ("draft", speculate): speculate_requests(target, width),
        ("draft", "/eyas.v1.Draft/Describe"): [asked],
    }
    for role in services.all:
        for name in ("Check", "Watch"):
            service = "eyas.v1.Worker"
            found[role, f"/grpc.health.v1.Health/{name}"] = [health_pb2.HealthCheckRequest(service=service)]
        found[role, reflection] = [
            reflection_pb2.ServerReflectionRequest(host="x", list_services="*"),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="eyas.v1.Worker"),
            reflection_pb2.ServerReflectionRequest(
                file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="a.B", extension_number=7)
            ),
        ]
    return {key: tuple(message.SerializeToString() for message in messages) for key, messages in found.items()}


TAG = types_pb2.StructuredOutputs(
    structural_tag='{"type": "structural_tag", "format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, '
    '"end": "b"}}'
)


def generate_request(
    text: str = "", tokens: Sequence[int] = (), n: int = 1, rich: bool = True, drafter: str = ""
) -> generation_pb2.GenerateRequest:
    """A valid request. rich: with every parameter set."""
    sampling = types_pb2.SamplingParams(max_tokens=2, temperature=0.8, seed=7)
    if rich:
        sampling.MergeFrom(
            types_pb2.SamplingParams(
                top_k=20, top_p=0.9, stop_token_ids=[9], ignore_eos=True, n=n, min_p=0.01, min_tokens=1, logprobs=2,
                logit_bias=[types_pb2.LogitBias(token_id=5, bias=1.5)], repetition_penalty=1.1, presence_penalty=0.1,
                frequency_penalty=0.1, bad_token_ids=[types_pb2.TokenIds(ids=[3, 4])], prompt_logprobs=1,
                structured_outputs=types_pb2.StructuredOutputs(regex="[a-z]{1,9}") if text else TAG,
            )
        )  # fmt: skip
        if text:
            sampling.MergeFrom(types_pb2.SamplingParams(stop=["\n\n"], bad_words=["import"]))
    message = generation_pb2.GenerateRequest(request_id="fuzz", session_id="s", sampling=sampling, drafter=drafter)
    if text:
        message.text = text
    else:
        message.tokens.ids.extend(tokens)
    return message


def speculate_requests(target: draft_pb2.TargetInfo, width: int) -> list[Message]:
    """The first request of a stream with two sessions, and one that goes on and ends a session."""

    def commit(session: str, start: int, count: int, **more: Any) -> draft_pb2.Commit:
        rows = start + count - 1 - max(start - 1, 0)
        features = types_pb2.Tensor(dtype="float32", shape=[rows, width], data=bytes(4 * rows * width))
        noise = types_pb2.NoiseKey(seed=7, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01)
        tokens = range(5, 5 + count)
        return draft_pb2.Commit(
            session=session, epoch=1, start_position=start, tokens=tokens, features=features, noise=noise,
            max_nodes=8, max_depth=3, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", **more
        )  # fmt: skip

    first = draft_pb2.SpeculateRequest(step=1, commits=[commit("a", 0, 5), commit("b", 0, 2)], target=target)
    second = draft_pb2.SpeculateRequest(
        step=2, commits=[commit("a", 5, 1, samples=[6, 7])], ended_sessions=["b"], target=target
    )
    return [first, second]
