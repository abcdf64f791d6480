# ruff: noqa: D103 (pairs of functions whose names say all)
"""Dataclasses to protobuf messages and back, with eyas.rpc.draft_wire the only code that touches message fields.

Pure functions in pairs. What cannot be said on the wire, or makes no sense when it arrives, raises InvalidRequest.

Drafting dataclasses to protobuf messages and back: the other half of eyas.rpc.wire, for the Draft service.

Pure functions in pairs. Ranges are for the receiver to check: a drafter trusts no commit, a verifier no tree.

Leases to messages of the Worker service and back. The only code that touches their fields.
"""

from __future__ import annotations

from typing import cast, get_args

from eyas.draft_protocol import Commit, ResyncRequired, TensorBytes, TreeBudget
from eyas.errors import InvalidRequest
from eyas.request import (
    Chunk,
    FinishReason,
    GenerationStats,
    NoiseKey,
    Request,
    SamplingParams,
    TokenLogprob,
    VerifyStep,
)
from eyas.rpc.messages import (
    DrafterInfo,
    DraftReply,
    DraftRequest,
    GenerateCall,
    Lease,
    Load,
    ModelInfo,
    Role,
    SessionTree,
    TargetInfo,
    TextChunk,
    Totals,
)
from eyas.tree import DraftLaw, DraftTree, Sampled
from eyas.v1 import draft_pb2, generation_pb2, types_pb2, worker_pb2


