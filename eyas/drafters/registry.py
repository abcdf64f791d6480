"""The table of drafting methods, and what is built from it by name.

A new method is one module and one entry in `METHODS`; what users have to know of it is in `METHOD_FACTS` of
`eyas.config.drafting`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.config import DraftingConfig, MethodsConfig, TreeConfig
from eyas.config.drafting import METHOD_FACTS, MTP, split_method
from eyas.config.file_values import get_setting
from eyas.config.mtp_layouts import find_modules, num_layers_of
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.ahead.eagle import NUM_GROWN_SLOTS
from eyas.drafters.base import LocalDrafter
from eyas.drafters.block import BlockDrafter
from eyas.drafters.combined import CombinedDrafter
from eyas.drafters.draft_model import ModelDrafter
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.lookup.lookahead import LookaheadDrafter
from eyas.drafters.lookup.prompt_lookup import prompt_lookup
from eyas.drafters.lookup.rest import load_rest
from eyas.drafters.lookup.suffix import SuffixDrafter
from eyas.drafters.mtp import MtpDrafter
from eyas.drafters.multi_head import MultiHeadDrafter
from eyas.drafters.peagle import PEagleDrafter
from eyas.drafters.trees.growth import StaticTree
from eyas.models.backends.cuda_graphs import Capture, CudaCapture
from eyas.models.checkpoint import Checkpoint, check_vocabulary
from eyas.models.fingerprints import head_fingerprint
from eyas.models.heads.block import load_block_fuser, load_block_head, serve
from eyas.models.heads.block_config import BlockKind, read_block_size
from eyas.models.heads.eagle import EagleHead, load_fuser, load_head
from eyas.models.heads.eagle_config import HeadWiring, Kind, trained_depth
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.heads.hydra import HydraHead, load_hydra
from eyas.models.heads.medusa import MedusaHead, load_medusa
from eyas.models.heads.mtp import load_mtp_head, stated_wiring
from eyas.models.heads.validation import WiringReport, validate_block_head, validate_head, validate_mtp_head
from eyas.models.loading import load_target
from eyas.models.target import TargetModel

BLOCK_KINDS: tuple[BlockKind, ...] = ("dspark", "dflash", "dflash2")
# Levels of a tree whose drafter runs one pass for each.
DEFAULT_NUM_STEPS = 5
# A module is trained for one level. On its own states it loses more of its acceptance at each than an EAGLE head.
MTP_NUM_STEPS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterParts:
    """Parts from which a drafter is built.

    Attributes:
        head: what the method loads; its path is empty if it loads nothing, and may be a file.
        wiring: how an EAGLE-3 or block head is wired; None if its config says so.
        has_idle_time: whether `draft_ahead` is called while the drafter has nothing else to do, as draft services do.
    """

    target: Checkpoint
    head: Checkpoint
    dtype: str
    device: str
    tree: TreeConfig
    drafting: DraftingConfig
    methods: MethodsConfig
    wiring: HeadWiring | None = None
    has_idle_time: bool = False

    @property
    def head_tree(self) -> TreeConfig:
        """Return the tree with as many levels as a head may grow itself."""
        num_steps = min(self.drafting.max_head_steps or self.tree.num_steps, self.tree.num_steps)
        return replace(self.tree, num_steps=num_steps)

    @property
    def drafts_ahead(self) -> bool:
        """Return whether trees grow while the target verifies: as the settings say, or else in a draft service on a GPU."""
        has_gpu = torch.device(self.device).type != "cpu" or bool(self.drafting.emulated_device)
        mode = self.drafting.draft_ahead.mode
        return has_gpu and self.has_idle_time if not mode else mode == "always"

    def capture(self) -> Capture | None:
        """Return how to capture trees as CUDA graphs; None if that is impossible or switched off."""
        device = torch.device(self.device)
        return CudaCapture(device) if device.type == "cuda" and self.drafting.cuda_graphs else None


@dataclass(frozen=True)
class TargetFeatures:
    """The features that a method is fed.

    Attributes:
        load_fuser: makes them beside the target, from (head, target, dtype, device).
        fingerprint: identifies them, from the head: equal fingerprints mean equal features.
    """

    load_fuser: Callable[[Checkpoint, Checkpoint, str, str], FeatureFuser]
    fingerprint: Callable[[Checkpoint], str]


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        build: makes the drafter.
        features: the target features that it is fed, if any.
        validate: compares the head's guesses with the target's, if that is possible; from (target, head, checkpoint of
            the target, dtype, device).
        num_steps: levels of its trees if `tree.num_steps` names none, from the head and the tree's other sizes.
    """

    build: Callable[[DrafterParts], LocalDrafter]
    features: TargetFeatures | None = None
    validate: Callable[[TargetModel, Checkpoint, Checkpoint, str, str], WiringReport] | None = None
    num_steps: Callable[[Checkpoint, TreeConfig], int] = lambda head, tree: DEFAULT_NUM_STEPS


