"""`eyas.services.ray.app:build`: router, verifier and draft service as one Ray Serve application; see docs/ray.md."""

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

# How often Serve checks whether a stopping replica has requests, in seconds; workers get none through Serve.
_SHUTDOWN_CHECK_S = 0.1
# Seconds of reports that Serve keeps for policies; it accepts no less than its own push interval.
_HISTORY_S = 15.0


def build(args: Mapping[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`. args: a RayConfig as YAML. Raises ConfigError."""
    config = read(args)
    workers = [_verifier(config)]
    if config.draft is not None:
        workers.append(_draft(config, config.draft))
    return _router(config, workers)


def _verifier(config: RayConfig) -> Application:
    pool, own = config.pools.verifier, config.verifier
    gpus = num_gpus(pool, own.device, own.engine.tensor_parallel_size)
    policy = AutoscalingPolicy(policy_function=VerifierPolicy, policy_kwargs=_policy_kwargs(pool))
    options = _options(pool, policy, own.server, gpus)
    deploy = serve.deployment(name="Verifier", graceful_shutdown_wait_loop_s=_SHUTDOWN_CHECK_S, **options)
    return deploy(Verifier).bind(own, config.environment)


def _draft(config: RayConfig, own: DraftConfig) -> Application:
    pool = config.pools.draft
    kwargs = _policy_kwargs(pool) | {"max_late_ratio": pool.max_late_ratio}
    policy = AutoscalingPolicy(policy_function=DraftPolicy, policy_kwargs=kwargs)
    options = _options(pool, policy, own.server, num_gpus(pool, own.device))
    deploy = serve.deployment(name="Draft", graceful_shutdown_wait_loop_s=_SHUTDOWN_CHECK_S, **options)
    return deploy(Draft).bind(own, config.environment, config.verifier.draft_client.draft_timeout_s)


def _router(config: RayConfig, workers: Sequence[Application]) -> Application:
    pool, own = config.pools.router, config.router
    kwargs = asdict(pool.scaling) | {"max_requests": pool.max_requests}
    policy = AutoscalingPolicy(policy_function=RouterPolicy, policy_kwargs=kwargs)
    options = _options(pool, policy, own.server, pool.num_gpus)
    deploy = serve.deployment(name="Router", max_ongoing_requests=2 * pool.max_requests, **options)
    return deploy(serve.ingress()(Router)).bind(own, config.environment, *workers)


def _options(pool: PoolConfig, policy: AutoscalingPolicy, server: ServerConfig, gpus: float) -> dict[str, Any]:
    """Options of every deployment. Serve's own delays are 0, because they would add to those of the policy."""
    scaling = AutoscalingConfig(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        look_back_period_s=_HISTORY_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return {
        "autoscaling_config": scaling,
        "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": gpus, "resources": dict(pool.resources)},
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s(server),
    }


def _policy_kwargs(pool: PoolConfig) -> dict[str, float]:
    """Arguments that the policies of verifiers and drafters share."""
    return asdict(pool.scaling) | {"look_back_period_s": pool.look_back_period_s}
