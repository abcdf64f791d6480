"""JSON schema of the chart's values. The schema below each `config` comes from the service's configuration class.

Unknown keys are rejected everywhere, except inside Kubernetes's own types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import TypeAdapter

from eyas.config import DraftConfig, RouterConfig, VerifierConfig
from eyas.config.router import ReasoningParser, ToolCallParser

Schema = dict[str, Any]

ANY: Schema = {"type": "object"}
LIST: Schema = {"type": "array", "items": {"type": "object"}}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
NAMES: Schema = {"type": "array", "items": NAME}
SWITCH: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}

# Settings that the chart sets itself; `config` must not contain them.
OWNED = (
    *("server.host", "server.port", "server.advertise_host", "server.zone", "registry.url", "registry.prefix"),
    *("telemetry.metrics_host", "telemetry.metrics_port"),
    *("peers.token_file", "peers.token_env"),
    *("peers.cert_file", "peers.key_file", "peers.ca_file", "peers.tls_server_name", "peers.require_client_cert"),
    *("discovery.kind", "discovery.verifiers", "discovery.drafters", "discovery.kubernetes"),
)
OWNED_BY_SERVICE: Mapping[str, tuple[str, ...]] = {
    "router": (
        "models",
        "http.host",
        "http.port",
        "http.operations_host",
        "http.operations_port",
        "http.playground",
        "api_keys",
        "tls",
    ),
    "verifier": (
        "served_model_name",
        "model",
        "draft_model",
        "method",
        "dtype",
        "device",
        "tree",
        "engine.tensor_parallel_size",
    ),
    "draft": ("served_model_name", "model", "draft_model", "method", "dtype", "device", "tree"),
}


def values_schema() -> Schema:
    """Return the schema of values.yaml."""
    root = strict(
        fullnameOverride={"type": "string", "maxLength": 40},
        commonLabels=LABELS,
        imagePullSecrets=LIST,
        mode=one_of("plain", "ray"),
        extraObjects=LIST,
        image=strict(registry=TEXT, tag=TEXT, pullPolicy=one_of("Always", "IfNotPresent", "Never")),
        model=model(),
        telemetry=strict(otlpEndpoint=TEXT, sampleRatio={"type": "number", "minimum": 0, "maximum": 1}),
        prometheus=strict(address=TEXT, matchers=NAME),
        serviceMonitor=strict(enabled=SWITCH, labels=LABELS, interval=TEXT),
        prometheusRule=strict(enabled=SWITCH, labels=LABELS),
        dashboards=strict(enabled=SWITCH, labels=LABELS),
        networkPolicy=strict(
            enabled=SWITCH, clients=LIST, scrapers=LIST, egress=SWITCH, egressPorts={"type": "array", "items": PORT}
        ),
        discovery=strict(kind=one_of("redis", "kubernetes")),
        peers=strict(
            token=strict(enabled=SWITCH, existingSecret=TEXT, key=NAME),
            tls=strict(existingSecret=TEXT, serverName=NAME, requireClientCert=SWITCH, allowedNames=NAMES),
        ),
        security=strict(runAsUser=at_least(1), fsGroup=at_least(1)),
        router=router(),
        verifier=verifier(),
        draft=draft(),
        redis=redis(),
        ray=ray(),
    )
    root["properties"]["global"] = ANY
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Eyas chart", **root}


def model() -> Schema:
    """Return the schema of the target and the source of checkpoints."""
    source = strict(
        kind=one_of("hub", "pvc", "hostPath", "image"),
        mountPath={"type": "string", "pattern": "^/.+"},
        hub=strict(tokenSecret=TEXT, tokenKey=NAME, cacheClaim=TEXT, cacheSize=TEXT),
        pvc=strict(claimName=TEXT),
        hostPath=strict(path=TEXT),
    )
    return strict(
        servedModelName=NAME,
        model=NAME,
        chatTemplate=TEXT,
        toolCallParser=one_of(*get_args(ToolCallParser)),
        reasoningParser=one_of(*get_args(ReasoningParser)),
        dtype=one_of("float32", "bfloat16", "float16"),
        device=one_of("cuda", "cpu"),
        source=source,
    )


def workload() -> Mapping[str, Schema]:
    """Return the properties of every component."""
    return {
        "resources": strict(requests=ANY, limits={"type": "object", "required": ["cpu", "memory"]}),
        "nodeSelector": LABELS,
        "tolerations": LIST,
        "affinity": ANY,
        "topologySpreadConstraints": LIST,
        "priorityClassName": TEXT,
        "podAnnotations": LABELS,
        "podLabels": LABELS,
        "extraEnv": LIST,
        "extraVolumes": LIST,
        "extraVolumeMounts": LIST,
        "serviceAccount": strict(create=SWITCH, name=TEXT, annotations=LABELS),
    }


def service(name: str, config: type) -> Mapping[str, Schema]:
    """Return the properties that router, verifier and draft share."""
    scaling = strict(
        kind=one_of("none", "hpa", "keda"),
        minReplicas=at_least(1),
        maxReplicas=at_least(1),
        metrics=LIST,
        triggers=LIST,
        behavior=ANY,
    )
    return {
        **workload(),
        "replicas": at_least(0),
        "image": strict(repository=NAME),
        "podDisruptionBudget": strict(enabled=SWITCH, maxUnavailable={"type": ["integer", "string"]}),
        "autoscaling": scaling,
        "probes": strict(startupFailureThreshold=at_least(1), livenessFailureThreshold=at_least(1)),
        "preStopSeconds": at_least(1),
        "config": config_schema(config, (*OWNED, *OWNED_BY_SERVICE[name])),
    }


def router() -> Schema:
    """Return the schema of `router`."""
    ports = strict(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=LABELS, grpcPort=PORT, httpPort=PORT)
    keys = strict(existingSecret=TEXT, key=NAME, maxPriority=at_least(0), sharePrefixCache=SWITCH)
    own = strict(existingSecret=TEXT)
    return strict(**service("router", RouterConfig), service=ports, tls=own, apiKeys=keys, playground=SWITCH)


def on_gpu() -> Mapping[str, Schema]:
    """Return the properties of components on GPUs."""
    gpu = strict(resource=NAME, **{"class": TEXT}, classLabel=NAME)
    return {"gpu": gpu, "runtimeClassName": TEXT, "sharedMemory": TEXT}


def verifier() -> Schema:
    """Return the schema of `verifier`."""
    group = strict(enabled=SWITCH, port=PORT)
    return strict(**service("verifier", VerifierConfig), **on_gpu(), tensorParallelSize=at_least(1), multiNode=group)


def draft() -> Schema:
    """Return the schema of `draft`."""
    tree = strict(num_draft_tokens=at_least(1), num_steps=at_least(0), top_k=at_least(1))
    own = {"enabled": SWITCH, "draftModel": TEXT, "method": NAME, "tree": tree}
    return strict(**service("draft", DraftConfig), **on_gpu(), **own)


def redis() -> Schema:
    """Return the schema of `redis`."""
    external = strict(url=TEXT, existingSecret=TEXT, urlKey=NAME, port=PORT)
    image, auth = strict(repository=NAME, tag=NAME), strict(existingSecret=TEXT)
    kind = one_of("bundled", "external", "none")
    return strict(**workload(), kind=kind, prefix=NAME, external=external, image=image, auth=auth)


def ray() -> Schema:
    """Return the schema of `ray`."""
    return strict(
        image=strict(repository=NAME),
        operatorNamespace=NAME,
        version=NAME,
        application=NAME,
        importPath=NAME,
        args=ANY,
        deployments=LIST,
        gcsFaultTolerance=strict(redisAddress=TEXT, passwordSecret=TEXT, passwordKey=NAME),
        head=strict(resources=workload()["resources"]),
        maxWorkers=at_least(1),
    )


def strict(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def one_of(*choices: str) -> Schema:
    """Return the schema of an enumeration."""
    return {"enum": list(choices)}


def at_least(minimum: int) -> Schema:
    """Return the schema of an integer with a minimum."""
    return {"type": "integer", "minimum": minimum}


def config_schema(kind: type, owned: Iterable[str]) -> Schema:
    """Return the schema of a service's `config`: all its settings, without those that the chart sets itself."""
    whole = TypeAdapter(kind).json_schema()
    schema: Schema = _resolved(whole, whole.get("$defs", {}))
    for path in owned:
        _remove(schema, path.split("."))
    return schema


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Return the node with references resolved and objects closed, without titles and descriptions."""
    if isinstance(node, list):
        return [_resolved(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kept = {key: value for key, value in node.items() if key not in ("$defs", "title", "description", "default", "required")}
    out = {key: _resolved(value, definitions) for key, value in kept.items() if key != "properties"}
    if "properties" in node:
        out |= strict(**{key: _resolved(value, definitions) for key, value in node["properties"].items()})
    return out


def _remove(schema: Schema, path: list[str]) -> None:
    for key in path[:-1]:
        schema = schema["properties"].get(key, strict())
    schema["properties"].pop(path[-1], None)
