"""NetworkPolicies permit every connection that is used, and no other."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.charts import RENDERINGS, Object, configs, matches, of_kind, pod_templates, rendered

CLOSED = [name for name in RENDERINGS if name != "open"]
PORTS = {"router": 50050, "verifier": 50051, "draft": 50052, "redis": 6379}
STRANGER: Object = {"metadata": {"labels": {"app": "stranger"}, "namespace": "elsewhere"}}
OPERATOR_LABELS = {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"}
RAY_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "agent": 52365}

each_closed = pytest.mark.parametrize("name", CLOSED)


def pods_of(name: str) -> dict[str, Object]:
    """The pods by component; ranks that are not the first are their own."""
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for _, pod in pod_templates(rendered(name))}


def policies_on(name: str, pod: Object, direction: str) -> list[Object]:
    return [
        policy["spec"]
        for policy in of_kind(rendered(name), "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod["metadata"]["labels"]) and direction in policy["spec"]["policyTypes"]
    ]


def peers_allow(peers: list[Object] | None, pod: Object) -> bool:
    namespace = {"kubernetes.io/metadata.name": pod["metadata"].get("namespace", "eyas")}
    own: Object = {"matchLabels": {"kubernetes.io/metadata.name": "eyas"}}
    return not peers or any(
        matches(peer.get("namespaceSelector", own), namespace)
        and matches(peer.get("podSelector", {}), pod["metadata"]["labels"])
        for peer in peers
    )


def allows(rules: list[Object], side: str, pod: Object, port: int) -> bool:
    """Whether one of the rules opens the port to (or from) the pod."""
    return any(peers_allow(rule.get(side), pod) and port in ports_of(rule, port) for rule in rules)


def ports_of(rule: Object, default: int) -> set[int]:
    return {port["port"] for port in rule["ports"]} if "ports" in rule else {default}


def may_talk(name: str, client: Object, server: Object, port: int) -> bool:
    """Whether the cluster permits the connection. A side without a policy permits everything."""
    egress, ingress = policies_on(name, client, "Egress"), policies_on(name, server, "Ingress")
    out = not egress or any(allows(policy["egress"], "to", server, port) for policy in egress)
    return out and (not ingress or any(allows(policy["ingress"], "from", client, port) for policy in ingress))


def used(name: str) -> Iterator[tuple[str, str]]:
    """Which component connects to which."""
    parts = pods_of(name)
    discovering = [("router", "draft")] if "kubernetes discovery" in name else []
    for client, server in [("router", "verifier"), ("verifier", "draft"), *discovering]:
        if client in parts and server in parts:
            yield client, server
    for client in ("router", "verifier", "draft", "ray"):
        if "redis" in parts and client in parts:
            yield client, "redis"


@each_closed
def test_every_way_in_use_is_open_and_no_other(name: str) -> None:
    parts = pods_of(name)
    ways = set(used(name))
    for client in parts:
        for server, port in PORTS.items():
            if server in parts and client != server and server != "router" and not {client, server} & {"verifier-rank"}:
                assert may_talk(name, parts[client], parts[server], port) == ((client, server) in ways), (client, server)


@each_closed
def test_foreign_pods_reach_only_the_router(name: str) -> None:
    for component, pod in pods_of(name).items():
        if component in PORTS:
            assert may_talk(name, STRANGER, pod, PORTS[component]) == (component == "router"), component


@each_closed
def test_every_port_of_every_pod_is_in_a_policy(name: str) -> None:
    for component, pod in pods_of(name).items():
        (policy,) = policies_on(name, pod, "Ingress")
        opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
        anywhere = any("ports" not in rule for rule in policy["ingress"])
        has = {port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert anywhere or has <= opened, component


@each_closed
def test_names_can_be_looked_up(name: str) -> None:
    for component, pod in pods_of(name).items():
        policies = policies_on(name, pod, "Egress")
        open_ports: set[Any] = {port["port"] for p in policies for rule in p["egress"] for port in rule.get("ports", ())}
        assert not policies or component == "redis" or 53 in open_ports, component


def test_metrics_are_served_only_to_allowed_clients() -> None:
    scraper: Object = {"metadata": {"labels": {"app": "prometheus"}}}
    for component, pod in pods_of("host path").items():
        if component != "redis":
            assert may_talk("host path", scraper, pod, 9464)
            assert not may_talk("host path", STRANGER, pod, 9464), component


@each_closed
def test_clients_do_not_reach_the_operations_port(name: str) -> None:
    config = configs(name)["router.yaml"]["http"]
    assert config["operations_port"] not in (None, config["port"])
    for service in of_kind(rendered(name), "Service"):
        assert "operations" not in [port["targetPort"] for port in service["spec"]["ports"]]
    if name == "host path":
        assert not may_talk(name, STRANGER, pods_of(name)["router"], config["operations_port"])


def test_ranks_of_a_group_reach_each_other_at_any_port() -> None:
    parts = pods_of("70b-tp4-multinode")
    for port in (29500, 41234):
        assert may_talk("70b-tp4-multinode", parts["verifier-rank"], parts["verifier"], port)
        assert may_talk("70b-tp4-multinode", parts["verifier"], parts["verifier-rank"], port)
        assert not may_talk("70b-tp4-multinode", parts["router"], parts["verifier-rank"], port)


def test_only_the_operator_reaches_the_job_api_of_ray() -> None:
    """Also not a pod with the operator's labels elsewhere, and no pod of Eyas's own namespace."""
    ray = pods_of("ray")["ray"]
    operator: Object = {"metadata": {"labels": OPERATOR_LABELS, "namespace": "default"}}
    pretender: Object = {"metadata": {"labels": OPERATOR_LABELS, "namespace": "elsewhere"}}
    neighbour: Object = {"metadata": {"labels": {"app": "stranger"}}}
    assert [may_talk("ray", operator, ray, port) for port in (8265, 8000)] == [True, True]
    for other in (STRANGER, pretender, neighbour):
        assert not [name for name, port in RAY_PORTS.items() if may_talk("ray", other, ray, port)]
        assert may_talk("ray", other, ray, 8000), "clients reach the proxies"


def test_calls_of_the_control_plane_of_ray_need_a_token() -> None:
    (service,) = of_kind(rendered("ray"), "RayService")
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
