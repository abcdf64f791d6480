"""A run that dies continues exactly: weights, optimiser, data and noise are those of a run that never stopped."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import pytest
import torch
from safetensors.torch import load_file

from eyas.config.loader import load
from eyas.errors import ConfigError
from eyas.services.local.cluster import free_port
from eyas.train.config import TrainConfig
from eyas.train.methods import build_trainer
from eyas.train.windows import Windows
from tests.support.services.forks import Popen
from tests.support.tiers import nightly
from tests.support.tiny_block import tiny_block_head
from tests.train.small_runs import prepared, settings, small_disk, tiny_target

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows have 30 or 16 supervised tokens: no two documents fit into one of 32."""
    folder = tmp_path_factory.mktemp("resume")
    prepared(folder, tiny_target(folder), lengths=(31, 17))
    return folder


def write_settings(folder: Path, out: Path, method: str = "dspark", steps: int = STEPS, **changes: object) -> Path:
    target = str(folder / "target")
    config = settings(folder, target, method, out=str(out), optimizer__max_steps=steps, threads=1, **changes)
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(asdict(config)))  # JSON is YAML
    return file


def records(out: Path) -> list[dict[str, object]]:
    """The lines of a run's log, without times."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(out) if "loss" in record}  # type: ignore[misc]


NO_SCHEDULE = {"optimizer__lr_scheduler": "constant", "optimizer__warmup_ratio": 0}
RUNS: dict[str, dict[str, object]] = {
    "dspark": {},
    "eagle1": {
        "optimizer__name": "muon",
        "optimizer__gradient_accumulation_steps": 2,
        "eval__every": 2,
        "eval__num_prompts": 1,
    },
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["dspark", nightly("eagle1")])
def test_a_killed_run_continues_bit_for_bit(method: str, folder: Path, tmp_path: Path) -> None:
    """It is killed at any moment after its first checkpoint; how long both runs are follows from that."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = {**NO_SCHEDULE, **RUNS[method]}
    process = Popen(command(write_settings(folder, killed, method, 10**6, **changes)), stdout=DEVNULL, stderr=DEVNULL)
    while not list(killed.glob("checkpoints/step-*.pt")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    steps = int(max(killed.glob("checkpoints/step-*.pt")).stem.removeprefix("step-")) + 4
    run(write_settings(folder, killed, method, steps, **changes))
    run(write_settings(folder, whole, method, steps, **changes))
    assert records(killed) == records(whole)
    assert len(losses(killed)) == steps
    a, b = (torch.load(out / "checkpoints" / f"step-{steps:08d}.pt", weights_only=True) for out in (whole, killed))
    assert all(torch.equal(a["parameters"][name], b["parameters"][name]) for name in a["parameters"])
    best = [(out / "best" / "model.safetensors").read_bytes() for out in (whole, killed)]
    assert best[0] == best[1]


def command(file: Path) -> list[str]:
    return [sys.executable, "-m", "eyas.cli", "train", "run", "--config", str(file)]


def run(file: Path) -> None:
    """Train in this process."""
    build_trainer(load(TrainConfig, file)).run()


def test_other_settings_do_not_continue_a_run(folder: Path, tmp_path: Path) -> None:
    build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "run"))).save()
    other = settings(folder, str(folder / "target"), out=str(tmp_path / "run"), optimizer__learning_rate=0.5)
    with pytest.raises(ConfigError, match="run with other settings"):
        build_trainer(other).resume()


def test_a_run_stopped_before_a_checkpoint_begins_its_log_again(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, str(folder / "target"), out=str(tmp_path / "run"))
    stopped, other = build_trainer(config), build_trainer(config)
    stopped.log_step(stopped.step())
    other.resume()
    assert records(tmp_path / "run") == []


def test_other_data_do_not_continue_a_run(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    for count in (12, 13):
        prepared(tmp_path, target, count)
        trainer = build_trainer(settings(tmp_path, target, out=str(tmp_path / "run")))
        if count == 12:
            trainer.save()
    with pytest.raises(ConfigError, match="run with other data"):
        trainer.resume()


def test_a_run_made_longer_goes_on_at_the_new_rate(folder: Path, tmp_path: Path) -> None:
    """A run that ended at the rate 0 continues at the rate that a run of the new length has there."""
    made = [
        build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "run"), optimizer__max_steps=steps))
        for steps in (2, 8)
    ]
    for _ in range(2):
        made[0].step()
    made[0].save()
    made[1].resume()
    (ended,), (goes_on,) = ([own.optimizer.param_groups[0]["lr"] for own in trainer.schedulers] for trainer in made)
    assert (ended, goes_on, made[1].progress.step) == (0.0, 1e-3, 2)
    assert float(made[1].step()["loss"]) > 0


