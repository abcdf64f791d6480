"""Configuration of drafters: the shape of draft trees, drafting with a model, and one class for each method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eyas.config.checks import at_least, num_bytes, one_of, require
from eyas.errors import ConfigError

TreeChoices = tuple[tuple[int, ...], ...]
TreeShape = Literal["static", "dynamic"]
DraftAheadMode = Literal["", "always", "never"]
DraftQuantization = Literal["", "none", "fp8", "int8"]
# features: the target's, of committed positions. samples: the target's, at every node of the last tree.
# prompt: one that resembles what follows it.
Need = Literal["features", "samples", "prompt"]

# The method of plain decoding, and the one that reads what a target's own checkpoint brings along.
NO_DRAFTS = "none"
MTP = "mtp"


@dataclass(frozen=True)
class MethodFacts:
    """Facts about a drafting method that users and configurations have to know.

    Attributes:
        head: what must be named as `draft_model`, in words; empty if nothing.
        optional_head: what may be named, if nothing must.
        needs: what it takes besides committed tokens.
        has_probs: whether it ranks by probabilities, to which the noise of the target's draws can be added.
        drafts_ahead: whether a draft service grows its trees while the target verifies.
    """

    head: str = ""
    optional_head: str = ""
    needs: tuple[Need, ...] = ()
    has_probs: bool = False
    drafts_ahead: bool = False

    @property
    def has_head(self) -> bool:
        """Return whether it loads a head or a draft model; a configuration names one at most."""
        return bool(self.head) or "features" in self.needs


def _with_head(head: str, drafts_ahead: bool = False) -> MethodFacts:
    return MethodFacts(head, needs=("features",), has_probs=True, drafts_ahead=drafts_ahead)


# Every drafting method; `eyas.drafters.registry` has what builds it.
METHOD_FACTS: Mapping[str, MethodFacts] = {
    "eagle1": _with_head("a draft head of EAGLE-1"),
    "eagle2": _with_head("a draft head of EAGLE-1", drafts_ahead=True),
    "eagle3": _with_head("a draft head of EAGLE-3", drafts_ahead=True),
    "peagle": _with_head("a draft head of P-EAGLE"),
    MTP: MethodFacts(
        optional_head="another checkpoint with the target's modules for multi-token prediction, if its own has none",
        needs=("features",),
        has_probs=True,
        drafts_ahead=True,
    ),
    "dspark": _with_head("a draft head of DSpark"),
    "dflash": _with_head("a draft head of DFlash"),
    "dflash2": _with_head("a draft head of DFlash2"),
    "medusa": _with_head("Medusa heads"),
    "hydra": _with_head("Hydra heads"),
    "sps": MethodFacts("a causal LM with the target's vocabulary", has_probs=True),
    "prompt_lookup": MethodFacts(needs=("prompt",)),
    "suffix": MethodFacts(needs=("prompt",)),
    "rest": MethodFacts(optional_head="a datastore, if methods.rest names none", has_probs=True),
    "lookahead": MethodFacts(needs=("samples",)),
}
# Methods that look tokens up in the request and in earlier ones. They load nothing and take microseconds.
LOOKUPS = frozenset(name for name, facts in METHOD_FACTS.items() if not (facts.head or facts.optional_head))

# EAGLE's published static tree, `mc_sim_7b_63` in its code: 4, 8, 8, 3 and 2 nodes on five levels.
MC_SIM_7B_63: TreeChoices = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class TreeConfig:
    """Shape of a dynamic draft tree.

    Attributes:
        num_draft_tokens: most tree nodes, with the root.
        num_steps: most levels below the root. 0 takes all tokens that a one-pass head proposes, as many as there are nodes
            for lookups, 3 for `mtp` or one for each of more modules, and 5 for other methods. Of two methods together the
            head keeps its own default.
        top_k: nodes that each level expands, and children per node.
    """

    num_draft_tokens: int = 24
    num_steps: int = 0
    top_k: int = 8

    def __post_init__(self) -> None:
        at_least(1, num_draft_tokens=self.num_draft_tokens, top_k=self.top_k)
        at_least(0, num_steps=self.num_steps)


@dataclass(frozen=True)
class DraftAheadConfig:
    """Settings by which a draft service with an EAGLE head prepares the next trees while the target verifies.

    Attributes:
        top_k: most nodes of a session that a pass runs, again or for the first time.
        num_candidates: children kept for each node.
        num_steps: greatest depth below the last committed token, including the tree under verification.
        miss_steps: most levels of a tree on demand, whose commit was not foreseen.
        mode: whether to do it. Empty is "always" on a GPU, also an emulated one, and "never" on a CPU, whose cores a draft
            service mostly shares.
    """

    top_k: int = 128
    num_candidates: int = 32
    num_steps: int = 24
    miss_steps: int = 8
    mode: DraftAheadMode = ""

    def __post_init__(self) -> None:
        at_least(1, top_k=self.top_k, num_candidates=self.num_candidates, miss_steps=self.miss_steps)
        one_of(DraftAheadMode, mode=self.mode)
        at_least(2, num_steps=self.num_steps)


@dataclass(frozen=True)
class DraftingConfig:
    """Settings of every drafter that has a model: EAGLE, Medusa, Hydra and small draft models.

    Attributes:
        max_kv_tokens: capacity of the draft KV cache, for all sessions. If it is full, the least recently used session is
            evicted. 0 takes kv_cache_memory, or 65536 tokens if that is empty too.
        kv_cache_memory: size of the draft KV cache instead, such as 512MiB or 2GiB.
        shared_noise: above temperature 0, rank children with the target's own Gumbel noise, which raises acceptance.
        ranking_temperature: temperature of the ranking by draft logits: lower values trust the best children more, and make
            trees deeper. 0 takes 0.6 for requests up to temperature 0.8 and 0.8 above it; without shared noise it takes 1
            for every request above temperature 0. 1 ranks by draft probabilities, at temperature 0 as EAGLE-2 does.
        proposal_top_k: likeliest tokens from which a sampled proposal draws.
        cuda_graphs: capture tree growth as CUDA graphs.
        cuda_graph_max_batch: most sessions whose trees grow together, in one captured graph.
        max_head_steps: most tree levels that the head grows; a combined method's other drafter may go deeper. 0 takes
            tree.num_steps.
        quantization: "fp8" rounds the weights of a draft head's linear layers to 8 bits at load, with a scale for each
            output; "int8" does so on a CPU, with a scale for each 16 inputs. "none" keeps them. Empty is "int8" where the
            compiled CPU kernels run (numba, one thread of torch, AVX2 and FMA, passes in float32) and the target is from a
            GGUF file, or in `LLM` has `engine.quantization` "int8"; else "none".
        emulated_device: cost table of a device to emulate on the CPU, as `engine.emulated_device`.
        draft_ahead: drafting between two commits. Only draft services do it.
    """

    max_kv_tokens: int = 0
    kv_cache_memory: str = ""
    shared_noise: bool = True
    ranking_temperature: float = 0.0
    proposal_top_k: int = 128
    cuda_graphs: bool = True
    cuda_graph_max_batch: int = 64
    max_head_steps: int = 0
    quantization: DraftQuantization = ""
    emulated_device: str = ""
    draft_ahead: DraftAheadConfig = field(default_factory=DraftAheadConfig)

    def __post_init__(self) -> None:
        at_least(1, proposal_top_k=self.proposal_top_k, cuda_graph_max_batch=self.cuda_graph_max_batch)
        at_least(0, max_kv_tokens=self.max_kv_tokens, max_head_steps=self.max_head_steps)
        at_least(0, ranking_temperature=self.ranking_temperature)
        one_of(DraftQuantization, quantization=self.quantization)
        require(
            not (self.max_kv_tokens and self.kv_cache_memory),
            f"max_kv_tokens is {self.max_kv_tokens} and kv_cache_memory {self.kv_cache_memory}; leave one of them out",
        )
        if self.kv_cache_memory:
            num_bytes("kv_cache_memory", self.kv_cache_memory)

    @property
    def num_bytes(self) -> int:
        """kv_cache_memory in bytes; 0 if it is empty."""
        return num_bytes("kv_cache_memory", self.kv_cache_memory) if self.kv_cache_memory else 0


@dataclass(frozen=True)
class Eagle1Config:
    """EAGLE-1.

    Attributes:
        tree_choices: the static tree. A node is a path of ranks from the root: [0, 2] is the third child of the best child.
    """

    tree_choices: TreeChoices = MC_SIM_7B_63

    def __post_init__(self) -> None:
        _valid_tree(self.tree_choices)


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa and Hydra.

    Attributes:
        shape: "static" trees always have the same nodes, "dynamic" trees the nodes with the best scores, as in EAGLE-2.
        tree_choices: the static tree, as for EAGLE-1. Empty takes the likeliest nodes within the limits of `tree`.
    """

    shape: TreeShape = "static"
    tree_choices: TreeChoices = ()

    def __post_init__(self) -> None:
        one_of(TreeShape, shape=self.shape)
        if self.tree_choices:
            _valid_tree(self.tree_choices)


