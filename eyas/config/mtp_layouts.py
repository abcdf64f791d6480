"""Where checkpoints hold their modules for multi-token prediction (MTP), and whether one drafts by default. Needs no torch.

A module reads the embedding of a token and the hidden state before it, both normed, through a projection and a decoder layer
of the target's own kind. Embedding and output head are the target's. Another layout is one more entry of LAYOUTS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyas.config.drafting import MTP, NO_DRAFTS
from eyas.config.file_values import get_setting, read_json
from eyas.config.target_limits import quantisation, text_settings

log = logging.getLogger(__name__)

INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
# Settings of config.json that give the number of modules.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class MtpLayout:
    """Names of a module's tensors, below a prefix that all share, such as `model.`. `{n}` is the module's number.

    Attributes:
        layer: prefix of the tensors of its decoder layer; without `{n}` that of all layers of the only module.
        projection, embedding_norm, hidden_norm: of its inputs.
        final_norms: of the norm before the output head, which has one of these names; the last may be the target's own.
        counts_on: whether modules are numbered on from the target's layers instead of from 0.
        copies: prefixes of copies of tensors that the target has; they are not read.
    """

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    final_norms: tuple[str, ...]
    counts_on: bool = False
    copies: tuple[str, ...] = ()

    @property
    def is_numbered(self) -> bool:
        """Return whether a module has one layer, whose number is the module's."""
        return "{n}" in self.layer

    @property
    def own(self) -> tuple[str, ...]:
        """Return the names that are not of the decoder layer, even if they begin as its names do."""
        return self.projection, self.embedding_norm, self.hidden_norm, *self.final_norms, *self.copies


LAYOUTS = (
    # Nemotron-H, whose module is attention and experts, a layer each
    MtpLayout(
        "mtp.layers", "mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm",
        tuple(f"mtp.layers.{last}.final_layernorm" for last in (1, 0, 2, 3)),
    ),
    # DeepSeek-V3, GLM-4.5 to 4.7; Hy-V3, whose final norm has another name
    MtpLayout(
        "layers.{n}", "layers.{n}.eh_proj", "layers.{n}.enorm", "layers.{n}.hnorm",
        ("layers.{n}.shared_head.norm", "layers.{n}.final_layernorm"), counts_on=True,
        copies=("layers.{n}.embed_tokens", "layers.{n}.shared_head"),
    ),
    # K-EXAONE, Mellum 2, Qwen3-Next and later
    MtpLayout(
        "mtp.layers.{n}", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", ("mtp.norm",),
        copies=("mtp.embed_tokens", "mtp.lm_head"),
    ),
    # Ernie 4.5
    MtpLayout("mtp_block.{n}", "mtp_linear_proj.{n}", "mtp_emb_norm.{n}", "mtp_hidden_norm.{n}", ("norm",)),
)  # fmt: skip


@dataclass(frozen=True)
class MtpModules:
    """The modules of a checkpoint.

    Attributes:
        prefix: before all names of the layout.
        first: number of the first module.
        count: how many there are.
    """

    layout: MtpLayout
    prefix: str
    first: int
    count: int

    def name(self, template: str, module: int = 0) -> str:
        """Return a name of the layout as the files spell it."""
        return self.prefix + template.format(n=self.first + module)

    def layer_tensors(self, names: Collection[str], module: int = 0) -> dict[str, str]:
        """Return the tensors of a module's decoder layers: their names in the files, by those within a decoder that has no
        others, such as `0.mlp.up_proj.weight`.
        """
        layer = f"{self.name(self.layout.layer, module)}."
        others = tuple(f"{self.name(template, module)}." for template in self.layout.own)
        own = [name for name in names if name.startswith(layer) and not name.startswith(others)]
        return {f"{'0.' if self.layout.is_numbered else ''}{name.removeprefix(layer)}": name for name in own}

    def owns(self, name: str) -> bool:
        """Return whether a tensor is of one of the modules."""
        templates = self.layout.layer, self.layout.projection, self.layout.embedding_norm, self.layout.hidden_norm
        own = (f"{self.name(each, module)}." for each in templates for module in range(self.count))
        others = (f"{self.name(each)}." for each in (*self.layout.final_norms, *self.layout.copies) if "mtp" in each)
        return name.startswith((*own, *others))

    def final_norm(self, names: Collection[str], module: int = 0) -> str:
        """Return the name of the norm before the output head; where there is none, the one that is missing."""
        found = [f"{self.name(template, module)}.weight" for template in self.layout.final_norms]
        return next((name for name in found if name in names), found[0])


def find_modules(names: Collection[str], num_layers: int) -> MtpModules | None:
    """Return the modules that tensors of these names make, after a target with this number of layers; None without one."""
    for layout in LAYOUTS:
        first = num_layers if layout.counts_on else 0
        tail = f"{layout.projection.format(n=first)}.weight"
        found = [name.removesuffix(tail) for name in names if name == tail or name.endswith(f".{tail}")]
        if not found:
            continue
        prefix = min(found, key=len)
        count = 1
        while layout.is_numbered and any(
            name.startswith(f"{prefix}{layout.layer.format(n=first + count)}.") for name in names
        ):
            count += 1
        return MtpModules(layout, prefix, first, count)
    return None


def num_layers_of(config: Mapping[str, Any], source: object) -> int:
    """Return the layers of a target's text model. config: its config.json. Raises CheckpointError for what is no number."""
    return get_setting(int, text_settings(config), "num_hidden_layers", source, 0)


def default_method(source: str, find_file: Callable[[str], Path | None]) -> str:
    """Return the method that drafts for a target if the user names none: MTP if its checkpoint brings a module along.

    Quantised checkpoints get none: their modules are quantised too, or left out. Says why in the log.

    Args:
        source: the target, for the log.
        find_file: finds a file of the checkpoint by its name.
    """
    file = find_file("config.json")
    if file is None:
        return NO_DRAFTS
    config = read_json(file)
    names = _tensor_names(find_file)
    found = find_modules(names, num_layers_of(config, file)) if names else None
    stated = next((count for key in COUNTS if (count := text_settings(config).get(key))), 0)
    if found is None:
        if stated and names:
            others = sorted(name for name in names if "mtp" in name)
            what = (f"hold them in a layout that Eyas does not know, {others[0]}" if others
                    else "hold none. Quantised copies often leave them out")  # fmt: skip
            log.info("%s: its config announces %s modules for multi-token prediction, but its files %s; it is served "
                     "without drafts", source, stated, what)  # fmt: skip
        return NO_DRAFTS
    if kind := quantisation(config):
        log.info("%s: it has modules for multi-token prediction, and weights quantised by %s; to draft with plain modules, "
                 "set method to mtp. It is served without drafts", source, kind)  # fmt: skip
        return NO_DRAFTS
    log.info("%s: drafts come from its own module for multi-token prediction; to do without, set method to none", source)
    return MTP


def _tensor_names(find_file: Callable[[str], Path | None]) -> Collection[str]:
    """Return the names of a checkpoint's tensors, from its index or the header of its only file.

    Empty for other formats, and for a damaged file: its loader says more.
    """
    if (index := find_file(INDEX_FILE)) is not None:
        found = read_json(index).get("weight_map")
        return list(found) if isinstance(found, dict) else []
    if (file := find_file(WEIGHTS_FILE)) is None:
        return []
    try:
        with safe_open(file, "numpy") as stored:
            return list(stored.keys())
    except SafetensorError:
        return []
