"""What is known of a verifier's drafters, as metrics. Given the links' states; knows no requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eyas.telemetry import catalog
from eyas.telemetry.metrics import Reading
from services.verifier.timing import CIRCUITS, LinkState

LINKS = (
    catalog.LINK_ROUNDS,
    catalog.LINK_DRAFTED,
    catalog.LINK_ACCEPTED,
    catalog.LINK_SESSIONS,
    catalog.LINK_UP,
    catalog.LINK_CIRCUIT,
)


def link_readings(links: Iterable[LinkState]) -> Iterator[Reading]:
    """The present values of all links."""
    for link in links:
        yield Reading(catalog.LINK_ROUNDS, link.num_answered, (link.address, "answered"))
        yield Reading(catalog.LINK_ROUNDS, link.num_lost, (link.address, "late"))
        yield Reading(catalog.LINK_DRAFTED, link.num_drafted, (link.address,))
        yield Reading(catalog.LINK_ACCEPTED, link.num_accepted, (link.address,))
        yield Reading(catalog.LINK_SESSIONS, link.num_sessions, (link.address,))
        yield Reading(catalog.LINK_UP, link.up, (link.address,))
        for circuit in CIRCUITS:
            yield Reading(catalog.LINK_CIRCUIT, circuit == link.circuit, (link.address, circuit))
