"""How the work of router and verifier grows with the values of a request: ids, biases, digests, trace headers."""

from collections.abc import Callable

import pytest

from eyas.api.request import Request, SamplingParams, StructuredOutputs
from eyas.api.validation import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_SCHEMA_LENGTH, check_request
from eyas.config import RoutingConfig
from eyas.protocol.prefix_hash import block_hashes
from eyas.rpc.convert import generate_call_from_proto, generate_call_to_proto
from eyas.rpc.messages import GenerateCall, Lease, Load, ModelInfo
from eyas.services.router.dispatch.poison import request_digest
from eyas.services.router.dispatch.routing import RoutingRequest, WorkerSnapshot, pick
from eyas.telemetry.logging import escaped
from eyas.telemetry.tracing import context_of, trace_pairs
from eyas.v1.generation_pb2 import GenerateRequest
from tests.growth.growth import Reader, check_growth, label, pairs

MAX_VALUES, MAX_HEADER_BYTES, VOCAB_SIZE = 2**18, 2**15, 2**17


def ids(n: int) -> tuple[int, ...]:
    return tuple(range(n)) if n < VOCAB_SIZE else (*range(VOCAB_SIZE), *range(n - VOCAB_SIZE))


def prompt(n: int) -> GenerateCall:
    return GenerateCall(Request("r", ids(max(n, 1)), SamplingParams(1)))


def bad_ids(n: int) -> GenerateCall:
    words = tuple((1,) * MAX_BAD_WORD_TOKENS for _ in range(n // MAX_BAD_WORD_TOKENS))
    return GenerateCall(Request("r", (1,), SamplingParams(1, bad_token_ids=words)))


def schema(n: int) -> GenerateCall:
    constraint = StructuredOutputs(json='{"const": "%s"}' % ("a" * (n - 20)))
    return GenerateCall(Request("r", (1,), SamplingParams(1, structured_outputs=constraint)))


def stale_id(n: int) -> GenerateCall:
    return GenerateCall(Request("r", (*ids(n), VOCAB_SIZE), SamplingParams(1)))


def to_message(call: Callable[[int], GenerateCall]) -> Callable[[int], GenerateRequest]:
    return lambda n: generate_call_to_proto(call(n))


def biased(n: int) -> GenerateRequest:
    message = generate_call_to_proto(prompt(1))
    for token in range(n):
        message.sampling.logit_bias.add(token_id=token, bias=1.0)
    return message


def route(hashes: tuple[int, ...]) -> object:
    """Pick among verifiers that have the whole prompt, and none of it."""
    model, load = ModelInfo("m", "f", VOCAB_SIZE, 2 * MAX_VALUES), Load(0, 0, MAX_VALUES, 32)
    cached = frozenset(hashes)
    verifiers = [Lease("verifier", f"v{i}:1", f"v{i}", model, load, "", cached if i % 2 else frozenset()) for i in range(8)]
    request = RoutingRequest("m", MAX_VALUES, block_hashes=hashes)
    return pick(WorkerSnapshot(verifiers, [], {}), request, RoutingConfig())


PROMPTS = {"long prompt": prompt}
MAX_BAD_IDS = MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS

READERS = (
    Reader("block_hash.block_hashes", block_hashes, {"long prompt": ids}, MAX_VALUES, on_loop=True),
    Reader("routing.pick", route, {"long prompt": lambda n: block_hashes(ids(n))}, MAX_VALUES, on_loop=True),
    Reader("poison.request_digest", request_digest, PROMPTS, MAX_VALUES, on_loop=True),
    Reader("poison.request_digest", request_digest, {"bad ids": bad_ids}, MAX_BAD_IDS, on_loop=True),
    Reader("poison.request_digest", request_digest, {"schema": schema}, MAX_SCHEMA_LENGTH, on_loop=True),
    Reader("convert.generate_call_to_proto", generate_call_to_proto, PROMPTS, MAX_VALUES, on_loop=True),
    Reader("convert.generate_call_to_proto", generate_call_to_proto, {"bad ids": bad_ids}, MAX_BAD_IDS, on_loop=True),
    Reader(
        "convert.generate_call_from_proto",
        generate_call_from_proto,
        {"prompt": to_message(prompt)},
        MAX_VALUES,
        on_loop=True,
    ),
    Reader(
        "convert.generate_call_from_proto",
        generate_call_from_proto,
        {"bad ids": to_message(bad_ids)},
        MAX_BAD_IDS,
        on_loop=True,
    ),
    Reader("convert.generate_call_from_proto", generate_call_from_proto, {"biases": biased}, 1024, on_loop=True),
    Reader(
        "validation.check_request",
        lambda call: check_request(call.request, VOCAB_SIZE, 2 * MAX_VALUES),
        {"long prompt": prompt, "one wrong id": stale_id, "bad ids": lambda n: bad_ids(min(n, MAX_BAD_IDS))},
        MAX_VALUES,
        on_loop=True,
    ),
    Reader(
        "tracing.trace_pairs",
        lambda headers: context_of(trace_pairs(headers)),
        {
            "many headers": lambda n: [("traceparent", "0")] * (n // 13),
            "long tracestate": lambda n: [
                ("traceparent", f"00-{'1' * 32}-{'1' * 16}-01"),
                ("tracestate", "a=b," * (n // 4)),
            ],
            "open tracestate": lambda n: [("traceparent", f"00-{'1' * 32}-{'1' * 16}-01"), ("tracestate", "a@" * (n // 2))],
            "longest tracestate": lambda n: [
                ("traceparent", f"00-{'1' * 32}-{'1' * 16}-01"),
                ("tracestate", "\t" * 511 + "a"),
            ],
        },
        MAX_HEADER_BYTES,
        on_loop=True,
    ),
    Reader(
        "logging.escaped",
        escaped,
        {"control characters": lambda n: "\n" * n, "bidirectional": lambda n: "\u202e" * (n // 3)},
        MAX_HEADER_BYTES,
        on_loop=True,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_a_reader_of_messages_grows_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)


def test_a_trace_context_is_passed_on_once() -> None:
    headers = [("traceparent", "a"), ("TraceParent", "b"), ("tracestate", "c"), ("tracestate", "d"), ("other", "e")]
    assert trace_pairs(headers) == (("traceparent", "a"), ("tracestate", "c"))
