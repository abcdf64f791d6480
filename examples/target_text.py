"""Training text for draft heads: `python examples/target_text.py FILE` writes what the trainers read.

Half of the text is Python's standard library. The other half is sampled from the target, with beginnings from the library
as prompts. The file also holds the target's final hidden states of all tokens.
"""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
LENGTH = 256
PROMPT = 48
BATCH = 50


@dataclass(frozen=True)
class Text:
    """tokens int64 [N, L]; states bfloat16 [N, L, H]: the target's hidden states behind its final norm."""

    tokens: Tensor
    states: Tensor


def read_text(file: Path) -> Text:
    """Read a file that `main` wrote."""
    return Text(**torch.load(file, weights_only=True))


def sources(model: str, count: int, seed: int) -> Tensor:
    """Return `count` windows of Python's standard library, int64 [count, LENGTH].

    Modules of heldout_modules.json are left out. Every other window starts with the BOS token.
    """
    tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
    library = Path(sysconfig.get_path("stdlib"))
    held_out = {library / name for name in json.loads((DEMO / "heldout_modules.json").read_text())}
    files = [file for file in sorted(library.rglob("*.py")) if "site-packages" not in file.parts and file not in held_out]
    random.Random(seed).shuffle(files)
    windows: list[list[int]] = []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore"), add_special_tokens=False).ids
        windows += [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
        if len(windows) > 4 * count:
            break
    random.Random(seed).shuffle(windows)
    tokens = torch.tensor(windows[:count])
    tokens[::2] = tokens[::2].roll(1, 1)
    tokens[::2, 0] = json.loads(Path(model, "config.json").read_text())["bos_token_id"]
    return tokens


def target_samples(target: Any, prompts: Tensor, temperature: float) -> Tensor:
    """Return the first PROMPT tokens of each row and the target's sampled continuation, int64 [N, LENGTH]."""
    parts = []
    for part in track(prompts[:, :PROMPT].split(BATCH), description="sampling"):
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "eos_token_id": None, "pad_token_id": 2}
        parts.append(target.generate(input_ids=part, attention_mask=torch.ones_like(part), max_length=LENGTH, **options))
    return torch.cat(parts)


def final_states(target: Any, tokens: Tensor) -> Tensor:
    """Return the target's hidden states after its final norm, bfloat16 [N, L, H]."""
    decoder, parts = target.get_decoder(), track(tokens.split(BATCH), description="target's states")
    return torch.cat([decoder(part).last_hidden_state.bfloat16() for part in parts])


@torch.inference_mode()
def main(
    out: Path,
    model: Annotated[str, typer.Option(help="Folder of the target.")] = str(DEMO / "target"),
    windows: Annotated[int, typer.Option(help="Windows of 256 tokens in all.")] = 3000,
    temperature: Annotated[float, typer.Option(help="Temperature of the target's samples.")] = 0.8,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write text and states to OUT."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    corpus = sources(model, windows, seed)
    tokens = torch.cat([corpus[windows // 2 :], target_samples(target, corpus[: windows // 2], temperature)])
    tokens = tokens[torch.randperm(len(tokens))]
    torch.save({"tokens": tokens, "states": final_states(target, tokens)}, out)


if __name__ == "__main__":
    typer.run(main)