@dataclass(frozen=True)
class DraftModelConfig:
    """A small draft model (method sps).

    Attributes:
        max_prefill_tokens: most tokens in one forward pass; longer prompts are prefilled in chunks.
    """

    max_prefill_tokens: int = 512

    def __post_init__(self) -> None:
        at_least(1, max_prefill_tokens=self.max_prefill_tokens)


@dataclass(frozen=True)
class PromptLookupConfig:
    """Prompt lookup: drafts the continuation of earlier occurrences of the last tokens in the same context.

    Attributes:
        max_ngram: longest match of the last tokens.
        min_ngram: shortest match.
        max_matches: most occurrences in a tree.
        max_cached_tokens: context tokens kept for all sessions, 200 to 400 bytes each, 1 KB without numba. Beyond it the
            least recently used session is evicted.
    """

    max_ngram: int = 6
    min_ngram: int = 1
    max_matches: int = 12
    max_cached_tokens: int = 2**20

    def __post_init__(self) -> None:
        at_least(1, min_ngram=self.min_ngram, max_matches=self.max_matches, max_cached_tokens=self.max_cached_tokens)
        at_least(self.min_ngram, max_ngram=self.max_ngram)


@dataclass(frozen=True)
class SuffixConfig:
    """Suffix decoding: drafts what followed the last tokens before, in the session and in its tenant's earlier outputs.

    Attributes:
        max_ngram: longest match of the last tokens.
        min_ngram: shortest match.
        max_matches: most occurrences in a tree.
        max_cached_tokens: context tokens kept for all sessions, about 250 bytes each. Beyond it the least recently used
            session is evicted.
        max_output_tokens: output tokens kept of ended sessions, of all tenants together. Beyond it the oldest outputs of the
            least recently used tenant are dropped.
    """

    max_ngram: int = 32
    min_ngram: int = 2
    max_matches: int = 24
    max_cached_tokens: int = 2**20
    max_output_tokens: int = 2**19

    def __post_init__(self) -> None:
        at_least(1, min_ngram=self.min_ngram, max_matches=self.max_matches, max_cached_tokens=self.max_cached_tokens)
        at_least(1024, max_output_tokens=self.max_output_tokens)
        at_least(self.min_ngram, max_ngram=self.max_ngram)


