"""What every pod of every rendering has: probes, limits, few rights, mounts that exist, time to drain."""

import re
from typing import Any

import pytest

from eyas.rpc.server import LIVE
from tests.deploy.charts import RENDERINGS, configs, containers, pod_templates, rendered

each_rendering = pytest.mark.parametrize("name", RENDERINGS)


@each_rendering
def test_every_container_is_probed_for_start_readiness_and_life(name: str) -> None:
    for place, container in containers(rendered(name)):
        probes = [container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")]
        assert all(probes), place
        startup, readiness, liveness = probes
        assert readiness != liveness, f"{place}: readiness is apart from liveness"
        assert readiness["periodSeconds"] < liveness["periodSeconds"], place
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 60, place


@each_rendering
def test_a_worker_that_is_not_serving_is_alive(name: str) -> None:
    """Readiness asks for the whole server, liveness for the event loop; a process without it gets little time to end."""
    for place, container in containers(rendered(name)):
        if place.startswith("RayService") or container["name"] == "redis":
            continue
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        if container["name"] == "router":
            asked = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
            assert asked == {"startup": "/live", "readiness": "/ready", "liveness": "/live"}, place
        else:
            asked = {kind: service_of(probe) for kind, probe in probes.items()}
            assert asked == {"startup": "", "readiness": "", "liveness": LIVE}, place
        assert probes["liveness"]["terminationGracePeriodSeconds"] < 60, place


def service_of(probe: dict[str, Any]) -> str:
    """The name that a probe asks for in the health protocol."""
    command = probe.get("exec", {}).get("command", ())
    return str(command[command.index("--service") + 1] if command else probe["grpc"]["service"])


@each_rendering
def test_probes_ask_at_ports_that_the_container_has(name: str) -> None:
    for place, container in containers(rendered(name)):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startup", "readiness", "liveness"):
            probe = container[f"{kind}Probe"]
            asked = next((probe[way]["port"] for way in ("grpc", "httpGet", "tcpSocket") if way in probe), None)
            ray_agent = 52365 if place.startswith("RayService") else None
            assert asked in {*ports, *ports.values(), None, ray_agent}, f"{place}: {kind}"


@each_rendering
def test_every_container_has_limits_and_no_rights_to_spare(name: str) -> None:
    for place, container in containers(rendered(name)):
        assert {"cpu", "memory"} <= set(container["resources"]["limits"]), place
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), place
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, place
    for place, pod in pod_templates(rendered(name)):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"], place
        assert security["runAsUser"] > 0, place
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, place


def test_a_gpu_pod_has_as_many_gpus_as_its_ranks() -> None:
    def gpus(rendering: str) -> dict[str, Any]:
        found = {place.split()[0]: container["resources"] for place, container in containers(rendered(rendering))}
        return {place: resources["limits"].get("nvidia.com/gpu") for place, resources in found.items()}

    assert gpus("host path")["StatefulSet"] == "4"
    assert gpus("70b-tp4-multinode")["LeaderWorkerSet"] == "1"
    assert gpus("cpu-demo")["StatefulSet"] is None


@each_rendering
def test_mounts_and_volumes_belong_together(name: str) -> None:
    for place, pod in pod_templates(rendered(name)):
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        mounts = [mount["name"] for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts), place
        assert len(set(volumes)) == len(volumes), place


@each_rendering
def test_processes_write_only_to_writable_volumes(name: str) -> None:
    for place, container in containers(rendered(name)):
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        folders = [item["value"] for item in container["env"] if item["name"] in ("HOME", "HF_HOME")]
        assert all(any(folder.startswith(top) for top in writable) for folder in folders), place


@each_rendering
def test_files_that_settings_name_are_mounted(name: str) -> None:
    settings, found = configs(name), 0
    for place, container in containers(rendered(name)):
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in paths(settings.get(f"{container['name']}.yaml", {})):
            found += 1
            assert any(path.startswith(f"{mount}/") for mount in mounts), f"{place}: {path}"
    assert bool(found) == (name not in {"open", "ray"})


def paths(node: Any) -> list[str]:
    """Every absolute path in a file of settings."""
    if isinstance(node, dict | list):
        return [path for item in (node.values() if isinstance(node, dict) else node) for path in paths(item)]
    return [node] if isinstance(node, str) and node.startswith("/") else []


@each_rendering
def test_arguments_refer_to_existing_environment_variables(name: str) -> None:
    injected = {"LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"} if "multinode" in name else set()
    for place, container in containers(rendered(name)):
        known = set(injected)
        for item in container["env"]:
            assert set(re.findall(r"\$\((\w+)\)", item.get("value") or "")) <= known, f"{place}: {item}"
            known.add(item["name"])
        for argument in container.get("args", ()):
            assert set(re.findall(r"\$\((\w+)\)", argument)) <= known, f"{place}: {argument}"


@each_rendering
def test_no_command_line_takes_a_variable_of_a_secret(name: str) -> None:
    """Kubernetes expands $(NAME) before the start, so every process of the node could read it."""
    found = 0
    for place, container in containers(rendered(name)):
        secret = [item["name"] for item in container["env"] if "secretKeyRef" in item.get("valueFrom", {})]
        hooks = [container.get(key, {}) for key in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle")]
        words = str([container.get("command"), container.get("args"), hooks])
        assert not [variable for variable in secret if f"$({variable})" in words], place
        found += len(secret)
    assert found or name in {"kubernetes discovery, no redis", "external redis by url"}


@each_rendering
def test_everything_that_pods_refer_to_exists(name: str) -> None:
    objects = rendered(name)
    own = {(item["kind"], item["metadata"]["name"]) for item in objects}
    brought = {"redis", "token", "ray", "router-tls", "peers", "keys", "hub-token", "checkpoints", "eyas-hub-cache"}
    for place, pod in pod_templates(objects):
        wanted = {("ServiceAccount", pod["spec"].get("serviceAccountName", "default"))}
        for volume in pod["spec"]["volumes"]:
            wanted |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
            wanted |= {("Secret", volume["secret"]["secretName"])} if "secret" in volume else set()
        for container in pod["spec"]["containers"]:
            sources = [item["valueFrom"] for item in container["env"] if "valueFrom" in item]
            wanted |= {("Secret", source["secretKeyRef"]["name"]) for source in sources if "secretKeyRef" in source}
        missing = {item for item in wanted - own if item[1] not in brought and item != ("ServiceAccount", "default")}
        assert not missing, place


@each_rendering
def test_the_kill_comes_later_than_the_longest_drain(name: str) -> None:
    drained = 0
    for place, pod in pod_templates(rendered(name)):
        (container,) = pod["spec"]["containers"]
        if f"{container['name']}.yaml" not in (settings := configs(name)):
            continue
        drained += 1
        server = settings[f"{container['name']}.yaml"]["server"]
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert (
            pod["spec"]["terminationGracePeriodSeconds"]
            > before + server["shutdown_delay_s"] + server["graceful_shutdown_timeout_s"]
        ), place
    assert drained >= 2 or name == "ray"


@each_rendering
def test_api_server_tokens_are_mounted_only_where_needed(name: str) -> None:
    asking = {"router", "verifier"} if "kubernetes discovery" in name else set()
    for _, pod in pod_templates(rendered(name)):
        if pod["spec"].get("automountServiceAccountToken"):
            assert pod["metadata"]["labels"]["app.kubernetes.io/component"] in asking
