"""Conversion to protobuf and back changes nothing."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import (
    Chunk,
    GenerationStats,
    Request,
    SamplingParams,
    StructuredOutputs,
    TokenLogprob,
    VerifyStep,
    VerifyStepDetails,
)
from eyas.api.validation import MAX_SEED
from eyas.device.transfer import tensor_from_bytes, tensor_to_bytes
from eyas.errors import InvalidRequest
from eyas.protocol.commit import Commit, KnownLogitBias, NoiseKey, ResyncRequired, TensorBytes, TreeBudget
from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from eyas.rpc import convert
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, GenerateCall, ModelInfo, SessionTree, TargetInfo
from eyas.v1 import draft_pb2, generation_pb2, types_pb2
from tests.support.strategies import unchecked

counts = st.integers(0, 2**31 - 1)
ids = st.lists(counts, max_size=5).map(tuple)
names = st.text(max_size=8)
seeds = st.integers(0, MAX_SEED)
floats = st.floats(allow_nan=False)
float32s = st.floats(width=32, allow_nan=False)

float32_lists = st.lists(float32s, max_size=3).map(tuple)
details = st.builds(
    VerifyStepDetails, ids, ids, float32_lists, ids, ids, names, float32s, float32s, float32s, float32s, counts
)
rounds = st.builds(VerifyStep, counts, counts, counts, st.booleans(), st.none() | details)
depths = st.lists(counts, max_size=3)
stats = st.builds(GenerationStats, counts, counts, counts, counts, depths, depths)
texts = st.text(min_size=1, max_size=8)
schemas = st.builds(lambda name: json.dumps({"title": name}), names)
constraints = st.one_of(
    st.just({}), st.just({"json_object": True}), st.builds(dict, choice=st.lists(texts, min_size=1, max_size=3).map(tuple)),
    *(st.builds(dict, **{name: schemas}) for name in ("json", "structural_tag")),
    *(st.builds(dict, **{name: texts}) for name in ("regex", "grammar")),
)  # fmt: skip
structured = st.builds(
    lambda given, spaces: StructuredOutputs(**given, whitespace_pattern=spaces),
    constraints,
    st.sampled_from([None, "", "[ \\n]?"]),
)
samplings = st.builds(
    SamplingParams, st.integers(16, 2**31 - 1), st.floats(0.01, 1e6), counts, st.floats(0.01, 1.0), st.none() | seeds,
    st.lists(texts, max_size=3), ids, st.booleans(), st.integers(1, 128), st.floats(0.0, 1.0), st.integers(0, 16),
    st.dictionaries(counts, st.floats(-100.0, 100.0), max_size=3), st.floats(0.01, 100.0), st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0), st.lists(texts, max_size=3), st.lists(ids.filter(bool), max_size=3),
    st.none() | st.integers(0, 20), st.none() | st.integers(0, 20), st.none() | structured.filter(lambda s: s.constraints),
)  # fmt: skip
logprobs = st.lists(st.builds(TokenLogprob, counts, st.none() | float32s, ids, float32_lists), max_size=3).map(tuple)
request_ids = names.filter(str.isprintable)
requests = st.builds(
    Request, request_ids, ids, samplings, names, counts, num_draft_tokens=counts, return_verify_steps=st.booleans()
)
infos = st.builds(ModelInfo, names, names, counts, counts, names, names)
tensors = st.builds(TensorBytes, names, ids, st.binary(max_size=16))
noises = st.builds(NoiseKey, seeds, floats, counts, floats, floats)
budgets = st.builds(TreeBudget, counts, counts)
biases = st.builds(KnownLogitBias, counts, float32s, counts)
proposals = st.sampled_from(["deterministic", "sampled"])
commits = st.builds(
    Commit,
    names,
    counts,
    counts,
    ids,
    st.none() | tensors,
    noises,
    budgets,
    ids,
    proposals,
    names,
    st.booleans(),
    st.binary(max_size=8),
    st.lists(biases, max_size=3).map(tuple),
    lookups_alone=st.booleans(),
)
scores = st.lists(float32s, max_size=5).map(tuple)
sampled = st.builds(SampledProposal, st.dictionaries(counts, st.builds(DraftProbs, ids, scores), max_size=3), st.booleans())
nodes = st.lists(st.tuples(counts, counts, float32s, counts), min_size=1, max_size=5).map(
    lambda rows: list(zip(*rows, strict=True))
)
trees = st.builds(
    lambda columns, ahead, drawn, has_sources: DraftTree.of(*columns[:3], ahead, drawn, columns[3] if has_sources else ()),
    *(nodes, st.booleans(), st.none() | sampled, st.booleans()),
)
session_trees = st.builds(SessionTree, names, counts, counts, trees)
resyncs = st.builds(ResyncRequired, names, counts, counts)


@st.composite
def text_chunks(draw: st.DrawFn) -> TextChunk:
    reason = draw(st.sampled_from([None, "stop", "length", "cancelled", "error"]))
    totals = draw(st.builds(Totals, counts, counts, st.none() | stats, counts)) if reason else None
    message = draw(names) if reason else ""
    is_draft_token = draw(st.lists(st.booleans(), max_size=5).map(tuple))
    rest = (draw(counts), draw(logprobs), draw(logprobs), draw(counts))
    chunk = Chunk("id", draw(ids), is_draft_token, draw(st.none() | rounds), reason, message, *rest)  # type: ignore[arg-type]
    stop = draw(st.none() | names | counts) if reason else None
    return TextChunk(chunk, draw(names), draw(ids), draw(st.none() | seeds), totals, stop)


@given(requests, names, names)
def test_a_call_with_token_ids_comes_back(request: Request, model: str, drafter: str) -> None:
    call = GenerateCall(request, None, model, drafter)
    assert convert.generate_call_from_proto(convert.generate_call_to_proto(call)) == call


@given(request_ids, names)
def test_a_call_with_text_comes_back(name: str, text: str) -> None:
    call = GenerateCall(Request(name, ()), text)
    assert convert.generate_call_from_proto(convert.generate_call_to_proto(call)) == call


@given(text_chunks())
def test_a_chunk_comes_back(chunk: TextChunk) -> None:
    assert convert.text_chunk_from_proto(convert.text_chunk_to_proto(chunk), "id") == chunk


@given(st.lists(infos, max_size=3).map(tuple))
def test_models_come_back(models: tuple[ModelInfo, ...]) -> None:
    assert convert.models_from_proto(convert.models_to_proto(models)) == models


@given(
    counts,
    st.lists(commits, max_size=3).map(tuple),
    st.lists(names).map(tuple),
    st.none() | st.builds(TargetInfo, names, names),
)
def test_a_draft_request_comes_back(
    step: int, commits: tuple[Commit[TensorBytes], ...], ended_sessions: tuple[str, ...], target: TargetInfo | None
) -> None:
    request = DraftRequest(step, commits, ended_sessions, target)
    data = convert.draft_request_to_proto(request).SerializeToString()
    assert convert.draft_request_from_proto(draft_pb2.SpeculateRequest.FromString(data)) == request


@given(counts, st.lists(session_trees, max_size=3).map(tuple), st.lists(resyncs, max_size=3).map(tuple), float32s)
def test_a_draft_response_comes_back(
    step: int, trees: tuple[SessionTree, ...], resyncs: tuple[ResyncRequired, ...], draft_ms: float
) -> None:
    response = DraftResponse(step, trees, resyncs, draft_ms)
    data = convert.draft_response_to_proto(response).SerializeToString()
    assert convert.draft_response_from_proto(draft_pb2.SpeculateResponse.FromString(data)) == response


@given(st.builds(DrafterInfo, infos, names, st.booleans(), st.booleans(), counts, st.booleans(), st.booleans()))
def test_a_drafter_info_comes_back(drafter: DrafterInfo) -> None:
    assert convert.drafter_info_from_proto(convert.drafter_info_to_proto(drafter)) == drafter


def test_unset_sampling_fields_take_their_defaults() -> None:
    assert convert.sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams()
    message, defaults = types_pb2.SamplingParams(top_k=0, min_p=0, temperature=1), {"top_k": 5, "min_p": 0.1, "top_p": 0.5}
    assert convert.sampling_params_from_proto(message, defaults) == SamplingParams(top_p=0.5)
    unset = convert.sampling_params_from_proto(types_pb2.SamplingParams(), defaults)
    assert unset == SamplingParams(top_k=5, min_p=0.1, top_p=0.5)


def test_sampling_defaults_of_a_model_keep_their_types() -> None:
    info = ModelInfo("m", "f", 10, 20, sampling_defaults=(("temperature", 1.0), ("top_k", 1), ("max_tokens", 64)))
    stored: TypeAdapter[ModelInfo] = TypeAdapter(ModelInfo)
    for other in (
        convert.model_info_from_proto(convert.model_info_to_proto(info)),
        stored.validate_json(stored.dump_json(info)),
    ):
        assert dict(other.sampling_defaults) == dict(info.sampling_defaults)
        SamplingParams(**other.defaults(16))  # type: ignore[arg-type]
    assert (info.defaults(16)["max_tokens"], info.defaults(100)["max_tokens"]) == (16, 64)


def test_a_zero_temperature_is_not_mistaken_for_an_unset_one() -> None:
    assert convert.sampling_params_from_proto(types_pb2.SamplingParams(temperature=0.0)).temperature == 0.0


@pytest.mark.parametrize(
    "call",
    [
        GenerateCall(Request("r", (2**31,))),
        GenerateCall(Request("r", (1,), unchecked(SamplingParams(), seed=-1))),
        GenerateCall(Request("r", (1,), unchecked(SamplingParams(), max_tokens=2**40))),
    ],
)
def test_values_beyond_the_wire_types_are_invalid_requests(call: GenerateCall) -> None:
    with pytest.raises(InvalidRequest, match="'r' holds a value that cannot be sent"):
        convert.generate_call_to_proto(call)


@pytest.mark.parametrize("request_id", ["x" * 129, "a\n2026-01-01 INFO eyas: forged", "a\u202eb", "\x1b[2K"])
def test_a_request_id_that_is_not_for_logs_is_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^request_id .*(at most 128|leave them out)"):
        convert.generate_call_from_proto(generation_pb2.GenerateRequest(request_id=request_id))


def test_an_unknown_finish_reason_is_refused() -> None:
    message = generation_pb2.GenerateChunk(finish=generation_pb2.Finish(reason="tired"))
    with pytest.raises(InvalidRequest, match="'tired'"):
        convert.text_chunk_from_proto(message)


def test_an_unknown_proposal_mode_is_refused() -> None:
    message = draft_pb2.SpeculateRequest(commits=[draft_pb2.Commit(session="a", proposal=9)])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="proposal is 9"):
        convert.draft_request_from_proto(message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (5,)])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = tensor_from_bytes(tensor_to_bytes(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_slice_travels_without_its_neighbours() -> None:
    value = tensor_to_bytes(torch.arange(12.0).reshape(3, 4)[:, 1:3])
    assert len(value.data) == 24
    assert tensor_from_bytes(value).tolist() == [[1, 2], [5, 6], [9, 10]]


@pytest.mark.parametrize(
    "value",
    [
        TensorBytes("float64", (1,), bytes(8)),
        TensorBytes("float32", (2,), bytes(4)),
        TensorBytes("float32", (-1, -1), bytes(4)),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused(value: TensorBytes) -> None:
    with pytest.raises(InvalidRequest):
        tensor_from_bytes(value)


def test_prepared_trees_of_an_older_drafter_are_no_trees() -> None:
    """Field 6 held them as messages of type Tree. These parse as no prepared tree: an empty one counts as a failure."""
    old = draft_pb2.Tree(session="a", epoch=1, committed_length=5, tokens=[7, 8], parents=[0, 0], log_probs=[0.0, -0.5])
    data = old.SerializeToString()
    message = draft_pb2.SpeculateResponse.FromString(bytes((6 << 3 | 2, len(data))) + data)
    assert convert.draft_response_from_proto(message) == DraftResponse(0)
