"""Spans that hang in the air: what a collector received in, complaints out."""

from collections.abc import Iterator, Sequence

from tests.support.services.collector import Received

PARTS = {"upstream_request", "serve", "queue", "prefill", "decode", "verify_step", "draft"}
SERVICES = {"eyas-router", "eyas-verifier", "eyas-draft"}


def torn(received: Sequence[Received], *callers: str) -> list[str]:
    """The spans whose parent is nowhere, and the attempts that no verifier knows of. callers: ids of spans of clients."""
    spans = list(received)
    known = {one.span.span_id for one in spans} | {bytes.fromhex(caller) for caller in callers}
    return list(_torn(spans, known | {b""}, {one.span.parent_span_id for one in spans}))


def _torn(spans: Sequence[Received], known: set[bytes], parents: set[bytes]) -> Iterator[str]:
    for one in spans:
        if one.span.parent_span_id not in known:
            yield f"{one.service}: {one.name} of {one.span.trace_id.hex()} has no parent"
        if one.name == "upstream_request" and "error.type" not in one.attributes and one.span.span_id not in parents:
            yield f"{one.service}: {one.name} of {one.span.trace_id.hex()} is known to no verifier"
