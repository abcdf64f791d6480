"""Results of a run: heads in other projects' layouts, a model card, and a plot of the training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from eyas.config.file_values import get_setting
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError, MissingPackage
from eyas.models.checkpoint import EMBEDDING_NAMES, LM_HEAD_NAMES, WIRING_KEY, Checkpoint, check_tensors
from eyas.models.heads.block import block_tensors, load_block_head, write_block_head
from eyas.models.heads.block_config import BlockHeadConfig, Dialect, block_config_json
from eyas.models.heads.eagle import config_json, write_head
from eyas.models.heads.eagle_config import DEPTH_KEY, EagleHeadConfig, Kind, canonical_name, read_head_config, tensor_shapes
from eyas.models.heads.layers import check_problems, stored_vocabulary, write_checkpoint
from eyas.models.heads.medusa import MEDUSA_FILES, load_medusa
from eyas.train.config import SERVED_BY, TrainConfig
from eyas.train.data import Prepared
from eyas.train.multi_head import write_medusa
from eyas.train.trainer import LOG_FILE, Progressed

Layout = Literal["vllm", "sglang", "eyas", "safeailab", "specforge", "speculators"]
# Layers of the target that EAGLE-3 heads read in vLLM and SGLang.
NUM_EAGLE3_LAYERS = 3
# Says in EAGLE-1's config that fc has a bias. The engines take it for a bias of attention.
FC_BIAS_KEY = "bias"


def export_head(head: str, model: str, out: Path, layout: str) -> None:
    """Write a head of Eyas in another layout: an engine's, so that it loads there, or another project's.

    SafeAILab's is Eyas' own for EAGLE heads, the authors' for block heads. Raises ConfigError for an unknown layout,
    CheckpointError for a head that the layout cannot express.
    """
    if layout not in get_args(Layout):
        raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(get_args(Layout))}")
    match DraftHead(head).detected:
        case "dspark" | "dflash" | "dflash2":
            _export_block(head, model, out, layout)
        case "eagle2" | "eagle3" | "peagle" as method:
            _export_eagle(head, model, out, layout, "eagle" if method == "eagle2" else method)
        case "medusa" if layout in ("vllm", "eyas"):
            tensors = Checkpoint(head).tensors(MEDUSA_FILES)
            dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
            vocab_size = get_setting(int, Checkpoint(model).text_config, "vocab_size", "the target's config")
            write_medusa(out, load_medusa(head, model).to(dtype), vocab_size)
        case "sps":
            raise CheckpointError(f"{head} is a whole draft model, which engines load as it is; name the folder there")
        case method:
            engines = (
                ", and neither vLLM nor SGLang runs Hydra heads" if method == "hydra" else "; it is vLLM's for Medusa heads"
            )
            raise CheckpointError(
                f"{head} holds no EAGLE or block head; Medusa, Hydra and draft models have one layout only{engines}"
            )


def _export_eagle(head: str, model: str, out: Path, layout: str, kind: Kind) -> None:
    checkpoint = Checkpoint(head)
    target = Checkpoint(model).text_config
    config = read_head_config(checkpoint, target, kind)
    tensors = {canonical_name(name, config.kind): tensor for name, tensor in checkpoint.tensors().items()}
    if layout in ("eyas", "safeailab"):
        write_head(out, config, tensors)
        return
    if layout in ("vllm", "sglang"):
        _check_eagle(head, config, layout, get_setting(int, target, "num_hidden_layers", "the target's config"))
    elif config.kind == "eagle":
        raise CheckpointError(
            f"{head} is an EAGLE-1 head, which {layout} has no layout for; export it to safeailab, or leave it as it is"
        )
    check_tensors(tensors, tensor_shapes(config), config.optional_tensors, Path(head))
    match layout:
        case "vllm":
            found = _vllm(config, tensors)
        case "sglang":
            found = _sglang(config, tensors)
        case "specforge":
            found = _specforge(config, tensors)
        case _:
            found = _speculators(config, tensors, model)
    write_checkpoint(out, *found)


def _check_eagle(head: str, c: EagleHeadConfig, engine: str, num_layers: int) -> None:
    """Raise CheckpointError for an EAGLE head with a part that the engine would leave out without a word, or not load.

    num_layers: of the target.
    """
    is_first = c.kind == "eagle"
    problems = {
        "it is an EAGLE-1 head with a bias of fc, which vLLM's has not; SGLang runs it": (
            engine == "vllm" and is_first and c.fc_bias
        ),
        "its logits come from a state without a norm, which the engine always takes": (
            not is_first and c.wiring.output == "bare"
        ),
        "it is a P-EAGLE head, which SGLang does not run; vLLM does": engine == "sglang" and c.kind == "peagle",
        f"it has {c.num_layers} layers, and SGLang reads one; vLLM reads all": engine == "sglang" and c.num_layers > 1,
        "its residual follows the norm (norm_before_residual), which SGLang does not know; vLLM does": (
            engine == "sglang" and c.wiring.norm_before_residual
        ),
        "it norms the target's states before fc (EAGLE-3.1), which SGLang leaves out; vLLM does not": (
            engine == "sglang" and c.input_norms != "none"
        ),
        "it has a bias of fc or of attention, which the engine's EAGLE-3 heads have not; train one without": (
            not is_first and (c.fc_bias or c.qkv_bias or c.out_bias)
        ),
        f"it reads the output of layer {num_layers - 1}, the target's last, which SGLang does not give to heads; vLLM runs "
        f"it, and SGLang runs a head that was trained with head.target_layer_ids up to {num_layers - 2}": (
            engine == "sglang" and not is_first and num_layers in c.aux_hidden_state_layers
        ),
        f"it reads {len(c.aux_hidden_state_layers)} layers of the target; {engine} expects three": (
            not is_first and len(c.aux_hidden_state_layers) != NUM_EAGLE3_LAYERS
        ),
    }
    check_problems(f"{head} cannot be exported to {engine}", problems)


def _vllm(c: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an EAGLE head as vLLM's `llama_eagle.py` and `llama_eagle3.py` load it; P-EAGLE's mask token is `pard_token`
    there.
    """
    config = {key: value for key, value in config_json(c).items() if key not in (DEPTH_KEY, FC_BIAS_KEY)}
    if c.kind == "eagle":
        return config | {"architectures": ["EagleLlamaForCausalLM"]}, dict(tensors)
    config |= {"architectures": ["Eagle3LlamaForCausalLM"]}
    if c.kind == "peagle":
        config |= {"pard_token": c.mask_token_id}
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _with_vocabulary(c, tensors).items()}
    return config, named


