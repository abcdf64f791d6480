"""Tiny random targets that bring a module for multi-token prediction along, in the layouts of public checkpoints."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.models.checkpoint import Checkpoint
from tests.support.families import config_of
from tests.support.family_configs import MORE_FAMILIES, SERVED
from tests.support.reference import whole_class
from tests.support.tiny import write_checkpoint

LAYERS, HIDDEN = 3, 32
# Parts of a module, in the order of `MtpFamily.names`.
PARTS = ("projection", "embedding norm", "hidden norm", "final norm")
DEEPSEEK = tuple(f"model.layers.{LAYERS}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
HY = (*DEEPSEEK[:3], f"model.layers.{LAYERS}.final_layernorm.weight")
BESIDE = tuple(f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
NEMOTRON = tuple(f"mtp.layers.{name}.weight" for name in ("0.eh_proj", "0.enorm", "0.hnorm", "1.final_layernorm"))
ERNIE = (*(f"model.mtp_{name}.0.weight" for name in ("linear_proj", "emb_norm", "hidden_norm")), "model.norm.weight")


@dataclass(frozen=True)
class MtpFamily:
    """A family of targets, and how it writes its module.

    layer: prefix of the module's layer; names: of its other PARTS. whole: settings of a model with one layer more than the
    target, which is the module's. own: settings of the target that differ from `whole`. adds_one:
    whether norms multiply by one more than their weight.
    """

    kind: str
    layer: str
    names: tuple[str, ...]
    whole: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    adds_one: bool = False

    @property
    def has_layers(self) -> bool:
        """Whether its only module is several layers."""
        return self.layer == "mtp.layers"


def _with_layer(kind: str, **lists: str) -> dict[str, Any]:
    """Settings of a family with one more entry in each of these lists."""
    settings = SERVED[kind]
    return {**settings, **{key: [*settings[key], value] for key, value in lists.items()}}


FAMILIES: dict[str, MtpFamily] = {
    "glm4_moe": MtpFamily("glm4_moe", f"model.layers.{LAYERS}", DEEPSEEK, MORE_FAMILIES["glm4_moe"]),
    "deepseek_v3": MtpFamily("deepseek_v3", f"model.layers.{LAYERS}", DEEPSEEK, MORE_FAMILIES["deepseek_v3"]),
    "bailing_hybrid": MtpFamily(
        "bailing_hybrid", f"model.layers.{LAYERS}", HY,
        _with_layer("bailing_hybrid", layer_types="full_attention", mlp_layer_types="sparse"),
    ),
    "deepseek_v32": MtpFamily("deepseek_v32", f"model.layers.{LAYERS}", DEEPSEEK, MORE_FAMILIES["deepseek_v32"]),
    "glm_moe_dsa": MtpFamily(
        "glm_moe_dsa", f"model.layers.{LAYERS}", DEEPSEEK, _with_layer("glm_moe_dsa", indexer_types="full"),
    ),
    "glm4_moe_lite": MtpFamily(
        "glm4_moe_lite", f"model.layers.{LAYERS}", DEEPSEEK, _with_layer("glm4_moe_lite", mlp_layer_types="sparse"),
    ),
    "hy_v3": MtpFamily("hy_v3", f"model.layers.{LAYERS}", HY, _with_layer("hy_v3", mlp_layer_types="sparse")),
    "mellum": MtpFamily(
        "mellum", "mtp.layers.0", BESIDE,
        _with_layer("mellum", mlp_layer_types="sparse", layer_types="sliding_attention"), {"num_mtp_layers": 1},
    ),
    "exaone_moe": MtpFamily(
        "exaone_moe", "mtp.layers.0", BESIDE,
        _with_layer("exaone_moe", mlp_layer_types="dense", layer_types="sliding_attention"),
    ),
    "ernie4_5_moe": MtpFamily(
        "ernie4_5_moe", "model.mtp_block.0", ERNIE, {**MORE_FAMILIES["ernie4_5_moe"], "use_bias": False},
    ),
    "nemotron_h": MtpFamily(
        "nemotron_h", "mtp.layers", NEMOTRON,
        {**SERVED["nemotron_h"],
         "layers_block_type": ["linear_attention", "moe", "full_attention", "full_attention", "moe"]},
    ),
    "qwen3_5_text": MtpFamily(
        "qwen3_5_text", "mtp.layers.0", BESIDE, _with_layer("qwen3_5_text", layer_types="full_attention"), adds_one=True,
    ),
    "qwen3_next": MtpFamily(
        "qwen3_next", "mtp.layers.0", BESIDE, _with_layer("qwen3_next", layer_types="full_attention"), adds_one=True,
    ),
    "llama": MtpFamily("llama", "mtp.layers.0", BESIDE, {}),
}  # fmt: skip


def of_module(name: str, number: int) -> str:
    """The name of a module's tensor, given that of the first module's."""
    return name.replace(f"layers.{LAYERS}", f"layers.{LAYERS + number}").replace("mtp.layers.0", f"mtp.layers.{number}")


def is_of_module(name: str, family: MtpFamily, number: int) -> bool:
    """Whether a tensor of the model with all layers is of a module."""
    layer = re.match(r"\w+\.layers\.(\d+)\.", name)
    return layer is not None and (int(layer[1]) == LAYERS + number or (family.has_layers and int(layer[1]) > LAYERS))


def stored_name(name: str, family: MtpFamily, number: int) -> str:
    """The name in the files of a module's tensor."""
    layer, rest = re.sub(r"^\w+\.layers\.", "", name).split(".", 1)
    own = f".{int(layer) - LAYERS}" if family.has_layers else ""
    return f"{of_module(family.layer, number)}{own}.{rest}"


