"""lm-eval over HTTP: a task of log-likelihoods through /v1/completions, and one of generation through chats."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, TOKENIZER, URL, check, require, run_command

folder = Path(tempfile.mkdtemp(prefix="eyas-lm-eval-"))
rows = [{"question": f"def f{i}(x):\n    return", "choices": [" x", " self", " None"], "answer": i % 3} for i in range(6)]
data = folder / "rows.jsonl"
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
(folder / "choice.yaml").write_text(
    f"task: eyas_choice\n{source}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
    "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
)
(folder / "write.yaml").write_text(
    f"task: eyas_write\n{source}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
    "doc_to_target: '{{choices[answer]}}'\ngeneration_kwargs:\n  until: ['\\n']\n  max_gen_toks: 8\n"
    "metric_list:\n  - metric: exact_match\n"
)


def evaluate(kind: str, path: str, task: str, *more: str) -> None:
    """Run one task."""
    shared = f"base_url={URL}{path},model={MODEL},num_concurrent=2,max_retries=1,tokenizer={TOKENIZER}"
    out = folder / f"{kind}-{task}"
    command = ["lm_eval", "--model", kind, "--model_args", shared, "--tasks", task, "--include_path", str(folder)]
    run_command([*command, "--output_path", str(out), *more], folder / f"{kind}.log")
    results = json.loads(next(out.rglob("results*.json")).read_text())["results"][task]
    require(any(isinstance(value, float) for value in results.values()), f"no score: {results}")


with check("local-completions, log-likelihoods"):
    evaluate("local-completions", "/v1/completions", "eyas_choice", "--batch_size", "4")
with check("local-completions, generation"):
    evaluate("local-completions", "/v1/completions", "eyas_write")
with check("local-chat-completions, generation"):
    evaluate("local-chat-completions", "/v1/chat/completions", "eyas_write", "--apply_chat_template")
