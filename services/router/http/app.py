"""The paths of the HTTP door: OpenAI's below /v1, and what an operator looks at. Knows no sockets and no workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import REGISTRY
from starlette.exceptions import HTTPException

from eyas.errors import EyasError, UnknownModel
from eyas.rpc.messages import ModelInfo
from eyas.services.router.api_keys import ApiKeys
from eyas.services.router.generation import GenerationService
from eyas.services.router.http.chat_template import ChatTemplate
from eyas.services.router.http.endpoints import ClientGone, OpenAIEndpoints
from eyas.services.router.http.requests import ChatBody, CompletionBody, problem
from eyas.services.router.http.responses import ErrorKind, ErrorResponse, refusal, status_refusal
from eyas.services.router.http.server import Authenticator
from eyas.services.router.registration import RouterRegistration
from eyas.services.router.telemetry import HttpMetrics, RouterTelemetry
from eyas.telemetry.exporters import exposition

# What nginx logs where the client closed the request; nobody reads it.
_CLIENT_GONE = 499


def build_app(
    front: GenerationService,
    templates: Mapping[str, ChatTemplate | None],
    presence: RouterRegistration,
    keys: ApiKeys,
    telemetry: RouterTelemetry,
) -> FastAPI:
    """The application. templates: of every model, None where it has none. telemetry: counts every answer."""
    app = FastAPI(title="Eyas", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Authenticator, keys=keys)
    app.add_middleware(HttpMetrics, routes=app.routes, observe=telemetry.http_response)
    _add_errors(app)
    _add_generation(app, OpenAIEndpoints(front, templates))
    _add_models(app, front)
    _add_operations(app, presence)
    return app


def _add_generation(app: FastAPI, serving: OpenAIEndpoints) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one or several prompts."""
        return await serving.complete(body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Write the assistant's next message."""
        return await serving.chat(body, request)


def _add_models(app: FastAPI, front: GenerationService) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for now."""
        return {"object": "list", "data": [_model(info, started) for info in front.models()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        found = next((info for info in front.models() if info.name == name), None)
        if found is None:
            raise UnknownModel(f"model {name!r} is not served here now", "model")
        return _model(found, started)


def _add_operations(app: FastAPI, presence: RouterRegistration) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """The process runs."""
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests can be served, and if not, why."""
        return JSONResponse(_state(presence), 503 if presence.reason else 200)

    @app.get("/health")
    async def health() -> JSONResponse:
        """As /ready, with the workers by model."""
        fleet, reachable = presence.workers.fleet(), presence.workers.reachable
        models = {
            name: {
                "verifiers": sum(lease.model.name == name for lease in fleet.verifiers),
                "reachable_verifiers": sum(lease.model.name == name for lease in reachable),
                "drafters": sum(lease.model.name == name for lease in fleet.drafters),
            }
            for name in sorted({lease.model.name for lease in (*fleet.verifiers, *fleet.drafters)})
        }
        return JSONResponse(_state(presence) | {"models": models}, 503 if presence.reason else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What Prometheus reads."""
        content_type, body = exposition(request.headers.get("accept", ""), REGISTRY)
        return Response(body, headers={"Content-Type": content_type})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(EyasError)
    async def eyas_error(request: Request, error: EyasError) -> JSONResponse:
        return _told(refusal(error))

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return _told(refusal(problem(error.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _told(status_refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        """The server logs the traceback."""
        return _told(ErrorResponse(ErrorKind(500, "server_error", "internal_error"), "internal error"))


def _told(refused: ErrorResponse) -> JSONResponse:
    return JSONResponse(refused.body, refused.kind.status, refused.headers)


def _state(presence: RouterRegistration) -> dict[str, Any]:
    return {"status": "not ready", "reason": presence.reason} if presence.reason else {"status": "ready"}


def _model(info: ModelInfo, created: int) -> dict[str, Any]:
    named = {"id": info.name, "object": "model", "created": created, "owned_by": "eyas"}
    return named | {"max_model_len": info.max_model_len}
