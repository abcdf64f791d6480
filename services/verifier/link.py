"""Keeps one stream to a draft service open: requests in, replies out, reopened by itself when it breaks.

Knows no rounds. A thread of its own reads; whoever sends never blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import grpc

from eyas.commit import Proposal
from eyas.drafters.base import DrafterNeeds
from eyas.errors import ConfigError, EyasError
from eyas.rpc import draft_wire
from eyas.rpc.messages import DrafterInfo, DraftReply, DraftRequest, Verified
from eyas.rpc.peers import Peers
from eyas.rpc.server import status_error
from eyas.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 2.0
_RETRY_SECONDS = 0.1
# A peer that is further behind in taking messages is as good as down.
_MAX_UNSENT = 256


@dataclass(frozen=True, eq=False)
class Stream:
    """One open stream. What is sent on a stream that has broken meanwhile is lost."""

    info: DrafterInfo
    outbox: SimpleQueue[draft_pb2.SpeculateRequest | None] = field(default_factory=SimpleQueue)

    def send(self, request: DraftRequest) -> None:
        """Queue a request. May be called from any thread."""
        self.outbox.put(draft_wire.draft_request_to_message(request))

    @property
    def congested(self) -> bool:
        return self.outbox.qsize() > _MAX_UNSENT


class DraftLink:
    """The stream to one address. `deliver` and `broken` are called from the link's thread.

    verified: what the drafter must fit; None takes whichever is there, if there is only one.
    """

    def __init__(
        self,
        address: str,
        needs: DrafterNeeds,
        proposal: Proposal,
        verified: Verified | None,
        peers: Peers,
        deliver: Callable[[DraftReply], None],
        broken: Callable[[], None],
    ) -> None:
        self.stream: Stream | None = None
        self._address = address
        self._needs = needs
        self._proposal = proposal
        self._verified = verified
        self._deliver = deliver
        self._broken = broken
        self._peers = peers
        self._identity = peers.identity
        self._channel = peers.open_sync_channel(address)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"link {address}", daemon=True).start()

    def close(self) -> None:
        """End the stream for good."""
        self._closed.set()
        self._channel.close()

    # Below: the link's own thread only.

    def _run(self) -> None:
        last_problem = ""
        while not self._closed.is_set():
            try:
                self._renew()
                last_problem = self._attempt(draft_pb2_grpc.DraftStub(self._channel), last_problem)
            except Exception:
                if not self._closed.is_set():  # grpc refuses calls on a channel that was closed with a ValueError
                    log.exception("the link to %s failed; trying again", self._address)
            self._closed.wait(_RETRY_SECONDS)

    def _renew(self) -> None:
        """Dial anew once what the channel was opened with has been replaced."""
        if self._identity is self._peers.identity:
            return
        self._channel.close()
        self._identity, self._channel = self._peers.identity, self._peers.open_sync_channel(self._address)
        if self._closed.is_set():
            self._channel.close()

    def _attempt(self, stub: draft_pb2_grpc.DraftStub, last_problem: str) -> str:
        """Talk until the stream breaks; gives back what was wrong."""
        try:
            info = self._describe(stub)
            last_problem = ""
            self._converse(stub, info)
        except grpc.RpcError as error:
            return self._report(status_error(error), last_problem)
        except ConfigError as error:
            return self._report(error, last_problem)
        return last_problem

    def _report(self, error: EyasError, last_problem: str) -> str:
        """Log a problem unless it is the same as before; gives back what to compare the next one with."""
        problem = type(error).__name__
        if problem != last_problem and not self._closed.is_set():
            log.warning("no drafts from %s for now: %s", self._address, error)
        return problem

    def _describe(self, stub: draft_pb2_grpc.DraftStub) -> DrafterInfo:
        verified = self._verified
        request = draft_pb2.DescribeRequest(verified=draft_wire.verified_to_message(verified) if verified else None)
        info = draft_wire.drafter_info_from_message(stub.Describe(request, timeout=_DESCRIBE_SECONDS, wait_for_ready=True))
        if verified and not verified.is_drafted_by(info.model):
            raise ConfigError(f"drafter {info.drafter} is for {info.model}, which is not {verified}")
        lacking = DrafterNeeds(
            info.needs_features and not self._needs.features, info.needs_samples and not self._needs.samples
        )
        if lacking.features or lacking.samples:
            raise ConfigError(f"drafter {info.drafter} needs what this verifier does not collect: {lacking}")
        if self._proposal == "sampled" and not info.can_sample:
            raise ConfigError(f"drafter {info.drafter} cannot draw trees from its own law, as engine.rule rejection needs")
        return info

    def _converse(self, stub: draft_pb2_grpc.DraftStub, info: DrafterInfo) -> None:
        stream = Stream(info)
        stream.send(DraftRequest(0, verified=self._verified))
        call = stub.Speculate(iter(stream.outbox.get, None))
        log.info("drafts come from %s (%s)", self._address, info.drafter)
        self.stream = stream
        try:
            for message in call:
                self._deliver(draft_wire.draft_reply_from_message(message))
        finally:
            self.stream = None
            stream.outbox.put(None)
            self._broken()
