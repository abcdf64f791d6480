"""`make gpu`: everything that a first GPU has to show, in one run of at most 25 minutes, as one dated report.

Beside the report it writes cost tables, one JSON file for each target and head, that emulation and planning read.
A stage that fails is reported with its error, and the others still run; in a new process with a report of its own, if this
one has lost the device. Each stage ends with its share of the minutes; what earlier ones leave is for those that follow.
Cases without time are reported as not run.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import torch
import typer

from benchmarks.gpu import drafts, end_to_end, kernels, prefill, steps
from benchmarks.gpu.measuring import Limit, OutOfTime, Part, Scale, full_scale, measure_rates
from eyas.bench.report import Report, Table
from eyas.device.host import num_cores
from eyas.progress import Progress, progress

PROGRAM = "python -m benchmarks.gpu"
RESULTS = Path("benchmarks/results")
# Minutes of each stage, of 24. One more is for what surrounds them: rates of the device, and the report.
SHARES = {"tests": 5.0, "kernels": 2.0, "prefill": 2.0, "steps": 5.0, "drafts": 4.0, "end-to-end": 6.0}
STAGES = tuple(SHARES)
RESERVE = 1 / 25
# Processes that share the tests, which compile most of the time; and plugins of pytest that they need.
TEST_PROCESSES, PLUGINS = 14, ("xdist.plugin", "pytest_timeout")
# Seconds before the end of their time at which tests are interrupted, so that they say what they have found.
GRACE_S = 15.0


@dataclass(frozen=True)
class Settings:
    """Choices of the user. minutes: of the whole run."""

    stages: tuple[str, ...]
    minutes: float
    scale: Scale


app = typer.Typer(add_completion=False)


@app.command()
def main(
    stage: Annotated[list[str], typer.Option(help=f"Only these of {', '.join(STAGES)}; may be repeated.")] = list(STAGES),  # noqa: B006
    minutes: Annotated[float, typer.Option(help="The whole run ends then.")] = 25.0,
    out: Annotated[Path, typer.Option(help="Folder of the report and the cost tables.")] = RESULTS,
) -> None:
    """Test, then measure kernels, prefill, verify steps, draft rounds and the widened demo on this machine's GPU."""
    unknown = [name for name in stage if name not in STAGES]
    if unknown:
        raise typer.BadParameter(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        print("error: no CUDA device here; `make gpu` measures a GPU, see `nvidia-smi`", file=sys.stderr)
        raise typer.Exit(1)
    faulthandler.enable()
    run(torch.device("cuda"), Settings(tuple(stage), minutes, full_scale(minutes)), out)


def run(device: torch.device, settings: Settings, out: Path, now: Callable[[], float] = time.monotonic) -> Path:
    """Run the stages, write the report also if a stage fails or Ctrl-C ends the run, and return the path of its page.

    now: a clock of seconds. If the device hangs so that no stage can be ended, the report is written and the process ends.
    If a stage has left the device unusable, another process takes the place of this one for the stages behind it.
    """
    started = now()
    limits = {name: Limit(started + 60 * end, now) for name, end in stage_ends(settings).items()}
    parts: dict[str, Part] = {}
    watchdog = threading.Timer(60 * settings.minutes, give_up, (device, settings, parts, out))
    watchdog.daemon = True
    watchdog.start()
    is_lost = False
    try:
        with progress() as shown:
            for name, work in _stages(device, settings, shown).items():
                shown.show(name, at_once=True)
                part = parts[name] = Part(limits[name])
                run_stage(work, part)
                # a crash of the driver would take with it what no file holds yet
                print(f"{name}: {_outcome(part)}", *(table.markdown() for table in part.tables), sep="\n\n", flush=True)
                if is_lost := bool(part.error) and cannot_use(device):
                    break
    finally:
        watchdog.cancel()
        page = _publish(device, settings, parts, out)
    if is_lost and (left := [name for name in STAGES if name in settings.stages and name not in parts]):
        go_on(left, settings.minutes - (now() - started) / 60, out)
    return page


def cannot_use(device: torch.device) -> bool:
    """Return whether this process has lost the device: after an access to memory that is not there, every call fails."""
    try:
        torch.zeros(1, device=device).tolist()
    except RuntimeError:
        return True
    return False


def go_on(stages: Sequence[str], minutes: float, out: Path) -> None:
    """Replace this process by one for these stages, with its own report."""
    print(f"the device is lost; another process runs {', '.join(stages)}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", *(f"--stage={name}" for name in stages)]
    os.execv(sys.executable, [*command, f"--minutes={minutes:.2f}", f"--out={out}"])


def stage_ends(settings: Settings) -> dict[str, float]:
    """Minutes after the start at which each stage ends at the latest, by its share; the last one before the reserve."""
    whole = sum(SHARES[name] for name in settings.stages)
    ends, before = dict[str, float](), 0.0
    for name in STAGES:
        if name in settings.stages:
            before += SHARES[name]
            ends[name] = settings.minutes * (1 - RESERVE) * before / whole
    return ends


def give_up(device: torch.device, settings: Settings, parts: Mapping[str, Part], out: Path) -> None:
    """Write the report from another thread, and end the process: its main thread waits for a device that hangs."""
    for part in parts.values():
        if part.waiting and not part.error:
            part.error = "the device hangs"
    print(f"error: the device hangs; report: {_publish(device, settings, parts, out)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _stages(device: torch.device, settings: Settings, progress: Progress) -> Mapping[str, Callable[[Part], None]]:
    scale = settings.scale
    rates = measure_rates(device, scale)
    works: dict[str, Callable[[Part], None]] = {
        "tests": run_tests,
        "kernels": lambda part: kernels.measure(device, scale, rates, part),
        "prefill": lambda part: prefill.measure(device, scale, rates, part),
        "steps": lambda part: steps.measure(device, scale, rates, part),
        "drafts": lambda part: drafts.measure(device, scale, rates, part),
        "end-to-end": lambda part: end_to_end.measure(device, scale, progress, part),
    }
    return {name: work for name, work in works.items() if name in settings.stages}


def run_stage(work: Callable[[Part], None], part: Part) -> None:
    """Run a stage, and keep in `part` what fails."""
    part.waiting = ["all"]  # until the stage names its cases
    try:
        with part.limit.enforced():
            work(part)
        part.waiting = []
    except OutOfTime:
        part.error = "out of time"
    except Exception as error:  # a GPU that has never run Eyas may refuse anything; the other stages are worth having
        traceback.print_exc()
        part.error = f"{type(error).__name__}: {error}"


def run_tests(part: Part) -> None:
    """tests/gpu in processes of their own, and the last lines."""
    if importlib.util.find_spec("pytest") is None:
        part.error = "pytest is not installed"
        return
    plugins = [name for name in PLUGINS if importlib.util.find_spec(name.partition(".")[0])]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", *(f"-p{name}" for name in plugins)]
    command += [f"-n{min(TEST_PROCESSES, num_cores())}"] if PLUGINS[0] in plugins else []
    # what else is installed may warn when it is imported, and no test may fail for that
    command += ["-Wdefault", "--disable-warnings", "--durations=10"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    code, output = run_within([*command, "tests/gpu"], part.limit, GRACE_S, environment)
    lines = output.strip().splitlines()
    failed = tuple((line,) for line in lines if line.startswith(("FAILED", "ERROR")))
    outcome = (lines[-1] if lines else "no output",)
    part.tables, part.results = [Table("tests/gpu", ("outcome",), (*failed, outcome))], {"output": lines[-400:]}
    if code is None:
        raise OutOfTime
    part.error = f"tests/gpu exited with {code}" if code else ""


def run_within(
    command: Sequence[str], limit: Limit, grace_s: float = 0.0, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Return the exit code of a command and what it printed; None if it had to be ended, with all processes that it started.

    grace_s: how long before the end it is interrupted, as by Ctrl-C.
    """
    with TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.0, limit.left - grace_s))
            if code is None and grace_s:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, limit.left))
        except OutOfTime:
            pass
        finally:
            if code is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def _outcome(part: Part) -> str:
    return part.error or ("interrupted" if part.waiting else "done")


def _publish(device: torch.device, settings: Settings, parts: Mapping[str, Part], out: Path) -> Path:
    """Write report, cost tables and picture."""
    stages = [(name, _outcome(part)) for name, part in parts.items()]
    stages += [(name, "not reached") for name in settings.stages if name not in parts]
    tables = [Table("Stages", ("stage", "outcome"), tuple(stages))]
    left = tuple(
        (name, case, f"not run: {part.error or 'interrupted'}") for name, part in parts.items() for case in part.waiting
    )
    tables += [Table("Cases that did not run", ("stage", "case", "why"), left)] if left else []
    tables += [table for part in parts.values() for table in part.tables]
    results = {name: part.results for name, part in parts.items()}
    facts = {"stages": settings.stages, "minutes": settings.minutes, "repeats": settings.scale.repeats}
    page = Report.here("gpu", PROGRAM, str(device), facts, results, tables).publish(out)
    for costs in (costs for part in parts.values() for costs in part.costs):
        file = page.with_name(f"{page.stem}-{costs.model.partition(',')[0]}.costs.json")
        costs.write(file)
        print(f"cost table: {file}")
    measured = parts["steps"].results if "steps" in parts else None
    if measured and steps.draw_roofline(measured, page.with_suffix(".png")):
        print(f"drawn as {page.with_suffix('.png')}")
    elif measured:
        print("no picture: it needs matplotlib")
    return page


if __name__ == "__main__":
    app()
