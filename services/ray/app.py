"""`eyas.services.ray.app:build`: router, verifier and draft service as one Ray Serve application.

Given args, gives back what `serve run` and `serve deploy` take; docs/ray.md shows both. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from eyas.config import DraftConfig, ServerConfig
from eyas.services.ray.autoscaling import DraftPolicy, RouterPolicy, VerifierPolicy
from eyas.services.ray.config import PoolConfig, RayConfig, graceful_shutdown_timeout_s, num_gpus, read
from eyas.services.ray.ingress import Router
from eyas.services.ray.replicas import Draft, Verifier

# How often Serve looks whether a stopping replica has requests, in seconds; workers get none through Serve.
_LOOK_SECONDS = 0.1
# How much of the past Serve keeps for policies; less than its own pushing interval it does not take.
_HISTORY_SECONDS = 15.0


def build(args: Mapping[str, Any]) -> Application:
    """The application. args: a RayConfig as YAML has it. Raises ConfigError for settings that do not do."""
    config = read(args)
    workers = [_verifier(config)]
    if config.draft is not None:
        workers.append(_draft(config, config.draft))
    return _router(config, workers)


def _verifier(config: RayConfig) -> Application:
    pool, own = config.pools.verifier, config.verifier
    gpus = num_gpus(pool, own.device, own.engine.tensor_parallel_size)
    policy = AutoscalingPolicy(policy_function=VerifierPolicy, policy_kwargs=_watching(pool))
    options = _options(pool, policy, own.server, gpus)
    return serve.deployment(name="Verifier", graceful_shutdown_wait_loop_s=_LOOK_SECONDS, **options)(Verifier).bind(
        own, config.environment
    )


def _draft(config: RayConfig, own: DraftConfig) -> Application:
    pool = config.pools.draft
    kwargs = _watching(pool) | {"late_share": pool.late_share}
    policy = AutoscalingPolicy(policy_function=DraftPolicy, policy_kwargs=kwargs)
    options = _options(pool, policy, own.server, num_gpus(pool, own.device))
    deploy = serve.deployment(name="Draft", graceful_shutdown_wait_loop_s=_LOOK_SECONDS, **options)
    return deploy(Draft).bind(own, config.environment, config.verifier.draft_client.draft_timeout_s)


def _router(config: RayConfig, workers: Sequence[Application]) -> Application:
    pool, own = config.pools.router, config.router
    kwargs = asdict(pool.damping) | {"requests": pool.requests}
    policy = AutoscalingPolicy(policy_function=RouterPolicy, policy_kwargs=kwargs)
    options = _options(pool, policy, own.server, pool.num_gpus)
    deploy = serve.deployment(name="Router", max_ongoing_requests=2 * pool.requests, **options)
    return deploy(serve.ingress()(Router)).bind(own, config.environment, *workers)


def _options(pool: PoolConfig, policy: AutoscalingPolicy, server: ServerConfig, gpus: float) -> dict[str, Any]:
    """What all deployments have. The policy alone decides when: Serve's own delays would come on top of its."""
    scaling = AutoscalingConfig(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        look_back_period_s=_HISTORY_SECONDS,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return {
        "autoscaling_config": scaling,
        "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": gpus, "resources": dict(pool.resources)},
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s(server),
    }


def _watching(pool: PoolConfig) -> dict[str, float]:
    """What the policies of workers have in common."""
    return asdict(pool.damping) | {"window": pool.window_seconds}
