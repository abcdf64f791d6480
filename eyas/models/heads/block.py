"""One-pass block heads: DFlash (2602.06036), DFlash2, DSpark (2607.05147). All depths are drafted in one backbone pass.

A block is the anchor (the last emitted token, without a feature yet) and rows of one mask token behind it. Context features
enter each layer through its own k_proj and v_proj; they are never queries and never pass an MLP. Block rows see each other
in both directions. The backbone's layers are Qwen3's. Parameters have the published names, so `state_dict` is a checkpoint.
Legend: N sequences, T context positions, A anchors of a sequence, B rows of a block, G tokens that a block proposes, R rows,
H draft hidden, d head width, V target vocabulary, D draft vocabulary, r rank, m aux layers of the target, C target hidden.

    sample from anchor (DSpark)    row     x0   m    m        bonus anchor (DFlash)    row     x0   m    m    m
                                   at       n  n+1  n+2                                at       n  n+1  n+2  n+3
                                   predicts n+1 n+2 n+3                                predicts -  n+1  n+2  n+3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.config.engine import INT8
from eyas.config.file_values import get_setting
from eyas.device.placement import check_device, runs_compiled
from eyas.kernels.arguments import BYTES, Projected
from eyas.models.backends.cpu import round_rows_of
from eyas.models.checkpoint import (
    EMBEDDING_NAMES,
    LM_HEAD_NAMES,
    WIRING_KEY,
    CheckpointSource,
    check_tensors,
    open_checkpoint,
)
from eyas.models.heads.block_config import (
    BlockHeadConfig,
    Dialect,
    block_config_json,
    block_fuser_shapes,
    block_tensor_shapes,
    canonical_name,
    read_block_config,
)
from eyas.models.heads.block_layers import BlockLayer, CandidateSelector, ConfidenceHead, MarkovHead, empty_linear
from eyas.models.heads.compiled import CompiledBackbone
from eyas.models.heads.eagle import head_rotary
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.fusers import LinearFuser
from eyas.models.heads.layers import (
    FP8,
    check_draft_vocabulary,
    draft_ids_of,
    quantise_head,
    rms_norm,
    stored_vocabulary,
    write_checkpoint,
)

# Attention of one layer: its number and projected rows to the attention output [R, heads, d].
BlockAttention = Callable[[int, Projected], Tensor]
# Of the context and of blocks.
Both = tuple[Tensor, Tensor]
FROZEN = ("embed_tokens.weight", "lm_head.weight")
# Of random weights.
INITIAL_STD = 0.02


class BlockHead(nn.Module):
    """The backbone and what stands on it: a Markov head and a confidence head (DSpark), or a candidate selector (DFlash2).

    embed_tokens and lm_head are frozen. draft_ids maps draft ids to the target's. compiled: see `serve`. In a new head the
    Markov head adds nothing, the confidence is even, and convolutions pass rows on.

    Args:
        max_model_len: positions of the rotary table.
    """

    def __init__(self, config: BlockHeadConfig, max_model_len: int) -> None:
        super().__init__()
        c = self.config = config
        self.fc = empty_linear(len(c.aux_hidden_state_layers) * c.target_hidden, c.hidden)
        self.hidden_norm, self.norm = nn.RMSNorm(c.hidden), nn.RMSNorm(c.hidden)
        self.layers = nn.ModuleList(BlockLayer(c) for _ in range(c.num_layers))
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.confidence_head = ConfidenceHead(c) if c.confidence else None
        self.candidate_selector = CandidateSelector(c) if c.selector_rank else None
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden)
        self.lm_head = empty_linear(c.hidden, c.draft_vocab_size)
        self.register_buffer("draft_ids", torch.arange(c.draft_vocab_size), persistent=False)
        self.register_buffer("rotary", head_rotary(c, max_model_len), persistent=False)
        self.draft_ids: Tensor
        self.rotary: Tensor
        self.compiled: CompiledBackbone | None = None
        for name, parameter in self.named_parameters():
            _initialise(name, parameter.data)
            parameter.requires_grad_(name not in FROZEN)

    @property
    def max_model_len(self) -> int:
        """Positions that the rotary table covers."""
        return int(self.rotary.shape[0])

    @property
    def is_independent(self) -> bool:
        """Return whether the tokens of a block are drafted without regard to each other."""
        return self.markov_head is None and self.candidate_selector is None

    def fuse(self, states: Tensor) -> Tensor:
        """Map hidden states of the target [..., m * C], side by side, to context features [..., H]."""
        return self._rms(self.fc(states), self.hidden_norm)

    def block_tokens(self, anchors: Tensor) -> Tensor:
        """Return the token ids of the rows of blocks, int64 [..., B], of anchor tokens [...]."""
        # The rows of a block: the anchor, which is the last known token, then B - 1 mask tokens.
        masks = anchors.new_full((*anchors.shape, self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat([anchors[..., None], masks], -1)

    def project_context(self, layer: int, features: Tensor, positions: Tensor) -> Projected:
        """Return keys and values of context features [R, H] at positions [R] in a layer; the query is empty."""
        return self._layer(layer).self_attn.project_context(features, self._rotary(positions))

    def run(self, tokens: Tensor, positions: Tensor, attention: BlockAttention) -> Tensor:
        """Block rows, tokens and positions [R], through all layers to normed states [R, H]. R is a multiple of B."""
        # Embeddings of the anchor and the masks; positions and attention alone distinguish the masks.
        states, rotary = F.embedding(tokens, self.embed_tokens.weight), self._rotary(positions)
        for number in range(len(self.layers)):
            states = self._layer(number)(states, rotary, lambda rows, number=number: attention(number, rows))
        return self._rms(states, self.norm)

    def drafted_rows(self, states: Tensor) -> Tensor:
        """Return, of states [..., B, H] of whole blocks, the ones that propose tokens, [..., G, H]."""
        # Row 0 is the anchor. Heads differ in whether it proposes a token itself.
        first = self.config.first_row
        return states[..., first : first + self.config.num_drafted, :]

    def backbone_logits(self, states: Tensor) -> Tensor:
        """Return logits float32 [..., D] of normed states [..., H], without regard to other tokens of the block."""
        logits: Tensor = self.lm_head(states).float()
        scale, cap = self.config.multiplier, self.config.softcap
        logits = logits if scale == 1 else logits * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    def initial_state(self, *shape: int) -> Tensor:
        """Return what the recurrent Markov head starts from, [..., r]; of width 0 for heads without a state."""
        weight = self.embed_tokens.weight
        width = self.markov_head.state_size if self.markov_head else 0
        return torch.zeros(*shape, width, dtype=weight.dtype, device=weight.device)

    def step(self, logits: Tensor, states: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits float32 [..., D] of a depth, given the token before it; and the memory [..., r] for the next depth.

        Args:
            logits: the output of `backbone_logits` at this depth, [..., D].
            states: normed states of this depth [..., H].
            previous: the target's id of the token before, int64 [...].
            memory: see `initial_state`.
        """
        if self.markov_head is not None:
            latent, memory = self.markov_head.latent(states, previous, memory)
            return logits + self.markov_head.bias(latent).float(), memory
        if self.candidate_selector is not None:
            return self.candidate_selector(logits, states, previous), memory
        return logits, memory

    def block_logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return logits float32 [..., G, D] of drafted rows [..., G, H], given the target's ids of the tokens before,
        [..., G].
        """
        if self.is_independent:
            return self.backbone_logits(states)
        if self.markov_head is None:
            return self.step(self.backbone_logits(states), states, previous, self.initial_state(*previous.shape))[0]
        return self.markov_logits(states, self.latents(states, previous))

    def markov_logits(self, states: Tensor, latents: Tensor) -> Tensor:
        """Return logits float32 [..., D] of drafted rows [..., H] with the Markov head's `latents` [..., r]."""
        assert self.markov_head is not None
        latents = latents.to(states.dtype)
        if self.config.multiplier != 1 or self.config.softcap:
            return self.backbone_logits(states) + self.markov_head.bias(latents).float()
        # backbone and Markov head by one product, [states; z] with [lm_head; W2]
        weight = torch.cat([self.lm_head.weight, self.markov_head.markov_w2.weight], -1)
        return F.linear(torch.cat([states, latents], -1), weight).float()

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return z [..., G, r] of the Markov head at all depths; arguments as `block_logits`."""
        markov = self.markov_head
        assert markov is not None
        memory, latents = self.initial_state(*previous.shape[:-1]), []
        # A vanilla Markov head has no memory: all depths at once.
        if not markov.state_size:
            return markov.latent(states, previous, memory)[0]
        for depth in range(previous.shape[-1]):
            latent, memory = markov.latent(states[..., depth, :], previous[..., depth], memory)
            latents.append(latent)
        return torch.stack(latents, -2)

    def confidence_logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return logits float32 [...] of the chance that the proposed token is accepted if all before it are.

        states [..., H], previous [...] as in `step`. The head must have a confidence head.
        """
        assert self.confidence_head is not None, "the head has no confidence head"
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            states = torch.cat([states, F.embedding(previous, self.markov_head.markov_w1.weight).to(states.dtype)], -1)
        return self.confidence_head.proj(states).squeeze(-1).float()  # type: ignore[no-any-return]

    def forward(
        self,
        states: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the normed states of the drafted rows of many blocks at once, [N, A, G, H], for training.

        Args:
            states: hidden states of the target [N, T, m * C].
            tokens: int64 [N, T].
            anchors: positions of the anchors within the sequence, int64 [N, A].
            documents: number of the document that each position belongs to, int64 [N, T]; blocks see their own only.
            positions: for RoPE, int64 [N, T]; by default those within the sequence.
        """
        c, places = self.config, _places(tokens, positions)
        ahead = torch.arange(c.block_size, device=tokens.device)
        # at [N, A, B]: row r of a block stands r positions after its anchor.
        at = places.gather(1, anchors)[:, :, None] + ahead
        masks = {
            w: block_masks(anchors, tokens.shape[1], c.block_size, w, c.causal_windows, documents) for w in set(c.windows)
        }
        return self.drafted_rows(self._train(states, places, self.block_tokens(tokens.gather(1, anchors)), at, masks))

    def _train(self, states: Tensor, places: Tensor, tokens: Tensor, at: Tensor, masks: Mapping[int | None, Both]) -> Tensor:
        """Return the normed states [N, A, R, H] of the rows of blocks: tokens and positions [N, A, R]. masks: by window."""
        features, flat, count = self.fuse(states).flatten(0, 1), places.flatten(), len(places)
        attend = attend_blocks_apart if features.device.type == "cpu" else attend_blocks

        def attention(layer: int, rows: Projected) -> Tensor:
            context = self.project_context(layer, features, flat)
            # Rows of the context and of the blocks, [N * T] and [N * A * R], back to their sequences.
            query, *own, known_key, known_value = (
                x.view(count, -1, *x.shape[1:]) for x in (rows.query, rows.key, rows.value, context.key, context.value)
            )
            return attend(query, (known_key, own[0]), (known_value, own[1]), masks[self.config.windows[layer]]).flatten(0, 1)

        rows = self.run(tokens.flatten(), at.clamp(max=self.max_model_len - 1).flatten(), attention)
        return rows.view(*tokens.shape, -1)

    def _layer(self, layer: int) -> BlockLayer:
        return cast(BlockLayer, self.layers[layer])

    def _rotary(self, positions: Tensor) -> Tensor:
        return self.rotary[positions].to(self.embed_tokens.weight.dtype)

    def _rms(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        return rms_norm(x, norm.weight, self.config.rms_norm_eps)


def block_masks(
    anchors: Tensor,
    length: int,
    block_size: int,
    window: int | None = None,
    is_causal: bool = False,
    documents: Tensor | None = None,
) -> Both:
    """Return what the rows of blocks see of the context, bool [N, A * B, T], and of the rows of their own block, bool
    [1, 1, B, B].

    A row sees the context before its anchor and its own block; with a window only what is less than `window` tokens before
    it and, if `is_causal`, no later row.

    Args:
        anchors: positions int64 [N, A].
        documents: see `BlockHead.forward`.
    """
    place = torch.arange(block_size, device=anchors.device)
    # behind[q, k]: how many rows key k lies before query q; negative for later rows. B = 3: 0 -1 -2 | 1 0 -1 | 2 1 0.
    behind = place[:, None] - place
    own = torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        own = (behind < window) & (behind >= 0 if is_causal else True)
    return _seen_context(anchors, anchors[:, :, None] + place, length, window, documents), own[None, None]


def _seen_context(anchors: Tensor, at: Tensor, length: int, window: int | None, documents: Tensor | None) -> Tensor:
    """Return what rows at places [N, A, R] see of the context before their anchors [N, A], bool [N, A * R, T]."""
    # starts [N, A * R]: the anchor of each row's block. The anchor itself is a row of the block, not of the context.
    context, starts = torch.arange(length, device=anchors.device), anchors.repeat_interleave(at.shape[2], 1)
    seen = context < starts[:, :, None]
    if documents is not None:
        seen = seen & (documents[:, None, :] == documents.gather(1, starts)[:, :, None])
    return seen if window is None else seen & (at.flatten(1)[:, :, None] - context < window)


def _places(tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Return the positions of tokens [N, T], by default those within their sequences."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1) if positions is None else positions


def attend_blocks(query: Tensor, keys: Both, values: Both, masks: Both) -> Tensor:
    """Return the attention [N, A * B, heads, d] of block rows to the context and their own block.

    query [N, A * B, heads, d]; keys and values [N, T, J, d] and [N, A * B, J, d]; masks: from `block_masks`.
    """
    seen, own = masks
    size, num_rows = own.shape[-1], query.shape[1]
    # `within` [., A * B, A * B] repeats the mask of a block; rows of different blocks do not see each other.
    blocks = torch.arange(num_rows, device=query.device) // size
    within = own.expand(-1, num_rows // size, -1, -1).flatten(1, 2).repeat(1, 1, num_rows // size)
    mask = torch.cat([seen, ((blocks[:, None] == blocks) & within).expand(len(query), -1, -1)], -1)
    q, k, v = (x.transpose(1, 2) for x in (query, torch.cat(keys, 1), torch.cat(values, 1)))
    return F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True).transpose(1, 2)


def attend_blocks_apart(query: Tensor, keys: Both, values: Both, masks: Both) -> Tensor:
    """Run `attend_blocks` by two products, so that rows of other blocks cost nothing: a quarter of its time on the CPU.

    Letters of shapes: n windows, a blocks, b and c rows of a block, j key-value heads, g query heads of each, t context,
    d width.
    """
    (count, rows, heads, width), num_kv, size = query.shape, keys[0].shape[2], masks[1].shape[-1]
    grouped = (query * width**-0.5).view(count, rows // size, size, num_kv, heads // num_kv, width)
    own_keys, own_values = (x.view(count, rows // size, size, num_kv, width) for x in (keys[1], values[1]))
    # Two sets of scores for each row, over the context [..., T] and over its own block [..., B]; one softmax over both.
    before = torch.einsum("nabjgd,ntjd->njgabt", grouped, keys[0]).float()
    within = torch.einsum("nabjgd,nacjd->njgabc", grouped, own_keys).float()
    before = before.masked_fill(~masks[0].view(count, 1, 1, rows // size, size, -1), -torch.inf)
    within = within.masked_fill(~masks[1][:, None, None], -torch.inf)
    weights = torch.softmax(torch.cat([before, within], -1), -1).to(values[0].dtype)
    length = keys[0].shape[1]
    out = torch.einsum("njgabt,ntjd->nabjgd", weights[..., :length], values[0])
    out = out + torch.einsum("njgabc,nacjd->nabjgd", weights[..., length:], own_values)
    return out.reshape(count, rows, heads, width)


def _initialise(name: str, values: Tensor) -> None:
    """Initialise a parameter as BlockHead's docstring says, or by torch's global generator."""
    module = name.rsplit(".", 2)[-2] if "." in name else name
    if name.endswith("base_kernel"):
        values.zero_()[:, 0] = 1.0
    elif module.endswith("norm"):
        values.fill_(1.0)
    elif (
        name.endswith(".bias") or module == "kernel_projection" or "markov_w2" in name or name.startswith("confidence_head.")
    ):
        values.zero_()
    else:
        values.normal_(0.0, INITIAL_STD)


def load_block_head(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    wiring: HeadWiring | None = None,
) -> BlockHead:
    """Load a block head, with the target's embedding and lm_head where it has none of its own.

    wiring: replaces what its config says. The result can be trained; `serve` makes it fast instead.
    Raises CheckpointError for tensors that are missing, left over or of another shape than the two configs imply.
    """
    check_device(dtype, device)
    checkpoint, target = open_checkpoint(checkpoint), open_checkpoint(target)
    config = read_block_config(checkpoint, target.text_config, wiring)
    tensors = checkpoint.tensors_of(canonical_name, block_tensor_shapes(config), config.optional_tensors)
    head = new_block_head(config, target, dtype)
    check_draft_vocabulary(config.vocab_size, tensors, checkpoint.folder)
    head.draft_ids = draft_ids_of(tensors, config.draft_vocab_size)
    missing = head.load_state_dict(
        {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items() if name not in ("d2t", "t2d")},
        strict=False,
    )
    assert not missing.unexpected_keys
    return head.to(torch.device(device))


def new_block_head(config: BlockHeadConfig, target: CheckpointSource, dtype: str = "float32") -> BlockHead:
    """Return a random head on the CPU, with the target's embedding, and its lm_head if the vocabulary is whole."""
    target = open_checkpoint(target)
    head = BlockHead(config, get_setting(int, target.text_config, "max_position_embeddings", target.folder))
    if config.hidden == config.target_hidden:
        shape = (config.vocab_size, config.target_hidden)
        head.embed_tokens.weight.data.copy_(target.vocabulary(EMBEDDING_NAMES, shape))
        if config.draft_vocab_size == config.vocab_size:
            head.lm_head.weight.data.copy_(target.vocabulary(LM_HEAD_NAMES, shape))
    return head.to(getattr(torch, dtype))


def serve(head: BlockHead, quantization: str = "") -> BlockHead:
    """Freeze a head and lay out its weights for fast passes. It cannot be trained or saved any more.

    On the CPU in float32 its layers are prepared for kernels, too, but for convolutions and biases. quantization: as
    `drafting.quantization`. Raises ConfigError as `quantise_head`.
    """
    c, weight = head.requires_grad_(False).eval().config, head.embed_tokens.weight
    for number in range(len(head.layers)):
        head._layer(number).self_attn.serve()
    quantise_head(head, weight.device, quantization)
    is_plain = weight.dtype == torch.float32 and quantization != FP8 and not c.conv_kernel and not c.attention_bias
    if is_plain and runs_compiled(weight.device):
        if quantization == INT8:
            round_rows_of(head.modules(), BYTES)
        head.compiled = CompiledBackbone(c, list(head.layers), head.norm, head.rotary, quantization == INT8)
    return head


def load_block_fuser(
    checkpoint: CheckpointSource, target: CheckpointSource, dtype: str = "float32", device: str = "cpu"
) -> LinearFuser:
    """Load only the part of a block head that runs beside the target: fc and the norm behind it. Raises CheckpointError."""
    checkpoint = open_checkpoint(checkpoint)
    config = read_block_config(checkpoint, open_checkpoint(target).text_config)
    tensors = checkpoint.part_of(canonical_name, block_fuser_shapes(config))
    weight, norm = (tensors[name].to(getattr(torch, dtype)) for name in ("fc.weight", "hidden_norm.weight"))
    fuser = LinearFuser(weight, config.aux_hidden_state_layers, eps=config.rms_norm_eps, output_norm=norm)
    return fuser.to(torch.device(device))


def write_block_head(
    folder: Path, config: BlockHeadConfig, tensors: Mapping[str, Tensor], dialect: Dialect = "author"
) -> None:
    """Write config.json and model.safetensors. The authors' dialect records the wiring under Eyas' own key too.

    tensors: under the authors' names, such as `block_tensors(head)`.

    Raises CheckpointError for tensors that `config` does not imply.
    """
    record = {WIRING_KEY: asdict(config.wiring)} if dialect == "author" else {}
    settings = block_config_json(config, dialect) | record
    check_tensors(tensors, block_tensor_shapes(config), config.optional_tensors, folder)
    write_checkpoint(folder, settings, tensors)


def block_tensors(head: BlockHead) -> dict[str, Tensor]:
    """Return the tensors of a head's checkpoint, on the CPU. Left out is what the target has: embedding, lm_head."""
    c, tensors = head.config, {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if c.draft_vocab_size != c.vocab_size:
        tensors |= stored_vocabulary(head.draft_ids, c.vocab_size)
    return {name: tensor for name, tensor in tensors.items() if name not in FROZEN or name not in c.optional_tensors}
