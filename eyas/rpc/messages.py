"""Dataclasses of what services send to each other. eyas.rpc.convert turns them into protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eyas.api.request import Request
from eyas.protocol.commit import Commit, Refusal, ResyncRequired, TensorBytes
from eyas.protocol.tree import DraftTree, PreparedTree

Role = Literal["verifier", "draft"]

# ModelInfo.features_fingerprint of a drafter that needs no features.
NO_FEATURES = "none"
# GenerateCall.drafter for plain decoding.
NO_DRAFTER = "none"
# Trailing metadata of a rejected call: when to retry, in ms. gRPC's own retry policies use this key.
RETRY_KEY = "grpc-retry-pushback-ms"
# Trailing metadata of a call that one of our services failed. Without it gRPC made the error, whose text names addresses.
ERROR_KEY = "eyas-error"
# Trailing metadata of a rejected call: the parameter that is wrong.
PARAM_KEY = "eyas-param"


# Workers


@dataclass(frozen=True)
class TargetInfo:
    """The target of a verifier, and the fused features that it sends. It selects a drafter."""

    target_fingerprint: str
    features_fingerprint: str

    def is_drafted_by(self, drafter: ModelInfo) -> bool:
        """Return whether a drafter fits: same target, and the same features or none."""
        features_fit = drafter.features_fingerprint in (self.features_fingerprint, NO_FEATURES)
        return bool(self.features_fingerprint) and self.target_fingerprint == drafter.fingerprint and features_fit


@dataclass(frozen=True)
class ModelInfo:
    """The model that a worker serves or drafts for.

    Attributes:
        name: served model name.
        fingerprint: digest of the target.
        features_fingerprint: digest of the features that a verifier sends or a drafter needs. NO_FEATURES for a drafter
            that needs none; empty for a verifier that accepts no drafts.
        outputs_fingerprint: digest of all that decides a verifier's outputs; empty for drafters and older verifiers.
        sampling_defaults: of a verifier, the sampling parameters of requests that name none, by their names in
            SamplingParams; others have the defaults of that class.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    features_fingerprint: str = ""
    outputs_fingerprint: str = ""
    sampling_defaults: tuple[tuple[str, int | float], ...] = ()

    def defaults(self, max_tokens: int) -> dict[str, float]:
        """Return the sampling parameters of a request that names none. max_tokens: unless the model asks for fewer."""
        defaults = dict(self.sampling_defaults)
        return defaults | {"max_tokens": min(max_tokens, int(defaults.get("max_tokens", max_tokens)))}

    @property
    def pin(self) -> str:
        """Return what another verifier is asked for that is to continue a request of this one with the same tokens."""
        return self.outputs_fingerprint or self.fingerprint

    def continues(self, pin: str) -> bool:
        """Return whether a verifier gives the same tokens as that of a pin; an empty one takes any, an older one is a
        target's.
        """
        return pin in ("", self.fingerprint, self.outputs_fingerprint)

    @property
    def target(self) -> TargetInfo:
        """The part that decides which drafters fit a verifier of this model."""
        return TargetInfo(self.fingerprint, self.features_fingerprint)


