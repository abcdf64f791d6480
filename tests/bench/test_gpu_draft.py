"""The draft benchmark runs on a tiny head, also without a GPU."""

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.scripts.gpu_draft import Settings, level_bytes, llama_head, make_head, measure, tables
from eyas.bench.report import Report
from eyas.config import TreeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = replace(llama_head(32, 48, 2), num_kv_heads=1, head_dim=16, vocab_size=64, draft_vocab_size=40, max_positions=64)


def test_every_round_is_timed_and_reported(tmp_path: Path) -> None:
    settings, head = Settings(TreeConfig(10, 3, 4), cached=9, repeats=1), make_head(TINY, torch.device(DEVICE))
    rounds = measure("tiny", head, [1, 3], settings, rate=1e9)
    assert all(min(r.floor, r.greedy.captured, r.greedy.launched, r.noised.captured) > 0 for r in rounds)
    page = Report.here("gpu-draft", "command", DEVICE, settings, rounds, tables(rounds, 1e9)).write(tmp_path)
    assert page.read_text(encoding="utf-8").count("| tiny | 3 |") == 2


def test_the_floor_counts_what_a_level_reads() -> None:
    """Llama 3 8B's head has 0.37 billion weights: attention over 2 H, MLP and 32,000 draft tokens, without the embedding."""
    hidden, kv, inner, vocab = 32, 16, 48, 40
    weights = (hidden + 2 * kv) * 2 * hidden + hidden**2 + 3 * hidden * inner + vocab * hidden + 4 * hidden
    assert level_bytes(make_head(TINY, torch.device("cpu"))) == 2 * weights
