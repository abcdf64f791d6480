"""A draft head, or another checkpoint to draft with: what its folder says, and all that is built from it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from eyas.config import DraftingConfig, MethodsConfig, TreeConfig
from eyas.config.drafting import (
    METHOD_FACTS,
    MTP,
    NO_DRAFTS,
    DraftQuantization,
    check_method,
    check_quantization,
    split_method,
)
from eyas.config.engine import INT8
from eyas.config.gguf_files import gguf_file
from eyas.config.mtp_layouts import default_method
from eyas.device.host import report_phase
from eyas.device.memory import explain_out_of_memory
from eyas.device.placement import why_no_int8
from eyas.drafters.base import LocalDrafter
from eyas.drafters.lookup.datastore import HEADER as DATASTORE_HEADER
from eyas.drafters.registry import DEFAULT_NUM_STEPS, DrafterParts, Method, find_method, with_levels
from eyas.errors import CheckpointError, OutOfMemory
from eyas.models.checkpoint import EMBEDDING_NAMES, WIRING_KEY, Checkpoint, CheckpointSource, explained, open_checkpoint
from eyas.models.heads.block_config import find_kind
from eyas.models.heads.eagle_config import HeadWiring, find_eagle_kind
from eyas.models.heads.fusers import FeatureFuser, LinearFuser
from eyas.models.heads.validation import WiringReport
from eyas.models.target import TargetModel

log = logging.getLogger(__name__)

# Features fingerprint of methods without features.
NO_FEATURES = "none"
FOR_DRAFTER = "lower drafting.max_kv_tokens or drafting.cuda_graph_max_batch, or set drafting.cuda_graphs to false"


class DraftHead:
    """A folder, hub id or file to draft with, and the method that uses it. Its config and tensor names are read once.

    Every method of this class raises ConfigError for an unknown drafting method or a missing head, and CheckpointError for
    a head that does not load or is for another method.

    Attributes:
        path: Folder, hub id or file; empty for methods that load nothing, and for modules in the target's own checkpoint.
        is_default: True if the target's own module drafts where it has one, because nothing was named.

    Args:
        target: whose own modules `mtp` reads, if `path` is empty.
        has_default: whether they draft if neither path nor method is named.
    """

    def __init__(
        self, path: str, method: str = "", target: CheckpointSource | None = None, has_default: bool = False
    ) -> None:
        self.path = path
        self.is_default = has_default and target is not None and not (path or method)
        self._target = None if target is None else open_checkpoint(target)
        self._own = Checkpoint(path)
        self._named = method

    @cached_property
    def _is_own_module(self) -> bool:
        return self._target is not None and not self.path and MTP in self.method.split("+")

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._target if self._target is not None and self._is_own_module else self._own

    @property
    def _remedy(self) -> str:
        return f"{FOR_DRAFTER}, or set method to none" if self._is_own_module else FOR_DRAFTER

    @cached_property
    def method(self) -> str:
        """The method that was named, or else the one that the head or the target's own module is for; NO_DRAFTS without
        one.
        """
        if self.is_default and self._target is not None:
            folder = self._target.folder
            return default_method(self._target.path, lambda name: file if (file := folder / name).is_file() else None)
        if self._named or not self.path:
            return self._named or NO_DRAFTS
        if self.detected is None:
            reason = f"{self.path} does not show which drafting method it is for"
            raise CheckpointError(f"{reason}; name the method, one of {', '.join(METHOD_FACTS)}")
        return self.detected

    @contextmanager
    def falling_back(self) -> Iterator[None]:
        """Set `method` to NO_DRAFTS, with a warning, if the block cannot use the default module.

        Heads that were named raise their CheckpointError and OutOfMemory.
        """
        try:
            yield
        except (CheckpointError, OutOfMemory) as error:
            if not self.is_default:
                raise
            log.warning("decoding without drafts, because the target's own module for multi-token prediction cannot be "
                        "used: %s. To leave it out, set method to none; to insist on it, to mtp", error)  # fmt: skip
            self.method = NO_DRAFTS

    @property
    def drafts(self) -> bool:
        """Return whether there is anything to draft with."""
        return self.method != NO_DRAFTS

    @cached_property
    def detected(self) -> str | None:
        """The method that the head is for, from its config and the names of its tensors; None if they do not show it.

        EAGLE-1's heads give eagle2: its dynamic trees are the better ones.
        """
        checkpoint = self._own
        if (checkpoint.folder / DATASTORE_HEADER).exists():
            return "rest"
        raw = checkpoint.config
        called = " ".join(map(str, (*(raw.get("architectures") or ()), raw.get("model_type")))).lower()
        heads = next((kind for kind in ("medusa", "hydra") if kind in called or f"{kind}_num_heads" in raw), None)
        if found := heads or find_kind(raw):
            return found
        if eagle := find_eagle_kind(checkpoint.files):
            return "eagle2" if eagle == "eagle" else eagle
        # a head of an unknown kind may be called a model too
        is_model = bool(set(EMBEDDING_NAMES) & checkpoint.files.keys())
        return "sps" if is_model and "causallm" in called and "eagle" not in called else None

    def resolve_tree(self, tree: TreeConfig) -> TreeConfig:
        """Return the tree with as many levels as the method drafts well, if it leaves them open."""
        if tree.num_steps:
            return tree
        if not self.drafts:
            return replace(tree, num_steps=DEFAULT_NUM_STEPS)
        with self._loading() as method:
            return replace(tree, num_steps=method.num_steps(self._checkpoint, tree))

    def resolve_drafting(
        self, drafting: DraftingConfig, target: CheckpointSource, dtype: str, device: str, is_rounded: bool = False
    ) -> DraftingConfig:
        """Return the settings with what an empty `quantization` stands for.

        Raises ConfigError for another one than "none" if the method has no head.

        Args:
            is_rounded: whether the target's weights are rounded to 8 bits.
        """
        check_quantization(self.method, drafting.quantization)
        needs = [METHOD_FACTS[side].needs for side in split_method(self.method)] if self.drafts else []
        can_round = dtype == "float32" and not why_no_int8(device)
        has_bytes = is_rounded or gguf_file(open_checkpoint(target).path) is not None
        default: DraftQuantization = INT8 if can_round and has_bytes and ("features",) in needs else "none"
        return replace(drafting, quantization=drafting.quantization or default)

    def build_drafter(
        self,
        target: CheckpointSource,
        dtype: str,
        device: str,
        tree: TreeConfig,
        drafting: DraftingConfig,
        methods: MethodsConfig | None = None,
        wiring: HeadWiring | None = None,
        has_idle_time: bool = False,
    ) -> LocalDrafter:
        """Build and warm up a drafter, see DrafterParts. Raises OutOfMemory when the device has too little."""
        name = self.method
        target, methods = open_checkpoint(target), methods or MethodsConfig()
        drafting = self.resolve_drafting(drafting, target, dtype, device)
        parts = DrafterParts(target, self._checkpoint, dtype, device, tree, drafting, methods, wiring, has_idle_time)
        report_phase("loading")
        with explain_out_of_memory(f"no memory for the drafter {name}", device, self._remedy):
            with self._loading() as method:
                drafter = method.build(parts if "+" in name else with_levels(method, parts))
            report_phase("compiling")
            drafter.warm_up()
        return drafter

    def build_fuser(self, target: CheckpointSource, dtype: str, device: str) -> FeatureFuser | None:
        """Build what makes the method's features beside the target; None for a method without features."""
        features = find_method(self.method).features if self.drafts else None
        if features is None:
            return None
        with self._loading():
            fuser = features.load_fuser(self._checkpoint, open_checkpoint(target), dtype, device)
        if isinstance(fuser, LinearFuser):
            fuser.serve()
        return fuser

    def features_fingerprint(self) -> str:
        """Return the digest that verifier and drafter must agree on besides the target; empty without drafts."""
        if not self.drafts:
            return ""
        features = find_method(self.method).features
        if features is None:
            return NO_FEATURES
        with self._loading():
            return features.fingerprint(self._checkpoint)

    def validate(self, model: TargetModel, target: CheckpointSource, dtype: str, device: str) -> WiringReport | None:
        """Measure how well the head works beside the loaded target `model` in each plausible wiring.

        Returns None for a method without such a head.
        """
        validate = find_method(self.method).validate if self.drafts else None
        if validate is None:
            return None
        with self._loading():
            return validate(model, self._checkpoint, open_checkpoint(target), dtype, device)

    def resolve_wiring(
        self, model: TargetModel, fuser: FeatureFuser, target: CheckpointSource, dtype: str, device: str
    ) -> HeadWiring | None:
        """Find the wiring in which the head works, log it, and set it on target and fuser; drafters must take it too.

        A wiring that `eyas train` or `eyas check head --write` recorded stays, also of a head that has learnt little so
        far. Returns None for a method without a head that has wirings. A target's own module that works in none sets
        `method` to NO_DRAFTS if it is the default, and else is served; another head raises CheckpointError. Raises
        OutOfMemory when the device has too little.
        """
        report_phase("checking")
        with explain_out_of_memory(f"no memory to check the head of {self.method}", device, self._remedy):
            report = self.validate(model, target, dtype, device)
        if report is None:
            return None
        is_recorded = WIRING_KEY in self._checkpoint.config
        if is_recorded:
            report = replace(report, scores=report.scores[:1])
        elif not self._is_own_module:
            report.require(self._checkpoint.path)
        if report.failed and self.is_default:
            log.warning("%s: no more than chance, so that drafts would save no time; decoding without them. To draft all "
                        "the same, set method to mtp", report)  # fmt: skip
            self.method = NO_DRAFTS
            return None
        if report.failed:
            log.warning(
                "%s: no more than chance, so that drafts cost time and save none. %s; --validate-head never leaves this "
                "check out",
                report,
                "The head is served, for its config records its wiring"
                if is_recorded and not self._is_own_module
                else "To decode without drafts, set method to none",
            )
        elif report.config_is_right:
            log.info("%s", report)
        else:
            log.warning("%s; `eyas check head --write` records it in the head's config, for draft services too", report)
        fuser.aux_hidden_state_layers = report.best.wiring.aux_hidden_state_layers
        model.set_aux_hidden_state_layers(fuser.aux_hidden_state_layers)
        return report.best.wiring

    @contextmanager
    def _loading(self) -> Iterator[Method]:
        """Check method and head, and give the method.

        Adds to the load errors of a head what the method needs: the head may be fine, and the method's name the mistake.
        """
        needed = check_method(self.method, self.path)
        method = find_method(self.method)
        try:
            with explained(f"cannot load {self.path or self.method!r}"):
                if needed:
                    self._check_fits()
                yield method
        except CheckpointError as error:
            if not needed or self.path not in str(error):
                raise
            raise CheckpointError(f"{error} (method {self.method} needs {needed})") from error

    def _check_fits(self) -> None:
        """Raises CheckpointError for a head of another method than the one that was named."""
        found = self.detected
        asked = next(side for side in self.method.split("+") if METHOD_FACTS[side].head)
        if found is not None and asked != found and {asked, found} != {"eagle1", "eagle2"}:
            raise CheckpointError(
                f"{self.path} is for the method {found} ({METHOD_FACTS[found].head or METHOD_FACTS[found].optional_head}), "
                f"not for {asked}, which needs {METHOD_FACTS[asked].head}; set the method to {found}, or leave it out"
            )