def _sglang(c: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an EAGLE head as SGLang's `llama_eagle.py` and `llama_eagle3.py` load it.

    EAGLE-1's fc always has a bias there. Layer ids count outputs, which SpecForge's do only if they begin with 1: so the
    wiring is recorded for Eyas.
    """
    if c.kind == "eagle":
        config = {key: value for key, value in config_json(c).items() if key != FC_BIAS_KEY}
        no_bias = torch.zeros(c.hidden, dtype=tensors["fc.weight"].dtype)
        return config | {"architectures": ["LlamaForCausalLMEagle"]}, {"fc.bias": no_bias, **tensors}
    config, named = _specforge(c, tensors)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in c.aux_hidden_state_layers]
    return config | {WIRING_KEY: asdict(c.wiring)}, named


def _check_block(head: str, c: BlockHeadConfig, engine: str) -> None:
    """Raise CheckpointError for a block head with a part that the engine does not load."""
    is_reduced = c.draft_vocab_size < c.vocab_size
    problems = {
        f"its draft vocabulary has {c.draft_vocab_size} of {c.vocab_size} tokens, and SGLang takes the target's output "
        "layer; vLLM runs it, and SGLang runs a head that was trained with head.draft_vocab_size 0": (
            engine == "sglang" and is_reduced
        ),
        f"its Markov head is of the kind {c.markov_kind}, and vLLM's is vanilla; SGLang runs it": (
            engine == "vllm" and c.markov_rank > 0 and c.markov_kind != "vanilla"
        ),
        "it has no Markov head, which DSpark needs there": c.kind == "dspark" and not c.markov_rank,
    }
    check_problems(f"{head} cannot be exported to {engine}", problems)


def _export_block(head: str, model: str, out: Path, layout: str) -> None:
    loaded = load_block_head(head, model)
    tensors = block_tensors(loaded)
    if layout in ("vllm", "sglang"):
        _check_block(head, loaded.config, layout)
        config = block_config_json(loaded.config)
        if loaded.config.kind == "dspark" and layout == "sglang":  # which reads the settings of the Markov head on top
            config = block_config_json(loaded.config, "specforge") | config | {"architectures": ["DSparkDraftModel"]}
        write_checkpoint(out, config, tensors)
        return
    if layout == "speculators":
        target = Checkpoint(model)
        tensors.setdefault("embed_tokens.weight", target.tensor(EMBEDDING_NAMES).float())
        tensors.setdefault("lm_head.weight", target.tensor(LM_HEAD_NAMES).float()[loaded.draft_ids])
    dialect = layout if layout in get_args(Dialect) else "author"
    write_block_head(out, loaded.config, tensors, cast(Dialect, dialect))


def _specforge(c: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return SpecForge's config. Layer ids count outputs if the first of them is output 1, and inputs otherwise, as
    `read_head_config` takes them.

    norm_output says whether lm_head reads the normed state, and with a norm for each feature whether the next step does.
    """
    layers, config = list(c.aux_hidden_state_layers), config_json(c)
    ids = [layer - 1 for layer in layers] if layers[0] == 2 else layers
    if c.kind == "eagle3":
        is_normed = c.wiring.output == "normed" if c.input_norms == "each" else c.wiring.output != "bare"
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": is_normed}
    del config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return config, _with_vocabulary(c, tensors)


def _speculators(c: EagleHeadConfig, tensors: Mapping[str, Tensor], model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings, target = config_json(c), Checkpoint(model)
    settings.pop(DEPTH_KEY, None)
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    parallel = ("mask_token_id", "parallel_drafting") if c.kind == "peagle" else ()
    kept = {key: settings.pop(key) for key in (*own, *parallel, "eagle_aux_hidden_state_layer_ids")}
    architectures = settings.pop("architectures") if parallel else ["Eagle3Speculator"]
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _with_vocabulary(c, tensors).items()}
    named.setdefault("embed_tokens.weight", target.tensor(EMBEDDING_NAMES).to(named["fc.weight"].dtype))
    config = {
        "architectures": architectures,
        "speculators_model_type": c.kind,
        "speculators_config": {
            "algorithm": c.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.depth or 5}],
            "verifier": {"name_or_path": model, "architectures": target.config.get("architectures")},
        },
        "transformer_layer_config": settings,
        **kept,
    }
    return config, named


