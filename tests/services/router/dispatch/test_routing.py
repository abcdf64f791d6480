"""Filter, score, pick: the pair of a request, as pure functions of a worker snapshot."""

from dataclasses import replace
from typing import Any

import pytest

from eyas.config import RoutingConfig
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.services.discovery.redis_registry import Placement
from eyas.services.router.dispatch.routing import RoutingRequest, WorkerSnapshot, pick

MODEL = ModelInfo("demo", "target", 4096, 2048, "head")
REQUEST = RoutingRequest("demo", 100)


def lease(role: Role, name: str, model: ModelInfo = MODEL, load: Load | None = None) -> Lease:
    return Lease(role, f"{name}:1", name, model, load or Load(free_kv_tokens=1000))


def snapshot(*leases: Lease, **known: Any) -> WorkerSnapshot:
    by_role = {role: [lease for lease in leases if lease.role == role] for role in ("verifier", "draft")}
    return WorkerSnapshot(by_role["verifier"], by_role["draft"], **({"in_flight": {}} | known))


def chosen(snapshot: WorkerSnapshot, request: RoutingRequest) -> tuple[str, str] | None:
    pair = pick(snapshot, request, RoutingConfig())
    if pair is None:
        return None
    return pair.verifier.incarnation, pair.drafter.incarnation if pair.drafter else ""


V, W, D, E = lease("verifier", "v"), lease("verifier", "w"), lease("draft", "d"), lease("draft", "e")


def of_model(worker: Lease, **changes: Any) -> Lease:
    return replace(worker, model=replace(MODEL, **changes))


def loaded(worker: Lease, *load: int, **changes: Any) -> Lease:
    return replace(worker, load=Load(*load), **changes)


BLOCKS = tuple(range(10))
PREFIX = {"num_tokens": 900, "block_hashes": BLOCKS}
V_BITS, W_BITS = of_model(V, outputs_fingerprint="v bits"), of_model(W, outputs_fingerprint="w bits")


@pytest.mark.parametrize(
    ("workers", "changes", "expected"),
    [
        pytest.param(snapshot(of_model(V, name="other")), {}, None, id="not another model"),
        pytest.param(snapshot(V, of_model(D, fingerprint="x")), {}, ("v", ""), id="no drafter of another target"),
        pytest.param(snapshot(V, of_model(D, features_fingerprint="x")), {}, ("v", ""), id="no drafter of another head"),
        pytest.param(snapshot(V, of_model(D, features_fingerprint="")), {}, ("v", ""), id="no drafter without a head"),
        pytest.param(snapshot(V, D), {"wants_drafter": False}, ("v", ""), id="no drafter for plain decoding"),
        pytest.param(snapshot(of_model(V, max_model_len=99), W), {}, ("w", ""), id="not too short a context"),
        pytest.param(snapshot(of_model(V, max_model_len=100)), {}, ("v", ""), id="a context that just suffices"),
        pytest.param(snapshot(V, W), {"excluded": frozenset("v")}, ("w", ""), id="not one that failed the request"),
        pytest.param(snapshot(V), {"excluded": frozenset("v")}, None, id="none if all failed the request"),
        pytest.param(
            snapshot(V, of_model(W, fingerprint="x")), {"target_fingerprint": "x"}, ("w", ""), id="the target it began with"
        ),
        pytest.param(
            snapshot(V_BITS, W_BITS), {"target_fingerprint": W_BITS.model.pin}, ("w", ""), id="the dtype it began with"
        ),
        pytest.param(snapshot(V_BITS), {"target_fingerprint": W_BITS.model.pin}, None, id="no other dtype"),
        pytest.param(snapshot(V_BITS), {"target_fingerprint": V.model.pin}, ("v", ""), id="begun by an older verifier"),
        pytest.param(snapshot(loaded(V, 2, 1, 1000), loaded(W, 1, 1, 1000)), {}, ("w", ""), id="the less loaded verifier"),
        pytest.param(snapshot(V, W, in_flight={"v": 1}), {}, ("w", ""), id="requests in flight count"),
        pytest.param(snapshot(V, D, E, in_flight={"d": 1}), {}, ("v", "e"), id="the less loaded drafter"),
        pytest.param(snapshot(loaded(V, 0, 0, 10), loaded(W, 3, 0, 100)), {}, ("w", ""), id="not a full cache"),
        pytest.param(snapshot(V, loaded(W, 0, 0, 2000)), {}, ("w", ""), id="of equals the larger free cache"),
        pytest.param(
            snapshot(V, loaded(W, 3, 1, 1000), D, E), {"last": Placement("w", "e")}, ("w", "e"), id="the session's own pair"
        ),
        pytest.param(snapshot(V, D), {"last": Placement("gone", "gone")}, ("v", "d"), id="the session's pair is gone"),
        pytest.param(
            snapshot(V, W, unhealthy=frozenset("v")), {"last": Placement("v")}, ("w", ""), id="an unhealthy one last"
        ),
        pytest.param(snapshot(V, unhealthy=frozenset("v")), {"last": Placement("v")}, ("v", ""), id="none but unhealthy"),
        pytest.param(
            snapshot(loaded(V, 0, 0, 10_000, 32), loaded(W, 4, 0, 10_000, 32, prefix_hashes=frozenset(BLOCKS))),
            PREFIX, ("w", ""), id="a cached prefix despite an idle one",
        ),
        pytest.param(
            snapshot(replace(V, prefix_hashes=frozenset(BLOCKS[:2])), replace(W, prefix_hashes=frozenset(BLOCKS[:7]))),
            PREFIX, ("w", ""), id="the longer cached prefix",
        ),
        pytest.param(
            snapshot(loaded(V, 2, 5, 0, 32), loaded(W, 0, 0, 10_000, 32)), {"num_tokens": 900, "last": Placement("v")},
            ("w", ""), id="a session leaves a full queue and cache",
        ),
        pytest.param(
            snapshot(*(replace(one, zone="east" if one in (V, D) else "west") for one in (V, W, D, E)), zone="west"),
            {}, ("w", "e"), id="the nearer of equals",
        ),
        pytest.param(snapshot(of_model(V, features_fingerprint=""), W, D), {}, ("w", "d"), id="one with an idle drafter"),
    ],
)  # fmt: skip
def test_a_request_gets_the_pair_that_fits_it(
    workers: WorkerSnapshot, changes: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    assert chosen(workers, replace(REQUEST, **changes)) == expected
