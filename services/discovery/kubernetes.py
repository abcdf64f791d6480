"""The way to a Kubernetes API server: settings in, a client and a namespace out. Knows nothing of what is asked for.

Endpoints from Kubernetes: EndpointSlices are listed, watched, and listed again. Knows nothing of who answers there.

A watch may miss an event, stall without an error, or be refused; so it is trusted for `list_interval_s` at most, and
every list stands in place of all that was known before.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration, DiscoveryV1Api, V1Endpoint, V1EndpointSlice
from kubernetes.aio.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config
from kubernetes.aio.watch import Watch

from eyas.config import KubernetesConfig
from eyas.errors import ConfigError
from eyas.rpc.messages import Role
from eyas.services.discovery.base import Endpoint, Tell

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class ClusterApi:
    """An open client, to be closed by its owner, and where to ask."""

    client: ApiClient
    namespace: str


async def open_api(config: KubernetesConfig) -> ClusterApi:
    """The API server that the settings name, else the one of this pod, else that of the kubeconfig. Dials nobody yet.

    Raises ConfigError where there is none.
    """
    target = Configuration(host=config.api_server or None)
    namespace = "default"
    if not config.api_server:
        try:
            load_incluster_config(client_configuration=target)
            namespace = OWN_NAMESPACE.read_text().strip()
        except (ConfigException, OSError) as error:
            namespace = await _from_kubeconfig(target, str(error))
    return ClusterApi(ApiClient(target), config.namespace or namespace)


async def _from_kubeconfig(target: Configuration, not_in_a_pod: str) -> str:
    """Fill `target` in; gives back the context's namespace."""
    try:
        await load_kube_config(client_configuration=target)
        _, context = list_kube_config_contexts()
    except ConfigException as error:
        raise ConfigError(
            f"discovery.kind is kubernetes, but this is no pod with a service account ({not_in_a_pod}) and there is no "
            f"kubeconfig ({error}); set automountServiceAccountToken, KUBECONFIG, or discovery.kubernetes.api_server"
        ) from error
    return str(context["context"].get("namespace", "default"))


LIST_SECONDS = 10.0
PAUSE_SECONDS = 0.5
GONE = 410

log = logging.getLogger(__name__)


class SliceEndpoints:
    """Implements Endpoints by EndpointSlices: ready endpoints with their pod's UID as identity."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._selectors: dict[Role, str] = {"verifier": config.verifier_selector, "draft": config.draft_selector}
        self._api: ClusterApi | None = None

    async def open(self) -> None:
        """Find the API server. Raises ConfigError where there is none."""
        if self._api is None:
            self._api = await open_api(self._config)

    async def close(self) -> None:
        """Close all connections to it."""
        if self._api is not None:
            await self._api.client.close()

    async def follow(self, role: Role, tell: Tell) -> None:
        """List and watch in turns. While the server is away what was told last holds; the log says so once."""
        away = False

        def show(slices: Iterable[V1EndpointSlice]) -> None:
            nonlocal away
            if away:
                log.info("the Kubernetes API server answers again")
            away = False
            tell(self._endpoints(slices))

        while True:
            try:
                await self._round(role, show)
            except Exception as error:
                away = away or _complain(role, error)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _round(self, role: Role, show: Callable[[Iterable[V1EndpointSlice]], None]) -> None:
        """Show all slices now, and again after each change, for `list_interval_s` at most: a watch without events and a
        stalled one look the same."""
        assert self._api is not None, "open comes first"
        read = DiscoveryV1Api(self._api.client).list_namespaced_endpoint_slice
        namespace, selector = self._api.namespace, self._selectors[role]
        async with asyncio.timeout(LIST_SECONDS):
            found = await read(namespace, label_selector=selector)
        slices = {_name(item): item for item in found.items}
        show(slices.values())
        version, seconds = found.metadata.resource_version if found.metadata else None, self._config.list_interval_s
        with suppress(TimeoutError, aiohttp.ClientError):  # the next list says whether the server is away
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
                    show(slices.values())

    def _endpoints(self, slices: Iterable[V1EndpointSlice]) -> Iterator[Endpoint]:
        """The endpoints that may be sent work, on their port for gRPC."""
        for part in slices:
            ports = [port.port for port in part.ports or () if port.name == self._config.port_name and port.port]
            for endpoint in part.endpoints or () if ports else ():
                if _takes_work(endpoint):
                    host = f"[{endpoint.addresses[0]}]" if part.address_type == "IPv6" else endpoint.addresses[0]
                    identity = endpoint.target_ref.uid if endpoint.target_ref else ""
                    yield Endpoint(f"{host}:{ports[0]}", identity or "", endpoint.zone or "")


def _name(part: V1EndpointSlice) -> str:
    return part.metadata.name or "" if part.metadata else ""


def _takes_work(endpoint: V1Endpoint) -> bool:
    """Unknown conditions count as good ones, as the API's own description asks for."""
    conditions = endpoint.conditions
    if conditions is None:
        return True
    return conditions.ready is not False and conditions.serving is not False and not conditions.terminating


def _complain(role: Role, error: Exception) -> bool:
    """Whether the server is away; one that only forgot how a watch began is not."""
    if isinstance(error, ApiException) and error.status == GONE:
        return False
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ApiException):
        reason = f"{error.status} {error.reason}"
        if error.status in (401, 403):
            reason += "; the service account needs get, list and watch on endpointslices of discovery.k8s.io"
    log.warning("cannot read the %s endpoints, going on with what is known: %s", role, reason)
    return True