def _with_vocabulary(c: EagleHeadConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the draft vocabulary. Both projects want d2t and t2d, also for a whole vocabulary."""
    is_whole = c.draft_vocab_size == c.vocab_size
    return {**(stored_vocabulary(torch.arange(c.vocab_size), c.vocab_size) if is_whole else {}), **tensors}


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log. Raises ConfigError."""
    try:
        return [json.loads(line) for line in (run / LOG_FILE).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {run / LOG_FILE}: {error}") from error


def plot(run: Path) -> Path:
    """Draw loss and tau of a run. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("the plot", "matplotlib", "bench") from error
    records = read_log(run)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=0.8)
    above.set_ylabel("loss")
    for name in sorted({key for record in records for key in record if key.startswith("tau_t")}):
        points = [(record["step"], record[name]) for record in records if name in record]
        below.plot(*zip(*points, strict=True), marker="o", label=f"trees, temperature {name.removeprefix('tau_t')}")
    chains = [(record["step"], record["tau_chain"]) for record in records if "tau_chain" in record]
    if chains:
        below.plot(*zip(*chains, strict=True), linewidth=0.8, label="greedy chains on training text")
    below.set_ylabel("tokens per verify step (tau)")
    below.set_xlabel("step")
    if below.lines:
        below.legend()
    figure.savefig(run / "training.png", dpi=150)
    return run / "training.png"


def write_card(config: TrainConfig, prepared: Prepared, progress: Progressed, num_parameters: int) -> Path:
    """Write the README.md of the run's best head, or its last if none was evaluated: data, settings and tau."""
    run = Path(config.out)
    folder = run / "best" if (run / "best").is_dir() else run / "last"
    evaluations = [record for record in read_log(run) if any(key.startswith("tau_t") for key in record)]
    best = next((record for record in evaluations if record["step"] == progress.best_step), {})
    taus = "\n".join(
        f"| {key.removeprefix('tau_t')} | {value:.2f} |" for key, value in best.items() if key.startswith("tau_t")
    )
    tree, settings = config.eval, json.dumps(asdict(config), indent=1)
    shape = f"{tree.num_draft_tokens} nodes, {tree.num_prompts} held-out prompts of {tree.max_tokens} tokens"
    if (share := best.get("written_share", 1.0)) < 1:
        shape += f", {100 * share:.1f} % of these written"
    measured = (
        f"**Measured** at step {progress.best_step}, tokens per verify step:\n\n"
        f"| temperature | tau ({shape}) |\n|---|---|\n{taus}\n"
        if taus
        else "**Untested**: no evaluation has run. This is the last head.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(
        f"# {config.method} head for {config.model}\n\n"
        f"{num_parameters / 1e6:.2f} M trained parameters; made by `eyas train run`, served as the method "
        f"`{SERVED_BY.get(config.method, config.method)}`.\n\n"
        f"**Data**: {prepared.num_tokens:,} tokens, {prepared.num_supervised:,} supervised, of {prepared.num_documents:,} "
        f"documents; {prepared.num_heldout:,} held out. Sources: {', '.join(prepared.sources)}.\n\n"
        f"**Training**: {progress.step} steps, {progress.num_tokens:,} tokens, {progress.seconds / 60:.1f} minutes.\n\n"
        f"{measured}\n"
        f"**Settings**:\n\n```json\n{settings}\n```\n"
    )
    return folder / "README.md"