def _build_eagle1(parts: DrafterParts) -> LocalDrafter:
    head = _load_eagle(parts, "eagle")
    static_tree = StaticTree(parts.methods.eagle1.tree_choices, head.draft_ids.device)
    return EagleDrafter(head, parts.tree, parts.drafting, static_tree, parts.capture())


def _load_eagle(parts: DrafterParts, kind: Kind) -> EagleHead:
    quantization = parts.drafting.quantization
    return load_head(parts.head, parts.target, parts.dtype, parts.device, kind, parts.wiring, quantization)


def _build_dynamic_eagle(kind: Kind, parts: DrafterParts) -> LocalDrafter:
    num_grown_slots = NUM_GROWN_SLOTS if parts.drafts_ahead else 0
    head, capture = _load_eagle(parts, kind), parts.capture()
    drafter = EagleDrafter(head, parts.head_tree, parts.drafting, capture=capture, num_grown_slots=num_grown_slots)
    return DraftAheadDrafter(drafter, parts.drafting.draft_ahead) if parts.drafts_ahead else drafter


def _build_mtp(parts: DrafterParts) -> LocalDrafter:
    quantization = parts.drafting.quantization
    head = load_mtp_head(parts.head, parts.target, parts.dtype, parts.device, parts.wiring, quantization)
    why_not_ahead = "attention slides" if head.has_window else "there are several modules" if head.num_modules > 1 else ""
    if parts.drafting.draft_ahead.mode == "always" and why_not_ahead:
        log.warning("%s: %s, so that trees do not grow ahead", parts.head, why_not_ahead)
    is_ahead = parts.drafts_ahead and not why_not_ahead
    # a graph cannot be captured if the host waits to see which experts the rows take
    capture = None if head.has_experts or head.num_modules > 1 else parts.capture()
    drafter = MtpDrafter(head, parts.head_tree, parts.drafting, capture, NUM_GROWN_SLOTS if is_ahead else 0)
    return DraftAheadDrafter(drafter, parts.drafting.draft_ahead) if is_ahead else drafter


def _mtp_num_steps(head: Checkpoint, tree: TreeConfig) -> int:
    found = find_modules(head.files, num_layers_of(head.config, head.config_file))
    return max(MTP_NUM_STEPS, found.count if found else 0)


def _build_peagle(parts: DrafterParts) -> LocalDrafter:
    return PEagleDrafter(_load_eagle(parts, "peagle"), parts.head_tree, parts.drafting, parts.capture())


def _build_block(kind: BlockKind, parts: DrafterParts) -> LocalDrafter:
    head = load_block_head(parts.head, parts.target, parts.dtype, parts.device, parts.wiring)
    assert head.config.kind == kind, "the method was checked"
    return BlockDrafter(serve(head, parts.drafting.quantization), parts.head_tree, parts.drafting, parts.capture())


def _build_multi_head(
    load: Callable[[Checkpoint, Checkpoint, str, str, str], MedusaHead | HydraHead], parts: DrafterParts
) -> LocalDrafter:
    head = load(parts.head, parts.target, parts.dtype, parts.device, parts.drafting.quantization)
    return MultiHeadDrafter(head, parts.tree, parts.drafting, parts.methods.medusa, parts.capture())


def _build_draft_model(parts: DrafterParts) -> LocalDrafter:
    check_vocabulary(parts.head, parts.target)
    model = load_target(parts.head, parts.dtype, parts.device)
    # a graph cannot be captured if the host waits to see which experts the rows take
    capture = None if model.is_mixture_of_experts else parts.capture()
    return ModelDrafter(model, parts.tree, parts.drafting, parts.methods.draft_model, capture)


def _build_rest(parts: DrafterParts) -> LocalDrafter:
    source = parts.methods.rest.datastore or parts.head.path
    return load_rest(source, parts.target, parts.tree, parts.methods.rest, parts.drafting)


