"""Sampling defaults of a model: what its generation_config.json recommends for requests that name no values."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from eyas.config import GenerationDefaults
from eyas.file_values import FileValue, read_json, shown
from eyas.models.checkpoint import resolve
from eyas.validation import MAX_INT, MAX_TEMPERATURE

# The keys that count, as in vLLM, which ignores do_sample; and the values that requests may have too.
SAMPLING_VALUES: Mapping[str, FileValue] = {
    "temperature": FileValue("number", 0, MAX_TEMPERATURE),
    "top_p": FileValue("number", 0, 1, is_open=True),
    "top_k": FileValue("whole number", -1, MAX_INT),
    "min_p": FileValue("number", 0, 1),
    "repetition_penalty": FileValue("number", 0.01, 100),
    "max_new_tokens": FileValue("whole number", 1, MAX_INT),
}

log = logging.getLogger(__name__)


def sampling_defaults(model: str, defaults: GenerationDefaults = "auto") -> dict[str, float]:
    """Return the sampling parameters that a model recommends, by their names in SamplingParams.

    model: folder or hub id. defaults: "auto" reads them from the model; "vllm" and "none" return none.
    A value that no request could have is left out with a warning. Raises CheckpointError for a file that is no JSON object.
    """
    file = resolve(model) / "generation_config.json"
    stated = read_json(file) if defaults == "auto" and file.is_file() else {}
    found = dict[str, float]()
    for key, allowed in SAMPLING_VALUES.items():
        if (value := stated.get(key)) is None:
            continue
        if allowed.holds(value):
            found["max_tokens" if key == "max_new_tokens" else key] = value
        else:
            log.warning("%s: %s is %s, but must be %s; it does not count", file, key, shown(value), allowed)
    return found