def sampling_to_message(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        logit_bias=[types_pb2.TokenBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bad_words=sampling.bad_words,
        bad_token_ids=[types_pb2.TokenIds(ids=ids) for ids in sampling.bad_token_ids],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_message(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams."""
    default = SamplingParams()
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default.max_tokens,
        temperature=message.temperature if message.HasField("temperature") else default.temperature,
        top_p=message.top_p if message.HasField("top_p") else default.top_p,
        seed=message.seed if message.HasField("seed") else None,
        n=message.n if message.HasField("n") else default.n,
        repetition_penalty=message.repetition_penalty
        if message.HasField("repetition_penalty")
        else default.repetition_penalty,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        top_k=message.top_k,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_p=message.min_p,
        min_tokens=message.min_tokens,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        bad_words=tuple(message.bad_words),
        bad_token_ids=tuple(tuple(word.ids) for word in message.bad_token_ids),
    )


def logprob_to_message(value: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token=value.token, logprob=value.logprob, top_ids=value.top_ids, top_logprobs=value.top_logprobs
    )


def logprob_from_message(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    logprob = message.logprob if message.HasField("logprob") else None
    return TokenLogprob(message.token, logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def call_to_message(call: GenerateCall) -> generation_pb2.GenerateRequest:
    request = call.request
    try:
        message = generation_pb2.GenerateRequest(
            request_id=request.id,
            session_id=request.session,
            model=call.model,
            sampling=sampling_to_message(request.sampling),
            drafter=call.drafter,
            num_emitted=request.num_emitted,
            priority=request.priority,
            fingerprint=call.fingerprint,
        )
        if call.prompt_text is None:
            message.tokens.CopyFrom(types_pb2.TokenIds(ids=request.prompt_ids))
        else:
            message.text = call.prompt_text
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"request {request.id!r} holds a value that cannot be sent: {error}") from error
    return message


def call_from_message(message: generation_pb2.GenerateRequest) -> GenerateCall:
    """A message without a prompt gives an empty tuple of prompt ids."""
    sampling = sampling_from_message(message.sampling)
    return GenerateCall(
        request=Request(
            message.request_id,
            tuple(message.tokens.ids),
            sampling,
            message.session_id,
            message.priority,
            message.num_emitted,
        ),
        prompt_text=message.text if message.WhichOneof("prompt") == "text" else None,
        model=message.model,
        drafter=message.drafter,
        fingerprint=message.fingerprint,
    )


def chunk_to_message(chunk: TextChunk) -> generation_pb2.GenerateChunk:
    inner = chunk.chunk
    finish = None
    if inner.finish_reason is not None:
        totals = chunk.totals or Totals(0, 0)
        finish = generation_pb2.Finish(
            reason=inner.finish_reason,
            message=inner.message,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_output_tokens=totals.num_output_tokens,
            stats=stats_to_message(totals.stats) if totals.stats else None,
            num_cached_tokens=totals.num_cached_tokens,
        )
    return generation_pb2.GenerateChunk(
        token_ids=inner.token_ids,
        is_draft_token=inner.is_draft_token,
        text=chunk.text,
        text_lengths=chunk.text_lengths,
        verify_step=round_to_message(inner.verify_step) if inner.verify_step else None,
        finish=finish,
        seed=chunk.seed,
        index=inner.index,
        logprobs=map(logprob_to_message, inner.logprobs),
        prompt_logprobs=map(logprob_to_message, inner.prompt_logprobs),
        num_cached_tokens=inner.num_cached,
    )


def chunk_from_message(message: generation_pb2.GenerateChunk, request_id: str = "") -> TextChunk:
    """request_id: of the call that the chunk answers; chunks do not carry it."""
    finish = message.finish if message.HasField("finish") else None
    inner = Chunk(
        request_id=request_id,
        token_ids=tuple(message.token_ids),
        is_draft_token=tuple(message.is_draft_token),
        verify_step=round_from_message(message.verify_step) if message.HasField("verify_step") else None,
        finish_reason=_finish_reason(finish.reason) if finish else None,
        message=finish.message if finish else "",
        index=message.index,
        logprobs=tuple(map(logprob_from_message, message.logprobs)),
        prompt_logprobs=tuple(map(logprob_from_message, message.prompt_logprobs)),
        num_cached=message.num_cached_tokens,
    )
    totals = None
    if finish:
        stats = stats_from_message(finish.stats) if finish.HasField("stats") else None
        totals = Totals(finish.num_prompt_tokens, finish.num_output_tokens, stats, finish.num_cached_tokens)
    seed = message.seed if message.HasField("seed") else None
    return TextChunk(inner, message.text, tuple(message.text_lengths), seed, totals)


def _finish_reason(text: str) -> FinishReason:
    if text not in get_args(FinishReason):
        raise InvalidRequest(f"finish reason is {text!r}; known are {', '.join(get_args(FinishReason))}")
    return cast("FinishReason", text)


def round_to_message(value: VerifyStep) -> generation_pb2.VerifyStep:
    return generation_pb2.VerifyStep(
        drafted=value.drafted, depth=value.depth, accepted=value.accepted, grown_ahead=value.grown_ahead
    )


def round_from_message(message: generation_pb2.VerifyStep) -> VerifyStep:
    return VerifyStep(message.drafted, message.depth, message.accepted, message.grown_ahead)


def stats_to_message(stats: GenerationStats) -> generation_pb2.Stats:
    return generation_pb2.Stats(
        num_verify_steps=stats.num_verify_steps,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        num_emitted=stats.num_emitted,
        offered_by_depth=stats.offered_by_depth,
        accepted_by_depth=stats.accepted_by_depth,
        acceptance_length=stats.acceptance_length,
    )


def stats_from_message(message: generation_pb2.Stats) -> GenerationStats:
    return GenerationStats(
        num_verify_steps=message.num_verify_steps,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        num_emitted=message.num_emitted,
        offered_by_depth=list(message.offered_by_depth),
        accepted_by_depth=list(message.accepted_by_depth),
    )


def model_info_to_message(info: ModelInfo) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        name=info.name,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        head_fingerprint=info.head_fingerprint,
    )


def model_info_from_message(message: types_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(message.name, message.fingerprint, message.vocab_size, message.max_model_len, message.head_fingerprint)


def models_to_message(models: tuple[ModelInfo, ...]) -> generation_pb2.ListModelsResponse:
    return generation_pb2.ListModelsResponse(models=[model_info_to_message(model) for model in models])


def models_from_message(message: generation_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info_from_message(model) for model in message.models)


def tensor_to_message(tensor: TensorBytes) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=tensor.dtype, shape=tensor.shape, data=tensor.data)


def tensor_from_message(message: types_pb2.Tensor) -> TensorBytes:
    return TensorBytes(message.dtype, tuple(message.shape), message.data)


def noise_to_message(noise: NoiseKey) -> types_pb2.NoiseKey:
    return types_pb2.NoiseKey(**vars(noise))


def noise_from_message(message: types_pb2.NoiseKey) -> NoiseKey:
    return NoiseKey(message.seed, message.temperature, message.top_k, message.top_p, message.min_p)


def commit_to_message(commit: Commit[TensorBytes]) -> draft_pb2.Commit:
    return draft_pb2.Commit(
        session=commit.session,
        epoch=commit.epoch,
        start_position=commit.start_position,
        tokens=commit.tokens,
        features=tensor_to_message(commit.features) if commit.features is not None else None,
        noise=noise_to_message(commit.noise),
        max_nodes=commit.budget.max_nodes,
        max_depth=commit.budget.max_depth,
        proposal=draft_pb2.PROPOSAL_SAMPLED if commit.proposal == "sampled" else draft_pb2.PROPOSAL_DETERMINISTIC,
        samples=commit.samples,
        traceparent=commit.traceparent,
    )


def commit_from_message(message: draft_pb2.Commit) -> Commit[TensorBytes]:
    """Raises InvalidRequest for a way of proposing that this version does not know."""
    if message.proposal not in (draft_pb2.PROPOSAL_DETERMINISTIC, draft_pb2.PROPOSAL_SAMPLED):
        raise InvalidRequest(
            f"proposal is {message.proposal}; known are PROPOSAL_DETERMINISTIC (0) and PROPOSAL_SAMPLED (1)"
        )
    return Commit(
        session=message.session,
        epoch=message.epoch,
        start_position=message.start_position,
        tokens=tuple(message.tokens),
        features=tensor_from_message(message.features) if message.HasField("features") else None,
        noise=noise_from_message(message.noise),
        budget=TreeBudget(message.max_nodes, message.max_depth),
        samples=tuple(message.samples),
        proposal="sampled" if message.proposal == draft_pb2.PROPOSAL_SAMPLED else "deterministic",
        traceparent=message.traceparent,
    )


def sampled_to_message(sampled: Sampled) -> draft_pb2.Sampled:
    laws = [draft_pb2.DraftLaw(parent=node, token_ids=law.ids, probs=law.probs) for node, law in sampled.laws.items()]
    return draft_pb2.Sampled(laws=laws, replacement=sampled.replacement)


def sampled_from_message(message: draft_pb2.Sampled) -> Sampled:
    laws = {law.parent: DraftLaw(tuple(law.token_ids), tuple(law.probs)) for law in message.laws}
    return Sampled(laws, message.replacement)


def tree_to_message(value: SessionTree) -> draft_pb2.Tree:
    return draft_pb2.Tree(
        session=value.session,
        epoch=value.epoch,
        committed_length=value.committed_length,
        tokens=value.tree.tokens,
        parents=value.tree.parents,
        log_probs=value.tree.log_probs,
        grown_ahead=value.tree.grown_ahead,
        sampled=sampled_to_message(value.tree.sampled) if value.tree.sampled is not None else None,
    )


def tree_from_message(message: draft_pb2.Tree) -> SessionTree:
    sampled = sampled_from_message(message.sampled) if message.HasField("sampled") else None
    tree = DraftTree(tuple(message.tokens), tuple(message.parents), tuple(message.log_probs), message.grown_ahead, sampled)
    return SessionTree(message.session, message.epoch, message.committed_length, tree)


def refusal_to_message(refusal: ResyncRequired) -> draft_pb2.ResyncRequired:
    return draft_pb2.ResyncRequired(session=refusal.session, epoch=refusal.epoch, committed_length=refusal.committed_length)


def refusal_from_message(message: draft_pb2.ResyncRequired) -> ResyncRequired:
    return ResyncRequired(message.session, message.epoch, message.committed_length)


def verified_to_message(verified: TargetInfo) -> draft_pb2.TargetInfo:
    return draft_pb2.TargetInfo(**vars(verified))


def verified_from_message(message: draft_pb2.TargetInfo) -> TargetInfo:
    return TargetInfo(message.target_fingerprint, message.features_digest)


def draft_request_to_message(request: DraftRequest) -> draft_pb2.SpeculateRequest:
    commits = [commit_to_message(commit) for commit in request.commits]
    verified = verified_to_message(request.target) if request.target else None
    return draft_pb2.SpeculateRequest(step=request.step, commits=commits, released=request.released, target=verified)


def draft_request_from_message(message: draft_pb2.SpeculateRequest) -> DraftRequest:
    commits = tuple(commit_from_message(commit) for commit in message.commits)
    verified = verified_from_message(message.target) if message.HasField("target") else None
    return DraftRequest(message.step, commits, tuple(message.released), verified)


def draft_reply_to_message(reply: DraftReply) -> draft_pb2.SpeculateReply:
    return draft_pb2.SpeculateReply(
        step=reply.step,
        trees=[tree_to_message(tree) for tree in reply.trees],
        resyncs=[refusal_to_message(refusal) for refusal in reply.resyncs],
        draft_ms=reply.draft_ms,
    )


def draft_reply_from_message(message: draft_pb2.SpeculateReply) -> DraftReply:
    trees = tuple(tree_from_message(tree) for tree in message.trees)
    refusals = tuple(refusal_from_message(refusal) for refusal in message.resyncs)
    return DraftReply(message.step, trees, refusals, message.draft_ms)


def drafter_info_to_message(info: DrafterInfo) -> draft_pb2.DescribeReply:
    return draft_pb2.DescribeReply(
        model=model_info_to_message(info.model),
        method=info.method,
        needs_features=info.needs_features,
        needs_samples=info.needs_samples,
        feature_size=info.feature_size,
        can_sample=info.can_sample,
    )


def drafter_info_from_message(message: draft_pb2.DescribeReply) -> DrafterInfo:
    return DrafterInfo(
        model=model_info_from_message(message.model),
        method=message.method,
        needs_features=message.needs_features,
        needs_samples=message.needs_samples,
        feature_size=message.feature_size,
        can_sample=message.can_sample,
    )


def status_to_message(lease: Lease, *others: Lease) -> worker_pb2.WorkerStatus:
    """All of a lease but its address, which whoever asks knows. others: of the same process."""
    return worker_pb2.WorkerStatus(
        role=lease.role,
        incarnation=lease.incarnation,
        model=model_info_to_message(lease.model),
        load=worker_pb2.Load(
            num_running=lease.load.num_running,
            num_waiting=lease.load.num_waiting,
            free_kv_tokens=lease.load.free_kv_tokens,
            max_num_seqs=lease.load.max_num_seqs,
            step_seconds=lease.load.step_seconds,
        ),
        zone=lease.zone,
        prefix_hashes=lease.prefix_hashes,
        additional_workers=map(status_to_message, others),
    )


def statuses_from_message(message: worker_pb2.WorkerStatus, address: str) -> tuple[Lease, ...]:
    """The leases of all workers of the process that said so. Raises InvalidRequest for a role that there is not."""
    return tuple(status_from_message(part, address) for part in (message, *message.additional_workers))


def status_from_message(message: worker_pb2.WorkerStatus, address: str) -> Lease:
    """The lease of the worker that said so at `address`. Raises InvalidRequest for a role that there is not."""
    if message.role not in get_args(Role):
        raise InvalidRequest(f"role is {message.role!r}; known are {', '.join(get_args(Role))}")
    load = message.load
    return Lease(
        role=cast("Role", message.role),
        address=address,
        incarnation=message.incarnation,
        model=model_info_from_message(message.model),
        load=Load(load.num_running, load.num_waiting, load.free_kv_tokens, load.max_num_seqs, load.step_seconds),
        zone=message.zone,
        prefix_hashes=frozenset(message.prefix_hashes),
    )
