"""Which of a service's drafters a verifier is given: what it verifies in, a worker out. Knows no streams."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.errors import ConfigError, UnknownModel
from eyas.rpc.messages import NO_FEATURES, DrafterInfo, ModelInfo, Verified
from services.draft.worker import DraftWorker


def choose(workers: Sequence[DraftWorker], verified: Verified | None) -> DraftWorker:
    """The drafter that is fed the verifier's features, else the one that needs none; without `verified`, the only one.

    Raises UnknownModel saying what there is.
    """
    if verified is None and len(workers) == 1:
        return workers[0]
    fitting = [worker for worker in workers if verified and verified.is_drafted_by(worker.info.model)]
    if not fitting:
        there_is = "; ".join(f"{worker.info.drafter} for {_named(worker.info.model)}" for worker in workers)
        if verified is None:
            raise UnknownModel(
                f"this service has several drafters, and the verifier does not say what it serves: {there_is}"
            )
        raise UnknownModel(
            f"no drafter here for target {verified.target_fingerprint[:12]} with features {verified.features_digest[:12]}; "
            f"there is {there_is}"
        )
    return min(fitting, key=lambda worker: worker.info.model.head_fingerprint == NO_FEATURES)


def check_distinct(drafters: Sequence[DrafterInfo]) -> None:
    """Raises ConfigError for two drafters between which no verifier could choose."""
    seen: dict[tuple[str, str], DrafterInfo] = {}
    for info in drafters:
        key = (info.model.fingerprint, info.model.head_fingerprint)
        if key in seen:
            raise ConfigError(
                f"drafters {seen[key].drafter} and {info.drafter} are both for {_named(info.model)}; no verifier could tell "
                "them apart. Leave one out, or run it in a service of its own"
            )
        seen[key] = info


def _named(model: ModelInfo) -> str:
    return f"{model.name} (target {model.fingerprint[:12]}, features {model.head_fingerprint[:12] or 'unknown'})"
