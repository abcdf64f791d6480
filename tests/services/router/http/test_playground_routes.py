"""The routes of the playground: its files and their headers, and who may see the cluster's state."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eyas.services.lifecycle import is_loopback
from eyas.services.router.auth.keys import ApiKey, ApiKeys, hash_of
from eyas.services.router.http.drafter_kill import KILL_PATH, KILL_SIGNAL, SUPERVISOR_VARIABLE
from tests.support.services.http_router import TOKENS, Script, http_router, worker

SECRETS = {"all": ("generate", "models", "cluster"), "usual": ("generate", "models")}


async def fetch(url: str, paths: list[str], headers: dict[str, str] | None = None, **router: Any) -> list[httpx.Response]:
    async with http_router(url, **router) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        return [await client.get(path, headers=headers) for path in paths]


async def scripts_of(url: str, first: str) -> set[str]:
    """A script and all that it imports, directly or not."""
    found, new = set[str](), {first}
    while new:
        found |= new
        texts = [answer.text for answer in await fetch(url, [f"/{script}" for script in sorted(new)])]
        new = {f"playground/{name}" for text in texts for name in re.findall(r'from "\./([^"]+)"', text)} - found
    return found


async def test_the_page_loads_only_its_own_files(url: str) -> None:
    """Every file that one of them names is served, by a relative address, with the type that browsers insist on."""
    (page,) = await fetch(url, ["/"])
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", page.text), "the policy blocks these"
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    links += sorted(await scripts_of(url, "playground/playground.js") | {"playground/recorded.json"})
    assert {link.rpartition(".")[2] for link in links} == {"css", "js", "json", "svg"}
    assert not [link for link in links if link.startswith("/") or "//" in link]
    types = {"js": "text/javascript", "css": "text/css", "json": "application/json", "svg": "image/svg+xml"}
    for link, answer in zip(links, await fetch(url, [f"/{link}" for link in links]), strict=True):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(types[link.rpartition(".")[2]])


async def test_every_file_has_the_security_headers(url: str) -> None:
    for answer in await fetch(url, ["/", "/playground/playground.js", "/playground/playground.css", "/playground/icon.svg"]):
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_an_unchanged_file_is_not_sent_again(url: str) -> None:
    (first,) = await fetch(url, ["/"])
    (again,) = await fetch(url, ["/"], {"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


async def test_the_playground_can_be_switched_off(url: str) -> None:
    answers = await fetch(url, ["/", "/playground/playground.js"], playground=False)
    assert [answer.status_code for answer in answers] == [404, 404]


async def cluster(url: str, key: str = "", **router: Any) -> httpx.Response:
    async with worker(url, Script(TOKENS)), http_router(url, **router) as base:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=base) as client:
            while True:
                answer = await client.get("/v1/cluster", headers=headers)
                if answer.status_code != 200 or answer.json()["router"]["status"] == "healthy":
                    return answer


def keys() -> ApiKeys:
    return ApiKeys(ApiKey(name, hash_of(name), scopes=scopes) for name, scopes in SECRETS.items())  # type: ignore[arg-type]


async def test_the_state_names_addresses_only_for_its_scope(url: str) -> None:
    for answer, has_address in ((await cluster(url), False), (await cluster(url, "all", keys=keys()), True)):
        (verifier,) = answer.json()["workers"]
        assert (verifier["role"], verifier["health"], verifier["kv_cache"]["free_tokens"]) == ("verifier", "healthy", 10_000)
        assert ("address" in verifier) == has_address == ("127.0.0.1" in answer.text)


async def test_the_recorded_run_is_a_race_with_equal_tokens(url: str) -> None:
    (answer,) = await fetch(url, ["/playground/recorded.json"])
    run = json.loads(answer.text)
    texts = ["".join(token["text"] for step in run[name] for token in step["tokens"]) for name in ("drafted", "plain")]
    assert texts[0] == texts[1]
    assert len(run["drafted"]) < len(run["plain"])
    times = [sum((step["wait_ms"] or 0) + (step["verify_ms"] or 0) for step in run[name]) for name in ("drafted", "plain")]
    assert times[0] < times[1], "the first sight shows no loss"
    assert {"date", "machine", "request", "endpoint"} <= run.keys()
    assert (run["request"]["temperature"], len(answer.content) < 80_000) == (0, True)


async def delete(url: str, api_keys: ApiKeys | None = None, **headers: str) -> int:
    """Ask for the drafter's death as a browser would; %s in a header is the server's host and port."""
    async with http_router(url, keys=api_keys) as base, httpx.AsyncClient(base_url=base) as client:
        own = base.removeprefix("http://")
        given = {name.replace("_", "-"): value.replace("%s", own) for name, value in headers.items()}
        return (await client.delete(KILL_PATH, headers=given)).status_code


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that this process gets, as the one that started the router."""
    received = list[int]()
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(os.getpid()))
    before = signal.signal(KILL_SIGNAL, lambda number, _: received.append(number))
    yield received
    signal.signal(KILL_SIGNAL, before)


async def test_the_own_page_may_kill_the_drafter(url: str, kills: list[int]) -> None:
    assert await delete(url, Origin="http://%s", Sec_Fetch_Site="same-origin") == 202
    assert await delete(url, Origin="http://%s") == 202
    assert kills == [KILL_SIGNAL, KILL_SIGNAL]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "https://%s"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://%s", "Sec_Fetch_Site": "cross-site"},
        {"Origin": "http://%s", "Sec_Fetch_Site": "same-site"},
        {"Host": "rebound.example", "Origin": "http://rebound.example"},
        {"Host": "[::1", "Origin": "http://[::1"},
        {"Origin": "http://%s", "X_Forwarded_For": "203.0.113.9"},
    ],
)
async def test_no_other_page_may_kill_the_drafter(url: str, kills: list[int], headers: dict[str, str]) -> None:
    assert await delete(url, None, **headers) == 403
    assert kills == []


async def test_killing_the_drafter_needs_a_key(url: str, kills: list[int]) -> None:
    assert await delete(url, keys(), Origin="http://%s") == 401
    assert await delete(url, keys(), Origin="http://%s", Authorization="Bearer other") == 401
    assert kills == []
    assert await delete(url, keys(), Origin="http://%s", Authorization="Bearer usual") == 202
    (script,) = await fetch(url, ["/playground/drafter.js"], keys=keys())
    assert script.status_code == 200


async def test_a_usual_router_cannot_kill_a_drafter(url: str) -> None:
    assert await delete(url, Origin="http://%s") in (404, 405)
    (page,) = await fetch(url, ["/"])
    assert "data-can-kill" not in page.text


async def test_a_router_that_was_adopted_cannot_kill(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISOR_VARIABLE, "1")
    assert await delete(url, Origin="http://%s") in (404, 405)


async def test_the_page_of_the_demo_shows_the_button(url: str, kills: list[int]) -> None:
    (page,) = await fetch(url, ["/"])
    assert '<html lang="en" data-can-kill="">' in page.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_which_hosts_are_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert not is_loopback(f"{host}.example")
