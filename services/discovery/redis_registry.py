"""Leases and placements in Redis: workers publish leases, routers read them and remember where sessions ran.

With a shared token every lease is signed, so that a writer of Redis without the token cannot publish a worker.

No running generation needs it: while Redis is away, heartbeats go on trying and readers keep the last known list.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from eyas.config import DiscoveryConfig, RegistryConfig, masked
from eyas.errors import ConfigError
from eyas.rpc.channel import Peers
from eyas.rpc.identity import SharedToken
from eyas.rpc.messages import Lease, Role
from eyas.services.discovery.base import cancel_task, repeat

ResultT = TypeVar("ResultT")

PLACEMENT_TTL_S = 3600
# What the client raises for a reply that is no text, or not of the type that the command returns.
_DAMAGED_REPLY = (ValueError, TypeError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """The incarnations of the workers of a session's last request; drafter is empty if it ran without one."""

    verifier: str
    drafter: str = ""


@dataclass(frozen=True)
class _Claim:
    """Claim that a worker signs. expires_at: Unix time by the clock of Redis, so that clocks of workers may differ."""

    lease: Lease
    expires_at: int


@dataclass(frozen=True)
class _Member:
    """A known worker. missing_since: by time.monotonic(), since when a readable Redis has lacked its lease."""

    claim: _Claim
    missing_since: float | None = None


@dataclass(frozen=True)
class _SignedClaim:
    """A claim as JSON, with the signature of that text; empty without a token."""

    claim: str
    signature: str = ""