def test_a_full_disk_loses_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "run")))
    trainer.step()
    trainer.save()
    trainer.step()
    with small_disk(4096), pytest.raises(ConfigError, match="nothing that was saved is lost"):
        trainer.save()
    again = build_trainer(trainer.config)
    again.resume()
    assert again.progress.step == 1
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_full_disk_keeps_the_older_head(name: str, folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "run")))
    trainer.write_head(name)
    written = {file.name: file.read_bytes() for file in (tmp_path / "run" / name).iterdir()}
    trainer.step()
    with small_disk(4096), pytest.raises(ConfigError, match="nothing that was saved is lost"):
        trainer.write_head(name)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run" / name).iterdir()} == written
    assert not (tmp_path / "run" / f"{name}.part").exists()


def test_another_number_of_processes_does_not_continue_a_run(folder: Path, tmp_path: Path) -> None:
    trainer = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "run")))
    trainer.save()
    file = next((tmp_path / "run" / "checkpoints").glob("*.pt"))
    torch.save(torch.load(file, weights_only=True) | {"num_processes": 2}, file)
    with pytest.raises(ConfigError, match="on 2 processes, but there are 1 now"):
        trainer.resume()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_two_processes_train_the_head_of_one(method: str, folder: Path, tmp_path: Path) -> None:
    """Two gloo processes with a sharded target and half the windows each take the steps of one process with all of them.

    A window may have more supervised rows than the other process's: then rows count alike, and not processes. Each process
    reads one half of the target, and no lm_head. The first evaluates a head of DSpark.
    """
    changes: dict[str, object] = {"optimizer__max_grad_norm": 0.1, "eval__num_prompts": 2 if method == "dspark" else 0}
    shared = {"optimizer__batch_size": 1, "shard_target": True, "eval__device": "cpu"}
    file = write_settings(folder, tmp_path / "two", method, **changes, **shared)
    assert uneven_steps(load(TrainConfig, file)) >= 2
    outputs = run_on_two_processes(file)
    weights = load_file(folder / "target" / "model.safetensors")
    half = sum(tensor.nbytes for name, tensor in weights.items() if name != "lm_head.weight") // 2
    for rank, output in enumerate(outputs):
        assert f"process {rank} of 2 has read {half} bytes of the target" in output
    run(write_settings(folder, tmp_path / "one", method, **changes))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    two, one = (parameters(tmp_path / name) for name in ("two", "one"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


def uneven_steps(config: TrainConfig) -> int:
    """In how many steps of a run two processes have windows with unequal numbers of supervised tokens."""
    windows, count = Windows(Path(config.data.path), config.data.max_length), config.optimizer.batch_size
    steps = [[windows.step_batch(config.seed, step, count, rank, 2) for rank in range(2)] for step in range(STEPS)]
    return sum(first.loss_mask.sum() != second.loss_mask.sum() for first, second in steps)


def test_a_dry_run_gives_the_memory_of_each_process(folder: Path, tmp_path: Path) -> None:
    """The first process speaks for both, in warnings too."""
    warm = {"draft_model": tiny_block_head("dspark", str(folder / "target")), "head": {}}
    file = write_settings(folder, tmp_path / "run", optimizer__batch_size=1, eval__num_prompts=0, **warm)
    first, second = run_on_two_processes(file, "--dry-run")
    assert "keeps its own settings in place of the defaults" in first
    assert "keeps its own settings" not in second
    assert re.search(r"memory, .*: \d.\d\d GiB on cpu \(process 0\); \d.\d\d GiB on cpu \(process 1\)\n", first), first
    assert "memory" not in second


def run_on_two_processes(file: Path, *options: str) -> list[str]:
    """What two processes print that are started with the variables that torchrun sets."""
    group = {
        **os.environ, "ACCELERATE_USE_CPU": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
    }  # fmt: skip
    ranks = [
        Popen(
            [*command(file), *options],
            env={**group, "RANK": rank, "LOCAL_RANK": rank},
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [process.communicate(timeout=500)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return outputs


def parameters(out: Path) -> dict[str, torch.Tensor]:
    state = torch.load(out / "checkpoints" / f"step-{STEPS:08d}.pt", weights_only=True)
    return dict(state["parameters"])
