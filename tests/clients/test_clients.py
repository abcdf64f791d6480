"""The matrix of clients: its jobs exist, its checks go on after a failure, its page shows what failed and why."""

import json
import subprocess
import sys
from pathlib import Path

from tests.clients.__main__ import CLIENTS, JOBS, MARK, job_environment


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
