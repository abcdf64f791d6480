"""Reports hold what was measured, with hardware, versions and settings."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from eyas.api.request import GenerationStats
from eyas.bench.report import Machine, Report, Spread, Table
from eyas.bench.results import Agreement, Run, SpeedComparison, StageTimes


@dataclass(frozen=True)
class Settings:
    folder: Path
    sizes: tuple[int, ...]


def make_report(gpu: str = "") -> Report:
    return Report(
        name="toy",
        command="eyas bench toy",
        machine=Machine("a processor", 2, gpu, "Linux"),
        versions={"python": "3.11", "torch": "2.13"},
        commit="f00d",
        settings=Settings(Path("somewhere"), (1, 8)),
        results={"speed": Spread.of([3.0, 1.0, 1234.56789])},
        tables=[Table("Speed", ("batch", "tokens/s"), (("1", "10"), ("8", "70")), "More is better.")],
        day=date(2025, 3, 1),
    )


def test_a_second_report_of_the_day_keeps_the_first(tmp_path: Path) -> None:
    pages = [make_report(gpu="NVIDIA H200").write(tmp_path / "new") for _ in range(3)]
    stem = "2025-03-01-toy-nvidia-h200"
    assert [page.stem for page in pages] == [stem, f"{stem}-2", f"{stem}-3"]
    assert all(page.with_suffix(".json").is_file() for page in pages)


def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_report().publish(file / "folder")
    assert make_report().markdown() in capsys.readouterr().out


def run(seconds: float, *outputs: tuple[int, ...]) -> Run:
    return Run(
        seconds, outputs, GenerationStats(num_verify_steps=2, num_emitted=5, offered_by_depth=[2], accepted_by_depth=[1])
    )


def test_a_comparison_takes_ratios_batch_by_batch() -> None:
    runs = {"plain": [run(4.0, (1, 2)), run(2.0, (3, 4))], "speculative": [run(1.0, (1, 2)), run(1.0, (3, 4))]}
    times = StageTimes(1, 1, Spread.of([1.0]), {"forward": 1.0}, 0.0)
    found = SpeedComparison.of(0.0, 1, runs, {"plain": times})
    assert found.ratios["speculative / plain"].values == (4.0, 2.0)
    assert found.tokens_per_second["plain"].values == (0.5, 1.0)
    assert (found.tau, found.acceptance_by_depth) == (2.5, (0.5,))
    assert set(found.identical) == {"speculative / plain"}


def test_agreement_finds_the_first_difference() -> None:
    left, right = run(1.0, (1, 2, 3), (4, 5), (6,)), run(1.0, (1, 2, 9), (4, 5), (6, 7))
    found = Agreement.between([left], [right])
    assert found == Agreement(1, 3, 1)
    assert str(found) == "1 of 3, else from token 1"
    assert str(Agreement.between([left], [left])) == "3 of 3"
