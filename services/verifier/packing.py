"""Cuts a round of commits into messages of bounded size: contexts in, lists of wire commits out. Knows no gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from eyas.commit import Budget, Commit, TensorBytes
from eyas.drafters.base import DraftContext
from eyas.models.tensors import tensor_to_bytes

_BOOKKEEPING = Budget(max_nodes=1, max_depth=0)


def pack(contexts: Sequence[DraftContext], max_tokens: int) -> list[list[Commit[TensorBytes]]]:
    """Messages to send in order. Each holds at most `max_tokens` new tokens, and a session at most once.

    A longer commit is cut; only its last piece keeps the budget, the samples and the trace.
    """
    messages: list[list[Commit[TensorBytes]]] = []
    room: list[int] = []
    for context in _on_host(contexts):
        earliest = 0
        for piece in _pieces(context, max_tokens):
            size = len(piece.tokens)
            index = next((i for i in range(earliest, len(room)) if room[i] >= size), len(room))
            if index == len(room):
                messages.append([])
                room.append(max_tokens)
            messages[index].append(piece)
            room[index] -= size
            earliest = index + 1
    return messages


def _on_host(contexts: Sequence[DraftContext]) -> list[DraftContext]:
    """The same with their features on the host, all in one copy."""
    features = [context.features for context in contexts if context.features is not None]
    if not features:
        return list(contexts)
    parts = iter(torch.split(torch.cat(features).cpu(), [len(part) for part in features]))
    return [context if context.features is None else replace(context, features=next(parts)) for context in contexts]


def _pieces(context: DraftContext, max_tokens: int) -> Iterator[Commit[TensorBytes]]:
    """A cut at token i leaves the features before it to the left: those of the positions up to the left root's."""
    origin = max(context.base - 1, 0)
    for start in range(0, len(context.tokens), max_tokens):
        tokens = context.tokens[start : start + max_tokens]
        base, last = context.base + start, start + max_tokens >= len(context.tokens)
        features = None
        if context.features is not None:
            rows = context.features[max(base - 1, 0) - origin : base + len(tokens) - 1 - origin]
            features = tensor_to_bytes(rows)
        yield Commit(
            session=context.session,
            epoch=context.epoch,
            base=base,
            tokens=tokens,
            features=features,
            noise=context.noise,
            budget=context.budget if last else _BOOKKEEPING,
            samples=context.samples if last else (),
            proposal=context.proposal,
            traceparent=context.traceparent if last else "",
        )
