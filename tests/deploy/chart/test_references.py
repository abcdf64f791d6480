"""References between objects hold: selectors match, ports exist, named objects exist."""

import pytest
import yaml

from tests.deploy.charts import RENDERINGS, Object, configs, matches, named, of_kind, pod_templates, rendered

each_rendering = pytest.mark.parametrize("name", RENDERINGS)


def pods(name: str) -> list[Object]:
    return [pod for _, pod in pod_templates(rendered(name))]


def selected(name: str, selector: Object) -> list[Object]:
    return [pod for pod in pods(name) if matches(selector, pod["metadata"]["labels"])]


@each_rendering
def test_workloads_select_their_own_pods(name: str) -> None:
    for item in of_kind(rendered(name), "Deployment", "StatefulSet"):
        found = selected(name, item["spec"]["selector"])
        assert found == [item["spec"]["template"]], item["metadata"]["name"]


@each_rendering
def test_services_budgets_and_policies_select_one_component_each(name: str) -> None:
    for item in of_kind(rendered(name), "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = item["spec"]
        if item["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
        else:
            selector = spec["selector" if item["kind"] == "PodDisruptionBudget" else "podSelector"]
        components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in selected(name, selector)}
        assert len(components) == 1, f"{item['kind']} {item['metadata']['name']}: {components}"


@each_rendering
def test_service_ports_exist_in_their_pods(name: str) -> None:
    for service in of_kind(rendered(name), "Service"):
        for pod in selected(name, {"matchLabels": service["spec"]["selector"]}):
            names = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names, service["metadata"]["name"]


def test_the_service_of_clients_has_no_metrics() -> None:
    service = named(rendered("monitored"), "Service", "demo-eyas-router")
    assert [port["name"] for port in service["spec"]["ports"]] == ["grpc", "http"]


def test_http_and_grpc_of_a_ray_service_have_a_service() -> None:
    """KubeRay makes one for the port of the head that is named serve, and none without it."""
    head = next(pod for name, pod in pod_templates(rendered("ray")) if name.endswith("head"))
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    (service,) = of_kind(rendered("ray"), "RayService")
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert ports["serve"] == serve["http_options"]["port"]
    assert ports["grpc"] == serve["grpc_options"]["port"]
    router = named(rendered("ray"), "Service", "demo-eyas-router")
    assert [port["targetPort"] for port in router["spec"]["ports"]] == ["grpc"]
    assert router["metadata"]["annotations"] == {"team": "a"}


@each_rendering
def test_a_stateful_set_names_its_headless_service(name: str) -> None:
    headless = [s["metadata"]["name"] for s in of_kind(rendered(name), "Service") if s["spec"].get("clusterIP") == "None"]
    assert all(item["spec"]["serviceName"] in headless for item in of_kind(rendered(name), "StatefulSet"))


@each_rendering
def test_scalers_scale_what_there_is_and_never_two_the_same(name: str) -> None:
    objects = rendered(name)
    targets = [item["spec"]["scaleTargetRef"] for item in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")]
    keys = [(target["apiVersion"], target["kind"], target["name"]) for target in targets]
    assert len(set(keys)) == len(keys)
    for version, kind, scaled in keys:
        (item,) = [o for o in objects if (o["apiVersion"], o["kind"], o["metadata"]["name"]) == (version, kind, scaled)]
        assert "replicas" not in item["spec"], "an upgrade would undo the scaling"


@each_rendering
def test_the_service_monitor_finds_every_service_and_its_port(name: str) -> None:
    objects = rendered(name)
    for monitor in of_kind(objects, "ServiceMonitor"):
        found = [s for s in of_kind(objects, "Service") if matches(monitor["spec"]["selector"], s["metadata"]["labels"])]
        components = [service["spec"]["selector"]["app.kubernetes.io/component"] for service in found]
        assert sorted(components) == ["draft", "router", "verifier"]
        for endpoint in monitor["spec"]["endpoints"]:
            assert all(endpoint["port"] in {port["name"] for port in service["spec"]["ports"]} for service in found)


@each_rendering
def test_roles_are_bound_to_accounts_that_exist(name: str) -> None:
    objects = rendered(name)
    accounts = {item["metadata"]["name"] for item in of_kind(objects, "ServiceAccount")}
    bindings = of_kind(objects, "RoleBinding")
    assert bool(bindings) == ("kubernetes discovery" in name)
    for binding in bindings:
        (role,) = [r for r in of_kind(objects, "Role") if r["metadata"]["name"] == binding["roleRef"]["name"]]
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        assert {subject["name"] for subject in binding["subjects"]} <= accounts


@each_rendering
def test_no_password_stands_outside_of_a_secret(name: str) -> None:
    for item in rendered(name):
        if item["kind"] != "Secret":
            assert "redis://:" not in str(item), f"{item['kind']} {item['metadata']['name']}"
    for secret in of_kind(rendered(name), "Secret"):
        made = secret["stringData"].get("password") or secret["stringData"]["token"]
        assert len(made) >= 32
        assert not [item for item in rendered(name) if item["kind"] != "Secret" and made in str(item)]


@each_rendering
def test_the_services_share_a_token_unless_it_is_switched_off(name: str) -> None:
    secrets = [item for item in of_kind(rendered(name), "Secret") if item["metadata"]["name"] == "demo-eyas-token"]
    assert len(secrets) == (name not in ("open", "external redis by url")), "one of its own, if none is brought"
    expected = {"open": None, "external redis by url": "/etc/eyas-token/shared"}.get(name, "/etc/eyas-token/token")
    settings = configs(name)
    assert set(settings) >= {"router.yaml", "verifier.yaml"}
    for service in settings.values():
        assert service.get("peers", {}).get("token_file") == expected
