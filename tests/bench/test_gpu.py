"""`make gpu` on tiny shapes, also without a GPU: the same code as on one."""

import contextlib
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import drafts, steps
from benchmarks.gpu.drafts import Round, Times, level_bytes, make_head
from benchmarks.gpu.drafts import cost_table as draft_costs
from benchmarks.gpu.measuring import Case, Limit, Part, Rates, Scale, full_scale, llama_head
from benchmarks.gpu.steps import Step, cost_table, make_backends, make_target
from benchmarks.widen.target import Shape
from eyas.bench import timing
from eyas.config import TreeConfig
from eyas.emulation.costs import DeviceCosts
from eyas.models.backends.base import BackendPlan
from eyas.models.backends.cuda import plan_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD = replace(llama_head(32, 48, 2), num_kv_heads=1, head_dim=16, vocab_size=64, draft_vocab_size=40, max_positions=128)
TARGET = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
TINY = Scale(
    {"tiny": TARGET}, {"tiny-head": HEAD},
    [Case(1, 1, 9), Case(2, 1, 9), Case(2, 5, 9), Case(2, 5, 40), Case(2, 5, 9, is_narrow=True)], (1, 2), (1, 3),
    (32, 48, 64), Shape(320, 512, 12, 4, 2, 64, 4200, 4100), batches=(1,), num_prompts=1, num_groups=1, max_groups=1,
    temperatures=(0.0,), max_tokens=3, repeats=1,
    copied_bytes=1 << 16, product_width=32, num_steps=2, cached=9, chunks=(3, 16), prefixes=(0, 5),
)  # fmt: skip


class Clock:
    """Seconds that pass with each look at it."""

    def __init__(self, tick: float) -> None:
        self._tick, self.moment = tick, 0.0

    def __call__(self) -> float:
        self.moment += self._tick
        return self.moment


def test_a_run_reports_every_stage_with_cost_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run_tests", lambda part: None)
    monkeypatch.setattr(timing, "WARM_UP_TOKENS", 2)
    monkeypatch.setattr(drafts, "TREE", TreeConfig(num_draft_tokens=12, top_k=4))
    page = gpu.run(DEVICE, gpu.Settings(gpu.STAGES, 25.0, TINY), tmp_path)
    text, data = page.read_text(encoding="utf-8"), json.loads(page.with_suffix(".json").read_text())
    for stage in gpu.STAGES:
        assert f"| {stage} | done |" in text
    assert "did not run" not in text
    assert all(min(s["floor"], s["graphs"], s["forward"], s["plain_attention"]) > 0 for s in data["results"]["steps"])
    assert all(
        s["device_attention"] > 0 and (s["library_attention"] > 0) != s["case"]["is_narrow"]
        for s in data["results"]["steps"]
    )
    assert all(time["us"] > 0 and time["floor_us"] > 0 for time in data["results"]["kernels"])
    assert {time["name"] for time in data["results"]["kernels"] if time["plain_us"]} == {
        "residual and norm", "rotary and cache", "gate",
    }  # fmt: skip
    chunks = data["results"]["prefill"]
    assert [(c["rows"], c["cached"]) for c in chunks] == [(3, 0), (3, 5), (16, 0), (16, 5)]
    assert all(min(c["whole"], c["floor"], c["kernel"], c["library"]) > 0 for c in chunks)
    assert "| 2 | 5 | 9 | 8 bits |" in text
    assert "| batch | contender | step, ms | pass | sampler | draft round | host |" in text
    methods = {s["method"] for s in data["results"]["end-to-end"]["methods"]["scores"]}
    assert methods == {
        "plain",
        "generate",
        "generate, prompt lookup",
        "assisted generate",
        "eagle3",
        "dspark",
        "medusa",
        "sps",
        "prompt_lookup",
    }
    tables = {file.name.removeprefix(f"{page.stem}-"): DeviceCosts.read(str(file)) for file in tmp_path.glob("*.costs.json")}
    assert tables["tiny.costs.json"].seconds("verify", 10, 80) > 0
    assert set(tables["tiny-head.costs.json"].passes) == {"draft_round", "draft_level"}


