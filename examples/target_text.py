"""Text to train draft heads on, given a target: half of it Python's own sources, half what the target makes of their first
lines; with the target's final states over all of it. `python examples/target_text.py FILE` writes what the trainers read."""

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
    """What `main` wrote."""
    return Text(**torch.load(file, weights_only=True))


def sources(target: str, count: int, seed: int) -> Tensor:
    """`count` windows of Python's standard library, int64 [count, LENGTH]; modules that the demo keeps out are left out.
    Every other window begins with the token that begins a text."""
    tokenizer = Tokenizer.from_file(str(Path(target, "tokenizer.json")))
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
    tokens[::2, 0] = json.loads(Path(target, "config.json").read_text())["bos_token_id"]
    return tokens


def own_words(model: Any, prompts: Tensor, temperature: float) -> Tensor:
    """The target's continuations of the prompts' first tokens, sampled; [N, LENGTH]."""
    parts = []
    for part in track(prompts[:, :PROMPT].split(BATCH), description="sampling"):
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "eos_token_id": None, "pad_token_id": 2}
        parts.append(model.generate(input_ids=part, attention_mask=torch.ones_like(part), max_length=LENGTH, **options))
    return torch.cat(parts)


def final_states(model: Any, tokens: Tensor) -> Tensor:
    """Bfloat16 [N, L, H]."""
    decoder, parts = model.get_decoder(), track(tokens.split(BATCH), description="target's states")
    return torch.cat([decoder(part).last_hidden_state.bfloat16() for part in parts])


@torch.inference_mode()
def main(
    out: Path,
    target: Annotated[str, typer.Option()] = str(DEMO / "target"),
    windows: Annotated[int, typer.Option(help="Windows of 256 tokens in all.")] = 3000,
    temperature: Annotated[float, typer.Option(help="What the target's own half is sampled at.")] = 0.8,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write text and states to OUT."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    corpus = sources(target, windows, seed)
    tokens = torch.cat([corpus[windows // 2 :], own_words(model, corpus[: windows // 2], temperature)])
    tokens = tokens[torch.randperm(len(tokens))]
    torch.save({"tokens": tokens, "states": final_states(model, tokens)}, out)


if __name__ == "__main__":
    typer.run(main)
