"""Verify steps as JSON, for requests with `return_verify_steps`: the tokens of a chunk, its draft tree and its times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from eyas.api.outputs import TextChunk
from eyas.api.request import VerifyStepDetails

UNKNOWN_METHOD = "unknown"


def verify_step_object(chunk: TextChunk, number: int, token_name: Callable[[int], str]) -> dict[str, Any]:
    """Return what a chunk reports.

    The tokens' texts together are the chunk's text. A token has an empty text while a character is incomplete.

    Args:
        number: of the chunk in its completion.
        token_name: the text of a single token.
    """
    inner = chunk.chunk
    details = inner.verify_step.details if inner.verify_step else None
    nodes = list(_nodes(details, sum(inner.is_draft_token), token_name)) if details else []
    path = [place for place, node in enumerate(nodes) if node["accepted"] and place]
    tokens = [
        {"id": token, "text": text, "drafter": nodes[path[place]]["drafter"] if place < len(path) else None}
        for place, (token, text) in enumerate(zip(inner.token_ids, _texts(chunk), strict=True))
    ]
    return {"index": number, "tokens": tokens, "nodes": nodes, **_times(details)}


def _texts(chunk: TextChunk) -> list[str]:
    """Return each token's part of the chunk's text; the last one's has what was held back before the end."""
    texts = chunk.token_texts
    if texts:
        texts[-1] += chunk.released_text
    return texts


def _nodes(details: VerifyStepDetails, num_accepted: int, token_name: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a tree, the root first. num_accepted: drafted tokens that are part of the output."""
    accepted = {0, *details.path[:num_accepted]}
    for node, (token, parent, log_prob) in enumerate(zip(details.tokens, details.parents, details.log_probs, strict=True)):
        prob = math.exp(min(log_prob - details.log_probs[parent], 0.0)) if node and math.isfinite(log_prob) else None
        yield {
            "id": token,
            "token": token_name(token),
            "parent": parent if node else None,
            "accepted": node in accepted,
            "prob": None if prob is None else round(prob, 4),
            "drafter": _drafter(details, node) if node else None,
        }


def _drafter(details: VerifyStepDetails, node: int) -> str:
    """Return the method that proposed a node; of a combined method, its part, or both if both did."""
    parts, source = details.method.split("+"), details.sources[node] if details.sources else 0
    return "+".join(part for bit, part in enumerate(parts) if source >> bit & 1) or details.method or UNKNOWN_METHOD


def _times(details: VerifyStepDetails | None) -> dict[str, Any]:
    if details is None:
        return {"method": None, "draft_ms": None, "wire_ms": None, "wait_ms": None, "verify_ms": None, "rows": None}
    wire_ms = max(details.round_trip_ms - details.draft_ms, 0.0)
    return {
        "method": details.method or None,
        "draft_ms": round(details.draft_ms, 3),
        "wire_ms": round(wire_ms, 3),
        "wait_ms": round(details.wait_ms, 3),
        "verify_ms": round(details.verify_ms, 3),
        "rows": details.num_rows,
    }
