"""Reads generation_config.json: the end tokens of a model, and the sampling parameters that it recommends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.api.validation import MAX_INT, MAX_TEMPERATURE
from eyas.config import GenerationDefaults
from eyas.config.file_values import TOKENS, FileValue, check_values, read_json, shown
from eyas.models.checkpoint import CheckpointSource, open_checkpoint

# The keys that count, as in vLLM, which ignores do_sample. Those of sampling have the values that requests may have too.
GENERATION_VALUES: Mapping[str, FileValue] = {
    "eos_token_id": TOKENS,
    "temperature": FileValue("number", 0, MAX_TEMPERATURE),
    "top_p": FileValue("number", 0, 1, is_open=True),
    "top_k": FileValue("whole number", -1, MAX_INT),
    "min_p": FileValue("number", 0, 1),
    "repetition_penalty": FileValue("number", 0.01, 100),
    "max_new_tokens": FileValue("whole number", 1, MAX_INT),
}

log = logging.getLogger(__name__)


def end_tokens(folder: Path, config: Any) -> list[int]:
    """Return the end-of-sequence tokens of a model, from its generation config, else from `config`, transformers' of the
    model.

    Ids beyond the vocabulary, which many families have by default, are left out with a warning. Raises CheckpointError.
    """
    file, text = folder / "generation_config.json", config.get_text_config()
    stated = read_json(file) if file.is_file() else {}
    found = stated.get("eos_token_id")
    check_values({"eos_token_id": found}, file, GENERATION_VALUES)
    source, found = (folder / "config.json", text.eos_token_id) if found is None else (file, found)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if beyond := [token for token in ids if not 0 <= token < text.vocab_size]:
        log.warning(
            "%s: eos_token_id holds %s, which the vocabulary of %d tokens does not have; it never ends an output",
            source, shown(beyond[0] if len(beyond) == 1 else beyond), text.vocab_size,
        )  # fmt: skip
    return [token for token in ids if token not in beyond]


def sampling_defaults(model: CheckpointSource, defaults: GenerationDefaults = "auto") -> dict[str, float]:
    """Return the sampling parameters that a model recommends, by their names in SamplingParams.

    Raises CheckpointError for a file that is no JSON object.

    Args:
        defaults: "auto" reads them from the model; "vllm" and "none" return none. A value that no request could have is
            left out with a warning.
    """
    file = open_checkpoint(model).folder / "generation_config.json"
    stated = read_json(file) if defaults == "auto" and file.is_file() else {}
    found = dict[str, float]()
    for key, allowed in GENERATION_VALUES.items():
        if (value := stated.get(key)) is None or key == "eos_token_id":
            continue
        if allowed.holds(value):
            found["max_tokens" if key == "max_new_tokens" else key] = value
        else:
            log.warning("%s: %s is %s, but must be %s; it does not count", file, key, shown(value), allowed)
    return found
