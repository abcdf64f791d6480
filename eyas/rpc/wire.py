"""Dataclasses to protobuf messages and back, with eyas.rpc.draft_wire the only code that touches message fields.

Pure functions in pairs. What cannot be said on the wire, or makes no sense when it arrives, raises InvalidRequest.
"""

# ruff: noqa: D103 - a pair says what it does by its name and types.

from __future__ import annotations

from typing import cast, get_args

from eyas.errors import InvalidRequest
from eyas.request import Chunk, FinishReason, GenerationStats, Request, Round, SamplingParams, TokenLogprob
from eyas.rpc.messages import GenerateCall, ModelInfo, TextChunk, Totals
from eyas.v1 import generation_pb2, types_pb2


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
            emitted=request.emitted,
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
            message.emitted,
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
        foreseen=inner.foreseen,
        text=chunk.text,
        text_lengths=chunk.text_lengths,
        round=round_to_message(inner.round) if inner.round else None,
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
        foreseen=tuple(message.foreseen),
        round=round_from_message(message.round) if message.HasField("round") else None,
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


def round_to_message(value: Round) -> generation_pb2.Round:
    return generation_pb2.Round(
        drafted=value.drafted, depth=value.depth, accepted=value.accepted, grown_ahead=value.grown_ahead
    )


def round_from_message(message: generation_pb2.Round) -> Round:
    return Round(message.drafted, message.depth, message.accepted, message.grown_ahead)


def stats_to_message(stats: GenerationStats) -> generation_pb2.Stats:
    return generation_pb2.Stats(
        num_rounds=stats.num_rounds,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        num_emitted=stats.num_emitted,
        offered_by_depth=stats.offered_by_depth,
        accepted_by_depth=stats.accepted_by_depth,
        acceptance_length=stats.acceptance_length,
    )


def stats_from_message(message: generation_pb2.Stats) -> GenerationStats:
    return GenerationStats(
        num_rounds=message.num_rounds,
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
        context_length=info.context_length,
        head_fingerprint=info.head_fingerprint,
    )


def model_info_from_message(message: types_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(message.name, message.fingerprint, message.vocab_size, message.context_length, message.head_fingerprint)


def models_to_message(models: tuple[ModelInfo, ...]) -> generation_pb2.ListModelsResponse:
    return generation_pb2.ListModelsResponse(models=[model_info_to_message(model) for model in models])


def models_from_message(message: generation_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(model_info_from_message(model) for model in message.models)