class Registry:
    """One process's view of the registry; use it from one event loop and close it there.

    token: signs published leases; leases that are not signed with it are ignored. None accepts all.
    Raises ConfigError for a URL that Redis does not take; it connects later.
    """

    def __init__(self, config: RegistryConfig, token: SharedToken | None = None) -> None:
        self._config = config
        self._token = token
        self._redis = _connect(config)
        self._heartbeat: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._published: tuple[Lease, ...] = ()
        self._roles: tuple[Role, ...] = ()
        self._known: dict[Role, tuple[Lease, ...]] = {}
        self._members: dict[Role, tuple[_Member, ...]] = {}
        # The last values and their claims: unchanged ones are not checked again, damaged ones do not count.
        self._claims: dict[tuple[Role, str], tuple[str, _Claim]] = {}
        self._reachable = True
        self._settled_at = self._refilled_at = 0.0
        self._contents: str | bytes | None = None

    async def publish(self, *leases: Callable[[], Lease]) -> None:
        """Write the leases of one process now and at every heartbeat until `withdraw`.

        Args:
            leases: Each is called at every heartbeat for the present state.

        Leases of other processes at the same address are removed: only one process can listen there.
        """

        async def beat() -> None:
            await self._attempt(lambda: self.write([lease() for lease in leases]))

        await self._attempt(lambda: self._replace(leases[0]()))
        await beat()
        interval = self._config.heartbeat_interval_s
        self._heartbeat = asyncio.create_task(repeat(interval, beat, interval), name="heartbeat")

    async def withdraw(self) -> None:
        """Stop the heartbeat and remove the leases at once."""
        await cancel_task(self._heartbeat)
        leases, self._published = self._published, ()
        if leases:
            await self._attempt(lambda: self._erase(leases))

    async def leases(self, role: Role) -> list[Lease]:
        """Return the live leases of a role, ordered by address. A lease that does not parse is replaced by the last known
        one.

        Raises RedisError while Redis is away.
        """
        claims, _ = await self._read_claims(role)
        return [claim.lease for claim in claims]

    async def _read_claims(self, role: Role) -> tuple[list[_Claim], int]:
        """Return the claims of `leases`, and the time of Redis."""
        incarnations = sorted(map(str, await self._redis.smembers(self._index_key(role))))
        async with self._redis.pipeline() as pipe:
            pipe.time()
            pipe.mget([self._lease_key(role, name) for name in (*incarnations, "")])  # at least one key
            (seconds, _), (*values, _) = await pipe.execute()
        gone = [name for name, value in zip(incarnations, values, strict=True) if value is None]
        if gone:
            await self._redis.srem(self._index_key(role), *gone)
        pairs = [(name, str(value)) for name, value in zip(incarnations, values, strict=True) if value is not None]
        read = {(role, name): self._read(role, name, value) for name, value in pairs}
        live = {key: last for key, last in read.items() if last and last[1].expires_at >= seconds}
        self._claims = {key: last for key, last in self._claims.items() if key[0] != role} | live
        return sorted((claim for _, claim in live.values()), key=lambda claim: claim.lease.address), seconds

    async def watch(self, *roles: Role) -> None:
        """Read the leases of `roles` now and keep them fresh in the background; `known` gives them.

        May be called again for further roles; without any it only notices when Redis goes and comes back.
        """
        self._roles = tuple(dict.fromkeys((*self._roles, *roles)))
        await self.refresh()
        interval = self._config.heartbeat_interval_s
        if self._watcher is None:
            self._watcher = asyncio.create_task(repeat(interval, self.refresh, interval), name="registry")

    def known(self, role: Role) -> tuple[Lease, ...]:
        """Return the last known leases of a watched role."""
        return self._known.get(role, ())

    def has_synced(self, role: Role) -> bool:
        """Return whether the leases of a watched role have been read."""
        return role in self._known

    @property
    def outage(self) -> str:
        """Return that Redis is away, if it is."""
        return "" if self._reachable else "Redis is away"

    async def place(self, session: str, placement: Placement) -> None:
        """Remember where a session runs for an hour; does nothing while Redis is away."""
        value = _PLACEMENTS.dump_json(placement)
        if self._reachable:
            await self._attempt(lambda: self._redis.set(self._placement_key(session), value, ex=PLACEMENT_TTL_S))

    async def placement(self, session: str) -> Placement | None:
        """Return where the session ran last; None if that is unknown or Redis is away."""
        value = await self._attempt(lambda: self._redis.get(self._placement_key(session))) if self._reachable else None
        try:
            return _PLACEMENTS.validate_json(value) if value else None
        except ValidationError as error:
            log.warning(
                "ignored the placement of session %s, which does not parse: %s", session, error, extra={"rate_limited": True}
            )
            return None

    async def close(self) -> None:
        """Stop all background work and the connection; published leases expire."""
        await cancel_task(self._heartbeat)
        await cancel_task(self._watcher)
        await self._redis.aclose()

    async def refresh(self) -> None:
        if not self._roles:
            await self._attempt(self._redis.ping)
        fresh = {role: await self._attempt(partial(self._read_claims, role)) for role in self._roles}
        contents = await self._attempt(partial(self._redis.get, self._contents_key))
        if self._contents and contents != self._contents:
            self._refilled_at = time.monotonic() + self._config.ttl_s
        self._contents = contents
        for role, answer in fresh.items():
            if answer is not None:
                claims, seconds = answer
                members = (*(_Member(claim) for claim in claims), *self._unsettled(role, claims, seconds))
                self._members[role], self._known[role] = members, tuple(member.claim.lease for member in members)

    def _unsettled(self, role: Role, fresh: list[_Claim], seconds: int) -> list[_Member]:
        """Return the known workers that a Redis which has just come back or was emptied lacks; kept for one TTL each.

        By then every live worker has written its lease again. Only an outage lets one outlive the expiry that it signed, by
        the clock of Redis: a client of Redis can say again and again that it was emptied.
        """
        now = time.monotonic()
        listed, processes = {c.lease.incarnation for c in fresh}, {c.lease.address: c.lease.process for c in fresh}
        kept = []
        for member in self._members.get(role, ()):
            lease, since = member.claim.lease, member.missing_since or now
            is_valid = now < self._settled_at or (now < self._refilled_at and member.claim.expires_at >= seconds)
            is_missing = lease.incarnation not in listed and processes.get(lease.address, lease.process) == lease.process
            if is_missing and is_valid and now < since + self._config.ttl_s:
                kept.append(replace(member, missing_since=since))
        return kept

    async def write(self, leases: Iterable[Lease]) -> None:
        self._published = tuple(leases)
        seconds, _ = await self._redis.time()
        async with self._redis.pipeline() as pipe:
            for lease in self._published:
                key = self._lease_key(lease.role, lease.incarnation)
                pipe.set(key, self._signed(lease, seconds), px=int(self._config.ttl_s * 1000))
                pipe.sadd(self._index_key(lease.role), lease.incarnation)
            pipe.set(self._contents_key, uuid.uuid4().hex, nx=True)
            await pipe.execute()

    def _signed(self, lease: Lease, seconds: int) -> bytes:
        """Return the value of a lease. seconds: time of Redis."""
        claim = _CLAIMS.dump_json(_Claim(lease, seconds + math.ceil(self._config.ttl_s) + 1))
        signature = self._token.sign(claim) if self._token else ""
        return _SIGNED_CLAIMS.dump_json(_SignedClaim(claim.decode(), signature))

    def _read(self, role: Role, incarnation: str, value: str) -> tuple[str, _Claim] | None:
        """Return a value and its claim; the last ones, with a warning, if no worker has written this value there."""
        last = self._claims.get((role, incarnation))
        if last and last[0] == value:
            return last
        reason, claim = "", None
        try:
            signed = _SIGNED_CLAIMS.validate_json(value)
            claim = _CLAIMS.validate_json(signed.claim)
        except ValidationError as error:
            reason = f"it does not parse: {error}"
        if claim and self._token and not self._token.has_signed(signed.claim.encode(), signed.signature):
            reason = "it is not signed with the shared token; its worker needs the same peers.token_file or token_env"
        elif claim and (claim.lease.role, claim.lease.incarnation) != (role, incarnation):
            reason = f"it is the lease of {claim.lease.role} {claim.lease.incarnation}"
        if reason:
            log.warning("ignored the lease of %s %s: %s", role, incarnation, reason, extra={"rate_limited": True})
        return (value, claim) if claim and not reason else last

    async def _replace(self, lease: Lease) -> None:
        known = [other for role in get_args(Role) for other in await self.leases(role)]
        gone = [other for other in known if other.address == lease.address and other.process != lease.process]
        if gone:
            await self._erase(gone)

    async def _erase(self, leases: Iterable[Lease]) -> None:
        async with self._redis.pipeline() as pipe:
            for lease in leases:
                pipe.delete(self._lease_key(lease.role, lease.incarnation))
                pipe.srem(self._index_key(lease.role), lease.incarnation)
            await pipe.execute()

    @property
    def _contents_key(self) -> str:
        """The key whose value names the contents of Redis: it changes when Redis was emptied, however short the outage."""
        return f"{self._config.prefix}:contents"

    def _lease_key(self, role: Role, incarnation: str) -> str:
        return f"{self._config.prefix}:lease:{role}:{incarnation}"

    def _index_key(self, role: Role) -> str:
        return f"{self._config.prefix}:leases:{role}"

    def _placement_key(self, session: str) -> str:
        return f"{self._config.prefix}:placement:{session}"

    async def _attempt(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT | None:
        """Return the result of `call`, or None while Redis is away or its replies are damaged; logs each outage once."""
        try:
            result = await call()
        except (RedisError, *_DAMAGED_REPLY) as error:
            if self._reachable:
                log.warning("registry %s is away, keeping the last known workers: %s", masked(self._config.url), error)
            self._reachable = False
            self._settled_at = time.monotonic() + self._config.ttl_s
            self._members = {role: tuple(_Member(one.claim) for one in members) for role, members in self._members.items()}
            return None
        if not self._reachable:
            log.info("registry %s is back", masked(self._config.url))
        self._reachable = True
        return result


def _connect(config: RegistryConfig) -> Redis:
    """Return a client, which connects later. Raises ConfigError for a URL that Redis does not take."""
    timeout_s = config.ttl_s / 2
    try:
        client = Redis.from_url(
            config.url,
            retry=Retry(NoBackoff(), 1),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            decode_responses=True,
        )
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # parses the whole URL, does not dial
    except (ValueError, TypeError) as error:
        raise ConfigError(f"registry.url is {masked(config.url)}; expected one such as redis://host:6379/0") from error
    return client


_CLAIMS = TypeAdapter(_Claim)
_SIGNED_CLAIMS = TypeAdapter(_SignedClaim)
_PLACEMENTS = TypeAdapter(Placement)


def lease_registry(discovery: DiscoveryConfig, registry: RegistryConfig, peers: Peers) -> Registry | None:
    """Return where a worker publishes its lease; None if it is found without one. Raises ConfigError for a bad URL."""
    return Registry(registry, peers.token) if discovery.kind == "redis" else None


def session_registry(discovery: DiscoveryConfig, registry: RegistryConfig, peers: Peers) -> Registry | None:
    """Return where routers share placements; None if each keeps its own. Raises ConfigError for a bad URL."""
    return Registry(registry, peers.token) if registry.url or discovery.kind == "redis" else None
