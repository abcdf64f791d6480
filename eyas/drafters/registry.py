"""How each drafting method is made: parts in, a drafter and what feeds it out. Imports on demand.

The one place that knows drafters by name: name and checkpoints in, a drafter and its features out. Imports on demand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from eyas.config import DraftingConfig, MethodsConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.errors import CheckpointError, ConfigError
from eyas.models.heads.features import FeatureFuser

if TYPE_CHECKING:
    from eyas.models.cuda.graphs import Capture
    from eyas.models.heads.eagle import EagleHead
    from eyas.models.heads.eagle_config import HeadWiring
    from eyas.models.heads.eagle_validation import WiringReport
    from eyas.models.target import TargetModel


# features: the target's, of committed positions; samples: the target's at every node of the last tree; prompt: one that says
# something of what follows it.
Need = Literal["features", "samples", "prompt"]
# "anywhere" includes a service of its own on another machine.
Place = Literal["anywhere", "beside the target"]

# In place of a digest of features: drafts are made without any.
NO_FEATURES = "none"
# In place of a digest of features: they are the target's final states, the same for all heads that are fed these.
FINAL_FEATURES = "final"


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter is made of. head: folder, hub id or file of what the method loads; empty for one that loads nothing.
    wiring: how an EAGLE-3 head is read; None as its config says."""

    target: str
    head: str
    dtype: str
    device: str
    tree: TreeConfig
    eagle: DraftingConfig
    methods: MethodsConfig
    wiring: HeadWiring | None = None


@dataclass(frozen=True)
class Method:
    """A way to draft. needs_head: what `head` must name, in words; empty where it need not name anything.

    build: makes the drafter. fuse: what runs beside the target for it, from (head, target, dtype, device); None for a
    method without features. digest: of what decides those features, from the head. probe: tries out beside the loaded target
    how the head is to be read, from (target model, head, target, dtype, device); None where there is nothing to try. needs:
    what it lives on, besides the committed tokens that every drafter is told. place: where it may run. may_head: what `head`
    may name, where it need not. has_law: whether it has a law of its own, to be ranked with the noise of the target's draw.
    """

    needs_head: str
    build: Callable[[DrafterParts], LocalDrafter]
    fuse: Callable[[str, str, str, str], FeatureFuser] | None = None
    digest: Callable[[str], str] = lambda head: NO_FEATURES
    validate_head: Callable[[TargetModel, str, str, str, str], WiringReport] | None = None
    needs: tuple[Need, ...] = ()
    place: Place = "anywhere"
    may_head: str = ""
    has_law: bool = False


def find_method(name: str) -> Method:
    """The method of a name, or the union of two. Raises ConfigError for an unknown one."""
    return _union(name) if "+" in name else _known(name)


def _known(name: str) -> Method:
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"unknown drafter {name!r}; known: {', '.join(METHODS)}, and unions of two, such as A+B")
    return method


def _union(name: str) -> Method:
    """Two methods at once; the head is for the one that needs one."""
    sides = [_known(side) for side in name.split("+")]
    if len(sides) != 2 or sides[0] is sides[1]:
        raise ConfigError(f"drafter {name!r} is no union; name two different methods, such as eagle3+prompt_lookup")
    heads, fed = [side for side in sides if side.needs_head], [side for side in sides if side.fuse]
    if len(heads) == 2 or len(fed) == 2:
        raise ConfigError(
            f"both drafters of {name!r} need a head, and a configuration names one; join either with one that needs none: "
            f"{', '.join(known for known, method in METHODS.items() if not method.needs_head)}"
        )
    needs_head = heads[0].needs_head if heads else ""
    needs = tuple(dict.fromkeys(need for side in sides for need in side.needs))
    made = Method(needs_head, partial(_build_union, sides), needs=needs, has_law=any(side.has_law for side in sides))
    return replace(made, fuse=fed[0].fuse, digest=fed[0].digest, validate_head=fed[0].validate_head) if fed else made


