"""`eyas train regenerate`: answers by the target itself, through the engine. Heads trained on them accept more.

Each line of the output has the number of its input, so that a run that was stopped continues where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.api.request import Prompt, SamplingParams
from eyas.config.checks import at_least, require
from eyas.errors import ConfigError, EyasError
from eyas.llm import LLM
from eyas.text.rows import BadRow, read_entries, text_of, token_ids_of
from eyas.train.data import FAILED, SKIPPED, messages_of, prompt_of


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of `eyas train regenerate`.

    Attributes:
        temperatures: entries take them in turn.
        prompt_tokens: of plain text, at `prompts_per_document` places of a document.
        model: who answers, for the record beside the output.
        batch: entries at a time; the output grows by as many lines.
        max_entries: 0 answers all of them.
        chat_template_kwargs: as `LLM.chat` takes them.
    """

    model: str
    max_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompt_tokens: int = 64
    prompts_per_document: int = 1
    batch: int = 64
    seed: int = 0
    max_entries: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, max_tokens=self.max_tokens, prompt_tokens=self.prompt_tokens, batch=self.batch)
        at_least(1, prompts_per_document=self.prompts_per_document)
        at_least(0, max_entries=self.max_entries)
        require(bool(self.temperatures), "temperatures is empty; name at least one")
        at_least(0, temperature=min(self.temperatures))


@dataclass(frozen=True)
class Regenerated:
    """Counts of the input's entries by outcome, earlier runs included."""

    num_entries: int
    num_answered: int
    num_failed: int
    num_skipped: int


def regenerate(
    llm: LLM,
    files: Sequence[Path],
    out: Path,
    settings: RegenerateSettings,
    show: Callable[[int], object] = lambda _: None,
) -> Regenerated:
    """Append an answered entry to `out` for each entry that it lacks; failures are kept with their reason.

    show: called with the number of entries done. Raises ConfigError for input that cannot be read, for an `out` of other
    files or settings, and for a full disk.
    """
    _check_same_run(files, out, settings)
    done = _done(out)
    counts = {"answered": 0, "failed": 0, "skipped": 0}
    for outcome in done.values():
        counts[outcome] += 1
    show(sum(counts.values()))
    for batch in _batches(_entries(llm, _spread(files, settings), settings), done, settings):
        answers = _answer_all(llm, batch, settings)
        try:
            with out.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in answers)
        except OSError as error:
            raise ConfigError(
                f"cannot write {out}: {error}; free space and run the same command again, it continues"
            ) from error
        for line in answers:
            counts[_outcome(line)] += 1
        show(sum(counts.values()))
    return Regenerated(sum(counts.values()), counts["answered"], counts["failed"], counts["skipped"])


