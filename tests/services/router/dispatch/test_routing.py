"""Filter, score, pick: the pair of a request, as pure functions of a worker snapshot."""

from dataclasses import replace

import pytest

from eyas.config import RoutingConfig
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.services.discovery.redis_registry import Placement
from eyas.services.router.dispatch.routing import RoutingRequest, WorkerSnapshot, eligible_verifiers, pick

MODEL = ModelInfo("demo", "target", 4096, 2048, "head")
REQUEST = RoutingRequest("demo", 100)


def lease(role: Role, name: str, model: ModelInfo = MODEL, load: Load | None = None) -> Lease:
    return Lease(role, f"{name}:1", name, model, load or Load(free_kv_tokens=1000))


def snapshot(
    *leases: Lease, in_flight: dict[str, int] | None = None, unhealthy: frozenset[str] = frozenset()
) -> WorkerSnapshot:
    by_role = {role: [lease for lease in leases if lease.role == role] for role in ("verifier", "draft")}
    return WorkerSnapshot(by_role["verifier"], by_role["draft"], in_flight or {}, unhealthy)


def chosen(snapshot: WorkerSnapshot, request: RoutingRequest = REQUEST) -> tuple[str, str] | None:
    pair = pick(snapshot, request, RoutingConfig())
    if pair is None:
        return None
    return pair.verifier.incarnation, pair.drafter.incarnation if pair.drafter else ""


V, W, D, E = lease("verifier", "v"), lease("verifier", "w"), lease("draft", "d"), lease("draft", "e")


def test_a_verifier_of_another_model_is_not_eligible() -> None:
    assert eligible_verifiers(snapshot(replace(V, model=replace(MODEL, name="other"))), REQUEST) == []


@pytest.mark.parametrize(
    "model",
    [replace(MODEL, fingerprint="x"), replace(MODEL, features_fingerprint="x"), replace(MODEL, features_fingerprint="")],
)
def test_a_drafter_for_another_target_or_head_is_left_out(model: ModelInfo) -> None:
    assert chosen(snapshot(V, replace(D, model=model))) == ("v", "")


def test_a_verifier_without_a_head_gets_no_drafter() -> None:
    headless = replace(MODEL, features_fingerprint="")
    assert not headless.target.is_drafted_by(headless)


def test_plain_decoding_gets_no_drafter() -> None:
    assert chosen(snapshot(V, D), replace(REQUEST, wants_drafter=False)) == ("v", "")


def test_a_verifier_with_too_short_a_context_is_not_eligible() -> None:
    short = replace(V, model=replace(MODEL, max_model_len=99))
    assert chosen(snapshot(short, W)) == ("w", "")
    assert chosen(snapshot(replace(V, model=replace(MODEL, max_model_len=100)))) == ("v", "")


def test_a_verifier_that_failed_the_request_is_excluded_for_it() -> None:
    assert chosen(snapshot(V, W), replace(REQUEST, excluded=frozenset("v"))) == ("w", "")
    assert chosen(snapshot(V), replace(REQUEST, excluded=frozenset("v"))) is None


def test_a_running_request_stays_with_its_target() -> None:
    other = replace(W, model=replace(MODEL, fingerprint="x"))
    assert chosen(snapshot(V, other), replace(REQUEST, target_fingerprint="x")) == ("w", "")


def test_a_running_request_stays_with_its_dtype() -> None:
    v, w = (replace(worker, model=replace(MODEL, outputs_fingerprint=f"{worker.incarnation} bits")) for worker in (V, W))
    assert chosen(snapshot(v, w), replace(REQUEST, target_fingerprint=w.model.pin)) == ("w", "")
    assert chosen(snapshot(v), replace(REQUEST, target_fingerprint=w.model.pin)) is None
    assert chosen(snapshot(v), replace(REQUEST, target_fingerprint=V.model.pin)) == ("v", "")  # of an older verifier


def test_the_less_loaded_verifier_wins() -> None:
    assert chosen(snapshot(replace(V, load=Load(2, 1, 1000)), replace(W, load=Load(1, 1, 1000)))) == ("w", "")


def test_requests_in_flight_count_before_a_lease_shows_them() -> None:
    assert chosen(snapshot(V, W, in_flight={"v": 1})) == ("w", "")


def test_a_verifier_with_free_cache_beats_an_idle_full_one() -> None:
    assert chosen(snapshot(replace(V, load=Load(free_kv_tokens=10)), replace(W, load=Load(3, 0, 100)))) == ("w", "")


def test_of_equals_the_one_with_more_free_kv_cache_wins() -> None:
    assert chosen(snapshot(V, replace(W, load=Load(free_kv_tokens=2000)))) == ("w", "")


def test_a_session_returns_to_its_verifier_despite_idle_ones() -> None:
    busy = replace(W, load=Load(3, 1, 1000))
    assert chosen(snapshot(V, busy, D, E), replace(REQUEST, last=Placement("w", "e"))) == ("w", "e")


def test_a_session_moves_when_its_verifier_is_gone() -> None:
    assert chosen(snapshot(V, D), replace(REQUEST, last=Placement("gone", "gone"))) == ("v", "d")


def test_an_unhealthy_verifier_comes_last_even_for_its_session() -> None:
    request = replace(REQUEST, last=Placement("v"))
    assert chosen(snapshot(V, W, unhealthy=frozenset("v")), request) == ("w", "")
    assert chosen(snapshot(V, unhealthy=frozenset("v")), request) == ("v", "")


def test_the_less_loaded_drafter_wins() -> None:
    assert chosen(snapshot(V, D, E, in_flight={"d": 1})) == ("v", "e")
