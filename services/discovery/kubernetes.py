"""Endpoints from Kubernetes: EndpointSlices are listed, watched, and listed again.

A watch may miss an event, stall without an error, or be refused. So it is used for `resync_interval_s` at most, and every
list replaces what was known before.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration, DiscoveryV1Api, V1Endpoint, V1EndpointSlice
from kubernetes.aio.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config
from kubernetes.aio.watch import Watch

from eyas.config import DiscoveryConfig, KubernetesConfig
from eyas.errors import ConfigError
from eyas.rpc.messages import Role
from eyas.services.discovery.base import Endpoint, EndpointSource, OnEndpoints

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIST_TIMEOUT_S = 10.0
RETRY_S = 0.5
HTTP_GONE = 410

log = logging.getLogger(__name__)


class KubernetesEndpoints(EndpointSource):
    """EndpointSlices: ready endpoints, with the UID of their pod as identity."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._config = config.kubernetes
        self._selectors: dict[Role, str] = {
            "verifier": config.kubernetes.verifier_selector,
            "draft": config.kubernetes.draft_selector,
        }
        self._client: ApiClient | None = None
        self._namespace = ""

    async def open(self) -> None:
        """Find the API server. Raises ConfigError if there is none."""
        if self._client is None:
            self._client, self._namespace = await open_api(self._config)

    async def close(self) -> None:
        """Close all connections to the API server."""
        if self._client is not None:
            await self._client.close()

    async def follow(self, role: Role, on_endpoints: OnEndpoints) -> None:
        """List and watch in turns. Log once while the API server cannot be read."""
        away = False

        def update(slices: Iterable[V1EndpointSlice]) -> None:
            nonlocal away
            if away:
                log.info("the Kubernetes API server answers again")
            away = False
            on_endpoints(self._endpoints(slices))

        while True:
            try:
                await self._list_and_watch(role, update)
            except Exception as error:
                away = away or _is_outage(role, error)
            await asyncio.sleep(RETRY_S)

    async def _list_and_watch(self, role: Role, update: Callable[[Iterable[V1EndpointSlice]], None]) -> None:
        """Call `update` with all slices now and after each change, for `resync_interval_s`.

        A watch without events and a stalled one look the same, so neither goes on for longer.
        """
        assert self._client is not None, "open comes first"
        read = DiscoveryV1Api(self._client).list_namespaced_endpoint_slice
        namespace, selector = self._namespace, self._selectors[role]
        async with asyncio.timeout(LIST_TIMEOUT_S):
            found = await read(namespace, label_selector=selector)
        slices = {_name(item): item for item in found.items}
        update(slices.values())
        version, seconds = found.metadata.resource_version if found.metadata else None, self._config.resync_interval_s
        with suppress(TimeoutError, aiohttp.ClientError):  # the next list shows whether the server is away
            async with asyncio.timeout(seconds), Watch() as watch:
                async for event in watch.stream(
                    read,
                    namespace,
                    label_selector=selector,
                    resource_version=version,
                    timeout_seconds=math.ceil(seconds),
                    allow_watch_bookmarks=True,
                ):
                    if event["type"] == "DELETED":
                        slices.pop(_name(event["object"]), None)
                    elif event["type"] != "BOOKMARK":
                        slices[_name(event["object"])] = event["object"]
                    update(slices.values())

    def _endpoints(self, slices: Iterable[V1EndpointSlice]) -> Iterator[Endpoint]:
        """Yield the endpoints that take work, on their gRPC port."""
        for part in slices:
            ports = [port.port for port in part.ports or () if port.name == self._config.port_name and port.port]
            for endpoint in part.endpoints or () if ports else ():
                if _takes_work(endpoint):
                    host = f"[{endpoint.addresses[0]}]" if part.address_type == "IPv6" else endpoint.addresses[0]
                    identity = endpoint.target_ref.uid if endpoint.target_ref else ""
                    yield Endpoint(f"{host}:{ports[0]}", identity or "", endpoint.zone or "")


async def open_api(config: KubernetesConfig) -> tuple[ApiClient, str]:
    """Return an open client and a namespace: of the settings, else of this pod, else of the kubeconfig. Does not dial yet.

    Raises ConfigError if there is none.
    """
    target = Configuration(host=config.api_server or None)
    namespace = "default"
    if not config.api_server:
        try:
            load_incluster_config(client_configuration=target)
            namespace = OWN_NAMESPACE.read_text().strip()
        except (ConfigException, OSError) as error:
            namespace = await _from_kubeconfig(target, str(error))
    return ApiClient(target), config.namespace or namespace


async def _from_kubeconfig(target: Configuration, not_in_a_pod: str) -> str:
    """Fill in `target` from the kubeconfig; return the namespace of its context."""
    try:
        await load_kube_config(client_configuration=target)
        _, context = list_kube_config_contexts()
    except ConfigException as error:
        raise ConfigError(
            f"discovery.kind is kubernetes, but this is no pod with a service account ({not_in_a_pod}) and there is no "
            f"kubeconfig ({error}); set automountServiceAccountToken, KUBECONFIG, or discovery.kubernetes.api_server"
        ) from error
    return str(context["context"].get("namespace", "default"))


def _name(part: V1EndpointSlice) -> str:
    return part.metadata.name or "" if part.metadata else ""


def _takes_work(endpoint: V1Endpoint) -> bool:
    """Return whether an endpoint takes work. Unknown conditions count as good, as the API's description asks."""
    conditions = endpoint.conditions
    if conditions is None:
        return True
    return conditions.ready is not False and conditions.serving is not False and not conditions.terminating


def _is_outage(role: Role, error: Exception) -> bool:
    """Return whether the API server cannot be read; logs why. An expired watch (410 Gone) is no outage."""
    if isinstance(error, ApiException) and error.status == HTTP_GONE:
        return False
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ApiException):
        reason = f"{error.status} {error.reason}"
        if error.status in (401, 403):
            reason += "; the service account needs get, list and watch on endpointslices of discovery.k8s.io"
    log.warning("cannot read the %s endpoints, keeping the last list: %s", role, reason)
    return True
