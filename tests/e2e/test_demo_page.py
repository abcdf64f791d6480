"""The button of `eyas serve --demo` in Chromium: a real drafter dies during a stream, and another one takes its place."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.services.local.cluster import free_port
from tests.e2e.test_demo import LIGHT
from tests.e2e.test_serve import ENVIRONMENT, READY
from tests.support.services.browser import browser_page
from tests.support.services.forks import Popen

SETTINGS = (
    "verifier.draft_client.draft_timeout_s=0.2",
    "verifier.engine.draft_budget=fixed",
    "verifier.validate_head=never",
)
LOADS = 250.0  # seconds in which a new drafter loads on a busy machine


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc")
def test_a_stream_survives_the_death_of_its_drafter(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port()
    options = ("--port", str(port), "--grpc-port", str(free_port()), *LIGHT)
    options += tuple(word for setting in SETTINGS for word in ("--set", setting))
    command = [sys.executable, "-m", "eyas.cli", "serve", "--demo", *options]
    with browser_page(tmp_path_factory.mktemp("page")) as page:
        process = Popen(command, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            output = ""
            while "Serving demo at" not in output:
                output += process.stdout.readline()
                assert process.poll() is None
            assert len(READY.findall(output)) == 3
            page.open(f"http://127.0.0.1:{port}/")
            page.until("document.querySelector('#model').value === 'demo'")
            page.run("document.querySelector('#seed').value = '7'; document.querySelector('#kill').click()")
            page.until("!!document.querySelector('.mark.killed')")
            assert "was killed with SIGKILL" in page.text("#death")
            page.until("!!document.querySelector('#death.back')", LOADS)
            page.until("document.querySelector('#status').textContent.startsWith('Done')", LOADS)
            assert page.text("#same") == "✓ identical"
            assert "drafts again after" in page.text("#death")
            assert page.problems == []
            while "was killed from the playground" not in output:
                output += process.stdout.readline()
            page.until("!document.querySelector('#kill').disabled")
            page.run("document.querySelector('#max_tokens').value = 64; document.querySelector('#form').requestSubmit()")
            page.until("document.querySelector('#status').textContent.startsWith('Done: 64 tokens')")
            assert page.run("document.querySelectorAll('#output .token.d1').length") > 0, "the new one drafts"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=100)
