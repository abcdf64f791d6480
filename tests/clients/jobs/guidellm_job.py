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
    out = folder / f"{kind.rpartition('/')[2]}.json"
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={kind}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--seed", "kind=static,value=1"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16", "--output", f"kind=json,path={out}"]
    run_command([*command, "--disable-console-interactive"], out.with_suffix(".log"))
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    failed = [request.get("info", {}).get("error") or request for request in requests["errored"]]
    require(not failed, f"{len(failed)} of {NUM_REQUESTS} requests failed: {str(failed[:1])[:200]}")
    require(len(requests["successful"]) == NUM_REQUESTS, f"only {len(requests['successful'])} requests succeeded")


for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
    with check(f"{path}, {NUM_REQUESTS} requests"):
        benchmark(path)