@dataclass(frozen=True)
class Load:
    """Load of a worker.

    Attributes:
        num_running: sequences in the batch; sessions of a draft service.
        num_waiting: queued sequences or requests.
        free_kv_tokens: KV cache slots that no running sequence uses.
        max_num_seqs: maximum number of sequences in a step; 0 means no limit.
        step_seconds: seconds since the present step started; 0 between steps.
        num_kv_tokens: all KV cache slots.
        num_prompt_tokens: prompt tokens of all requests since the start. num_cached_tokens: those that were in the prefix
            cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    free_kv_tokens: int = 0
    max_num_seqs: int = 0
    step_seconds: float = 0.0
    num_kv_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class DraftClientStatus:
    """A verifier's connection to one draft service. Counts are since the verifier dialled it.

    Attributes:
        address: host:port of the draft service.
        method: of the drafter; empty until the first connection.
        connected: whether the stream is open.
        circuit: state of the circuit breaker: "closed", "half-open" or "open".
        num_sessions: sessions that the drafter serves.
        num_answered, num_lost: requests for trees, with and without an answer in time.
        num_drafted, num_accepted: verified draft tokens.
    """

    address: str
    method: str = ""
    connected: bool = False
    circuit: str = ""
    num_sessions: int = 0
    num_answered: int = 0
    num_lost: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class Lease:
    """State of a worker that was alive a moment ago.

    Attributes:
        address: host:port.
        incarnation: id of one start of the process. Several workers of a process append a slash and their own names.
        zone: availability zone; may be empty.
        prefix_hashes: hashes of the token blocks in the prefix cache, see eyas.protocol.prefix_hash.
        draft_clients: of a verifier, its connections to draft services.
    """

    role: Role
    address: str
    incarnation: str
    model: ModelInfo
    load: Load = Load()
    zone: str = ""
    prefix_hashes: frozenset[int] = frozenset()
    draft_clients: tuple[DraftClientStatus, ...] = ()

    @property
    def process(self) -> str:
        """The part of the incarnation that all workers of a process share."""
        return self.incarnation.partition("/")[0]


# Generation


@dataclass(frozen=True)
class GenerateCall:
    """A request with what the router needs or adds.

    Attributes:
        request: the request; prompt_ids is empty while the prompt is text.
        prompt_text: the prompt as text; None for a prompt of token ids.
        model: served model name; may be empty if only one is served.
        drafter: NO_DRAFTER for plain decoding. From the router: host:port of the chosen drafter, empty without one.
        trace: W3C trace context of the caller; metadata of the call, not part of the message.
        target_fingerprint: from the router: the pin of the verifiers that can serve the request; empty accepts any.
        skip_special_tokens: for the router: leave special tokens out of the text; not part of the message.
        include_stop: for the router: keep what ends the text, see TextStream; not part of the message.
        kept_tokens: for the router: special tokens that stay in the text; not part of the message.
        arrived_at: for the router: when the client's request arrived, by time.perf_counter(); 0 where it is not known.
        stop_specials: for the router: special tokens whose names stop strings hold; not part of the message.
        uses_model_defaults: from a client: the message leaves out the sampling parameters in DEFAULTED, so that the model's
            count. A call that was received has them already.
        feed_id, feed_call: from the router: the feed that chunks may take, and the call's number there; empty without one.
    """

    request: Request
    prompt_text: str | None = None
    model: str = ""
    drafter: str = ""
    trace: tuple[tuple[str, str], ...] = ()
    target_fingerprint: str = ""
    skip_special_tokens: bool = True
    include_stop: bool = False
    kept_tokens: frozenset[int] = frozenset()
    arrived_at: float = field(default=0.0, compare=False)
    stop_specials: frozenset[int] = frozenset()
    uses_model_defaults: bool = False
    feed_id: str = ""
    feed_call: int = 0


# Drafting


@dataclass(frozen=True)
class DraftRequest:
    """One step of a drafting stream.

    Attributes:
        step: sequence number.
        commits: tokens accepted since the last step, with requests for the next trees.
        ended_sessions: sessions whose state the drafter can free.
        target: on the first request of a stream, selects one of the service's drafters; None selects the only one.
        timeout_s: seconds after the arrival in which trees are of use; 0 without a limit.
    """

    step: int
    commits: tuple[Commit[TensorBytes], ...] = ()
    ended_sessions: tuple[str, ...] = ()
    target: TargetInfo | None = None
    timeout_s: float = 0.0


@dataclass(frozen=True)
class SessionTree:
    """A draft tree of one session. committed_length: committed length at the tree's root."""

    session: str
    epoch: int
    committed_length: int
    tree: DraftTree


@dataclass(frozen=True)
class DraftResponse:
    """The response to the DraftRequest with the same step; with step 0 one that answers none.

    Attributes:
        draft_ms: drafting time.
        prepared: trees that hold the next drafts of likely next commits, see PreparedTree.
    """

    step: int
    trees: tuple[SessionTree, ...] = ()
    resyncs: tuple[ResyncRequired, ...] = ()
    draft_ms: float = 0.0
    refusals: tuple[Refusal, ...] = ()
    prepared: tuple[PreparedTree, ...] = ()


@dataclass(frozen=True)
class DrafterInfo:
    """Target, method and needs of a drafter.

    Attributes:
        feature_size: width of the fused features; 0 if none are needed.
        can_sample, has_lookups: see Drafter.
    """

    model: ModelInfo
    method: str
    needs_features: bool
    needs_samples: bool
    feature_size: int
    can_sample: bool = False
    has_lookups: bool = False
