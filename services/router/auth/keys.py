"""API keys of both listeners: who calls, and what the key may do.

A file of keys holds hashes only. A key is random, so that one SHA-256 of it cannot be turned back; passwords are no keys.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.api.outputs import TextChunk
from eyas.api.validation import check_cache_salt
from eyas.config import ApiKeysConfig
from eyas.config.checks import at_least, require
from eyas.config.loader import validated
from eyas.errors import ConfigError, PermissionDenied, Unauthenticated
from eyas.rpc.admission import KEY_HEADERS, address_of, given_key
from eyas.rpc.identity import Reloaded
from eyas.rpc.messages import GenerateCall
from eyas.services.router.auth.quota import KeyLimits, Quota

KeyScope = Literal["generate", "models", "cluster"]

# Paths that need no key: probes, metrics, the page and the API's description; and where the page's files may be read.
OPEN_PATHS = frozenset({"/", "/live", "/ready", "/health", "/ping", "/metrics", "/docs", "/openapi.json"})
OPEN_FILES = "/playground/"

# Seconds between two looks at the file of keys.
RELOAD_INTERVAL_S = 1.0

_HASH = "sha256:"


@dataclass(frozen=True)
class ApiKey:
    """A key and what it may do.

    Attributes:
        name: for operators; unique.
        hash: "sha256:" and the digest of the key in hexadecimal digits. `eyas keys new` prints it.
        tenant: keys of one tenant share cached prefixes and one fair share of the engines; empty: the key's name.
        scopes: "generate", "models" (list models) and "cluster" (see the workers, their load and addresses).
        max_priority: highest `priority` of its requests; null takes api_keys.max_priority.
        limits: its quota.
    """

    name: str
    hash: str
    tenant: str = ""
    scopes: tuple[KeyScope, ...] = ("generate", "models")
    max_priority: int | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)

    def __post_init__(self) -> None:
        require(bool(self.name), "name is empty; give the key a name")
        require(bool(re.fullmatch(_HASH + "[0-9a-f]{64}", self.hash)), "hash is not sha256: and 64 hexadecimal digits")
        at_least(0, max_priority=self.max_priority or 0)

    @property
    def tenant_id(self) -> str:
        """The tenant as verifiers see it, which need no names."""
        return blake2b((self.tenant or self.name).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class KeyFile:
    """The content of a file of keys in YAML or JSON."""

    keys: tuple[ApiKey, ...] = ()

    def __post_init__(self) -> None:
        for values in ([key.name for key in self.keys], [key.hash for key in self.keys]):
            twice = next((value for value in values if values.count(value) > 1), None)
            require(twice is None, f"keys: {twice} is there twice; leave one out")


def hash_of(key: str | bytes) -> str:
    """Return the hash of a key as a file of keys has it."""
    return _HASH + sha256(key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")).hexdigest()


def plain_keys(values: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Return the keys of a list of plain keys: each its own tenant, without limits.

    Raises ConfigError if there is none, or for what is no key, such as a line of a YAML file without `keys:`.
    """
    plain = list(dict.fromkeys(key for value in values if (key := value.strip())))
    for number, key in enumerate(plain, 1):
        is_key = not re.search(r"\s", key) and not key.startswith(_HASH)
        reason = "holds white space or is a hash; hashed keys belong below the line 'keys:', plain ones have one word"
        require(is_key, f"{source}: entry {number} is no plain key: it {reason}")
    hashes = [hash_of(key) for key in plain]
    require(bool(hashes), f"{source} holds no key; put one there, or leave the setting empty to accept every call")
    return tuple(ApiKey(f"plain-{each[len(_HASH) :][:12]}", each) for each in hashes)


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file: YAML or JSON with the entry `keys`, or one plain key on each line.

    Lines that begin with "#" or "---" are no keys. Raises ConfigError.
    """
    import yaml

    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))]
    first = lines[0] if lines else ""
    if not re.match(r"""["']?keys["']?\s*:|\{""", first.strip()):
        return plain_keys(lines, source)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", "") or "syntax error"  # the whole message may quote the file
        raise ConfigError(f"{source} is neither YAML nor JSON: {problem}") from None
    return validated(KeyFile, data, source).keys


@dataclass(frozen=True)
class Access:
    """An authenticated call.

    Attributes:
        key, quota: None if no keys are configured; then everything is allowed.
    """

    key: ApiKey | None = None
    quota: Quota | None = None
    config: ApiKeysConfig = field(default_factory=ApiKeysConfig)

    def caller(self, peer: str) -> str:
        """Return whom the work of a call counts for: the key, or the peer's address where there are no keys."""
        return self.key.name if self.key else address_of(peer)

    def begin(self, scope: KeyScope) -> None:
        """Check that the key has a scope, and count a generation request. Raises PermissionDenied, RateLimited."""
        if self.key is None or self.quota is None:
            return
        if scope not in self.key.scopes:
            raise PermissionDenied(f"this API key lacks the scope {scope!r}; ask the operator for it")
        if scope == "generate":
            self.quota.count_request()

    def authorize(self, call: GenerateCall) -> GenerateCall:
        """Return the call with the key's tenant, and with a cache salt that no other tenant can have.

        Raises PermissionDenied for a priority that the key may not use, InvalidRequest for a salt that is too long.
        """
        request = replace(call.request, tenant="")
        check_cache_salt(request.cache_salt)
        if self.key is None:
            return replace(call, request=request)
        most = self.config.max_priority if self.key.max_priority is None else self.key.max_priority
        if request.priority > most:
            allowed = f"0 to {most}" if most else "0 only"
            raise PermissionDenied(f"priority is {request.priority}; this API key may use {allowed}")
        tenant, salt = self.key.tenant_id, request.cache_salt
        if not self.config.share_prefix_cache:
            salt = blake2b(f"{tenant}/{salt}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return replace(call, request=replace(request, tenant=tenant, cache_salt=salt))

    def meter(
        self,
        stream: Callable[..., AsyncGenerator[list[TextChunk], None]],
        calls: Iterable[GenerateCall],
        record_rejection: AbstractContextManager[None],
    ) -> AsyncGenerator[list[TextChunk], None]:
        """Return the chunks of prepared calls within the key's quota.

        The first raises what `Quota.reserve` does; `record_rejection` is entered around that.

        Args:
            stream: makes the chunks; with a quota it gets `count`, to call with the number of each chunk's tokens.
        """
        return stream() if self.quota is None else self._counted(self.quota, stream, calls, record_rejection)

    async def _counted(
        self,
        quota: Quota,
        stream: Callable[..., AsyncGenerator[list[TextChunk], None]],
        calls: Iterable[GenerateCall],
        record_rejection: AbstractContextManager[None],
    ) -> AsyncGenerator[list[TextChunk], None]:
        requests = [call.request for call in calls]
        num_prompt = sum(len(request.prompt_ids) for request in requests)
        num_output = sum(request.sampling.n * request.sampling.max_tokens for request in requests)
        with ExitStack() as stack:
            with record_rejection:
                num_completions = sum(request.sampling.n for request in requests)
                count = stack.enter_context(quota.reserve(num_completions, num_prompt, num_output))
            async with aclosing(stream(count=count)) as chunks:
                async for ready in chunks:
                    yield ready

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers about what is left of the quota; none without limits."""
        return self.quota.headers if self.quota else {}


class ApiKeys:
    """The valid API keys; if none are configured, every call is accepted.

    A configured file is read again within RELOAD_INTERVAL_S of a change. One that cannot be read then changes nothing.

    Raises ConfigError if the file cannot be read or holds no key.

    Args:
        keys: besides those of `config.file`.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey] = (),
        config: ApiKeysConfig = ApiKeysConfig(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._own = tuple(keys)
        self._quotas: dict[str, Quota] = {}
        self._of_file: Reloaded[tuple[ApiKey, ...]] | None = None
        if config.file:
            self._of_file = Reloaded((Path(config.file),), self._read, "api_keys.file", RELOAD_INTERVAL_S, clock)
            require(bool(self._of_file.get()), f"api_keys.file: the file {config.file} holds no key; put one there")

    def access(self, headers: Iterable[tuple[str, str]]) -> Access:
        """Return what the key in HTTP headers or gRPC metadata, with lower-case names, gives access to.

        Raises Unauthenticated, also for headers that name two keys: proxies and services would each take another one.
        """
        value = _given_key(headers)
        if not self._own and not self._of_file:
            return Access()
        key = self._find(value) if value else None
        if key is None:
            raise Unauthenticated("no known API key; send one as the header or metadata 'authorization: Bearer KEY'")
        quota = self._quotas.setdefault(key.name, Quota(key.limits, self._clock))
        if quota.limits != key.limits:
            quota.update(key.limits)
        return Access(key, quota, self._config)

    def _find(self, given: str) -> ApiKey | None:
        """Return the key with a value. Takes the same time whichever it is."""
        found, digest = None, hash_of(given)
        for key in (*self._own, *(self._of_file.get() if self._of_file else ())):
            if hmac.compare_digest(digest, key.hash):
                found = key
        return found

    def _read(self) -> tuple[ApiKey, ...]:
        file = self._config.file
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"api_keys.file: cannot read {file}: {error}") from error
        return parse_keys(text, f"api_keys.file: the file {file}")


def load_api_keys(config: ApiKeysConfig, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """Read the configured keys. Raises ConfigError if a configured source cannot be read or holds no key."""
    keys: tuple[ApiKey, ...] = ()
    if config.env:
        values = environment.get(config.env, "").split(",")
        keys = plain_keys(values, f"api_keys.env: the environment variable {config.env}")
    return ApiKeys(keys, config)


def _given_key(headers: Iterable[tuple[str, str]]) -> str:
    """Return the key in headers with lower-case names; empty without one. Raises Unauthenticated for two of them."""
    given = dict[str, str]()
    for name, value in headers:
        if name in KEY_HEADERS:
            if name in given:
                raise Unauthenticated(f"the header or metadata {name!r} is there twice; send one key, once")
            given[name] = value
    key, other = given_key(given), given.get("x-api-key", "").strip()
    if other and key != other:
        raise Unauthenticated("'authorization' and 'x-api-key' hold two keys; send one of them")
    return key


keys = typer.Typer(add_completion=False, no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Make API keys for a router."""


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, such as a team's.")],
    tenant: Annotated[str, typer.Option(help="Keys of one tenant share cached prefixes; its own by default.")] = "",
    max_priority: Annotated[
        int | None, typer.Option(help="Highest priority of its requests; the router's by default.")
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(help="Most requests a minute; 0 sets no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="Most tokens a minute; 0 sets no limit.")] = 0,
    max_running: Annotated[int, typer.Option(help="Most completions at once; 0 sets no limit.")] = 0,
) -> None:
    """Make an API key. Prints its entry for the router's file of keys, api_keys.file.

    The key itself goes to stderr, and is kept nowhere. For a key without limits, `eyas serve --api-key KEY` is enough.
    """
    import yaml

    value = f"eyas-{secrets.token_urlsafe(32)}"
    limits = KeyLimits(requests_per_minute, tokens_per_minute, max_running)
    key = ApiKey(name, hash_of(value), tenant, max_priority=max_priority, limits=limits)
    defaults = vars(ApiKey(name, key.hash))
    entry = {item: given for item, given in vars(key).items() if item in ("name", "hash") or given != defaults[item]}
    if key.limits != KeyLimits():
        entry["limits"] = {item: given for item, given in vars(limits).items() if given}
    text = yaml.safe_dump([entry], sort_keys=False)
    typer.echo("".join(f"  {line}\n" for line in text.splitlines()), nl=False)
    typer.echo(f"The key of {name}, shown once: {value}", err=True)