def configs(family: MtpFamily, count: int = 1) -> tuple[Any, Any]:
    """The configs of the target, and of a model with the layers of the modules behind the target's."""
    lists = {key: value for key, value in family.whole.items() if isinstance(value, list)}
    own = {**family.whole, **{key: value[:LAYERS] for key, value in lists.items()}}
    whole = {**family.whole, **{key: [*value, *value[-1:] * (count - 1)] for key, value in lists.items()}}
    made = config_of(family.kind, **{**whole, "num_hidden_layers": LAYERS + count})
    return config_of(family.kind, **{**own, **family.own, "num_hidden_layers": LAYERS}), made


class MtpFolders(dict[str, str]):
    """The folder of each family's target with its module, written when first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, family: str) -> str:
        self[family] = write_mtp(self.folder / family, family)
        return self[family]


def write_mtp(folder: Path, family: str, agrees: bool = False, modules: bool = True, count: int = 1) -> str:
    """A target with its module, or with several; all random except norms.

    agrees: the target's layers add nothing to the embedding, so that the next token depends on the last one alone, and the
    module reads the embedding alone.
    """
    of = FAMILIES[family]
    config, whole_config = configs(of, count)
    torch.manual_seed(0)
    whole = whole_class(whole_config).from_config(whole_config, dtype=torch.float32)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    names = list[str]()
    one = torch.zeros(HIDDEN) if of.adds_one else torch.ones(HIDDEN)
    for number in range(count):
        own = {name: stored_name(name, of, number) for name in tensors if is_of_module(name, of, number)}
        tensors = {own.get(name, name): tensor for name, tensor in tensors.items()}
        projection, *norms = (of_module(name, number) for name in of.names)
        tensors[projection] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
        tensors |= {name: 0.5 + torch.rand(HIDDEN, generator=generator) for name in norms}
        names += [projection, *norms, *own.values()]
        if agrees:
            tensors |= {projection: torch.eye(HIDDEN, 2 * HIDDEN)} | {name: one.clone() for name in norms}
    if agrees:
        silent = ("o_proj", "down_proj", "out_proj", "attention.dense")
        tensors |= {name: torch.zeros_like(t) for name, t in tensors.items() if any(part in name for part in silent)}
        tensors |= {name: one.clone() for name in ("model.norm.weight", "backbone.norm_f.weight") if name in tensors}
    if not modules:
        tensors = {name: t for name, t in tensors.items() if name not in names or name == "model.norm.weight"}
    save_file(tensors, folder / "model.safetensors")
    config.architectures = [type(whole).__name__]
    if count > 1:
        config.num_nextn_predict_layers = count
    config.save_pretrained(folder)
    return str(folder)


def tiny_mtp_module(target: str) -> str:
    """A random module alone, for a `write_target` of default sizes, in DeepSeek's layout; written once."""
    folder = Path(f"{target}-mtp")
    if not folder.exists():
        layer = "model.layers.4."
        stored = load_file(Path(target, "model.safetensors"))
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name.replace("model.layers.3.", layer): tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in stored.items()
            if name.startswith("model.layers.3.")
        }
        tensors[f"{layer}eh_proj.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{layer}{name}.weight"] = 0.5 + torch.rand(HIDDEN, generator=generator)
        write_checkpoint(folder, Checkpoint(target).config, tensors)
    return str(folder)
