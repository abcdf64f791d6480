"""llm: models on the command line, with a server of OpenAI's API in its extra models."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from checks import MODEL, PROMPT, URL, WEATHER, check, require, run_command

folder = Path(tempfile.mkdtemp(prefix="eyas-llm-"))
os.environ["LLM_USER_PATH"] = str(folder)
# YAML is a superset of JSON.
chat = {"model_id": "eyas", "model_name": MODEL, "api_base": f"{URL}/v1", "supports_schema": True, "supports_tools": True}
completion = {"model_id": "eyas-completion", "model_name": MODEL, "api_base": f"{URL}/v1", "completion": True}
(folder / "extra-openai-models.yaml").write_text(json.dumps([chat, completion]))


def ask(model: str, *more: str) -> str:
    """Return the answer of a prompt."""
    return run_command(["llm", "-m", model, "--key", "none", *more], folder / "log")


with check("chat, streamed"):
    ask("eyas", "Add two numbers.", "-o", "max_tokens", "16")
with check("chat"):
    ask("eyas", "Add two numbers.", "-o", "max_tokens", "16", "--no-stream", "-s", "Be brief.", "-u")
with check("completions"):
    require(ask("eyas-completion", PROMPT, "-o", "max_tokens", "16").strip(), "no text")
with check("schema"):
    answer = ask("eyas", "Oslo?", "--schema", json.dumps(WEATHER), "-o", "max_tokens", "64", "--no-stream")
    require(json.loads(answer)["city"] in ("Paris", "Oslo"), "no object")
with check("continued conversation"):
    ask("eyas", "Again.", "-c", "-o", "max_tokens", "16")
with check("tools, request accepted"):
    ask("eyas", "Which version?", "-T", "llm_version", "-o", "max_tokens", "16")
