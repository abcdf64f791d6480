"""The HTTP routes of a router: OpenAI's and Anthropic's APIs below /v1, and health and metrics for operators.

To add a route, register it in `build_app` or in one of the `_add_*_routes` functions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from starlette.middleware.cors import CORSMiddleware

from eyas import __version__
from eyas.config import HttpConfig
from eyas.errors import UnknownModel
from eyas.rpc.admission import Admission
from eyas.services.router.auth.keys import Access, ApiKeys
from eyas.services.router.auth.middleware import Authenticator
from eyas.services.router.dispatch.generation import GenerationService
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.http.bodies.base import FieldPolicy, JsonRoute, body_model, field_names
from eyas.services.router.http.endpoints import MAX_QUOTED_NAME, GenerationEndpoints
from eyas.services.router.http.errors import add_error_handlers
from eyas.services.router.http.playground import add_playground, cluster_state
from eyas.services.router.http.streaming import BodyLimit, HeadAsGet
from eyas.services.router.telemetry import HttpMetrics, RouterTelemetry
from eyas.telemetry.exporters import exposition

ANY_PORT = ":*"
DOCS_PAGE = Path(__file__).with_name("docs.html")
RATE_LIMIT_HEADERS = [f"{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")]


def build_app(
    service: GenerationService,
    readiness: ReadinessMonitor,
    keys: ApiKeys,
    telemetry: RouterTelemetry,
    config: HttpConfig | None = None,
    admission: Admission | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        telemetry: counts every response.
        admission: the bounds of bodies, shared with the gRPC server.
    """
    admission = admission or Admission()
    config = config or HttpConfig()
    app = FastAPI(title="Eyas", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = JsonRoute
    app.state.max_request_values = admission.limits.max_request_values
    app.state.service = service
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, admission=admission)
    app.add_middleware(Authenticator, keys=keys)
    if config.cors_allow_origins:
        exposed = ["X-Request-Id", "Retry-After", *(f"x-ratelimit-{what}" for what in RATE_LIMIT_HEADERS)]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in config.cors_allow_origins if not origin.endswith(ANY_PORT)],
            allow_origin_regex=_any_port(config.cors_allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    app.add_middleware(HttpMetrics, telemetry=telemetry)
    add_error_handlers(app)
    endpoints = GenerationEndpoints(service, config.keepalive_interval_s)
    app.post("/v1/completions", response_model=None)(endpoints.complete)
    app.post("/v1/chat/completions", response_model=None)(endpoints.chat)
    app.post("/v1/responses", response_model=None)(endpoints.responses)
    app.post("/v1/messages", response_model=None)(endpoints.messages)
    app.post("/v1/messages/count_tokens")(endpoints.count_tokens)
    app.post("/tokenize", response_model=None)(endpoints.tokenize)
    app.post("/detokenize", response_model=None)(endpoints.detokenize)
    _add_model_routes(app, service)
    _add_cluster_route(app, readiness)
    _add_probe_routes(app, readiness)
    if config.playground:
        add_playground(app)
    if config.operations_port is None:
        _add_operations_routes(app, readiness, app)
    app.state.field_policy = FieldPolicy(config.unknown_fields, _fields_of_bodies(app))
    return app


def _fields_of_bodies(app: FastAPI) -> frozenset[str]:
    models = [body_model(route) for route in app.routes if isinstance(route, APIRoute)]
    return frozenset[str]().union(*(field_names(model) for model in models if model is not None))


def build_operations_app(readiness: ReadinessMonitor, api: FastAPI) -> FastAPI:
    """Build the application of the operations port: probes, health, metrics, and the schema of `api`."""
    app = FastAPI(title="Eyas operations", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(HeadAsGet)
    _add_probe_routes(app, readiness)
    _add_operations_routes(app, readiness, api)
    return app


def _add_model_routes(app: FastAPI, service: GenerationService) -> None:
    created = int(time.time())

    def model_object(name: str) -> dict[str, Any]:
        lengths = {info.name: info.max_model_len for info in service.models()}
        named = {"id": name, "object": "model", "created": created, "owned_by": "eyas"}
        return named | {"max_model_len": lengths.get(name)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the configured models. max_model_len is null while no verifier serves a model."""
        return {"object": "list", "data": list(map(model_object, service.names))}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of Eyas."""
        return {"version": __version__}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe one of them."""
        if name not in service.names:
            raise UnknownModel(f"model {name[:MAX_QUOTED_NAME]!r} is not served here", "model")
        return model_object(name)


def _add_cluster_route(app: FastAPI, readiness: ReadinessMonitor) -> None:
    @app.get("/v1/cluster")
    async def cluster(request: Request) -> dict[str, Any]:
        """Report the live workers and their load. Only a key with the scope "cluster" gets their addresses."""
        access: Access = request.state.access
        return cluster_state(readiness, has_addresses=access.key is not None)


def _status(reason: str, good: str, bad: str, **details: Any) -> JSONResponse:
    if reason:
        return JSONResponse({"status": bad, "reason": reason} | details, 503)
    return JSONResponse({"status": good} | details)


def _add_probe_routes(app: FastAPI, readiness: ReadinessMonitor) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """Answer while the process runs."""
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Report whether the router takes requests, and if not, why. Without a verifier it does, and answers with 503.

        A ready router says as a warning that Redis is away.
        """
        warning = {"warning": readiness.warning} if readiness.warning and not readiness.reason else {}
        return _status(readiness.reason, "ready", "not ready", **warning)

    @app.get("/ping")
    @app.post("/ping", include_in_schema=False)
    async def ping() -> JSONResponse:
        """Report whether requests can be served, as /health does, under the name that SageMaker and vLLM have for it."""
        return _status(readiness.outage, "healthy", "unhealthy")


def _add_operations_routes(app: FastAPI, readiness: ReadinessMonitor, api: FastAPI) -> None:
    page = DOCS_PAGE.read_text(encoding="utf-8")
    app.get("/openapi.json", include_in_schema=False)(api.openapi)  # in a thread, because the first time takes a while

    @app.get("/health")
    async def health() -> JSONResponse:
        """Report whether requests can be served, and if not, why; with the number of workers of each model."""
        workers, reachable = readiness.workers.snapshot(), readiness.workers.reachable
        models = {
            name: {
                "verifiers": sum(lease.model.name == name for lease in workers.verifiers),
                "reachable_verifiers": sum(lease.model.name == name for lease in reachable),
                "drafters": sum(lease.model.name == name for lease in workers.drafters),
            }
            for name in sorted({lease.model.name for lease in (*workers.verifiers, *workers.drafters)})
        }
        return _status(readiness.outage, "healthy", "unhealthy", models=models)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Show the routes and fields of /openapi.json. The page loads nothing else."""
        return HTMLResponse(page)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Expose the metrics to Prometheus."""
        content_type, body = exposition(request.headers.get("accept", ""), REGISTRY)
        return Response(body, headers={"Content-Type": content_type})


def _any_port(origins: Sequence[str]) -> str | None:
    """Return a regular expression of the origins whose port may be any; None without such origins."""
    hosts = [re.escape(origin.removesuffix(ANY_PORT)) for origin in origins if origin.endswith(ANY_PORT)]
    return rf"(?:{'|'.join(hosts)})(?::[0-9]{{1,5}})?" if hosts else None