def _mtp_fuser(head: Checkpoint, target: Checkpoint, dtype: str, device: str) -> FeatureFuser:
    hidden = get_setting(int, target.text_config, "hidden_size", target.config_file)
    return FeatureFuser(hidden, stated_wiring(head).aux_hidden_state_layers)


def _mtp_fingerprint(head: Checkpoint) -> str:
    return f"{MTP} {stated_wiring(head).aux_hidden_state_layers}"


def _final_fuser(head: Checkpoint, target: Checkpoint, dtype: str, device: str) -> FeatureFuser:
    return FeatureFuser(get_setting(int, target.text_config, "hidden_size", target.config_file))


# Final states are the same whatever the head.
_FINAL = TargetFeatures(_final_fuser, fingerprint=lambda head: "final")
_EAGLE2 = Method(
    partial(_build_dynamic_eagle, "eagle"),
    features=_FINAL,
    validate=partial(validate_head, kind="eagle"),
)
_MEDUSA = Method(
    partial(_build_multi_head, load_medusa),
    features=_FINAL,
)

_BLOCK = Method(
    partial(_build_block, "dspark"),
    features=TargetFeatures(load_block_fuser, head_fingerprint),
    validate=validate_block_head,
    num_steps=lambda head, tree: read_block_size(head),
)

# A level costs a lookup nothing: its trees may be chains.
_LOOKUP = Method(
    lambda p: prompt_lookup(p.tree, p.methods.prompt_lookup),
    num_steps=lambda head, tree: max(tree.num_draft_tokens - 1, 1),
)

METHODS: Mapping[str, Method] = {
    "eagle1": replace(_EAGLE2, build=_build_eagle1),
    "eagle2": _EAGLE2,
    "eagle3": Method(
        partial(_build_dynamic_eagle, "eagle3"),
        features=TargetFeatures(load_fuser, head_fingerprint),
        validate=validate_head,
    ),
    "peagle": Method(
        _build_peagle,
        features=TargetFeatures(partial(load_fuser, kind="peagle"), head_fingerprint),
        validate=partial(validate_head, kind="peagle"),
        num_steps=lambda head, tree: trained_depth(head.config),
    ),
    MTP: Method(
        _build_mtp,
        features=TargetFeatures(_mtp_fuser, _mtp_fingerprint),
        validate=validate_mtp_head,
        num_steps=_mtp_num_steps,
    ),
    **{kind: replace(_BLOCK, build=partial(_build_block, kind)) for kind in BLOCK_KINDS},
    "medusa": _MEDUSA,
    "hydra": replace(_MEDUSA, build=partial(_build_multi_head, load_hydra)),
    "sps": Method(_build_draft_model),
    "prompt_lookup": _LOOKUP,
    "suffix": replace(_LOOKUP, build=lambda p: SuffixDrafter(p.tree, p.methods.suffix)),
    "rest": replace(_LOOKUP, build=_build_rest),
    "lookahead": replace(_LOOKUP, build=lambda p: LookaheadDrafter(p.tree, p.methods.lookahead)),
}


def find_method(name: str) -> Method:
    """Return a method by name, or two combined, such as eagle3+prompt_lookup. Raises ConfigError for an unknown one."""
    names = split_method(name)
    return _combine(names) if len(names) == 2 else METHODS[name]


def _combine(names: Sequence[str]) -> Method:
    """Combine two methods at once; the head is for the one that needs one."""
    sides = [METHODS[name] for name in names]
    return replace(
        METHODS[max(names, key=lambda name: METHOD_FACTS[name].has_head)],
        build=partial(_build_combined, names),
        num_steps=lambda head, tree: max(side.num_steps(head, tree) for side in sides),
    )


def _build_combined(names: Sequence[str], parts: DrafterParts) -> LocalDrafter:
    without_head = replace(parts, head=Checkpoint(""))
    first, second = (
        METHODS[name].build(with_levels(METHODS[name], parts if METHOD_FACTS[name].has_head else without_head))
        for name in names
    )
    deepest = max((METHODS[name] for name in names), key=lambda side: side.num_steps(parts.head, parts.tree))
    tree = with_levels(deepest, parts).tree
    return CombinedDrafter(first, second, tree, parts.methods.combined)


def with_levels(method: Method, parts: DrafterParts) -> DrafterParts:
    """Return the parts with as many levels as a method drafts well, if the tree leaves them open."""
    num_steps = parts.tree.num_steps or method.num_steps(parts.head, parts.tree)
    return replace(parts, tree=replace(parts.tree, num_steps=num_steps))