def test_a_stage_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    narrow = replace(TINY, targets={"broken": replace_heads(TARGET)})
    page = gpu.run(DEVICE, gpu.Settings(("steps", "kernels"), 25.0, narrow), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| kernels | done |" in text
    assert "| steps | " in text
    assert "| steps | done |" not in text
    assert "| steps | broken, batch 2, 5 rows, 40 cached | not run: " in text


def test_another_process_runs_what_is_left_of_a_lost_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(gpu, "cannot_use", lambda device: True)
    monkeypatch.setattr(gpu.os, "execv", lambda program, command: started.append(command))
    broken = replace(TINY, targets={"broken": replace_heads(TARGET)})
    page = gpu.run(DEVICE, gpu.Settings(("steps", "drafts"), 25.0, broken), tmp_path, Clock(30.0))
    assert "| drafts | not reached |" in page.read_text(encoding="utf-8")
    ((*command, minutes, out),) = started
    assert command == [sys.executable, "-m", "benchmarks.gpu", "--stage=drafts"]
    assert 0 < float(minutes.removeprefix("--minutes=")) < 25
    assert out == f"--out={tmp_path}"


@pytest.mark.nightly
def test_cases_without_time_are_reported_as_not_run(tmp_path: Path) -> None:
    """A look at the clock takes 130 s: stages run a few cases, later ones keep their share, and the run ends in time."""
    clock, stages = Clock(130.0), ("prefill", "steps", "drafts")
    page = gpu.run(DEVICE, gpu.Settings(stages, 25.0, TINY), tmp_path, clock)
    assert clock.moment - 130.0 <= 60 * 24
    text, data = page.read_text(encoding="utf-8"), json.loads(page.with_suffix(".json").read_text())
    assert "| prefill | out of time |" in text
    assert "| steps | out of time |" in text
    assert "| drafts | done |" in text
    assert [len(data["results"][stage]) for stage in stages] == [1, 3, 2]
    assert "| prefill | chunk of 3 rows behind 5 | not run: out of time |" in text
    assert "| steps | tiny, batch 2, 5 rows, 9 cached, keys of 8 bits | not run: out of time |" in text
    assert not list(tmp_path.glob("*-tiny.costs.json")), "a cost table of half the cases"
    assert list(tmp_path.glob("*-tiny-head.costs.json"))
    late = gpu.run(DEVICE, gpu.Settings(("kernels",), 25.0, TINY), tmp_path, Clock(3000.0)).read_text(encoding="utf-8")
    assert "| kernels | all | not run: out of time |" in late


def test_a_stage_that_looks_at_no_clock_is_interrupted() -> None:
    part, never = Part(Limit(time.monotonic() + 0.05)), threading.Event()

    def work(part: Part) -> None:
        part.waiting = ["one"]
        while True:
            with contextlib.suppress(Exception):  # as measured code may do
                never.wait()

    gpu.run_stage(work, part)
    assert (part.error, part.waiting) == ("out of time", ["one"])


def test_a_command_without_time_ends_with_its_children() -> None:
    """Also those that hold its output open."""
    held = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"]
    assert gpu.run_within(held, Limit(time.monotonic() + 0.5)) == (None, "")
    failing = [sys.executable, "-c", "print(3); raise SystemExit(4)"]
    assert gpu.run_within(failing, Limit(time.monotonic() + 60)) == (4, "3\n")


def test_a_command_is_interrupted_before_its_time_ends(tmp_path: Path) -> None:
    """So it can say what it has found."""
    ready = tmp_path / "ready"
    work = f"pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    code = f"import pathlib, time\ntry: {work}\nexcept KeyboardInterrupt: print(5)"

    def now() -> float:
        while not ready.exists():
            time.sleep(0.01)
        return 0.0

    assert gpu.run_within([sys.executable, "-c", code], Limit(60.0, now), grace_s=60.0) == (None, "5\n")


def test_a_device_that_hangs_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = list[int]()
    monkeypatch.setattr(gpu.os, "_exit", codes.append)
    parts = {"kernels": Part(Limit(0), waiting=["60 rows"])}
    gpu.give_up(DEVICE, gpu.Settings(("kernels", "steps"), 25.0, TINY), parts, tmp_path)
    text = next(tmp_path.glob("*.md")).read_text(encoding="utf-8")
    assert codes == [1]
    assert "| kernels | 60 rows | not run: the device hangs |" in text
    assert "| steps | not reached |" in text


def replace_heads(config: LlamaConfig) -> LlamaConfig:
    """A config whose key-value heads do not divide its query heads."""
    broken = LlamaConfig(**config.to_dict())
    broken.num_key_value_heads = 3
    return broken


def test_cost_tables_give_back_what_was_measured() -> None:
    ms = {Case(1, 1, 100): 5.1, Case(1, 60, 100): 6.1, Case(1, 60, 1100): 7.1, Case(4, 60, 100): 9.4}
    steps = [Step("8b", case, 1, each, each, each, each, 1, 1, 1, 1, 1) for case, each in ms.items()]
    costs = cost_table("8b", steps, DEVICE)
    for case, each in ms.items():
        assert 1e3 * costs.seconds("verify", case.batch * case.rows, case.batch * case.cached) == pytest.approx(each)
    assert costs.passes["verify"].us_per_context_token == pytest.approx(1.0)

    rounds = [Round("head", n, 1.0, Times(1.0 + n, 1.0), Times(1.0, 1.0), 0.5) for n in (1, 8)]
    drafts = draft_costs("head", rounds, full_scale(), DEVICE)
    assert 1e3 * (drafts.seconds("draft_round", 4) + 7 * drafts.seconds("draft_level", 10)) == pytest.approx(2.0)
    assert 1e3 * (drafts.seconds("draft_round", 32) + 7 * drafts.seconds("draft_level", 80)) == pytest.approx(9.0)


def test_graphs_hold_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its steps would be launched kernel by kernel, and the table would take that for a cost of the context."""
    plans = list[BackendPlan]()

    def plan(*arguments: Any) -> BackendPlan:
        plans.append(plan_backend(*arguments))
        return plans[-1]

    monkeypatch.setattr(steps, "plan_backend", plan)
    target, cases = make_target(TARGET, DEVICE), [Case(1, 5, 40), Case(4, 1, 9)]
    make_backends(target, cases, target.new_kv_cache(45))
    assert plans
    assert all(plan.limits.prefix // plan.limits.segments >= 40 for plan in plans)


def test_the_floor_counts_what_a_level_reads() -> None:
    """Llama 3 8B's head has 0.37 billion weights: attention over 2 H, MLP and 32,000 draft tokens, without the embedding."""
    hidden, kv, inner, vocab = 32, 16, 48, 40
    weights = (hidden + 2 * kv) * 2 * hidden + hidden**2 + 3 * hidden * inner + vocab * hidden + 4 * hidden
    assert level_bytes(make_head(HEAD, torch.device("cpu"))) == 2 * weights
    assert Rates(bytes=1e9, operations=1e12).floor_ms(2e6, 4e9) == pytest.approx(4.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_so() -> None:
    result = CliRunner().invoke(gpu.app)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["error: no CUDA device here; `make gpu` measures a GPU, see `nvidia-smi`"]
    assert "unknown stage 'all'" in CliRunner().invoke(gpu.app, ["--stage", "all"]).output
