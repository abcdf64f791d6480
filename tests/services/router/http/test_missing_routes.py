"""Paths that are nearly right say which one is meant; probes, models and CORS under the names that newcomers try."""

import httpx

from eyas.services.router.http.errors import instead_of
from tests.support.services.http_router import TOKENS, Script, get_until, http_router, is_ok, worker

MISSING = {
    "/chat/completions": "call /v1/chat/completions",
    "/v1/v1/chat/completions": "call /v1/chat/completions; the base URL ends with /v1 already",
    "/v1/chat/completions/": "call /v1/chat/completions",
    "/V1/Models": "call /v1/models",
    "/v1/tokenize": "call /tokenize",
    "/v1/ping": "call /ping",
}


async def test_a_missing_path_says_what_there_is_instead(url: str) -> None:
    async with http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        for path, instead in MISSING.items():
            for answer in (await client.post(path, json={}), await client.get(path)):
                if answer.status_code == 405:
                    continue
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (404, "invalid_request_error"), path
                assert instead in error["message"]
                assert error["message"].startswith(f"{answer.request.method} {path} does not exist here: ")
                assert "\n" not in error["message"]
        unknown = await client.get("/nowhere")
        assert unknown.json()["error"]["message"] == "GET /nowhere: Not Found"
        batches = (await client.post("/v1/messages/batches", json={})).json()
        assert (batches["type"], batches["error"]["type"]) == ("error", "not_found_error")
        wrong_method = await client.get("/v1/chat/completions")
        assert wrong_method.status_code == 405
        assert wrong_method.json()["error"]["message"].endswith("; use POST")


async def test_models_are_named_before_a_verifier_serves_them(url: str) -> None:
    async with http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 503
        for answer in ((await client.get("/v1/models")).json()["data"][0], (await client.get("/v1/models/demo")).json()):
            assert (answer["id"], answer["max_model_len"]) == ("demo", None)
        assert (await client.get("/v1/models/other")).status_code == 404
        async with worker(url, Script(TOKENS)):
            await get_until(base, "/ping", is_ok)
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] > 0
            assert (await client.head("/ping")).status_code == 200


async def test_an_origin_may_have_any_port(url: str) -> None:
    allowed = "http://localhost:5173", "http://localhost", "https://here.example"
    refused = (
        "http://localhost.evil.example", "http://localhost:5173.evil.example", "http://localhostx:1",
        "https://there.example", "null",
    )  # fmt: skip
    origins = ("http://localhost:*", "https://here.example")
    async with http_router(url, cors_allow_origins=origins) as base, httpx.AsyncClient(base_url=base) as client:
        for origin in allowed + refused:
            answer = await client.get("/v1/models", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (origin if origin in allowed else None), origin


def test_paths_are_compared_as_far_as_they_matter() -> None:
    assert instead_of("/models" + "/a" * 10_000, ["/v1/models"]) == ""
    assert instead_of("", []) == instead_of("/", ["/"]) == instead_of("//", []) == ""
