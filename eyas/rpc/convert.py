# ruff: noqa: D103 (pairs of functions whose names say all)
"""Dataclasses to protobuf messages and back, in pairs. Only this module touches message fields.

A value that a message cannot hold, or that makes no sense on arrival, raises InvalidRequest. Ranges of commits and trees are
not checked here: drafter and verifier check what they receive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import (
    DEFAULTED,
    Chunk,
    FinishReason,
    GenerationStats,
    ReasoningBudget,
    Request,
    SamplingParams,
    StructuredOutputs,
    TokenLogprob,
    VerifyStep,
    VerifyStepDetails,
)
from eyas.api.validation import MAX_CHOICES, MAX_INT, check_request_id
from eyas.errors import InvalidRequest, InvalidTree
from eyas.protocol.commit import (
    Commit,
    KnownLogitBias,
    NoiseKey,
    Refusal,
    RefusalReason,
    ResyncRequired,
    TensorBytes,
    TreeBudget,
)
from eyas.protocol.tree import DraftProbs, DraftTree, PreparedTree, SampledProposal
from eyas.rpc.messages import (
    DraftClientStatus,
    DrafterInfo,
    DraftRequest,
    DraftResponse,
    GenerateCall,
    Lease,
    Load,
    ModelInfo,
    Role,
    SessionTree,
    TargetInfo,
)
from eyas.v1 import draft_pb2, generation_pb2, types_pb2, worker_pb2


def _values(message: Message) -> dict[str, Any]:
    """Return the fields of a message by name, repeated ones as tuples; unset optional ones are left out."""
    present = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    values = {field.name: getattr(message, field.name) for field in present}
    return values | {field.name: tuple(values[field.name]) for field in present if field.is_repeated}


# types.proto


def sampling_params_to_proto(sampling: SamplingParams, left_out: Collection[str] = ()) -> types_pb2.SamplingParams:
    """Return the message, without the parameters in `left_out`, which the receiver chooses."""
    values = vars(sampling) | {
        "logit_bias": [types_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        "bad_token_ids": [types_pb2.TokenIds(ids=ids) for ids in sampling.bad_token_ids],
        "structured_outputs": sampling.structured_outputs and structured_outputs_to_proto(sampling.structured_outputs),
        "reasoning_budget": sampling.reasoning_budget and types_pb2.ReasoningBudget(**vars(sampling.reasoning_budget)),
    }
    return types_pb2.SamplingParams(**{name: value for name, value in values.items() if name not in left_out})


def sampling_params_from_proto(
    message: types_pb2.SamplingParams, defaults: Mapping[str, float] = MappingProxyType({})
) -> SamplingParams:
    """Read sampling parameters. Unset fields take `defaults`, or else the defaults of SamplingParams."""
    values = {**defaults, **_values(message)} | {
        "logit_bias": tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        "bad_token_ids": tuple(tuple(word.ids) for word in message.bad_token_ids),
    }
    if message.HasField("structured_outputs"):
        values["structured_outputs"] = structured_outputs_from_proto(message.structured_outputs)
    if message.HasField("reasoning_budget"):
        values["reasoning_budget"] = ReasoningBudget(**_values(message.reasoning_budget))
    return SamplingParams(**values)


def structured_outputs_to_proto(structured: StructuredOutputs) -> types_pb2.StructuredOutputs:
    """Raises InvalidRequest for several constraints; a message holds one."""
    values = {name: getattr(structured, name) for name in structured.constraints}
    if len(values) > 1:
        raise InvalidRequest(f"structured_outputs has {' and '.join(values)}; give one of them", "structured_outputs")
    if "choice" in values:
        values["choice"] = types_pb2.Texts(texts=structured.choice)
    return types_pb2.StructuredOutputs(**values, whitespace_pattern=structured.whitespace_pattern)


def structured_outputs_from_proto(message: types_pb2.StructuredOutputs) -> StructuredOutputs:
    """Read structured outputs. A message without a constraint gives a value without one, which `check_sampling` refuses."""
    values = _values(message)
    if "choice" in values:  # the count is checked with all else, a longer list is not converted
        values["choice"] = tuple(message.choice.texts[: MAX_CHOICES + 1])
    return StructuredOutputs(**values)


def model_info_to_proto(info: ModelInfo) -> types_pb2.ModelInfo:
    defaults = types_pb2.SamplingParams(**dict(info.sampling_defaults))  # type: ignore[arg-type]
    return types_pb2.ModelInfo(**vars(info) | {"sampling_defaults": defaults})


def model_info_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    present = _values(message.sampling_defaults)
    defaults = tuple((name, present[name]) for name in DEFAULTED if name in present)
    return ModelInfo(**_values(message) | {"sampling_defaults": defaults})


# generation.proto

# Fields of a Request that its message has under the same names.
_REQUEST_FIELDS = ("num_emitted", "priority", "tenant", "cache_salt", "num_draft_tokens", "return_verify_steps")


def generate_call_to_proto(call: GenerateCall) -> generation_pb2.GenerateRequest:
    request = call.request
    try:
        message = generation_pb2.GenerateRequest(
            request_id=request.id,
            session_id=request.session,
            model=call.model,
            sampling=sampling_params_to_proto(request.sampling, DEFAULTED if call.uses_model_defaults else ()),
            drafter=call.drafter,
            target_fingerprint=call.target_fingerprint,
            feed_id=call.feed_id,
            feed_call=call.feed_call,
            **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        )
        if call.prompt_text is None:
            message.tokens.CopyFrom(types_pb2.TokenIds(ids=request.prompt_ids))
        else:
            message.text = call.prompt_text
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"request {request.id!r} holds a value that cannot be sent: {error}") from error
    return message


def generate_call_from_proto(
    message: generation_pb2.GenerateRequest, defaults: Mapping[str, float] = MappingProxyType({})
) -> GenerateCall:
    """Read a call. A message without a prompt gives an empty tuple of prompt ids. defaults: of unset sampling parameters.

    Raises InvalidRequest for a request id that is not for logs.
    """
    check_request_id(message.request_id)
    return GenerateCall(
        request=Request(
            id=message.request_id,
            prompt_ids=tuple(message.tokens.ids),
            sampling=sampling_params_from_proto(message.sampling, defaults),
            session=message.session_id,
            **{name: getattr(message, name) for name in _REQUEST_FIELDS},
        ),
        prompt_text=message.text if message.WhichOneof("prompt") == "text" else None,
        model=message.model,
        drafter=message.drafter,
        target_fingerprint=message.target_fingerprint,
        feed_id=message.feed_id,
        feed_call=message.feed_call,
    )


def text_chunk_to_proto(chunk: TextChunk) -> generation_pb2.GenerateChunk:
    inner = chunk.chunk
    finish = None
    if inner.finish_reason is not None:
        totals = chunk.totals or Totals(0, 0)
        stats = totals.stats and generation_pb2.Stats(**vars(totals.stats), acceptance_length=totals.stats.acceptance_length)
        values = vars(totals) | {"stats": stats}
        if chunk.stop_reason is not None:
            values["stop_string" if isinstance(chunk.stop_reason, str) else "stop_token_id"] = chunk.stop_reason
        finish = generation_pb2.Finish(reason=inner.finish_reason, message=inner.message, **values)
    return generation_pb2.GenerateChunk(
        token_ids=inner.token_ids,
        is_draft_token=inner.is_draft_token,
        text=chunk.text,
        text_lengths=chunk.text_lengths,
        verify_step=verify_step_to_proto(inner.verify_step) if inner.verify_step else None,
        finish=finish,
        seed=chunk.seed,
        index=inner.index,
        logprobs=[generation_pb2.TokenLogprob(**vars(logprob)) for logprob in inner.logprobs],
        prompt_logprobs=[generation_pb2.TokenLogprob(**vars(logprob)) for logprob in inner.prompt_logprobs],
        num_cached_tokens=inner.num_cached,
    )


def text_chunk_from_proto(message: generation_pb2.GenerateChunk, request_id: str = "") -> TextChunk:
    """Read a chunk as a client receives it. request_id, InvalidRequest: as `chunk_from_proto`."""
    finish = message.finish if message.HasField("finish") else None
    seed = message.seed if message.HasField("seed") else None
    totals = totals_from_proto(finish) if finish else None
    stop = finish.WhichOneof("stop_reason") if finish else None
    stop_reason = getattr(finish, stop) if stop else None
    chunk = chunk_from_proto(message, request_id)
    return TextChunk(chunk, message.text, tuple(message.text_lengths), seed, totals, stop_reason)


def chunk_from_proto(message: generation_pb2.GenerateChunk, request_id: str = "") -> Chunk:
    """Read a chunk without its text. request_id: of the call that the chunk answers; chunks do not carry it.

    InvalidRequest: an unknown finish reason.
    """
    finish = message.finish if message.HasField("finish") else None
    if finish and finish.reason not in get_args(FinishReason):
        reasons = ", ".join(get_args(FinishReason))
        raise InvalidRequest(f"finish reason is {finish.reason!r}; it must be one of {reasons}")
    return Chunk(
        request_id=request_id,
        token_ids=tuple(message.token_ids),
        is_draft_token=tuple(message.is_draft_token),
        verify_step=verify_step_from_proto(message.verify_step) if message.HasField("verify_step") else None,
        finish_reason=cast("FinishReason", finish.reason) if finish else None,
        message=finish.message if finish else "",
        index=message.index,
        logprobs=tuple(map(token_logprob_from_proto, message.logprobs)),
        prompt_logprobs=tuple(map(token_logprob_from_proto, message.prompt_logprobs)),
        num_cached=message.num_cached_tokens,
    )


def verify_step_to_proto(step: VerifyStep) -> generation_pb2.VerifyStep:
    details = generation_pb2.VerifyStepDetails(**vars(step.details)) if step.details else None
    return generation_pb2.VerifyStep(**vars(step) | {"details": details})


def verify_step_from_proto(message: generation_pb2.VerifyStep) -> VerifyStep:
    details = VerifyStepDetails(**_values(message.details)) if message.HasField("details") else None
    return VerifyStep(message.drafted, message.depth, message.accepted, message.grown_ahead, details)


def totals_from_proto(finish: generation_pb2.Finish) -> Totals:
    stats = None
    if finish.HasField("stats"):
        values = _values(finish.stats)
        del values["acceptance_length"]  # for other clients; here it follows from the counts
        lists = {name: list(values[name]) for name in ("offered_by_depth", "accepted_by_depth")}
        stats = GenerationStats(**(values | lists))
    return Totals(finish.num_prompt_tokens, finish.num_output_tokens, stats, finish.num_cached_tokens)


def token_logprob_from_proto(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    logprob = message.logprob if message.HasField("logprob") else None
    return TokenLogprob(message.token, logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def models_to_proto(models: tuple[ModelInfo, ...]) -> generation_pb2.ListModelsResponse:
    return generation_pb2.ListModelsResponse(models=map(model_info_to_proto, models))


def models_from_proto(message: generation_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(map(model_info_from_proto, message.models))


# draft.proto


def draft_request_to_proto(request: DraftRequest) -> draft_pb2.SpeculateRequest:
    return draft_pb2.SpeculateRequest(
        step=request.step,
        commits=map(commit_to_proto, request.commits),
        ended_sessions=request.ended_sessions,
        target=target_info_to_proto(request.target) if request.target else None,
        timeout_ms=min(math.ceil(request.timeout_s * 1000), MAX_INT),
    )


def draft_request_from_proto(message: draft_pb2.SpeculateRequest) -> DraftRequest:
    target = target_info_from_proto(message.target) if message.HasField("target") else None
    commits = tuple(map(commit_from_proto, message.commits))
    return DraftRequest(message.step, commits, tuple(message.ended_sessions), target, message.timeout_ms / 1000)


def target_info_to_proto(target: TargetInfo) -> draft_pb2.TargetInfo:
    return draft_pb2.TargetInfo(**vars(target))


def target_info_from_proto(message: draft_pb2.TargetInfo) -> TargetInfo:
    return TargetInfo(**_values(message))


def commit_to_proto(commit: Commit[TensorBytes]) -> draft_pb2.Commit:
    return draft_pb2.Commit(
        session=commit.session,
        epoch=commit.epoch,
        start_position=commit.start_position,
        tokens=commit.tokens,
        features=types_pb2.Tensor(**vars(commit.features)) if commit.features is not None else None,
        noise=types_pb2.NoiseKey(**vars(commit.noise)),
        max_nodes=commit.budget.max_nodes,
        max_depth=commit.budget.max_depth,
        proposal=draft_pb2.PROPOSAL_SAMPLED if commit.proposal == "sampled" else draft_pb2.PROPOSAL_DETERMINISTIC,
        samples=commit.samples,
        traceparent=commit.traceparent,
        wants_sources=commit.wants_sources,
        allowed_tokens=commit.allowed,
        tenant_key=commit.tenant_key,
        has_tree=commit.has_tree,
        lookups_alone=commit.lookups_alone,
        logit_biases=[draft_pb2.KnownLogitBias(**vars(bias)) for bias in commit.logit_biases],
    )


def commit_from_proto(message: draft_pb2.Commit) -> Commit[TensorBytes]:
    """Raises InvalidRequest for an unknown proposal."""
    if message.proposal not in (draft_pb2.PROPOSAL_DETERMINISTIC, draft_pb2.PROPOSAL_SAMPLED):
        raise InvalidRequest(
            f"proposal is {message.proposal}; it must be PROPOSAL_DETERMINISTIC (0) or PROPOSAL_SAMPLED (1)"
        )
    features, noise = message.features, message.noise
    return Commit(
        session=message.session,
        epoch=message.epoch,
        start_position=message.start_position,
        tokens=tuple(message.tokens),
        features=TensorBytes(features.dtype, tuple(features.shape), features.data) if message.HasField("features") else None,
        noise=NoiseKey(noise.seed, noise.temperature, noise.top_k, noise.top_p, noise.min_p),
        budget=TreeBudget(message.max_nodes, message.max_depth),
        samples=tuple(message.samples),
        proposal="sampled" if message.proposal == draft_pb2.PROPOSAL_SAMPLED else "deterministic",
        traceparent=message.traceparent,
        wants_sources=message.wants_sources,
        allowed=message.allowed_tokens,
        tenant_key=message.tenant_key,
        has_tree=message.has_tree,
        lookups_alone=message.lookups_alone,
        logit_biases=tuple(KnownLogitBias(**_values(bias)) for bias in message.logit_biases),
    )


def draft_response_to_proto(response: DraftResponse) -> draft_pb2.SpeculateResponse:
    return draft_pb2.SpeculateResponse(
        step=response.step,
        trees=map(session_tree_to_proto, response.trees),
        resyncs=[draft_pb2.ResyncRequired(**vars(resync)) for resync in response.resyncs],
        draft_ms=response.draft_ms,
        refusals=map(refusal_to_proto, response.refusals),
        prepared=map(prepared_to_proto, response.prepared),
    )


def draft_response_from_proto(message: draft_pb2.SpeculateResponse) -> DraftResponse:
    resyncs = tuple(ResyncRequired(**_values(resync)) for resync in message.resyncs)
    refusals = tuple(map(refusal_from_proto, message.refusals))
    trees, prepared = tuple(map(session_tree_from_proto, message.trees)), tuple(map(prepared_from_proto, message.prepared))
    return DraftResponse(message.step, trees, resyncs, message.draft_ms, refusals, prepared)


def prepared_to_proto(value: PreparedTree) -> draft_pb2.PreparedTree:
    nodes = value.tree.alone
    return draft_pb2.PreparedTree(
        session=value.session,
        epoch=value.epoch,
        committed_length=value.committed_length,
        tokens=nodes.tokens.astype("<i4").tobytes(),
        parents=nodes.parents.astype("<i4").tobytes(),
        log_probs=nodes.log_probs.astype("<f4").tobytes(),
    )


def prepared_from_proto(message: draft_pb2.PreparedTree) -> PreparedTree:
    tokens, parents = _numbers(message.tokens, "<i4"), _numbers(message.parents, "<i4")
    tree = _tree_of(tokens, parents, _numbers(message.log_probs, "<f4"), True)
    return PreparedTree(message.session, message.epoch, message.committed_length, tree)


def _tree_of(*fields: Any) -> DraftTree:
    """Return the tree of `DraftTree.of`. Lists of different lengths give one that fails its checks, as other faults do."""
    try:
        return DraftTree.of(*fields)
    except InvalidTree:
        return DraftTree.root_only(-1)


def _numbers(data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the array that was sent, of elements of 4 bytes. A rest does not make an element."""
    return np.frombuffer(data, dtype, len(data) // 4)


def refusal_to_proto(refusal: Refusal) -> draft_pb2.Refusal:
    reason = draft_pb2.RefusalReason.Value(f"REFUSAL_REASON_{refusal.reason.upper()}")
    return draft_pb2.Refusal(session=refusal.session, epoch=refusal.epoch, reason=reason)


def refusal_from_proto(message: draft_pb2.Refusal) -> Refusal:
    """Read a refusal. A reason that is not known here counts as "overloaded"."""
    known = {draft_pb2.RefusalReason.Value(f"REFUSAL_REASON_{reason.upper()}"): reason for reason in get_args(RefusalReason)}
    return Refusal(message.session, message.epoch, known.get(message.reason, "overloaded"))


def session_tree_to_proto(value: SessionTree) -> draft_pb2.Tree:
    nodes, proposal = value.tree.alone, value.tree.sampled
    sampled = None
    if proposal is not None:
        draft_probs = [
            draft_pb2.DraftProbs(parent=node, token_ids=draft.ids, probs=draft.probs)
            for node, draft in proposal.draft_probs.items()
        ]
        sampled = draft_pb2.SampledProposal(draft_probs=draft_probs, replacement=proposal.replacement)
    return draft_pb2.Tree(
        session=value.session,
        epoch=value.epoch,
        committed_length=value.committed_length,
        tokens=nodes.tokens.tolist(),
        parents=nodes.parents.tolist(),
        log_probs=nodes.log_probs.tolist(),
        grown_ahead=bool(nodes.grown_ahead[0]),
        sampled=sampled,
        sources=None if nodes.sources is None else nodes.sources.tolist(),
    )


def session_tree_from_proto(message: draft_pb2.Tree) -> SessionTree:
    sampled = None
    if message.HasField("sampled"):
        probs = {
            entry.parent: DraftProbs(tuple(entry.token_ids), tuple(entry.probs)) for entry in message.sampled.draft_probs
        }
        sampled = SampledProposal(probs, message.sampled.replacement)
    nodes = message.tokens, message.parents, message.log_probs
    tree = _tree_of(*nodes, message.grown_ahead, sampled, message.sources)
    return SessionTree(message.session, message.epoch, message.committed_length, tree)


def drafter_info_to_proto(info: DrafterInfo) -> draft_pb2.DescribeResponse:
    return draft_pb2.DescribeResponse(**(vars(info) | {"model": model_info_to_proto(info.model)}))


def drafter_info_from_proto(message: draft_pb2.DescribeResponse) -> DrafterInfo:
    return DrafterInfo(**_values(message) | {"model": model_info_from_proto(message.model)})


# worker.proto


def lease_to_proto(lease: Lease, *others: Lease) -> worker_pb2.WorkerStatus:
    """Convert a lease without its address, which the caller knows. others: leases of the same process."""
    return worker_pb2.WorkerStatus(
        role=lease.role,
        incarnation=lease.incarnation,
        model=model_info_to_proto(lease.model),
        load=worker_pb2.Load(**vars(lease.load)),
        zone=lease.zone,
        prefix_hashes=lease.prefix_hashes,
        additional_workers=map(lease_to_proto, others),
        draft_clients=[worker_pb2.DraftClientStatus(**vars(client)) for client in lease.draft_clients],
    )


def leases_from_proto(message: worker_pb2.WorkerStatus, address: str) -> tuple[Lease, ...]:
    """Return the leases of all workers of the process at `address`. Raises InvalidRequest for an unknown role."""
    return tuple(_lease_from_proto(part, address) for part in (message, *message.additional_workers))


def _lease_from_proto(message: worker_pb2.WorkerStatus, address: str) -> Lease:
    if message.role not in get_args(Role):
        raise InvalidRequest(f"role is {message.role!r}; it must be one of {', '.join(get_args(Role))}")
    return Lease(
        role=cast("Role", message.role),
        address=address,
        incarnation=message.incarnation,
        model=model_info_from_proto(message.model),
        load=Load(**_values(message.load)),
        zone=message.zone,
        prefix_hashes=frozenset(message.prefix_hashes),
        draft_clients=tuple(DraftClientStatus(**_values(client)) for client in message.draft_clients),
    )
