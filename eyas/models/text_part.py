"""Finds the language model of a checkpoint: in one for images or sound, the config and the tensors of its text part."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eyas.errors import CheckpointError

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$")
HEAD = "lm_head.weight"
# Names in checkpoints that bring code of their own along, which is not run, and the same architectures in transformers.
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}


def text_part(config: Any) -> Any:
    """Return the config of the text model inside a multimodal one, if transformers has a causal LM of it; else `config`.

    Raises CheckpointError for a config with several text models.
    """
    from transformers import AutoModelForCausalLM

    if config.is_encoder_decoder:
        return config
    text, mapping = _text_config(config), causal_models(AutoModelForCausalLM)
    if type(text) is type(config) or type(text) not in mapping:
        return config
    text = copy.deepcopy(text)
    text.name_or_path = config.name_or_path
    if quantised := getattr(config, "quantization_config", None):
        text.quantization_config = quantised
    return text


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError as error:
        raise CheckpointError(f"{config.model_type} has several text models; Eyas serves models with one") from error


def causal_models(auto: Any) -> Any:
    """Return the class of each config, as one of transformers' Auto classes knows them."""
    return auto._model_mapping


def auto_class(config: Any) -> Any:
    """Return the Auto class that makes a language model of a config: that of causal LMs, or of models for images and text
    whose text part has no class of its own. Raises CheckpointError for a config of neither.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in causal_models(AutoModelForCausalLM):
        return AutoModelForCausalLM
    if type(config) in causal_models(AutoModelForImageTextToText):
        return AutoModelForImageTextToText
    raise CheckpointError(f"{config.model_type} has no causal language model in transformers")


def architecture_class(config: Any) -> Any:
    """Return transformers' class of a language model of a config."""
    found = causal_models(auto_class(config))[type(config)]
    return found[0] if isinstance(found, tuple) else found


def drop_padding(config: Any) -> None:
    """Take the padding token from a config that can do without one.

    Some architectures look for padding in every pass: that waits for a device, and tokens without values have none.
    """
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    with suppress(StrictDataclassFieldValidationError):
        config.get_text_config().pad_token_id = None


@dataclass(frozen=True)
class StoredNames:
    """The names in the files of a text model's tensors.

    Attributes:
        prefix: before the names of the decoder's tensors in the files.
        own_prefix: before the same names in the model.
        head: of the output head in the files; empty if it is tied to the embedding.
    """

    prefix: str
    own_prefix: str
    head: str

    def own(self, stored: str) -> str:
        """Return the name in the model of a tensor of the files; empty if it belongs to another part."""
        if stored == self.head:
            return HEAD
        return self.own_prefix + stored.removeprefix(self.prefix) if stored.startswith(self.prefix) else ""

    @property
    def key_mapping(self) -> dict[str, str]:
        """Return the renaming that transformers' `from_pretrained` takes."""
        renamed = {f"^{re.escape(self.prefix)}": self.own_prefix}
        return renamed | ({f"^{re.escape(self.head)}$": HEAD} if self.head else {})


def find_stored_names(own: Iterable[str], stored: Collection[str]) -> StoredNames | None:
    """Return where the files of a multimodal checkpoint hold the tensors of its text model.

    The decoder is found by its embedding of tokens; of several, such as a decoder of speech, the one with most of the
    model's tensors counts. None if there is no embedding.

    Args:
        own: the model's parameters.
        stored: the tensors in the files.
    """
    names = [name for name in own if name != HEAD]
    embedding = next((name for name in names if EMBEDDING.search(name)), "")
    first = f"{embedding.partition('.')[0]}."
    own_prefix = first if all(name.startswith(first) for name in names) else ""
    within = [name.removeprefix(own_prefix) for name in names]
    suffix = embedding.removeprefix(own_prefix)
    prefixes = {name.removesuffix(suffix) for name in stored if name == suffix or name.endswith(f".{suffix}")}
    if not embedding or not prefixes:
        return None
    prefix = max(sorted(prefixes), key=lambda prefix: sum(prefix + name in stored for name in within))
    heads = [name for name in stored if name == HEAD or name.endswith(f".{HEAD}")]
    # The text model's own head is under the same roof as its decoder, or at the top.
    heads.sort(key=lambda name: (not prefix.startswith(name.removesuffix(HEAD)), -len(name)))
    return StoredNames(prefix, own_prefix, heads[0] if heads else "")


def is_nested(config: Any, raw: Mapping[str, Any]) -> bool:
    """Return whether a config is of the text part of what config.json, `raw`, describes."""
    name = raw.get("model_type")
    return bool(config.model_type != OTHER_NAMES.get(str(name), name))
