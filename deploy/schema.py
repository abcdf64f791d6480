"""The JSON schema of the chart's values: the chart's own settings, and below each `config` those of the service's dataclass.

Unknown keys are refused everywhere but inside what Kubernetes itself defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from eyas.config import DraftConfig, RouterConfig, VerifierConfig

Schema = dict[str, Any]

ANY: Schema = {"type": "object"}
LIST: Schema = {"type": "array", "items": {"type": "object"}}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
SWITCH: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}

# What the chart fills in itself, and so nobody else may.
OWNED = (
    *("server.host", "server.port", "server.advertise_host", "server.zone", "registry.url"),
    *("telemetry.metrics_host", "telemetry.metrics_port"),
    *("peers.cert_file", "peers.key_file", "peers.ca_file", "peers.tls_server_name", "peers.require_client_cert"),
    *("discovery.kind", "discovery.verifiers", "discovery.drafters", "discovery.kubernetes"),
)
OWNED_BY_SERVICE: Mapping[str, tuple[str, ...]] = {
    "router": ("models", "http", "api_keys", "tls"),
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
    """The whole schema, ready for values.schema.json."""
    root = strict(
        fullnameOverride={"type": "string", "maxLength": 40},
        commonLabels=LABELS,
        imagePullSecrets=LIST,
        mode=one_of("plain", "ray"),
        extraObjects=LIST,
        image=strict(registry=TEXT, tag=TEXT, pullPolicy=one_of("Always", "IfNotPresent", "Never")),
        model=model(),
        telemetry=strict(otlpEndpoint=TEXT, sampleRatio={"type": "number", "minimum": 0, "maximum": 1}),
        serviceMonitor=strict(enabled=SWITCH, labels=LABELS, interval=TEXT),
        prometheusRule=strict(enabled=SWITCH, labels=LABELS),
        dashboards=strict(enabled=SWITCH, labels=LABELS),
        networkPolicy=strict(
            enabled=SWITCH, clients=LIST, scrapers=LIST, egress=SWITCH, outsidePorts={"type": "array", "items": PORT}
        ),
        discovery=strict(kind=one_of("redis", "kubernetes")),
        peers=strict(tls=strict(existingSecret=TEXT, name=NAME, requireClientCert=SWITCH)),
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
    """The target and where checkpoints come from."""
    source = strict(
        kind=one_of("hub", "pvc", "hostPath", "image"),
        mountPath={"type": "string", "pattern": "^/.+"},
        hub=strict(tokenSecret=TEXT, tokenKey=NAME, cacheClaim=TEXT, cacheSize=TEXT),
        pvc=strict(claimName=TEXT),
        hostPath=strict(path=TEXT),
    )
    return strict(
        name=NAME,
        target=NAME,
        chatTemplate=TEXT,
        dtype=one_of("float32", "bfloat16", "float16"),
        device=one_of("cuda", "cpu"),
        source=source,
    )


def placed() -> Mapping[str, Schema]:
    """What every component has."""
    return {
        "resources": strict(requests=ANY, limits={"type": "object", "required": ["cpu", "memory"]}),
        "nodeSelector": LABELS,
        "tolerations": LIST,
        "affinity": ANY,
        "topologySpread": LIST,
        "priorityClassName": TEXT,
        "podAnnotations": LABELS,
        "podLabels": LABELS,
        "extraEnv": LIST,
        "extraVolumes": LIST,
        "extraVolumeMounts": LIST,
        "serviceAccount": strict(create=SWITCH, name=TEXT, annotations=LABELS),
    }


def service(name: str, config: type) -> Mapping[str, Schema]:
    """What router, verifier and draft have."""
    scaling = strict(
        kind=one_of("none", "hpa", "keda"),
        minReplicas=at_least(1),
        maxReplicas=at_least(1),
        metrics=LIST,
        triggers=LIST,
        behavior=ANY,
    )
    return {
        **placed(),
        "replicas": at_least(0),
        "image": strict(repository=NAME),
        "podDisruptionBudget": strict(enabled=SWITCH, maxUnavailable={"type": ["integer", "string"]}),
        "autoscaling": scaling,
        "probes": strict(startupFailures=at_least(1), livenessFailures=at_least(1)),
        "preStopSeconds": at_least(1),
        "config": config_schema(config, (*OWNED, *OWNED_BY_SERVICE[name])),
    }


def router() -> Schema:
    """The component and its doors."""
    door = strict(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=LABELS, grpcPort=PORT, httpPort=PORT)
    keys = strict(existingSecret=TEXT, key=NAME)
    return strict(**service("router", RouterConfig), service=door, tls=strict(existingSecret=TEXT), apiKeys=keys)


def on_gpu() -> Mapping[str, Schema]:
    """What components on GPUs have besides."""
    gpu = strict(resource=NAME, **{"class": TEXT}, classLabel=NAME)
    return {"gpu": gpu, "runtimeClassName": TEXT, "sharedMemory": TEXT}


def verifier() -> Schema:
    """The component and its ranks."""
    group = strict(enabled=SWITCH, port=PORT)
    return strict(**service("verifier", VerifierConfig), **on_gpu(), tensorParallel=at_least(1), multiNode=group)


def draft() -> Schema:
    """The component, its checkpoint, its method and its trees."""
    tree = strict(num_draft_tokens=at_least(1), num_steps=at_least(0), top_k=at_least(1))
    own = {"enabled": SWITCH, "checkpoint": TEXT, "method": NAME, "tree": tree}
    return strict(**service("draft", DraftConfig), **on_gpu(), **own)


def redis() -> Schema:
    """Bundled or not."""
    external = strict(url=TEXT, existingSecret=TEXT, urlKey=NAME, port=PORT)
    image, auth = strict(repository=NAME, tag=NAME), strict(existingSecret=TEXT)
    return strict(**placed(), kind=one_of("bundled", "external", "none"), external=external, image=image, auth=auth)


def ray() -> Schema:
    """The RayService of mode ray."""
    return strict(
        image=strict(repository=NAME),
        version=NAME,
        application=NAME,
        importPath=NAME,
        args=ANY,
        deployments=LIST,
        gcsFaultTolerance=strict(redisAddress=TEXT, passwordSecret=TEXT, passwordKey=NAME),
        head=strict(resources=placed()["resources"]),
        maxWorkers=at_least(1),
    )


def strict(**properties: Schema) -> Schema:
    """An object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def one_of(*choices: str) -> Schema:
    """One of these words."""
    return {"enum": list(choices)}


def at_least(least: int) -> Schema:
    """An integer from `least` on."""
    return {"type": "integer", "minimum": least}


def config_schema(kind: type, owned: Iterable[str]) -> Schema:
    """What `config` of a service may hold: every setting of the dataclass but those that the chart fills in."""
    whole = TypeAdapter(kind).json_schema()
    schema: Schema = _resolved(whole, whole.get("$defs", {}))
    for path in owned:
        _remove(schema, path.split("."))
    return schema


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The node with references put in, objects closed, and nothing in it that only people read."""
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
