"""Services of a cluster: EndpointSlices that follow the probes of a node's pods, and their API server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.deploy.charts import of_kind
from tests.deploy.running.kubelet import PERIOD, Node, Pod, selects
from tests.deploy.running.substitutions import ADDRESS, KUBECONFIG
from tests.support.services.api_server import ApiServer, pod, running


@contextmanager
def control_plane(node: Node) -> Iterator[ApiServer]:
    """Follow the node's present and later pods. A pod with API access gets the server's address."""
    server, over = ApiServer(), threading.Event()
    cluster = {"name": "test", "cluster": {"server": server.url}}
    context = {"name": "test", "context": {"cluster": "test", "user": ""}}
    file = {"clusters": [cluster], "contexts": [context], "current-context": "test", "users": []}
    (node.folder / KUBECONFIG).write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config"} | file))
    thread = threading.Thread(target=lambda: asyncio.run(_follow(node, server, over)))
    thread.start()
    try:
        yield server
    finally:
        over.set()
        thread.join()


async def _follow(node: Node, server: ApiServer, over: threading.Event) -> None:
    sent: dict[str, bool] = {}
    async with running(server):
        while not over.is_set():
            for one in list(node.started):
                ready = await asyncio.to_thread(_is_ready, one)
                if sent.get(one.name) != ready:
                    _send(node, server, one, ready)
                sent[one.name] = ready
            await asyncio.sleep(PERIOD)


def _is_ready(one: Pod) -> bool:
    return hasattr(one, "process") and not one.leaving and one.passes("readiness")


def _send(node: Node, server: ApiServer, one: Pod, ready: bool) -> None:
    """A slice for each port of each Service that selects the pod."""
    for service in of_kind(node.objects, "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        for port in spec["ports"] if selects(spec, one.template) else ():
            address = f"{ADDRESS}:{one.port(port['targetPort'])}"
            endpoint = pod(address, one.name, ready=ready, serving=ready, terminating=one.leaving)
            label = f"kubernetes.io/service-name={name}"
            server.put(f"{name}-{one.name}-{port['name']}", address, endpoint, label=label, port_name=port["name"])
