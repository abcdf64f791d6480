"""aiperf: a benchmark with synthetic prompts of completions and of chats, streamed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, TOKENIZER, URL, check, require, run_command

folder = Path(tempfile.mkdtemp(prefix="eyas-aiperf-"))
NUM_REQUESTS = 10


def profile(kind: str) -> None:
    """Run NUM_REQUESTS requests. All must succeed."""
    out = folder / kind
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming"]
    command += ["--tokenizer", TOKENIZER, "--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--random-seed", "1"]
    command += ["--synthetic-input-tokens-mean", "48", "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", "16", "--output-tokens-stddev", "0", "--artifact-dir", str(out), "--ui", "none"]
    run_command(command, folder / f"{kind}.log", offline=False)
    result = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    count = result["request_count"]["avg"]
    failed = (result.get("error_request_count") or {}).get("avg", 0)
    require(count == NUM_REQUESTS and not failed, f"{count} requests succeeded, {failed} failed")


for kind in ("completions", "chat"):
    with check(f"{kind}, streamed, {NUM_REQUESTS} requests"):
        profile(kind)
