"""Drafting dataclasses to protobuf messages and back: the other half of eyas.rpc.wire, for the Draft service.

Pure functions in pairs. Ranges are for the receiver to check: a drafter trusts no commit, a verifier no tree.
"""

# ruff: noqa: D103 - a pair says what it does by its name and types.

from __future__ import annotations

from eyas.commit import Budget, Commit, Refusal, TensorBytes
from eyas.errors import InvalidRequest
from eyas.request import NoiseKey
from eyas.rpc.messages import DrafterInfo, DraftReply, DraftRequest, SessionTree, Verified
from eyas.rpc.wire import model_info_from_message, model_info_to_message
from eyas.tree import DraftLaw, DraftTree, Sampled
from eyas.v1 import draft_pb2, types_pb2


def tensor_to_message(tensor: TensorBytes) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=tensor.dtype, shape=tensor.shape, data=tensor.data)


def tensor_from_message(message: types_pb2.Tensor) -> TensorBytes:
    return TensorBytes(message.dtype, tuple(message.shape), message.data)


def noise_to_message(noise: NoiseKey) -> types_pb2.NoiseKey:
    return types_pb2.NoiseKey(**vars(noise))


def noise_from_message(message: types_pb2.NoiseKey) -> NoiseKey:
    return NoiseKey(message.seed, message.temperature, message.top_k, message.top_p, message.min_p)


def commit_to_message(commit: Commit[TensorBytes]) -> draft_pb2.Commit:
    return draft_pb2.Commit(
        session=commit.session,
        epoch=commit.epoch,
        base=commit.base,
        tokens=commit.tokens,
        features=tensor_to_message(commit.features) if commit.features is not None else None,
        noise=noise_to_message(commit.noise),
        max_nodes=commit.budget.max_nodes,
        max_depth=commit.budget.max_depth,
        proposal=draft_pb2.PROPOSAL_SAMPLED if commit.proposal == "sampled" else draft_pb2.PROPOSAL_DETERMINISTIC,
        samples=commit.samples,
        traceparent=commit.traceparent,
    )


def commit_from_message(message: draft_pb2.Commit) -> Commit[TensorBytes]:
    """Raises InvalidRequest for a way of proposing that this version does not know."""
    if message.proposal not in (draft_pb2.PROPOSAL_DETERMINISTIC, draft_pb2.PROPOSAL_SAMPLED):
        raise InvalidRequest(
            f"proposal is {message.proposal}; known are PROPOSAL_DETERMINISTIC (0) and PROPOSAL_SAMPLED (1)"
        )
    return Commit(
        session=message.session,
        epoch=message.epoch,
        base=message.base,
        tokens=tuple(message.tokens),
        features=tensor_from_message(message.features) if message.HasField("features") else None,
        noise=noise_from_message(message.noise),
        budget=Budget(message.max_nodes, message.max_depth),
        samples=tuple(message.samples),
        proposal="sampled" if message.proposal == draft_pb2.PROPOSAL_SAMPLED else "deterministic",
        traceparent=message.traceparent,
    )


def sampled_to_message(sampled: Sampled) -> draft_pb2.Sampled:
    laws = [draft_pb2.DraftLaw(parent=node, token_ids=law.ids, probs=law.probs) for node, law in sampled.laws.items()]
    return draft_pb2.Sampled(laws=laws, replacement=sampled.replacement)


def sampled_from_message(message: draft_pb2.Sampled) -> Sampled:
    laws = {law.parent: DraftLaw(tuple(law.token_ids), tuple(law.probs)) for law in message.laws}
    return Sampled(laws, message.replacement)


def tree_to_message(value: SessionTree) -> draft_pb2.Tree:
    return draft_pb2.Tree(
        session=value.session,
        epoch=value.epoch,
        committed=value.committed,
        tokens=value.tree.tokens,
        parents=value.tree.parents,
        log_probs=value.tree.log_probs,
        grown_ahead=value.tree.grown_ahead,
        sampled=sampled_to_message(value.tree.sampled) if value.tree.sampled is not None else None,
    )


def tree_from_message(message: draft_pb2.Tree) -> SessionTree:
    sampled = sampled_from_message(message.sampled) if message.HasField("sampled") else None
    tree = DraftTree(tuple(message.tokens), tuple(message.parents), tuple(message.log_probs), message.grown_ahead, sampled)
    return SessionTree(message.session, message.epoch, message.committed, tree)


def refusal_to_message(refusal: Refusal) -> draft_pb2.Refusal:
    return draft_pb2.Refusal(session=refusal.session, epoch=refusal.epoch, have=refusal.have)


def refusal_from_message(message: draft_pb2.Refusal) -> Refusal:
    return Refusal(message.session, message.epoch, message.have)


def verified_to_message(verified: Verified) -> draft_pb2.Verified:
    return draft_pb2.Verified(**vars(verified))


def verified_from_message(message: draft_pb2.Verified) -> Verified:
    return Verified(message.target_fingerprint, message.features_digest)


def draft_request_to_message(request: DraftRequest) -> draft_pb2.SpeculateRequest:
    commits = [commit_to_message(commit) for commit in request.commits]
    verified = verified_to_message(request.verified) if request.verified else None
    return draft_pb2.SpeculateRequest(step=request.step, commits=commits, released=request.released, verified=verified)


def draft_request_from_message(message: draft_pb2.SpeculateRequest) -> DraftRequest:
    commits = tuple(commit_from_message(commit) for commit in message.commits)
    verified = verified_from_message(message.verified) if message.HasField("verified") else None
    return DraftRequest(message.step, commits, tuple(message.released), verified)


def draft_reply_to_message(reply: DraftReply) -> draft_pb2.SpeculateReply:
    return draft_pb2.SpeculateReply(
        step=reply.step,
        trees=[tree_to_message(tree) for tree in reply.trees],
        refusals=[refusal_to_message(refusal) for refusal in reply.refusals],
        draft_ms=reply.draft_ms,
    )


def draft_reply_from_message(message: draft_pb2.SpeculateReply) -> DraftReply:
    trees = tuple(tree_from_message(tree) for tree in message.trees)
    refusals = tuple(refusal_from_message(refusal) for refusal in message.refusals)
    return DraftReply(message.step, trees, refusals, message.draft_ms)


def drafter_info_to_message(info: DrafterInfo) -> draft_pb2.DescribeReply:
    return draft_pb2.DescribeReply(
        model=model_info_to_message(info.model),
        drafter=info.drafter,
        needs_features=info.needs_features,
        needs_samples=info.needs_samples,
        feature_size=info.feature_size,
        can_sample=info.can_sample,
    )


def drafter_info_from_message(message: draft_pb2.DescribeReply) -> DrafterInfo:
    return DrafterInfo(
        model=model_info_from_message(message.model),
        drafter=message.drafter,
        needs_features=message.needs_features,
        needs_samples=message.needs_samples,
        feature_size=message.feature_size,
        can_sample=message.can_sample,
    )
