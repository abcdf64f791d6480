"""Paths that do not exist, of OpenAI's and other servers' APIs or misspelt, and the ones to call instead.

To add one, add the beginning of its path to `_INSTEAD`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_TEXT_ONLY = "Eyas serves models that generate text"
_STATELESS = "Eyas stores nothing; send the whole conversation with each request"
_FILES = "Eyas stores no files; `eyas run-batch FILE` runs a batch file against this server"
_GENERATE = "call /v1/completions, or /v1/chat/completions with messages"
_OLLAMA = "this is no Ollama server, but most of its clients speak OpenAI's API too"
# Beginnings of paths, in lower case and without the slash at their end. The longest that fits counts.
_INSTEAD: Mapping[str, str] = {
    "/v1/embeddings": f"{_TEXT_ONLY}; embeddings need another server",
    "/embeddings": f"{_TEXT_ONLY}; embeddings need another server",
    "/embed": f"{_TEXT_ONLY}; embeddings need another server",
    "/v1/audio": f"{_TEXT_ONLY}; speech needs another server",
    "/v1/images": f"{_TEXT_ONLY}; images need another server",
    "/v1/videos": f"{_TEXT_ONLY}; videos need another server",
    "/v1/realtime": f"{_TEXT_ONLY} over HTTP; stream /v1/chat/completions or /v1/responses",
    "/v1/moderations": f"{_TEXT_ONLY}; ask one in /v1/chat/completions, with a JSON schema as response_format",
    "/v1/classify": f"{_TEXT_ONLY}; ask one in /v1/chat/completions, with structured_outputs.choice",
    "/classify": f"{_TEXT_ONLY}; ask one in /v1/chat/completions, with structured_outputs.choice",
    "/v1/rerank": f"{_TEXT_ONLY}; reranking needs another server",
    "/v2/rerank": f"{_TEXT_ONLY}; reranking needs another server",
    "/rerank": f"{_TEXT_ONLY}; reranking needs another server",
    "/v1/score": "log-probabilities of a prompt come from /v1/completions with prompt_logprobs",
    "/score": "log-probabilities of a prompt come from /v1/completions with prompt_logprobs",
    "/pooling": f"{_TEXT_ONLY}; pooling needs another server",
    "/v1/files": _FILES,
    "/v1/uploads": _FILES,
    "/v1/batches": _FILES,
    "/v1/messages/batches": _FILES,
    "/v1/vector_stores": _FILES,
    "/v1/containers": _FILES,
    "/v1/fine_tuning": "models are trained before they are served; `eyas train` makes draft heads",
    "/v1/fine-tunes": "models are trained before they are served; `eyas train` makes draft heads",
    "/v1/load_lora_adapter": "merge the adapter into the checkpoint before it is served",
    "/v1/unload_lora_adapter": "merge the adapter into the checkpoint before it is served",
    "/v1/assistants": f"{_STATELESS} to /v1/responses or /v1/chat/completions",
    "/v1/threads": f"{_STATELESS} to /v1/responses or /v1/chat/completions",
    "/v1/conversations": f"{_STATELESS} to /v1/responses or /v1/chat/completions",
    "/v1/responses": f"{_STATELESS} to POST /v1/responses",
    "/v1/chat/completions": f"{_STATELESS} to POST /v1/chat/completions",
    "/v1/complete": "call /v1/completions, or /v1/messages for Anthropic's API",
    "/v1/edits": "call /v1/chat/completions",
    "/v1/engines": "call /v1/completions with the model's name in the body",
    "/v1/organization": "quotas and keys are in the router's configuration; metrics are at /metrics",
    "/v1/usage": "metrics are at /metrics",
    "/v1/tokenize": "call /tokenize",
    "/v1/detokenize": "call /detokenize",
    "/api/generate": f"{_OLLAMA}; {_GENERATE}",
    "/api/chat": f"{_OLLAMA}; call /v1/chat/completions",
    "/api/tags": f"{_OLLAMA}; /v1/models lists the models",
    "/api/show": f"{_OLLAMA}; /v1/models lists the models",
    "/api/ps": f"{_OLLAMA}; /v1/cluster lists what runs",
    "/api/version": f"{_OLLAMA}; /version has the version",
    "/api/embed": f"{_TEXT_ONLY}; embeddings need another server",
    "/api/pull": f"{_OLLAMA}; `eyas serve MODEL` fetches and serves a model",
    "/api": f"{_OLLAMA}; its base URL is this one with /v1 at its end",
    "/completion": "call /v1/completions",
    "/infill": "call /v1/completions with suffix",
    "/generate_stream": f"{_GENERATE}; `stream: true` streams",
    "/generate": _GENERATE,
    "/invocations": _GENERATE,
    "/inference/v1/generate": _GENERATE,
    "/apply-template": "call /tokenize with messages",
    "/props": "/v1/models lists the models, /v1/cluster their workers",
    "/slots": "/v1/cluster lists the workers with their load",
    "/info": "/v1/models lists the models, /version has the version",
    "/get_model_info": "/v1/models lists the models",
    "/get_server_info": "/v1/cluster lists the workers, /version has the version",
    "/server_info": "/v1/cluster lists the workers, /version has the version",
    "/health_generate": "call /health",
    "/healthz": "call /live, /ready or /health",
    "/livez": "call /live",
    "/readyz": "call /ready",
    "/load": "/v1/cluster lists the workers with their load",
    "/is_sleeping": "Eyas has no sleep mode; stop the verifier, and the router waits for another one",
    "/sleep": "Eyas has no sleep mode; stop the verifier, and the router waits for another one",
    "/wake_up": "Eyas has no sleep mode; start a verifier",
    "/reset_prefix_cache": "prefix caches are bounded and need no reset; a cache_salt keeps a request's apart",
    "/flush_cache": "prefix caches are bounded and need no reset; a cache_salt keeps a request's apart",
    "/start_profile": "docs/telemetry.md says how to trace requests",
    "/stop_profile": "docs/telemetry.md says how to trace requests",
}
_MAX_PARTS = 8  # of a path that are looked at


def instead_of(path: str, routes: Collection[str]) -> str:
    """Return what to call instead of a path, as the end of a sentence; empty if that is unknown.

    routes: the paths that exist.
    """
    parts = [part for part in path.lower().split("/", _MAX_PARTS + 1)[1 : _MAX_PARTS + 1] if part]
    plain = "/" + "/".join(parts)
    candidates = [plain, f"/v1{plain}", plain.replace("/v1/v1/", "/v1/", 1), plain.removeprefix("/v1")]
    if found := next((one for one in candidates if one in routes and one != path), ""):
        doubled = "; the base URL ends with /v1 already" if plain.startswith("/v1/v1/") else ""
        return f"call {found}{doubled}"
    for length in range(len(parts), 0, -1):
        if reason := _INSTEAD.get("/" + "/".join(parts[:length])):
            return reason
    return ""
