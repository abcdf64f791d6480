"""`eyas.services.ray.app:build`: router, verifier and draft service as one Ray Serve application; see docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from eyas.config import ServerConfig
from eyas.services.ray.autoscaling import DraftPolicy, RouterPolicy, VerifierPolicy
from eyas.services.ray.config import PoolConfig, graceful_shutdown_timeout_s, num_gpus, read
from eyas.services.ray.ingress import Router
from eyas.services.ray.replicas import Draft, Verifier

# Seconds between Serve's checks for requests of a stopping replica; workers get none through Serve.
_WORKER_OPTIONS = {"graceful_shutdown_wait_loop_s": 0.1}
# Seconds of reports that Serve keeps for policies; it accepts no less than its own push interval.
_HISTORY_S = 15.0


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for `serve run` and `serve deploy`. args: a RayConfig as YAML. Raises ConfigError."""
    config = read(args)
    router, verifier, draft, pools = config.router, config.verifier, config.draft, config.pools
    policy = _policy(VerifierPolicy, pools.verifier)
    gpus = num_gpus(pools.verifier, verifier.device, verifier.engine.tensor_parallel_size)
    deploy = _deployment("Verifier", pools.verifier, policy, verifier.server, gpus, **_WORKER_OPTIONS)
    workers = [deploy(Verifier).bind(verifier, config.environment)]
    if draft is not None:
        policy = _policy(DraftPolicy, pools.draft, max_late_ratio=pools.draft.max_late_ratio)
        gpus = num_gpus(pools.draft, draft.device)
        deploy = _deployment("Draft", pools.draft, policy, draft.server, gpus, **_WORKER_OPTIONS)
        workers.append(deploy(Draft).bind(draft, config.environment, verifier.draft_client.draft_timeout_s))
    max_requests = pools.router.max_requests
    policy = _policy(RouterPolicy, pools.router, max_requests=max_requests)
    options = {"max_ongoing_requests": 2 * max_requests}
    deploy = _deployment("Router", pools.router, policy, router.server, pools.router.num_gpus, **options)
    return deploy(serve.ingress()(Router)).bind(router, config.environment, *workers)


def _policy(kind: type[Any], pool: PoolConfig, **kwargs: float) -> AutoscalingPolicy:
    kwargs |= asdict(pool.scaling) | {"look_back_period_s": pool.look_back_period_s}
    return AutoscalingPolicy(policy_function=kind, policy_kwargs=kwargs)


def _deployment(
    name: str, pool: PoolConfig, policy: AutoscalingPolicy, server: ServerConfig, gpus: float, **options: Any
) -> Callable[[type], serve.Deployment]:
    """Return the decorator of a deployment. Serve's own delays are 0, because they would add to those of the policy."""
    scaling = AutoscalingConfig(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        look_back_period_s=_HISTORY_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return serve.deployment(
        name=name,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": gpus, "resources": dict(pool.resources)},
        graceful_shutdown_timeout_s=graceful_shutdown_timeout_s(server),
        **options,
    )
