"""The way to a Kubernetes API server: settings in, a client and a namespace out. Knows nothing of what is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config

from eyas.config import KubernetesConfig
from eyas.errors import ConfigError

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
