"""Train a small draft model (method `sps`) for the demo target: a 2-layer Llama, on Python's standard library.

    python examples/train_draft_model.py models/demo/small --minutes 10

In the first half of the time it learns the text, in the second half the target's probabilities of every next token
(distillation). Modules that the demo prompts come from, and those of --without, are left out.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from target_text import DEMO
from tokenizers import Tokenizer
from torch import Tensor, nn

WINDOW, BATCH, PEAK_RATE = 256, 16, 4e-3
BOS = 0


def corpus(tokenizer: Tokenizer, held_out: set[str]) -> Tensor:
    """Return the token ids of all sources, in random order of files, each file after a BOS token."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [path.read_text(errors="ignore") for path in files if path.relative_to(root).as_posix() not in held_out]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    order = torch.randperm(len(encoded)).tolist()
    return torch.tensor([token for index in order for token in (BOS, *encoded[index].ids)])


def batches(tokens: Tensor) -> Iterator[Tensor]:
    """Yield random windows [BATCH, WINDOW + 1]; every other one starts with BOS, as prompts do."""
    while True:
        starts = torch.randint(0, len(tokens) - WINDOW - 1, (BATCH, 1))
        windows = tokens[starts + torch.arange(WINDOW + 1)]
        windows[::2, 0] = BOS
        yield windows


def train(draft_model: nn.Module, target: nn.Module, tokens: Tensor, minutes: float) -> None:
    """Train for `minutes` with AdamW; the rate rises for a twentieth of the time and then falls to a twentieth."""
    optimizer = torch.optim.AdamW(draft_model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started, seen, next_report = time.monotonic(), 0, 0.0
    for windows in batches(tokens):
        done = (time.monotonic() - started) / (60 * minutes)
        if done >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(20 * done + 0.01, 1 - 0.95 * done)
        inputs, next_tokens = windows[:, :-1], windows[:, 1:]
        logprobs = torch.log_softmax(draft_model(input_ids=inputs).logits.flatten(0, 1), -1)
        if done < 0.5:
            loss = F.nll_loss(logprobs, next_tokens.flatten())
        else:
            with torch.inference_mode():
                wanted = torch.log_softmax(target(input_ids=inputs).logits.float().flatten(0, 1), -1)
            loss = F.kl_div(logprobs, wanted.clone(), log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft_model.parameters(), 1.0)
        optimizer.step()
        seen += inputs.numel()
        if done > next_report:
            print(f"{done:5.0%} of the time, {seen / 1e6:.2f} M tokens, loss {loss.item():.3f}", flush=True)
            next_report += 0.05


def main(
    out: Path,
    minutes: Annotated[float, typer.Option()] = 10.0,
    without: Annotated[Path | None, typer.Option(help='JSON list of modules to leave out, such as ["csv.py"].')] = None,
    threads: Annotated[int, typer.Option()] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a model and write it to the folder OUT."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    held_out = {json.loads(line)["source"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()}
    held_out |= set(json.loads(without.read_text())) if without else set()
    tokens = corpus(Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")), held_out)
    print(f"{len(tokens) / 1e6:.1f} M tokens", flush=True)
    target: Any = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=target.config.max_position_embeddings,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    draft_model = LlamaForCausalLM(config)
    train(draft_model, target, tokens, minutes)
    draft_model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
