"""The verify benchmark runs on a tiny target, also without a GPU."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.scripts.gpu_verify import Case, Settings, copy_rate, make_target, measure, tables
from eyas.bench.report import Report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


def test_every_case_is_timed_and_reported(tmp_path: Path) -> None:
    settings = Settings(layers=1, cached=9, repeats=1)
    target = make_target(TINY, DEVICE)
    rate = copy_rate(target.device, 1 << 16)
    steps = measure(target, [Case(1, 1), Case(2, 1), Case(2, 5)], settings, rate)
    assert all(min(s.floor, s.graphs, s.kernel, s.plain, s.kernel_attention, s.plain_attention) > 0 for s in steps)
    page = Report.here("gpu-verify", "command", DEVICE, settings, steps, tables(steps, rate)).write(tmp_path)
    assert page.read_text(encoding="utf-8").count("| 2 | 5 |") == 2
