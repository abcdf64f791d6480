"""A small Kubernetes API server that knows EndpointSlices: lists with a resourceVersion, watches in chunks, bookmarks, 410.

It can miss an event, fall silent, forget its history, refuse, and be away.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from eyas.services.local.cluster import free_port

NAMESPACE = "eyas"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
KIND = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
VERIFIERS = "app.kubernetes.io/component=verifier"

Json = dict[str, Any]

EXPIRED: Json = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"},
}


def pod(address: str, uid: str = "uid", zone: str | None = None, **conditions: bool) -> Json:
    """An endpoint of a slice; its port belongs to the slice."""
    host = address.rpartition(":")[0]
    endpoint: Json = {"addresses": [host], "targetRef": {"kind": "Pod", "uid": uid}, "zone": zone}
    return endpoint | ({"conditions": conditions} if conditions else {})


@dataclass
class ApiServer:
    """State of the server, changed by tests. url: where it listens.

    mute: watches get no events and do not end. oldest: watches from before this version get a 410 event.
    error_status: status of every answer, if not 0.
    """

    port: int = field(default_factory=free_port)
    slices: dict[str, Json] = field(default_factory=dict)
    mute: bool = False
    oldest: int = 0
    error_status: int = 0
    version: int = 100
    num_lists: int = 0
    _history: list[tuple[int, Json]] = field(default_factory=list)
    _queues: dict[int, asyncio.Queue[Json]] = field(default_factory=dict)
    _requests: list[web.Request] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, name: str, address: str, *endpoints: Json, label: str = VERIFIERS, port_name: str = "grpc") -> None:
        """Make or change a slice whose port is that of `address`."""
        key, value = label.split("=")
        known = name in self.slices
        self.slices[name] = KIND | {
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {key: value}},
            "addressType": "IPv4",
            "endpoints": list(endpoints) or None,
            "ports": [{"name": port_name, "port": int(address.rpartition(":")[2]), "protocol": "TCP"}],
        }
        self._record("MODIFIED" if known else "ADDED", self.slices[name])

    def delete(self, name: str) -> None:
        """Remove a slice."""
        self._record("DELETED", self.slices.pop(name))

    def bookmark(self) -> None:
        """Send every watch a bookmark."""
        self._record("BOOKMARK", KIND | {"metadata": {}})

    def forget(self) -> None:
        """Expire all watches: each gets 410 and ends."""
        self.version += 1
        self.oldest = self.version
        self._send(EXPIRED)

    def hang_up(self) -> None:
        """Break all watches in mid-stream."""
        for request in self._requests:
            if request.transport:
                request.transport.abort()

    def _record(self, kind: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        event = {"type": kind, "object": json.loads(json.dumps(item))}
        self._history.append((self.version, event))
        self._send(event)

    def _send(self, event: Json) -> None:
        for queue in self._queues.values() if not self.mute else ():
            queue.put_nowait(event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
        if self.error_status:
            status = {"kind": "Status", "code": self.error_status, "reason": "Forbidden", "message": "not you"}
            return web.json_response(status, status=self.error_status)
        selector = request.query.get("labelSelector", "")
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request, selector)
        self.num_lists += 1
        items = [item for item in self.slices.values() if _matches(item, selector)]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response(KIND | {"kind": "EndpointSliceList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        self._requests.append(request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        queue = self._queues[number := next(self._numbers)] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        missed = [event for version, event in self._history if version > since and not self.mute]
        for event in [EXPIRED] if since < self.oldest else missed:
            queue.put_nowait(event)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"]) if not self.mute else None):
                while True:
                    event = await queue.get()
                    if event["type"] in ("ERROR", "BOOKMARK") or _matches(event["object"], selector):
                        await response.write(json.dumps(event).encode() + b"\n")
                    if event["type"] == "ERROR":
                        break
        except TimeoutError:
            pass
        finally:
            del self._queues[number]
            self._requests.remove(request)
        await response.write_eof()
        return response

    @property
    def num_watching(self) -> int:
        """Watches under way."""
        return len(self._queues)


def _matches(item: Json, selector: str) -> bool:
    key, _, value = selector.partition("=")
    return bool(item["metadata"].get("labels", {}).get(key) == value)


@asynccontextmanager
async def running(server: ApiServer) -> AsyncIterator[ApiServer]:
    """Serve on the server's port; at the end all connections break."""
    app = web.Application()
    app.router.add_get(PATH, server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    try:
        yield server
    finally:
        server.hang_up()
        await runner.cleanup()
