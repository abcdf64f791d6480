"""Chooses the part of the vocabulary that a head drafts, by how often each token is supervised in the data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import ConfigError
from eyas.train.data import FREQUENCY_FILE

# The size of a draft vocabulary that is chosen by coverage, the share of the supervised tokens that it then holds, and its
# least size.
BY_COVERAGE = -1
COVERAGE = 0.995
MIN_DRAFT_VOCABULARY = 8192
# Such a size is a multiple of this. Beyond this share of the whole vocabulary a part saves too little.
VOCABULARY_STEP = 128
MAX_DRAFT_SHARE = 0.75


def token_frequencies(folder: Path) -> Tensor:
    """Return how often each token is supervised in the training split, int64 [V]."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / FREQUENCY_FILE)["token_freq"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"cannot read {folder / FREQUENCY_FILE}: {error}; run `eyas train prepare` again") from error


def covering_size(counts: Tensor) -> int:
    """Return the size of the draft vocabulary that holds COVERAGE of the counted tokens, int64 [V]; 0 if a whole one is
    better.

    Rare tokens of other text need rows too, so that it has at least MIN_DRAFT_VOCABULARY.
    """
    shares = counts.sort(descending=True).values.double().cumsum(0)
    needed = int((shares < COVERAGE * shares[-1]).sum()) + 1
    size = max(-(-needed // VOCABULARY_STEP) * VOCABULARY_STEP, MIN_DRAFT_VOCABULARY)
    return size if size <= MAX_DRAFT_SHARE * len(counts) else 0


def draft_vocabulary(folder: Path, size: int, vocab_size: int) -> Tensor:
    """Return the ids of the most frequent supervised tokens, ascending, int64 [size].

    size: 0 takes all tokens, BY_COVERAGE as many as `covering_size` says. Raises ConfigError.
    """
    if size == BY_COVERAGE:
        size = covering_size(token_frequencies(folder))
    if not size or size == vocab_size:
        return torch.arange(vocab_size)
    if size > vocab_size:
        raise ConfigError(f"head.draft_vocab_size is {size}, but the target's vocabulary is {vocab_size}")
    return token_frequencies(folder).topk(size).indices.sort().values


def vocabulary_coverage(folder: Path, draft_ids: Tensor) -> float:
    """Return the share of the supervised tokens of the training split that are among these ids, int64 [D]."""
    counts = token_frequencies(folder)
    return float(counts[draft_ids].sum()) / max(1.0, float(counts.sum()))
