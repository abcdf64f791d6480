"""guidellm: a benchmark with synthetic prompts of completions and of chats."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, TOKENIZER, URL, check, require, run_command

folder = Path(tempfile.mkdtemp(prefix="eyas-guidellm-"))
NUM_REQUESTS = 20


def benchmark(kind: str) -> None:
    """Run NUM_REQUESTS requests. All must succeed."""
    out = folder / f"{kind}.json"
    command = ["guidellm", "benchmark", "run", "--target", URL, "--model", MODEL, "--processor", TOKENIZER]
    command += ["--profile", "concurrent", "--rate", "2", "--max-requests", str(NUM_REQUESTS), "--random-seed", "1"]
    command += ["--data", "prompt_tokens=48,output_tokens=16", "--request-type", kind, "--output-path", str(out)]
    run_command([*command, "--disable-console-interactive"], folder / f"{kind}.log")
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    failed = [request.get("info", {}).get("error") or request for request in requests["errored"]]
    require(not failed, f"{len(failed)} of {NUM_REQUESTS} requests failed: {str(failed[:1])[:200]}")
    require(len(requests["successful"]) == NUM_REQUESTS, f"only {len(requests['successful'])} requests succeeded")


with check(f"text completions, {NUM_REQUESTS} requests"):
    benchmark("text_completions")
with check(f"chat completions, {NUM_REQUESTS} requests"):
    benchmark("chat_completions")
