"""Values that exist only between processes: what a call, a chunk and a drafting round carry. Knows no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas.draft_protocol import Commit, ResyncRequired, TensorBytes
from eyas.request import Chunk, GenerationStats, Request
from eyas.tree import DraftTree

Role = Literal["verifier", "draft"]

# What ModelInfo.features_fingerprint says of drafts that are made without features.
NO_FEATURES = "none"
# What GenerateCall.drafter says for plain decoding.
NO_DRAFTER = "none"
# Trailing metadata of Generate: mean time of the request's drafting rounds, there and back, in ms.
ROUND_TRIP_KEY = "eyas-draft-round-trip-ms"
# Trailing metadata of a refused call: when to try again, in ms. The name is gRPC's own, whose retry policies heed it.
RETRY_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True)
class TargetInfo:
    """Which drafter a verifier wants: for the target with this fingerprint, fed features with this digest, or none."""

    target_fingerprint: str
    features_fingerprint: str

    def is_drafted_by(self, drafter: ModelInfo) -> bool:
        """Whether a drafter drafts for this target from the features that its verifier sends."""
        fed = drafter.features_fingerprint in (self.features_fingerprint, NO_FEATURES)
        return bool(self.features_fingerprint) and self.target_fingerprint == drafter.fingerprint and fed


@dataclass(frozen=True)
class ModelInfo:
    """The model that a worker serves or drafts for.

    fingerprint: digest of the target; features_fingerprint: digest of the features that the worker sends or expects: for a
    drafter that needs none, NO_FEATURES; for a verifier that takes no drafts, empty. A drafter fits a verifier only when
    the targets agree, and the features unless it needs none.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    features_fingerprint: str = ""

    def is_drafted_by(self, drafter: ModelInfo) -> bool:
        """Whether a drafter drafts for this target from the features that its verifier sends."""
        return TargetInfo(self.fingerprint, self.features_fingerprint).is_drafted_by(drafter)


@dataclass(frozen=True)
class Load:
    """How busy a worker is: sequences in a step, sequences in the queue, free token slots.

    max_num_seqs: most sequences in a step; 0 where there is no such limit. step_seconds: how long the present step has taken.
    """

    num_running: int = 0
    num_waiting: int = 0
    free_kv_tokens: int = 0
    max_num_seqs: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Lease:
    """A worker that was alive a moment ago. incarnation names one start of its process; of several workers in one process,
    each has a name of its own behind a slash.

    zone: where it is, may be empty. prefix_hashes: hashes of the token blocks that it has cached, see eyas.prefixes.
    """

    role: Role
    address: str
    incarnation: str
    model: ModelInfo
    load: Load = Load()
    zone: str = ""
    prefix_hashes: frozenset[int] = frozenset()

    @property
    def process(self) -> str:
        """The part of the incarnation that workers of one process share."""
        return self.incarnation.partition("/")[0]


@dataclass(frozen=True)
class GenerateCall:
    """A request as a client sends it.

    request: prompt_ids is empty while the prompt is text.
    prompt_text: the prompt as text; None where it came as token ids.
    model: may be empty where only one is served.
    drafter: from the router, host:port of the drafter that it picked, empty where none is available now; from a client,
    empty; from both, NO_DRAFTER for plain decoding.
    trace: W3C trace context of the caller, as metadata of the call; it is no part of the message.
    target_fingerprint: from the router, of the target that it means; another one refuses the call.
    """

    request: Request
    prompt_text: str | None = None
    model: str = ""
    drafter: str = ""
    trace: tuple[tuple[str, str], ...] = ()
    target_fingerprint: str = ""


@dataclass(frozen=True)
class Totals:
    """A finished generation in numbers. stats is None where the router has not summed them. num_cached_tokens: of the
    prompt, those that the prefix cache spared."""

    num_prompt_tokens: int
    num_output_tokens: int
    stats: GenerationStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class TextChunk:
    """A chunk as a client receives it.

    text: empty from a verifier, and while a character is incomplete.
    text_lengths: for each new token, how many characters of `text` it released; the rest had been held back.
    seed: the seed in use, on the first chunk only.
    totals: set exactly where chunk.finish_reason is.
    """

    chunk: Chunk
    text: str = ""
    text_lengths: tuple[int, ...] = ()
    seed: int | None = None
    totals: Totals | None = None


@dataclass(frozen=True)
class SessionTree:
    """A draft tree addressed to a session. committed_length: the committed length at its root."""

    session: str
    epoch: int
    committed_length: int
    tree: DraftTree


@dataclass(frozen=True)
class DraftRequest:
    """One step of a drafting stream: what was accepted, and which sessions have ended. target: on a stream's first, which
    drafter it is for; None for the only one."""

    step: int
    commits: tuple[Commit[TensorBytes], ...] = ()
    ended_sessions: tuple[str, ...] = ()
    target: TargetInfo | None = None


@dataclass(frozen=True)
class DraftResponse:
    """The answers to the DraftRequest with the same step. draft_ms: how long the drafter drafted."""

    step: int
    trees: tuple[SessionTree, ...] = ()
    resyncs: tuple[ResyncRequired, ...] = ()
    draft_ms: float = 0.0


@dataclass(frozen=True)
class DrafterInfo:
    """What a draft service drafts for and with. feature_size: width of the fused features; 0 if none are needed."""

    model: ModelInfo
    method: str
    needs_features: bool
    needs_samples: bool
    feature_size: int
    can_sample: bool = False
