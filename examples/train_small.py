"""Trains a small draft model for the demo target: the standard library's sources in, a 2-layer Llama for drafter "sps" out.

    python examples/train_small.py --minutes 10 --out models/demo/small

The first half of the time it learns the text, then what the target says of the text (distillation: the target's law at every
token), which takes the target's own forward pass. Modules that the demo prompts come from, and those listed in --without,
are left out.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).parents[1] / "models" / "demo"
WINDOW, BATCH, RATE = 256, 16, 4e-3
BOS = 0


def corpus(tokenizer: Tokenizer, held_out: set[str]) -> torch.Tensor:
    """Token ids of all sources, files in random order, one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [path.read_text(errors="ignore") for path in files if path.relative_to(root).as_posix() not in held_out]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    order = torch.randperm(len(encoded)).tolist()
    return torch.tensor([token for index in order for token in (BOS, *encoded[index].ids)])


def batches(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Random windows [BATCH, WINDOW + 1]; every other one begins like a prompt."""
    while True:
        starts = torch.randint(0, len(tokens) - WINDOW - 1, (BATCH, 1))
        windows = tokens[starts + torch.arange(WINDOW + 1)]
        windows[::2, 0] = BOS
        yield windows


def train(small: LlamaForCausalLM, target: torch.nn.Module, tokens: torch.Tensor, minutes: float) -> None:
    """Adam with a rate that rises for a twentieth of the time and then falls to a twentieth."""
    optimizer = torch.optim.AdamW(small.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started, seen, reported = time.monotonic(), 0, 0.0
    for windows in batches(tokens):
        done = (time.monotonic() - started) / (60 * minutes)
        if done >= 1:
            return
        rate = RATE * min(20 * done + 0.01, 1 - 0.95 * done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, following = windows[:, :-1], windows[:, 1:]
        laws = torch.log_softmax(small(input_ids=inputs).logits.flatten(0, 1), -1)
        if done < 0.5:
            loss = F.nll_loss(laws, following.flatten())
        else:
            with torch.inference_mode():
                wanted = torch.log_softmax(target(input_ids=inputs).logits.float().flatten(0, 1), -1)
            loss = F.kl_div(laws, wanted.clone(), log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        seen += inputs.numel()
        if done > reported:
            print(f"{done:5.0%} of the time, {seen / 1e6:.2f} M tokens, loss {loss.item():.3f}", flush=True)
            reported += 0.05


def main() -> None:
    """Read the options, train, write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--without", type=Path, help='JSON list of modules, such as ["csv.py"], to leave out as well')
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    prompts = (DEMO / "prompts.jsonl").read_text().splitlines()
    held_out = {json.loads(line)["source"] for line in prompts}
    held_out |= set(json.loads(options.without.read_text())) if options.without else set()
    tokens = corpus(Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")), held_out)
    print(f"{len(tokens) / 1e6:.1f} M tokens", flush=True)
    target = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=target.config.max_position_embeddings,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    small = LlamaForCausalLM(config)
    train(small, target, tokens, options.minutes)
    small.to(torch.bfloat16).save_pretrained(options.out)


if __name__ == "__main__":
    main()
