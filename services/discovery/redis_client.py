"""The client of Redis for a URL: of one server, or of the Sentinels that know which server is the master."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from eyas.config import RegistryConfig, masked
from eyas.errors import ConfigError

SENTINEL_PORT = 26379
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


def redis_client(config: RegistryConfig) -> Redis:
    """Return a client, which connects later. Raises ConfigError for a URL that Redis does not take."""
    try:
        if config.url.partition("://")[0] in _SENTINEL_SCHEMES:
            return _sentinel_client(config)
        client = Redis.from_url(config.url, retry=Retry(NoBackoff(), 1), **_connection(config))
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # parses the whole URL, does not dial
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"registry.url is {masked(config.url)}; expected one such as redis://host:6379/0, or "
            f"redis+sentinel://host:{SENTINEL_PORT},host:{SENTINEL_PORT}/master-name/0 for Sentinels"
        ) from error
    return client


async def close_client(client: Redis) -> None:
    """Close a client, and its connections to Sentinels, which the library leaves open."""
    await client.aclose()
    if isinstance(pool := client.connection_pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _sentinel_client(config: RegistryConfig) -> Redis:
    """Return a client that asks Sentinels for the master at each new connection.

    user:password before the hosts is for Redis; ?sentinel_username= and sentinel_password= are for the Sentinels.
    Raises ValueError.
    """
    scheme, _, rest = config.url.partition("://")
    rest, _, query = rest.partition("?")
    credentials, _, rest = rest.rpartition("@")
    hosts, _, path = rest.partition("/")
    name, _, database = path.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    if not name or not set(options) <= set(_SENTINEL_OPTIONS):
        raise ValueError(path)
    user, _, password = credentials.partition(":")
    secrets: dict[str, Any] = {"username": unquote(user) or None, "password": unquote(password) or None}
    common = {**_connection(config), "ssl": scheme == "rediss+sentinel"}
    of_sentinels = {**common, **{option.removeprefix("sentinel_"): value for option, value in options.items()}}
    sentinels = [_address(host) for host in hosts.split(",")]
    asked = Sentinel(sentinels, sentinel_kwargs=of_sentinels, **common)  # type: ignore[no-untyped-call]
    client: Redis = asked.master_for(name, db=int(database or 0), retry=Retry(NoBackoff(), 1), **secrets)
    return client


def _address(text: str) -> tuple[str, int]:
    """Return host and port of a Sentinel. Raises ValueError."""
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", str(SENTINEL_PORT))
    if not host:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def _connection(config: RegistryConfig) -> dict[str, Any]:
    timeout_s = config.ttl_s / 2
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "decode_responses": True}
