"""Tiny GGUF files, written with the package `gguf` as llama.cpp's converter does, of the tiny models in `tiny`."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support.tiny import write_spelling_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
CONTROL = gguf.TokenType.CONTROL
NORMAL = gguf.TokenType.NORMAL


def permuted(weight: Any, num_heads: int) -> Any:
    """Rows of a projection to queries or keys in llama.cpp's order: the halves of each head interleaved."""
    rows = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The tokenizer of `write_spelling_tokenizer`, whose tokens 0 and 1 begin and end a text, and a chat template."""
    write_spelling_tokenizer(folder)
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    tokens = sorted(ids, key=ids.__getitem__)
    tokens[2] = "<|im_end|>"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def write_gguf(target: Path, file: Path, kind: str = "F32", freqs: Any = None, **values: Any) -> Path:
    """The tiny Llama of `write_target` as a GGUF file.

    Args:
        kind: of the matrices' numbers.
        freqs: divisors of the frequencies of RoPE.
        values: metadata under `llama.`, with two underscores for a dot.
    """
    config = json.loads((target / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for name, value in values.items():
        add = {str: writer.add_string, int: writer.add_uint32}.get(type(value), writer.add_float32)
        add(f"llama.{name.replace('__', '.')}", value)
    write_tokenizer(writer, file.parent)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(target / "model.safetensors").items():
        own = names.get_name(name, try_suffixes=(".weight",))
        weight = (
            permuted(weight, heads if "q_proj" in name else kv_heads) if "q_proj" in name or "k_proj" in name else weight
        )
        stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        writer.add_tensor(own, gguf.quantize(weight.astype(np.float32), stored), raw_dtype=stored)
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
