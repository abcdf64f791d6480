"""Runs the pods of rendered workloads as a kubelet would: command, arguments, environment, files, probes, hooks, signals."""

import os
import random
import re
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.services.local.cluster import free_port
from tests.deploy.charts import Object, matches, named, of_kind
from tests.deploy.running.substitutions import ADDRESS, FIELDS, KUBECONFIG, WORKDIR, Local
from tests.support.services.forks import Popen

PERIOD = 0.5  # seconds between looks; a cluster's are longer


@dataclass
class Pod:
    """A pod of one container and its process. leaving: it is no longer an endpoint of its Services."""

    name: str
    template: Object
    local: Local
    objects: Sequence[Object]
    leaving: bool = False
    process: Popen[bytes] = field(init=False)

    @property
    def container(self) -> Object:
        (container,) = self.template["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def log(self) -> Path:
        return self.local.folder / f"{self.name}.log"

    def start(self) -> None:
        """Mount, resolve and run."""
        for volume in self.template["spec"]["volumes"]:
            mount = next(m for m in self.container["volumeMounts"] if m["name"] == volume["name"])
            folder = self.local.folder / self.name / mount["mountPath"].strip("/")
            folder.mkdir(parents=True)
            if "secret" in volume:
                for file, text in named(self.objects, "Secret", volume["secret"]["secretName"])["stringData"].items():
                    (folder / file).write_text(text)
            if "configMap" in volume:
                for file, text in named(self.objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                    (folder / file).write_text(self.local.config(self.name, text))
        words = [*self.container["command"], *self.container.get("args", ())]
        command = self.local.words(self.name, [self._expanded(word) for word in words])
        with self.log.open("wb") as log:
            self.process = Popen(command, cwd=WORKDIR, env=self._environment(), stdout=log, stderr=log)

    def passes(self, kind: str) -> bool:
        """Run the probe once; whether it passes."""
        probe = self.container[f"{kind}Probe"]
        if "exec" in probe:
            command = self.local.words(self.name, probe["exec"]["command"])
            return subprocess.run(command, env=self._environment(), capture_output=True, check=False).returncode == 0
        if "grpc" in probe:
            return _serves(f"{ADDRESS}:{self.port(probe['grpc']['port'])}", probe)
        if "tcpSocket" in probe:
            with socket.socket() as peer:
                return peer.connect_ex((ADDRESS, self.port(probe["tcpSocket"]["port"]))) == 0
        url = f"{probe['httpGet']['scheme'].lower()}://{ADDRESS}:{self.port(probe['httpGet']['port'])}{probe['httpGet']['path']}"
        return _answers(url, probe)

    def is_healthy(self) -> bool:
        """Whether a router says that requests can be served."""
        return _answers(f"http://{ADDRESS}:{self.port('operations')}/health", {"timeoutSeconds": 5})

    def wait(self, kind: str) -> None:
        """Return once the probe passes. Raises AssertionError with the log when the kubelet would have given up."""
        probe = self.container[f"{kind}Probe"]
        allowed = probe.get("failureThreshold", 3) * probe["periodSeconds"] if kind == "startup" else 200
        deadline = time.monotonic() + min(allowed, 200)
        while not self.passes(kind):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{self.name}: {kind}\n{self.log.read_text()}"
            time.sleep(PERIOD)

    def port(self, port: int | str) -> int:
        """The port of this machine for a container port, by number or name."""
        numbers = {item["name"]: item["containerPort"] for item in self.container["ports"]}
        return self.local.port(self.name, numbers.get(port, port))

    def terminate(self) -> None:
        """Run the preStop hook, then send the signal; do not wait for the exit."""
        self.leaving = True
        hook = self.container["lifecycle"]["preStop"]
        time.sleep(hook["sleep"]["seconds"])
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """The exit status, within the time that the pod has before it would be killed."""
        return self.process.wait(self.template["spec"]["terminationGracePeriodSeconds"])

    def _environment(self) -> dict[str, str]:
        out: dict[str, str] = {}
        for item in self.container["env"]:
            source = item.get("valueFrom", {})
            if "fieldRef" in source:
                value = FIELDS.get(source["fieldRef"]["fieldPath"], self.name)
            elif "secretKeyRef" in source:
                secret = named(self.objects, "Secret", source["secretKeyRef"]["name"])
                value = secret["stringData"][source["secretKeyRef"]["key"]]
            else:
                value = _expanded(item["value"], out)
            out[item["name"]] = self.local.text(self.name, value)
        if self.template["spec"].get("automountServiceAccountToken"):
            out["KUBECONFIG"] = str(self.local.folder / KUBECONFIG)
        return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **out}

    def _expanded(self, word: str) -> str:
        return _expanded(word, self._environment())


def _expanded(text: str, environment: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _serves(address: str, probe: Object) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"])
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(url: str, probe: Object) -> bool:
    """An HTTP probe; a kubelet does not verify certificates."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1), context=context) as answer:
            return 200 <= answer.status < 400
    except (urllib.error.URLError, OSError):
        return False


@dataclass
class Node:
    """The pods that run, and the Services over them. pods: the last of each workload, by its name."""

    objects: Sequence[Object]
    folder: Path
    pods: dict[str, Pod] = field(default_factory=dict)
    started: list[Pod] = field(default_factory=list)

    @property
    def workloads(self) -> dict[str, Object]:
        """The pod templates by the name of their workload."""
        found = of_kind(self.objects, "Deployment", "StatefulSet")
        return {item["metadata"]["name"]: item["spec"]["template"] for item in found}

    def start(self, *workloads: str) -> None:
        """Start one more pod of each; its name is the workload's with a number."""
        for workload in workloads:
            template, name = self.workloads[workload], f"{workload}-{len(self.started)}"
            (container,) = template["spec"]["containers"]
            ports = {(name, port["containerPort"]): free_port() for port in container["ports"]}
            known = {key: port for pod in self.started for key, port in pod.local.ports.items()}
            self.pods[workload] = Pod(name, template, Local(known | ports, self._services(), self.folder), self.objects)
            self.started.append(self.pods[workload])
        for workload in workloads:
            self.pods[workload].start()

    def wait(self, *workloads: str) -> None:
        """Return once the newest pods of these pass all their probes."""
        for kind in ("startup", "readiness", "liveness"):
            for workload in workloads:
                self.pods[workload].wait(kind)

    def wait_healthy(self) -> None:
        """Return once the routers reach a verifier; they are ready without one."""
        deadline = time.monotonic() + 250
        while not all(pod.is_healthy() for pod in self.started if pod.container["name"] == "router"):
            assert time.monotonic() < deadline, "no router reaches a verifier"
            time.sleep(PERIOD)

    def endpoint(self, service: str, port: str) -> str:
        """Address behind a port of the Service: any pod that is ready and not leaving."""
        spec = named(self.objects, "Service", service)["spec"]
        target = next(item["targetPort"] for item in spec["ports"] if item["name"] == port)
        there = [pod for pod in self.started if not pod.leaving and selects(spec, pod.template)]
        ready = [pod for pod in there if pod.passes("readiness")]
        assert ready, f"no pod of {service} is ready"
        return f"{ADDRESS}:{random.choice(ready).port(target)}"

    def _services(self) -> dict[str, str]:
        """The newest pod behind each Service."""
        return {
            service["metadata"]["name"]: pod.name
            for service in of_kind(self.objects, "Service")
            for pod in self.pods.values()
            if selects(service["spec"], pod.template)
        }


def selects(service: Object, template: Object) -> bool:
    """Whether the pods of a template are behind a Service. service: its spec."""
    return matches({"matchLabels": service["selector"]}, template["metadata"]["labels"])


@contextmanager
def running(objects: Sequence[Object], folder: Path) -> Iterator[Node]:
    """One pod of each workload, all of them ready; killed at the end."""
    with started(Node(objects, folder)) as node:
        yield node


@contextmanager
def started(node: Node) -> Iterator[Node]:
    """As `running`, on an existing node."""
    try:
        for workload in sorted(node.workloads, key=lambda name: not name.endswith("redis")):
            node.start(workload)
        node.wait(*node.workloads)
        node.wait_healthy()
        yield node
    finally:
        for pod in node.started:
            pod.process.kill()
            pod.process.wait()