def _check_same_run(files: Sequence[Path], out: Path, settings: RegenerateSettings) -> None:
    """Keep what decides the answers beside `out`. Raises ConfigError if `out` was begun with anything else."""
    begun = asdict(settings) | {"temperatures": list(settings.temperatures), "files": _contents(files)}
    begun |= {"batch": None, "max_entries": bool(settings.max_entries)}  # more entries than before may be answered
    record = out.with_suffix(out.suffix + ".settings.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and out.stat().st_size and not record.exists():
            raise ConfigError(f"{out} is there without {record.name}, which says how it was begun; name another output")
        if not record.exists():
            record.write_text(json.dumps(begun, indent=1) + "\n")
            return
        found = json.loads(record.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use {record}: {error}; remove it and {out}, or name another output") from error
    if changed := sorted(key for key, value in begun.items() if found.get(key) != value):
        raise ConfigError(f"{out} was begun with other {', '.join(changed)}; give the same ones, or name another output")


def _contents(files: Sequence[Path]) -> str:
    """Return the digest of what the files hold, in their order; they may be renamed. Raises ConfigError."""
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as content:
                digest.update(file.suffix.encode() + hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    return digest.hexdigest()


def _done(out: Path) -> dict[int, str]:
    """Return the numbers of the entries that `out` holds. A last line that a crash cut off is removed."""
    if not out.exists():
        return {}
    done: dict[int, str] = {}
    end = 0
    with out.open("rb") as lines:
        for raw in lines:
            if raw.endswith(b"\n"):
                end += len(raw)
                try:
                    line = json.loads(raw)
                    done[line["index"]] = _outcome(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{out} holds a line that is no answer: {raw[:80]!r}; name another output") from error
    if end < out.stat().st_size:
        os.truncate(out, end)
    return done


def _outcome(line: Mapping[str, Any]) -> str:
    return "failed" if FAILED in line else "skipped" if SKIPPED in line else "answered"


def _spread(files: Sequence[Path], settings: RegenerateSettings) -> list[Path]:
    """Return the files in a seeded order if not all entries are answered, so that the answered ones are from everywhere."""
    order = list(files)
    if settings.max_entries:
        random.Random(settings.seed).shuffle(order)
    return order


def _entries(llm: LLM, files: Sequence[Path], settings: RegenerateSettings) -> Iterator[dict[str, Any]]:
    """Yield the conversations with their messages, and beginnings of plain text as token ids. An unusable row has its
    reason.

    Raises ConfigError for a file whose rows are all unusable.
    """
    for file in files:
        first, num_good = "", 0
        for number, row in read_entries(file):
            try:
                if isinstance(row, BadRow):
                    raise row
                entries = list(_prompts(llm, row, settings))
                num_good += 1
            except BadRow as error:
                first = first or f"line {number}: {error}"
                entries = [{FAILED: f"{file}, line {number}: {error}"}]
            yield from entries
        if first and not num_good:
            raise ConfigError(f"no row of {file} can be used; {first}")


def _prompts(llm: LLM, row: Mapping[str, Any], settings: RegenerateSettings) -> Iterator[dict[str, Any]]:
    """Yield what a row asks. Raises BadRow."""
    if messages := messages_of(row):
        yield {"messages": messages}
    elif (prompt := prompt_of(row)) is not None:
        yield {"token_ids": list(llm.get_tokenizer().encode(prompt))}
    elif "token_ids" in row:
        yield from _beginnings(token_ids_of(row).tolist(), settings)
    else:
        yield from _beginnings(list(llm.get_tokenizer().encode(text_of(row))), settings)


def _beginnings(ids: list[int], settings: RegenerateSettings) -> Iterator[dict[str, Any]]:
    """Yield prompts at evenly spread places; each begins with the document's first token, which may be a BOS token.

    A document without text has one prompt without tokens.
    """
    span = max(1, len(ids) - settings.prompt_tokens)
    count = min(settings.prompts_per_document, span)
    for place in range(count):
        start = place * span // count
        yield {"token_ids": ids[:1] + ids[start + 1 : start + settings.prompt_tokens]}


def _batches(
    entries: Iterator[dict[str, Any]], done: Mapping[int, str], settings: RegenerateSettings
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield the numbered entries that are not done."""
    batch = []
    for index, entry in enumerate(entries):
        if settings.max_entries and index >= settings.max_entries:
            break
        if index in done:
            continue
        batch.append((index, entry))
        if len(batch) == settings.batch:
            yield batch
            batch = []
    if batch:
        yield batch


def _answer_all(llm: LLM, batch: Sequence[tuple[int, dict[str, Any]]], settings: RegenerateSettings) -> list[dict[str, Any]]:
    """Return the lines of a batch. If it fails as a whole, its halves run apart, so that one bad entry costs a few more
    batches.
    """
    try:
        return _answer(llm, batch, settings)
    except EyasError as error:
        if len(batch) == 1:
            return [{"index": batch[0][0], FAILED: str(error)}]
        middle = len(batch) // 2
        return _answer_all(llm, batch[:middle], settings) + _answer_all(llm, batch[middle:], settings)


def _answer(llm: LLM, batch: Sequence[tuple[int, dict[str, Any]]], settings: RegenerateSettings) -> list[dict[str, Any]]:
    texts = [(index, entry["token_ids"]) for index, entry in batch if entry.get("token_ids")]
    lines: list[dict[str, Any]] = [
        {"index": index, SKIPPED: "no text"} for index, entry in batch if entry.get("token_ids") == []
    ]
    lines += [{"index": index, FAILED: entry[FAILED]} for index, entry in batch if FAILED in entry]
    prompts: list[Prompt] = [{"prompt_token_ids": ids} for _, ids in texts]
    outputs = llm.generate(prompts, [_sampling(settings, index) for index, _ in texts], use_tqdm=False) if texts else []
    for (index, ids), output in zip(texts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        lines.append({"index": index, "token_ids": [*ids, *answer], "num_prompt_tokens": len(ids)})
    chats = [(index, entry["messages"]) for index, entry in batch if "messages" in entry]
    return sorted(lines + _answer_chats(llm, chats, settings), key=lambda line: int(str(line["index"])))


def _answer_chats(
    llm: LLM, chats: Sequence[tuple[int, list[dict[str, Any]]]], settings: RegenerateSettings
) -> list[dict[str, Any]]:
    """Replace each turn of an assistant by an answer to the turns before it, the replaced ones included."""
    grown: dict[int, list[dict[str, Any]]] = {index: [] for index, _ in chats}
    asked = {index: [message for message in messages if message["role"] != "assistant"] for index, messages in chats}
    while open_chats := [index for index, own in asked.items() if any(message["role"] == "user" for message in own)]:
        for index in open_chats:
            while asked[index]:
                grown[index].append(asked[index].pop(0))
                if grown[index][-1]["role"] == "user":
                    break
        histories, sampling = [grown[index] for index in open_chats], [_sampling(settings, index) for index in open_chats]
        answers = llm.chat(histories, sampling, use_tqdm=False, chat_template_kwargs=settings.chat_template_kwargs)
        for index, output in zip(open_chats, answers, strict=True):
            grown[index].append({"role": "assistant", "content": output.outputs[0].text})
    return [
        {"index": index, "messages": own}
        if any(message["role"] == "assistant" for message in own)
        else {"index": index, SKIPPED: "no turn of a user"}
        for index, own in grown.items()
    ]


def _sampling(settings: RegenerateSettings, index: int) -> SamplingParams:
    temperature = settings.temperatures[index % len(settings.temperatures)]
    return SamplingParams(settings.max_tokens, temperature, seed=settings.seed * 1_000_003 + index)
