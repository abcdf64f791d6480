"""The matrix of clients: its jobs exist, its checks go on after a failure, its page shows what failed and why."""

import json
import subprocess
import sys
from pathlib import Path

from tests.clients.__main__ import CLIENTS, JOBS, MARK, ClientResult, job_environment, latest, page


def test_every_client_has_a_job_with_checks() -> None:
    assert {path.name for path in JOBS.glob("*_job.*")} == {client.job for client in CLIENTS}
    for client in CLIENTS:
        source = (JOBS / client.job).read_text()
        if not client.is_node:
            compile(source, client.job, "exec")
        assert ("await check(" if client.is_node else "with check(") in source


def test_a_failed_check_does_not_end_a_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys; sys.path.insert(0, {str(JOBS)!r})\nfrom checks import check, require\n"
        "with check('one'):\n    require(False, 'wrong\\nhere')\nwith check('two'):\n    require(True, '')\n"
    )
    command = [sys.executable, str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=job_environment("http://there"))
    found = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines()]
    assert found == [{"feature": "one", "problem": "RuntimeError: wrong"}, {"feature": "two", "problem": ""}]


def test_the_page_has_what_works_and_what_does_not(tmp_path: Path) -> None:
    first, second = CLIENTS[:2]
    found = ClientResult(first, "2026-11-22", "1.0", checks={"a": "", "b": "broken | so"})
    found.save(tmp_path)
    assert latest(first, tmp_path) == found
    *_, row, other = page([found, latest(second, tmp_path)]).splitlines()
    assert row == f"| {first.name}: {first.what} | 1.0 | 2026-11-22 | a | b (broken \\| so) |"
    assert other == f"| {second.name}: {second.what} |  |  |  | not run |"
    assert not found.works
