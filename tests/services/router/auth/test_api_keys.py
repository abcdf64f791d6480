"""Keys with names, scopes and quotas; tenants that share neither cache nor capacity unfairly."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import yaml

from eyas.config import ApiKeysConfig
from eyas.errors import ConfigError, InvalidRequest, PermissionDenied, RateLimited, TimedOut, Unauthenticated
from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto, text_chunk_from_proto
from eyas.rpc.identity import Reloaded
from eyas.rpc.messages import RETRY_KEY, GenerateCall
from eyas.services.router.auth.keys import (
    RELOAD_INTERVAL_S,
    ApiKey,
    ApiKeys,
    hash_of,
    load_api_keys,
    new_key,
    parse_keys,
    plain_keys,
)
from eyas.services.router.auth.middleware import Authenticator
from eyas.services.router.auth.quota import KeyLimits, Quota, TokenBucket
from eyas.services.router.telemetry import RouterTelemetry
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.support.clock import Clock
from tests.support.services.http_router import ALL, TOKENS, Script, get_until, http_router, worker
from tests.support.services.scripted_verifier import PROMPT, REST, request_with, router, tokens_of, until
from tests.support.services.spans import Spans


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def accepts(keys: ApiKeys, key: str) -> bool:
    try:
        keys.access(bearer(key).items())
    except Unauthenticated:
        return False
    return True


def entry(key: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"name-of-{key}", "hash": hash_of(key), **fields}


def key_file(path: Path, *entries: dict[str, Any]) -> ApiKeysConfig:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return ApiKeysConfig(file=str(path))


# Files of keys


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_a_file_of_hashed_keys_is_yaml_or_json(dump: Any) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 30, "max_running": 4}
    fields = {"tenant": "acme", "scopes": ["models"], "max_priority": 3, "limits": limits}
    keys = parse_keys(dump({"keys": [entry("one"), entry("two", **fields)]}), "file")
    assert keys[0] == ApiKey("name-of-one", hash_of("one"))
    assert keys[1] == ApiKey("name-of-two", hash_of("two"), "acme", ("models",), 3, KeyLimits(2, 30, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"keys": [{"name": "a", "hash": "secret"}]}, "hash is not sha256: and 64 hexadecimal digits"),
        ({"keys": [entry("a"), entry("a")]}, "name-of-a is there twice"),
        ({"keys": [entry("a", scopes=["root"])]}, "scopes"),
        ({"keys": [entry("a", limits={"requests_per_minute": -1})]}, "must be at least 0"),
        ({"keys": [entry("a", limit={})]}, "did you mean keys.0.limits"),
    ],
)
def test_a_wrong_file_of_keys_says_what_is_wrong(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_keys(yaml.safe_dump(data), "file")
    assert "secret" not in str(raised.value)


def test_the_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys.yaml"
    keys = ApiKeys(config=key_file(file, entry("one")), clock=clock)
    assert [accepts(keys, key) for key in ("one", "two")] == [True, False]
    key_file(file, entry("two"), entry("three"))
    clock.now += 2
    assert [accepts(keys, key) for key in ("one", "two")] == [False, True]
    file.write_text("keys: [")
    clock.now += 2
    assert [accepts(keys, key) for key in ("one", "two")] == [False, True], "a broken file changes nothing"
    file.write_text("keys: []")
    clock.now += 2
    assert not any(accepts(keys, key) for key in ("one", "two")), "all keys are withdrawn"


def test_a_file_is_read_again_after_its_permissions_are_repaired(tmp_path: Path) -> None:
    clock, file, is_denied = Clock(), tmp_path / "keys", False
    file.write_text("old")

    def read() -> str:
        if is_denied:
            raise ConfigError("permission denied")
        return file.read_text()

    content = Reloaded((file,), read, "keys", RELOAD_INTERVAL_S, clock)
    file.write_text("newer")
    is_denied, clock.now = True, clock.now + 2
    assert content.get() == "old"
    is_denied, clock.now = False, clock.now + 2
    assert content.get() == "newer", "nothing about the file has changed since"


def test_a_mounted_secret_is_read_again_when_it_is_swapped(tmp_path: Path) -> None:
    """As the kubelet writes it: the file links to ..data/keys, and ..data to a folder that is replaced."""
    clock = Clock()
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        key_file(tmp_path / name / "keys", entry(name))
        os.utime(tmp_path / name / "keys", (1, 1))
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ApiKeys(config=ApiKeysConfig(file=str(tmp_path / "keys")), clock=clock)
    assert accepts(keys, "old")
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(tmp_path / "..data")
    clock.now += 2
    assert [accepts(keys, key) for key in ("old", "new")] == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "  - name: web\n    hash: {hash}\n",
        "version: 1\nkeys:\n- {{name: web, hash: '{hash}'}}\n",
        "{hash}\n",
        "one\ntwo words\n",
    ],
    ids=["without keys:", "another first line", "hash", "words"],
)
def test_lines_of_yaml_are_no_plain_keys(text: str) -> None:
    with pytest.raises(ConfigError, match=r"file: entry \d is no plain key") as raised:
        parse_keys(text.format(hash=hash_of("secret")), "file")
    assert "web" not in str(raised.value)
    with pytest.raises(ConfigError, match="entry 1 is no plain key"):
        load_api_keys(ApiKeysConfig(env="KEYS"), {"KEYS": "two words,one"})


def test_comments_are_no_plain_keys() -> None:
    keys = ApiKeys(parse_keys("---\n# team-a\nfirst\n#second\n", "file"))
    assert [accepts(keys, key) for key in ("first", "---", "# team-a", "#second")] == [True, False, False, False]


@pytest.mark.parametrize("root", ["", "/eyas", "/v"])
async def test_keys_are_required_below_any_root_path(root: str) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("called without a key")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": f"{root}/v1/models", "root_path": root, "headers": []}
    await Authenticator(app, ApiKeys(plain_keys(["one"], "test")))(scope, send, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([("authorization", "Bearer one"), ("authorization", "Bearer two")], "'authorization' is there twice"),
        ([("authorization", "Bearer one"), ("authorization", "Bearer one")], "'authorization' is there twice"),
        ([("x-api-key", "one"), ("x-api-key", "two")], "'x-api-key' is there twice"),
        ([("authorization", "Bearer one"), ("x-api-key", "two")], "hold two keys"),
    ],
)
def test_a_request_with_two_keys_is_refused(headers: list[tuple[str, str]], message: str, is_open: bool) -> None:
    keys = ApiKeys() if is_open else ApiKeys(plain_keys(["one", "two"], "test"))
    with pytest.raises(Unauthenticated, match=message):
        keys.access(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer one"), ("x-api-key", "one")],
        [("authorization", "Basic of-a-proxy"), ("x-api-key", "one")],
        [("authorization", "bearer  one ")],
        [("x-api-key", " one")],
    ],
)
def test_one_key_may_come_in_either_header_or_both(headers: list[tuple[str, str]]) -> None:
    assert ApiKeys(plain_keys(["one"], "test")).access(headers).key


def test_an_open_router_does_not_open_when_keys_are_withdrawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys(config=key_file(tmp_path / "keys"))


def test_a_new_key_is_accepted_by_the_file_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    new_key("team", "acme", 2, 60, 0, 8)
    printed = capsys.readouterr()
    value = printed.err.split()[-1]
    (key,) = parse_keys("keys:\n" + printed.out, "file")
    assert key == ApiKey("team", hash_of(value), "acme", max_priority=2, limits=KeyLimits(60, 0, 8))
    assert value not in printed.out
    assert accepts(ApiKeys([key]), value)


# Permissions


def test_priority_is_a_permission_of_the_key() -> None:
    keys = ApiKeys([ApiKey("a", hash_of("a")), ApiKey("b", hash_of("b"), max_priority=5)], ApiKeysConfig(max_priority=1))
    for key, allowed in (("a", 1), ("b", 5)):
        access = keys.access(bearer(key).items())
        access.authorize(request_with(priority=allowed))
        with pytest.raises(PermissionDenied, match=f"priority is {allowed + 1}; this API key may use 0 to {allowed}"):
            access.authorize(request_with(priority=allowed + 1))
    ApiKeys().access(()).authorize(request_with(priority=9))
    with pytest.raises(PermissionDenied, match="may use 0 only"):
        ApiKeys(plain_keys(["plain"], "test")).access(bearer("plain").items()).authorize(request_with(priority=1))


def test_each_tenant_gets_a_salt_and_keys_of_a_tenant_share_it() -> None:
    keys = [ApiKey(name, hash_of(name), tenant) for name, tenant in (("a", ""), ("b", "acme"), ("c", "acme"))]

    def sent(key: str, salt: str = "", **config: bool) -> tuple[str, str]:
        access = ApiKeys(keys, ApiKeysConfig(**config)).access(bearer(key).items())  # type: ignore[arg-type]
        request = access.authorize(request_with(cache_salt=salt, tenant="forged")).request
        return request.tenant, request.cache_salt

    assert sent("b") == sent("c") != sent("a")
    assert sent("b", "x") == sent("c", "x")
    assert len({sent("b")[1], sent("b", "x")[1], sent("a")[1], sent("a", "x")[1]}) == 4
    assert sent("a", "x", share_prefix_cache=True)[1] == sent("b", "x", share_prefix_cache=True)[1] == "x"
    assert "acme" not in "".join(sent("b"))
    with pytest.raises(InvalidRequest, match="cache_salt has 257 characters"):
        sent("a", "x" * 257)


# Quotas


def test_a_bucket_refills_evenly_and_keeps_its_debt() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.seconds_until(1), bucket.seconds_until(60), bucket.seconds_until(900)) == (1, 60, 60)
    clock.now += 30
    assert bucket.available == 30
    assert bucket.headers("tokens") == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "30s",
    }
    bucket.take(120)
    assert bucket.headers("tokens")["x-ratelimit-remaining-tokens"] == "0"
    assert bucket.headers("tokens")["x-ratelimit-reset-tokens"] == "2m30s"
    clock.now += 600
    assert bucket.available == 60


def test_tokens_that_a_request_does_not_use_come_back() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=100), Clock())
    with quota.reserve(1, 10, 60) as count:
        assert quota.tokens.available == 30
        with pytest.raises(RateLimited, match="100 tokens a minute, is used up") as raised, quota.reserve(1, 10, 30):
            pass
        assert raised.value.retry_after == pytest.approx(6)
        count(5)
    assert quota.tokens.available == 85
    with pytest.raises(RuntimeError), quota.reserve(1, 10, 60):
        raise RuntimeError("no token came")
    assert quota.tokens.available == 85


@pytest.mark.parametrize("end", [asyncio.CancelledError, GeneratorExit, TimedOut])
def test_a_client_that_leaves_early_pays_for_its_prompt(end: type[BaseException]) -> None:
    quota = Quota(KeyLimits(tokens_per_minute=100), Clock())
    with pytest.raises(end), quota.reserve(1, 30, 60):
        raise end
    assert quota.tokens.available == 70


def test_completions_at_once_are_bounded_by_the_key() -> None:
    quota = Quota(KeyLimits(max_running=3), Clock())
    with quota.reserve(2, 1, 1):
        with pytest.raises(RateLimited, match="2 completions of this key are running, of 3"), quota.reserve(2, 1, 1):
            pass
        with (
            pytest.raises(InvalidRequest, match="4 completions are asked for, but this key may run 3"),
            quota.reserve(4, 1, 1),
        ):
            pass
        with quota.reserve(1, 1, 1):
            pass
    with quota.reserve(3, 1, 1):
        pass


def test_a_quota_outlives_a_change_of_the_file(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys"
    keys = ApiKeys(config=key_file(file, entry("a", limits={"requests_per_minute": 1})), clock=clock)
    keys.access(bearer("a").items()).begin("generate")
    key_file(file, entry("a", limits={"requests_per_minute": 1}), entry("b"))
    clock.now += 2
    with pytest.raises(RateLimited):
        keys.access(bearer("a").items()).begin("generate")
    key_file(file, entry("a"))
    clock.now += 2
    keys.access(bearer("a").items()).begin("generate")


# Through the router


LIMITED = [
    ApiKey("small", hash_of("small"), limits=KeyLimits(requests_per_minute=2)),
    ApiKey("tokens", hash_of("tokens"), limits=KeyLimits(tokens_per_minute=len(PROMPT) + len(REST) + 9)),
    ApiKey("busy", hash_of("busy"), limits=KeyLimits(max_running=1)),
    ApiKey("list", hash_of("list"), scopes=("models",)),
    ApiKey("free", hash_of("free")),
]


async def complete(base: str, key: str, **changes: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base, timeout=30, headers=bearer(key)) as client:
        return await client.post("/v1/completions", json=ALL | changes)


async def test_a_used_up_quota_is_429_with_openais_headers(url: str) -> None:
    spans = Spans()
    router = http_router(url, keys=ApiKeys(LIMITED), telemetry=RouterTelemetry(spans.telemetry))
    async with worker(url, Script(TOKENS)), router as base:
        first, second, third = [await complete(base, "small", stream=stream) for stream in (False, True, True)]
        assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert [a.headers["x-ratelimit-remaining-requests"] for a in (first, second, third)] == ["1", "0", "0"]
        assert third.headers["x-ratelimit-reset-requests"].endswith("s")
        assert 0 < int(third.headers["retry-after"]) <= 30
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        answers = [await complete(base, "tokens") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[0].headers["x-ratelimit-limit-tokens"] == str(len(PROMPT) + len(REST) + 9)
        assert int(answers[1].headers["x-ratelimit-remaining-tokens"]) < len(REST)
        free = await complete(base, "free")
        assert free.status_code == 200
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    assert spans.value("eyas_router_requests_total", model="", status="RESOURCE_EXHAUSTED") == 1


async def test_what_a_key_may_not_do_is_403(url: str) -> None:
    async with worker(url, Script(TOKENS)), http_router(url, keys=ApiKeys(LIMITED)) as base:
        denied = [await complete(base, "list"), await complete(base, "free", priority=1)]
        assert [answer.status_code for answer in denied] == [403, 403]
        assert [answer.json()["error"]["code"] for answer in denied] == ["permission_denied"] * 2
        async with httpx.AsyncClient(base_url=base, headers=bearer("list")) as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_completions_at_once_end_with_their_client(url: str) -> None:
    gate = asyncio.Event()
    script = Script(TOKENS, gate=gate)
    async with worker(url, script), http_router(url, keys=ApiKeys(LIMITED)) as base:
        running = asyncio.create_task(complete(base, "busy"))
        await until(lambda: bool(script.calls))
        assert (await complete(base, "busy")).status_code == 429
        assert (await complete(base, "busy", n=2, temperature=1)).status_code == 400
        running.cancel()
        await until(lambda: script.num_cancelled == 1)
        gate.set()
        assert (await complete(base, "busy")).status_code == 200


async def test_a_retry_keeps_tenant_and_salt(url: str) -> None:
    gate = asyncio.Event()
    failing, other = Script(TOKENS, fails_after=2, gate=gate), Script(TOKENS)
    async with worker(url, failing), http_router(url, keys=ApiKeys(LIMITED)) as base:
        running = asyncio.create_task(complete(base, "free", cache_salt="x"))
        await until(lambda: bool(failing.calls))
        async with worker(url, other):
            await get_until(base, "/health", lambda health: health.json()["models"]["demo"]["reachable_verifiers"] == 2)
            gate.set()
            assert (await running).status_code == 200
    first, second = failing.calls[0].request, other.calls[0].request
    assert second.num_emitted > 0
    assert (second.tenant, second.cache_salt) == (first.tenant, first.cache_salt)
    assert first.tenant == LIMITED[-1].tenant_id
    assert len(first.cache_salt) == 32


async def test_grpc_clients_have_the_same_quota_and_no_say_in_tenants(url: str) -> None:
    script = Script(TOKENS)

    async def send(address: str, key: str, call: GenerateCall) -> list[Any]:
        async with open_channel(address) as channel:
            stream = GenerationStub(channel).Generate(
                generate_call_to_proto(call), timeout=30, metadata=tuple(bearer(key).items())
            )
            chunks = [text_chunk_from_proto(message) async for message in stream]
            return [tokens_of(chunks), dict(await stream.trailing_metadata())]

    async with worker(url, script), router(url, keys=ApiKeys(LIMITED)) as address:
        call = request_with(tenant="forged", cache_salt="x")
        tokens, trailers = await send(address, "small", call)
        assert tokens == REST
        assert trailers["x-ratelimit-remaining-requests"] == "1"
        assert script.calls[0].request.tenant == LIMITED[0].tenant_id
        await send(address, "small", call)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await send(address, "small", call)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = dict(raised.value.trailing_metadata() or ())
        assert 0 < int(hints[RETRY_KEY]) <= 30_000
        assert hints["x-ratelimit-remaining-requests"] == "0"
        for key, denied in (("list", call), ("free", request_with(priority=1))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await send(address, key, denied)
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
