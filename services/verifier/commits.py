"""Commits for a drafter: what the engine gives, cut into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eyas.device.transfer import tensor_to_bytes, to_host
from eyas.drafters.base import DraftContext
from eyas.protocol.commit import NO_TREE, Commit, TensorBytes


def split_commits(contexts: Sequence[DraftContext], max_tokens: int) -> list[list[Commit[TensorBytes]]]:
    """Return messages to send in order. Each holds at most `max_tokens` new tokens, and a session at most once.

    A longer commit is cut; only its last piece keeps the budget, the samples and the trace.
    """
    messages: list[list[Commit[TensorBytes]]] = []
    free: list[int] = []  # tokens that each message still takes
    for context in _features_to_host(contexts):
        earliest = 0
        for piece in _cut(context, max_tokens):
            size = len(piece.tokens)
            index = next((i for i in range(earliest, len(free)) if free[i] >= size), len(free))
            if index == len(free):
                messages.append([])
                free.append(max_tokens)
            messages[index].append(piece)
            free[index] -= size
            earliest = index + 1
    return messages


def _features_to_host(contexts: Sequence[DraftContext]) -> list[DraftContext]:
    """Return the contexts with their features on the host, all in one copy from the device to pinned memory."""
    features = [context.features for context in contexts if context.features is not None]
    if all(part.device.type == "cpu" for part in features):
        return list(contexts)
    parts = iter(torch.split(to_host(torch.cat(features)), [len(part) for part in features]))
    return [context if context.features is None else context._replace(features=next(parts)) for context in contexts]


def _cut(context: DraftContext, max_tokens: int) -> Iterator[Commit[TensorBytes]]:
    """Yield the pieces of at most `max_tokens` tokens. The piece of tokens [s, e) carries the features of [max(s - 1, 0), e
    - 1).
    """
    origin = max(context.start_position - 1, 0)
    for first in range(0, len(context.tokens), max_tokens):
        tokens = context.tokens[first : first + max_tokens]
        start, is_last = context.start_position + first, first + max_tokens >= len(context.tokens)
        features = None
        if context.features is not None:
            rows = context.features[max(start - 1, 0) - origin : start + len(tokens) - 1 - origin]
            features = tensor_to_bytes(rows)
        yield Commit(
            session=context.session,
            epoch=context.epoch,
            start_position=start,
            tokens=tokens,
            features=features,
            noise=context.noise,
            budget=context.budget if is_last else NO_TREE,
            samples=context.samples if is_last else (),
            proposal=context.proposal,
            traceparent=context.traceparent if is_last else "",
            wants_sources=context.wants_sources and is_last,
            allowed=context.allowed if is_last else b"",
            logit_biases=context.logit_biases if is_last else (),
            tenant_key=context.tenant_key,
            has_tree=context.has_tree and is_last,
            lookups_alone=context.lookups_alone,
        )
