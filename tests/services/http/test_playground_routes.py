"""The routes of the playground: its files and their headers, and who may see the cluster's state."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from eyas.services.router.auth import ApiKey, ApiKeys, hash_of
from tests.services.http.http_router import TOKENS, Script, get, http_router, worker

SECRETS = {"all": ("generate", "models", "cluster"), "usual": ("generate", "models")}


def fetch(url: str, paths: list[str], headers: dict[str, str] | None = None, **router: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with http_router(url, **router) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(run())


def test_the_page_loads_only_its_own_files(url: str) -> None:
    """Every file that one of them names is served, by a relative address, with the type that browsers insist on."""
    (page,) = fetch(url, ["/"])
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", page.text), "the policy blocks these"
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    scripts = fetch(url, ["/playground/playground.js", "/playground/cluster.js"])
    links += [f"playground/{name}" for script in scripts for name in re.findall(r'from "\./([^"]+)"', script.text)]
    assert {link.rpartition(".")[2] for link in links} == {"css", "js", "svg"}
    assert not [link for link in links if link.startswith("/") or "//" in link]
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for link, answer in zip(links, fetch(url, [f"/{link}" for link in links]), strict=True):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(types[link.rpartition(".")[2]])


def test_every_file_has_the_security_headers(url: str) -> None:
    for answer in fetch(url, ["/", "/playground/playground.js", "/playground/playground.css", "/playground/icon.svg"]):
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_an_unchanged_file_is_not_sent_again(url: str) -> None:
    (first,) = fetch(url, ["/"])
    (again,) = fetch(url, ["/"], {"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


def test_the_playground_can_be_switched_off(url: str) -> None:
    assert [answer.status_code for answer in fetch(url, ["/", "/playground/playground.js"], playground=False)] == [404, 404]


def cluster(url: str, key: str = "", **router: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with worker(url, Script(TOKENS)), http_router(url, **router) as base:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with asyncio.timeout(60), httpx.AsyncClient(base_url=base) as client:
                while True:
                    answer = await client.get("/v1/cluster", headers=headers)
                    if answer.status_code != 200 or answer.json()["router"]["status"] == "healthy":
                        return answer

    return asyncio.run(run())


def keys() -> ApiKeys:
    return ApiKeys(ApiKey(name, hash_of(name), scopes=scopes) for name, scopes in SECRETS.items())  # type: ignore[arg-type]


def test_the_state_names_addresses_only_for_its_scope(url: str) -> None:
    for answer, has_address in ((cluster(url), False), (cluster(url, "all", keys=keys()), True)):
        (verifier,) = answer.json()["workers"]
        assert (verifier["role"], verifier["health"], verifier["kv_cache"]["free_tokens"]) == ("verifier", "healthy", 10_000)
        assert ("address" in verifier) == has_address == ("127.0.0.1" in answer.text)


@pytest.mark.parametrize(("key", "status"), [("usual", 403), ("", 401), ("unknown", 401)])
def test_the_state_needs_its_scope(url: str, key: str, status: int) -> None:
    answer = cluster(url, key, keys=keys())
    assert (answer.status_code, "workers" in answer.json()) == (status, False)


def test_the_page_itself_needs_no_key(url: str) -> None:
    async def run() -> list[int]:
        async with http_router(url, keys=keys()) as base:
            return [(await get(base, path)).status_code for path in ("/", "/playground/playground.js", "/v1/models")]

    assert asyncio.run(run()) == [200, 200, 401]