@dataclass(frozen=True)
class RestConfig:
    """REST: drafts the continuation of the last tokens in a datastore.

    Attributes:
        datastore: folder written by `eyas datastore build`. Empty takes draft_model.
        max_ngram: longest match of the last tokens.
        min_ngram: shortest match.
        max_matches: most occurrences in a tree.
        max_sessions: sessions kept. Beyond it the least recently used one is evicted.
    """

    datastore: str = ""
    max_ngram: int = 16
    min_ngram: int = 2
    max_matches: int = 96
    max_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, min_ngram=self.min_ngram, max_matches=self.max_matches, max_sessions=self.max_sessions)
        at_least(self.min_ngram, max_ngram=self.max_ngram)


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding.

    Attributes:
        window_size: columns of the Jacobi window.
        ngram_size: tokens of an n-gram; the window has ngram_size - 1 rows.
        guess_set_size: most n-grams verified per step, and kept per first token.
        max_cached_tokens: n-gram tokens kept for all sessions. Beyond it the least recently used session is evicted.
    """

    window_size: int = 4
    ngram_size: int = 4
    guess_set_size: int = 6
    max_cached_tokens: int = 2**21

    def __post_init__(self) -> None:
        at_least(1, window_size=self.window_size, guess_set_size=self.guess_set_size)
        at_least(1, max_cached_tokens=self.max_cached_tokens)
        at_least(2, ngram_size=self.ngram_size)


@dataclass(frozen=True)
class CombinedConfig:
    """Two drafters that share a tree, such as eagle3+prompt_lookup.

    Attributes:
        min_share: share of the tree's draft tokens reserved for each drafter, in [0, 0.5]. The best scores get the rest.
        max_sessions: sessions kept. Beyond it the least recently used one is evicted.
    """

    min_share: float = 0.125
    max_sessions: int = 2**14

    def __post_init__(self) -> None:
        at_least(1, max_sessions=self.max_sessions)
        require(0 <= self.min_share <= 0.5, f"min_share is {self.min_share}; it must lie in [0, 0.5]")


@dataclass(frozen=True)
class MethodsConfig:
    """Settings of single drafting methods."""

    eagle1: Eagle1Config = field(default_factory=Eagle1Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    draft_model: DraftModelConfig = field(default_factory=DraftModelConfig)
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    rest: RestConfig = field(default_factory=RestConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    combined: CombinedConfig = field(default_factory=CombinedConfig)


def _valid_tree(choices: TreeChoices) -> None:
    """Check that the paths are distinct and that every node has its parent."""
    nodes = {(), *choices}
    require(
        len(nodes) == len(choices) + 1 > 1,
        f"tree_choices has {len(choices)} nodes, {len(nodes) - 1} of them distinct; list each one once",
    )
    for path in choices:
        require(
            path[:-1] in nodes and min(path) >= 0,
            f"tree_choices has the node {list(path)} without its parent, or with a rank below 0",
        )


def split_method(name: str) -> list[str]:
    """Return the one or two methods that a name such as eagle3 or eagle3+prompt_lookup combines.

    Raises ConfigError for an unknown method, and for two that cannot be combined.
    """
    sides = name.split("+")
    for side in sides:
        if side not in METHOD_FACTS:
            known = ", ".join(METHOD_FACTS)
            raise ConfigError(f"unknown drafter {side!r}; known: {known}, and two of them combined, such as A+B")
    if len(sides) > 2 or len(set(sides)) < len(sides):
        raise ConfigError(f"drafter {name!r} is no combination; name two different methods, such as eagle3+prompt_lookup")
    if all(METHOD_FACTS[side].has_head for side in sides) and len(sides) == 2:
        raise ConfigError(
            f"both drafters of {name!r} need a head, and a configuration names one; combine either with one that needs "
            f"none: {', '.join(method for method, facts in METHOD_FACTS.items() if not facts.has_head)}"
        )
    return sides


def check_method(name: str, draft_model: str) -> str:
    """Return what a method needs as `draft_model`, in words.

    Raises ConfigError for an unknown method, and if it needs a `draft_model` and none is named.
    """
    if name in ("", NO_DRAFTS):
        return ""
    needed = "".join(METHOD_FACTS[side].head for side in split_method(name))  # of two, one at most
    if needed and not draft_model:
        raise ConfigError(f"drafter {name!r} needs {needed}; none was named; set draft_model, or --draft-model")
    return needed


def check_quantization(name: str, quantization: DraftQuantization) -> None:
    """Raise ConfigError if `drafting.quantization` is set for a method without a head that can be served with 8 bits."""
    able = [method for method, facts in METHOD_FACTS.items() if "features" in facts.needs]
    require(
        quantization in ("", "none") or bool(set(able) & set(name.split("+"))),
        f"drafting.quantization is {quantization}, and drafter {name!r} has no head for it; leave it empty, or take one of "
        f"{', '.join(able)}",
    )