def _build_union(sides: Sequence[Method], parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.combined import CombinedDrafter

    first, second = (side.build(parts if side.needs_head else replace(parts, head="")) for side in sides)
    return CombinedDrafter(first, second, parts.tree, parts.methods.combined)


def _eagle1(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.eagle import EagleDrafter
    from eyas.drafters.tree_growth import StaticTree
    from eyas.models.heads.eagle_loader import load_head

    head = load_head(parts.head, parts.target, parts.dtype, parts.device, "eagle")
    plan = StaticTree(parts.methods.eagle1.paths)
    return EagleDrafter(head, parts.tree, parts.eagle, plan, _capture(parts))


def _eagle2(parts: DrafterParts) -> LocalDrafter:
    from eyas.models.heads.eagle_loader import load_head

    return _growing(parts, load_head(parts.head, parts.target, parts.dtype, parts.device, "eagle"))


def _eagle3(parts: DrafterParts) -> LocalDrafter:
    from eyas.models.heads.eagle_loader import load_head

    return _growing(parts, load_head(parts.head, parts.target, parts.dtype, parts.device, wiring=parts.wiring))


def _growing(parts: DrafterParts, head: EagleHead) -> LocalDrafter:
    """Dynamic trees, grown ahead if that is asked for."""
    from eyas.drafters.draft_ahead import DraftAheadDrafter
    from eyas.drafters.eagle import EagleDrafter

    levels = parts.eagle.max_head_steps or parts.tree.num_steps
    shape = replace(parts.tree, num_steps=min(levels, parts.tree.num_steps))
    drafter = EagleDrafter(head, shape, parts.eagle, capture=_capture(parts))
    return DraftAheadDrafter(drafter, parts.eagle.draft_ahead) if parts.eagle.draft_ahead.top_k else drafter


def _final_features(head: str, target: str, dtype: str, device: str) -> FeatureFuser:
    from eyas.models.checkpoint import read_target_config, resolve
    from eyas.models.heads.features import final_state_fuser

    return final_state_fuser(int(read_target_config(resolve(target))["hidden_size"]))


def _eagle3_features(head: str, target: str, dtype: str, device: str) -> FeatureFuser:
    from eyas.models.heads.eagle_loader import load_fuser

    return load_fuser(head, target, dtype, device)


def _eagle3_digest(head: str) -> str:
    from eyas.models.checkpoint import head_fingerprint

    return head_fingerprint(head)


def _probe_eagle(model: TargetModel, head: str, target: str, dtype: str, device: str) -> WiringReport:
    from eyas.models.heads.eagle_validation import validate_head

    return validate_head(model, head, target, dtype, device, "eagle")


def _probe_eagle3(model: TargetModel, head: str, target: str, dtype: str, device: str) -> WiringReport:
    from eyas.models.heads.eagle_validation import validate_head

    return validate_head(model, head, target, dtype, device)


def _capture(parts: DrafterParts) -> Capture | None:
    """How to capture whole trees, where that is possible and wanted."""
    import torch

    from eyas.models.cuda.graphs import CudaCapture

    device = torch.device(parts.device)
    return CudaCapture(device) if device.type == "cuda" and parts.eagle.cuda_graphs else None


def _medusa(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.medusa import medusa_drafter
    from eyas.models.heads.medusa import load_medusa

    head = load_medusa(parts.head, parts.target, parts.dtype, parts.device)
    return medusa_drafter(head, parts.tree, parts.eagle, parts.methods.medusa, _capture(parts))


def _hydra(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.medusa import hydra_drafter
    from eyas.models.heads.hydra import load_hydra

    head = load_hydra(parts.head, parts.target, parts.dtype, parts.device)
    return hydra_drafter(head, parts.tree, parts.eagle, parts.methods.medusa, _capture(parts))


def _small(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.draft_model import ModelDrafter
    from eyas.models.checkpoint import check_vocabulary
    from eyas.models.target import load_target

    check_vocabulary(parts.head, parts.target)
    model = load_target(parts.head, parts.dtype, parts.device)
    # where experts are looked up row by row the host has to wait for which ones
    capture = None if model.routes_rows else _capture(parts)
    return ModelDrafter(model, parts.tree, parts.eagle, parts.methods.draft_model, capture)


def _prompt_lookup(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(parts.tree, parts.methods.prompt_lookup)


def _rest(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.rest import load_rest

    return load_rest(parts.methods.rest.datastore or parts.head, parts.target, parts.tree, parts.methods.rest, parts.eagle)


def _lookahead(parts: DrafterParts) -> LocalDrafter:
    from eyas.drafters.lookahead import LookaheadDrafter

    return LookaheadDrafter(parts.tree, parts.methods.lookahead)


def _final_digest(head: str) -> str:
    return FINAL_FEATURES


_FED: tuple[Need, ...] = ("features",)

METHODS: Mapping[str, Method] = {
    "eagle1": Method("a draft head of EAGLE-1", _eagle1, _final_features, _final_digest, _probe_eagle, _FED, has_law=True),
    "eagle2": Method("a draft head of EAGLE-1", _eagle2, _final_features, _final_digest, _probe_eagle, _FED, has_law=True),
    "eagle3": Method(
        "a draft head of EAGLE-3", _eagle3, _eagle3_features, _eagle3_digest, _probe_eagle3, _FED, has_law=True
    ),
    "medusa": Method("Medusa heads", _medusa, _final_features, _final_digest, needs=_FED, has_law=True),
    "hydra": Method("Hydra heads", _hydra, _final_features, _final_digest, needs=_FED, has_law=True),
    "sps": Method("a causal LM with the target's vocabulary", _small, has_law=True),
    "prompt_lookup": Method("", _prompt_lookup, needs=("prompt",)),
    "rest": Method("", _rest, may_head="a datastore, if methods.rest names none", has_law=True),
    "lookahead": Method("", _lookahead, needs=("samples",)),
}


log = logging.getLogger(__name__)

# In place of a drafter's name: plain decoding.
NO_DRAFTS = "none"


def build_drafter(
    name: str,
    target: str,
    head: str,
    dtype: str,
    device: str,
    tree: TreeConfig,
    eagle: DraftingConfig,
    methods: MethodsConfig | None = None,
    wiring: HeadWiring | None = None,
) -> LocalDrafter:
    """Raises ConfigError for an unknown name or a missing head, CheckpointError for a head that does not fit the target."""
    parts = DrafterParts(target, head, dtype, device, tree, eagle, methods or MethodsConfig(), wiring)
    with _loading(name, head):
        drafter = find_method(name).build(parts)
    drafter.warm_up()
    return drafter


def build_fuser(name: str, head: str, target: str, dtype: str, device: str) -> FeatureFuser | None:
    """What makes the features that drafter `name` is fed, beside the target; None where it needs none, whatever it loads
    elsewhere. Raises as `build_drafter` does."""
    fuse = None if name == NO_DRAFTS else find_method(name).fuse
    if fuse is None:
        return None
    with _loading(name, head):
        return fuse(head, target, dtype, device)


def features_fingerprint(name: str, head: str) -> str:
    """What verifier and drafter must agree on besides the target: equal digests mean equal features. Empty for NO_DRAFTS."""
    if name == NO_DRAFTS:
        return ""
    method = find_method(name)
    with _loading(name, head) if method.fuse else nullcontext():
        return method.digest(head)


def validate_draft_head(
    name: str, model: TargetModel, head: str, target: str, dtype: str, device: str
) -> WiringReport | None:
    """How the head that drafter `name` loads works when read in each plausible way, beside `model`, which is the loaded
    target; None for a method without such a head. Raises as `build_drafter` does."""
    probe = None if name == NO_DRAFTS else find_method(name).validate_head
    if probe is None:
        return None
    with _loading(name, head):
        return probe(model, head, target, dtype, device)


def resolve_wiring(
    name: str, model: TargetModel, fuser: FeatureFuser, head: str, target: str, dtype: str, device: str
) -> HeadWiring | None:
    """Probe the head and have target and fuser tap what was found to work. The wiring that drafters should take, which the
    log tells of; None for a method without such a head. Raises CheckpointError for a head that works in none."""
    finding = validate_draft_head(name, model, head, target, dtype, device)
    if finding is None:
        return None
    finding.require(head)
    if finding.best is finding.trials[0]:
        log.info("%s", finding)
    else:
        log.warning("%s; `eyas check head --write` records it in the config, for draft services to read it so too", finding)
    fuser.aux_hidden_state_layers = finding.best.wiring.aux_hidden_state_layers
    model.set_aux_hidden_state_layers(fuser.aux_hidden_state_layers)
    return finding.best.wiring


def default_drafter(name: str, head: str) -> str:
    """The method meant by a name that may be left out."""
    return name or ("eagle3" if head else NO_DRAFTS)


@contextmanager
def _loading(name: str, head: str) -> Iterator[None]:
    """Raises ConfigError for an unknown method, and for one that loads something where nothing was named. Says of what does
    not load what the drafter would have needed: the head may be fine, and the name the mistake."""
    needed = find_method(name).needs_head
    if needed and not head:
        raise ConfigError(f"drafter {name!r} needs {needed}; none was named")
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error} (drafter {name} needs {needed})" if needed else str(error)) from error
