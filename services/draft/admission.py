"""What a draft service believes of a commit: bytes from a verifier in, a context fit for a drafter or an error out."""

from __future__ import annotations

from torch import Tensor

from eyas.commit import Commit, TensorBytes
from eyas.drafters.base import DraftContext
from eyas.errors import InvalidRequest
from eyas.limits import check_sampling
from eyas.models.tensors import tensor_from_bytes
from eyas.request import SamplingParams
from eyas.rpc.messages import DrafterInfo


def admit(commit: Commit[TensorBytes], session: str, info: DrafterInfo) -> DraftContext:
    """The commit as a context of the drafter that `info` describes, under the name `session`.

    Raises InvalidRequest for lengths, token ids, features or noise that no drafter could use, and for a proposal that this
    one cannot make.
    """
    if commit.proposal == "sampled" and not info.can_sample:
        raise InvalidRequest(f"drafter {info.drafter} cannot draw trees from its own law; ask for a deterministic proposal")
    if commit.base < 0 or not commit.tokens:
        raise InvalidRequest(f"commit of {len(commit.tokens)} tokens at length {commit.base}; send at least one, from 0 on")
    for token in (*commit.tokens, *commit.samples):
        if not 0 <= token < info.model.vocab_size:
            raise InvalidRequest(f"token {token} lies outside [0, {info.model.vocab_size})")
    check_sampling(SamplingParams(**vars(commit.noise)))
    return Commit(
        session=session,
        epoch=commit.epoch,
        base=commit.base,
        tokens=commit.tokens,
        features=_features(commit, info) if info.needs_features else None,
        noise=commit.noise,
        budget=commit.budget,
        samples=commit.samples,
        proposal=commit.proposal,
        traceparent=commit.traceparent,
    )


def _features(commit: Commit[TensorBytes], info: DrafterInfo) -> Tensor:
    shape = (commit.committed - 1 - max(commit.base - 1, 0), info.feature_size)
    if commit.features is None or commit.features.shape != shape:
        given = list(commit.features.shape) if commit.features else "none"
        raise InvalidRequest(f"features are {given}; length {commit.base} to {commit.committed} needs {list(shape)}")
    return tensor_from_bytes(commit.features)
