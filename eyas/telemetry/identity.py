"""Who tells: the service, its version and its instance, for metrics and for everything that is exported."""

from __future__ import annotations

import uuid
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import OTELResourceDetector, Resource


def package_version() -> str:
    """The installed version of Eyas; "unknown" in a checkout that is not installed."""
    try:
        return version("eyas")
    except PackageNotFoundError:
        return "unknown"


def resource(service: str) -> Resource:
    """Who exports: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before what Eyas says of itself."""
    own = {"service.name": f"eyas-{service}", "service.version": package_version(), "service.instance.id": uuid.uuid4().hex}
    return Resource.create(Resource(own).merge(OTELResourceDetector().detect()).attributes)
