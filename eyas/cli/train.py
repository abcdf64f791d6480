"""`eyas train`: prepare data, train a draft head, evaluate and export it. Torch is imported when a command starts."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.options import Quantization
from eyas.config.checks import at_least, require
from eyas.config.loader import load
from eyas.drafters.lookup.datastore import corpus_files
from eyas.errors import ConfigError
from eyas.progress import Show, progress
from eyas.train.config import SERVED_BY, EvalConfig, TrainConfig

if TYPE_CHECKING:
    from eyas.train.data import Prepared
    from eyas.train.trainer import Trainer

train = typer.Typer(add_completion=False, no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Folder or hub id of the target.")]
Out = Annotated[Path, typer.Option(help="Folder or file that is written.")]
Files = Annotated[
    list[Path],
    typer.Argument(help="JSON with messages, conversations, prompt and completion, text or token_ids; plain text; folders."),
]
Exclude = Annotated[Path | None, typer.Option(help="JSON list of names or ends of paths to leave out.")]
TemplateKwargs = Annotated[
    str, typer.Option("--chat-template-kwargs", help='Variables of the chat template, such as {"enable_thinking": false}.')
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings, such as model, method and data.path; see docs/training.md."),
]
Assignments = Annotated[
    list[str], typer.Option("--set", help="key=value, such as optimizer.max_steps=500; may be repeated.")
]
Threads = Annotated[int, typer.Option(help="CPU threads of torch; 0 takes what `LLM` takes.")]

# Seconds that the target decodes in the evaluation of a dry run, which shows what a whole one takes.
DRY_EVALUATION_S = 10.0
# A dry run measures whole steps if they take less.
DRY_STEP_S = 20.0
# Sizes of a draft vocabulary whose coverage `prepare` prints.
USUAL_DRAFT_VOCABULARIES = (8000, 16000, 32000)


@train.callback()
def _train() -> None:
    """Train draft heads for a target: prepare, regenerate, features, run, eval, export."""


@train.command()
def prepare(
    files: Files,
    model: Model,
    out: Out,
    heldout: Annotated[float, typer.Option(help="Share of documents that is kept out of training.")] = 0.02,
    max_length: Annotated[int, typer.Option(help="Tokens of a part; longer documents are cut.")] = 2048,
    min_loss_tokens: Annotated[int, typer.Option(help="Documents with fewer supervised tokens are left out.")] = 2,
    exclude: Exclude = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    draft_vocab_size: Annotated[int, typer.Option(help="Print the coverage of this size; 0 takes usual sizes.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn: an equal one gives equal data.")] = 0,
) -> None:
    """Make token ids and loss masks of text or conversations; count tokens; hold documents out."""
    at_least(0, draft_vocab_size=draft_vocab_size)
    variables = _template_kwargs(chat_template_kwargs)
    with progress() as shown:
        shown.show("importing torch")
        from eyas.train.data import FOLDER_SUFFIXES
        from eyas.train.data import prepare as run

        found = corpus_files(files, exclude, FOLDER_SUFFIXES)
        info = run(
            model, found, out, heldout, max_length, min_loss_tokens, seed, variables,
            lambda rows: shown.show(f"{rows} rows read"),
        )  # fmt: skip
    print(
        f"{out}: {info.num_documents} documents, {info.num_heldout} held out; {info.num_tokens} tokens, "
        f"{info.num_supervised} supervised; {info.num_skipped} documents left out"
    )
    if info.rejected:
        reasons = ", ".join(f"{count} {reason}" for reason, count in info.rejected.items())
        print(f"{sum(info.rejected.values())} rows cannot be used and are left out: {reasons}")
    if info.num_separate:
        print(
            f"{info.num_separate} turns are documents of their own: the chat template shows them differently in longer chats"
        )
    if info.num_refused:
        print(f"{info.num_refused} turns of the assistant are not supervised: the rendered chats do not hold them")
    _print_coverage(out, info, draft_vocab_size)
    if info.mask_token_id >= 0:
        print(f"token {info.mask_token_id} never occurs: one-pass heads take it as their mask token")
    settings = {"model": model, "data.path": str(out), "out": "runs/head"}
    print("train a head of it: eyas train run", *(f"--set {key}={shlex.quote(value)}" for key, value in settings.items()))


def _print_coverage(folder: Path, info: Prepared, draft_vocab_size: int) -> None:
    """Print the share of the supervised text that the draft vocabularies hold."""
    from eyas.train.draft_vocabulary import covering_size, draft_vocabulary, token_frequencies, vocabulary_coverage

    usual = [size for size in USUAL_DRAFT_VOCABULARIES if size < info.vocab_size]
    chosen = covering_size(token_frequencies(folder))
    for size in [draft_vocab_size] if draft_vocab_size else sorted({*usual, *([chosen] if chosen else [])}):
        require(
            size <= info.vocab_size,
            f"{folder} is prepared, but --draft-vocab-size is {size}, and {info.model} has {info.vocab_size} tokens",
        )
        covered = vocabulary_coverage(folder, draft_vocabulary(folder, size, info.vocab_size))
        default = ", the default" if size == chosen else ""
        print(f"a draft vocabulary of {size} tokens holds {covered:.2%} of the supervised tokens{default}")


def _template_kwargs(text: str) -> dict[str, Any]:
    """Return the variables of the chat template, from JSON. Raises ConfigError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    require(
        isinstance(found, dict),
        f"--chat-template-kwargs is {text!r}; it must be a JSON object such as '{{\"enable_thinking\": false}}'",
    )
    return dict(found)


@train.command()
def regenerate(
    files: Files,
    model: Model,
    out: Out,
    temperature: Annotated[list[float], typer.Option(help="Entries take them in turn; may be repeated.")] = [0.0, 1.0],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of plain text that are continued.")] = 64,
    prompts_per_document: Annotated[int, typer.Option(help="Places of a plain text that are continued.")] = 1,
    batch: Annotated[int, typer.Option(help="Answers at a time.")] = 64,
    draft_model: Annotated[str, typer.Option(help="Draft model that makes it faster, if there is one already.")] = "",
    method: Annotated[str, typer.Option(help="Drafting method of the draft model; by default what it is for.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    exclude: Exclude = None,
    max_entries: Annotated[int, typer.Option(help="Entries to answer, spread over the input; 0 answers all.")] = 0,
    chat_template_kwargs: TemplateKwargs = "{}",
    seed: Annotated[int, typer.Option(help="Seed of what is drawn: an equal one gives equal data.")] = 0,
    quantization: Quantization = "",
    threads: Threads = 0,
) -> None:
    """Let the target answer; the same command continues a run that was stopped."""
    variables = _template_kwargs(chat_template_kwargs)
    with progress() as shown:
        shown.show("importing torch")
        from eyas.llm import LLM
        from eyas.train.data import FOLDER_SUFFIXES
        from eyas.train.regenerate import RegenerateSettings
        from eyas.train.regenerate import regenerate as run

    settings = RegenerateSettings(
        model, max_tokens, tuple(temperature), prompt_tokens, prompts_per_document, batch, seed, max_entries,
        variables,
    )  # fmt: skip
    found = corpus_files(files, exclude, FOLDER_SUFFIXES)
    llm = LLM(
        model, draft_model or None, method or None, dtype, device, threads=threads, max_num_seqs=batch,
        quantization=quantization,
    )  # fmt: skip
    with llm, progress() as shown:
        done = run(llm, found, out, settings, lambda count: shown.show("entries", count, max_entries))
    print(
        f"{out}: {done.num_entries} entries: {done.num_answered} answered, {done.num_failed} failed, "
        f"{done.num_skipped} without a question"
    )


@train.command()
def features(out: Out, config: ConfigFile = None, assignments: Assignments = []) -> None:  # noqa: B006
    """Store the target's states of all windows of a run, for `data.features`. Prints the disk that they take first."""
    settings = load(TrainConfig, config, assignments)
    with progress() as shown:
        shown.show("importing torch")
        from eyas.train.features import features_bytes, load_target_weights, store_features
        from eyas.train.methods import build_online_target, build_trainee
        from eyas.train.windows import Windows

        shown.show(f"reading embedding and output layer of {settings.model}")
        target = load_target_weights(settings.model)
        windows = Windows(Path(settings.data.path), settings.data.max_length)
        layers = build_trainee(settings, target, windows).aux_hidden_state_layers
        needed = features_bytes(windows, len(layers), target.hidden)
        shown.print(f"{len(windows)} windows of {windows.max_length} tokens take {needed / 2**30:.2f} GiB")
        shown.show(f"loading {settings.model}")
        source = build_online_target(replace(settings, shard_target=False), layers)
        store_features(source, windows, layers, target.hidden, out, lambda shards: shown.track(shards, "storing shards"))


@train.command()
def run(
    config: ConfigFile = None,
    assignments: Assignments = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write an untrained head, and estimate the run.")] = False,
) -> None:
    """Train a head. The same command continues a run that was stopped. Under torchrun all processes train one head."""
    settings = load(TrainConfig, config, assignments)
    with progress(os.environ.get("RANK", "0") == "0") as shown:
        shown.show("importing torch")
        from eyas.train.methods import build_trainer

        trainer = build_trainer(settings, shown.show)
        estimate = _estimate(trainer, shown.show) if dry_run else ""
    _print_draft_vocabulary(trainer)
    _print_shard(trainer)
    if dry_run:
        if trainer.accelerator.is_main_process:
            print(estimate)
        return
    trainer.run()
    conclude(trainer)


def _print_draft_vocabulary(trainer: Trainer) -> None:
    """Print the share of the training text that a head with a reduced vocabulary can draft."""
    from eyas.train.draft_vocabulary import vocabulary_coverage

    draft_ids = getattr(getattr(trainer.trainee, "head", None), "draft_ids", None)
    if trainer.accelerator.is_main_process and draft_ids is not None and len(draft_ids) < trainer.windows.info.vocab_size:
        covered = vocabulary_coverage(Path(trainer.config.data.path), draft_ids.cpu())
        print(f"the draft vocabulary of {len(draft_ids)} tokens holds {covered:.2%} of the supervised training tokens")


def _print_shard(trainer: Trainer) -> None:
    """Print the share of the target that this process holds, if it holds a part."""
    accelerator = trainer.accelerator
    if (num_bytes := getattr(trainer.source, "bytes_read", None)) is not None:
        print(f"process {accelerator.process_index} of {accelerator.num_processes} has read {num_bytes} bytes of the target")


def conclude(trainer: Trainer) -> None:
    """Write card, plot and a line about the run."""
    from eyas.train.export import plot, write_card

    trainer.accelerator.end_training()
    if not trainer.accelerator.is_main_process:
        return
    num_parameters = sum(parameter.numel() for parameter in trainer.trained.values())
    card = write_card(trainer.config, trainer.windows.info, trainer.progress, num_parameters)
    best, c = trainer.progress, trainer.config
    print(
        f"{card.parent}: step {best.best_step}, tau {best.best_tau:.2f}"
        if best.best_step
        else f"{card.parent} is the last head, untested, for no evaluation has run; "
        f"`eyas train eval {card.parent} --model {c.model} --data {c.data.path}` measures it"
    )
    try:
        print(f"drawn as {plot(Path(trainer.config.out))}")
    except ConfigError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(f"serve it: {shlex.join(['eyas', 'serve', c.model, '--draft-model', str(card.parent)])}")


def _estimate(trainer: Trainer, show: Show) -> str:
    """Estimate time, memory and disk of a run, from few steps and an evaluation; the untrained head is in `dry-run`.

    On the disk are that head, `last`, `best` and one that is being written.
    """
    from accelerate.utils import gather_object

    from eyas.train.trainer import KEPT_CHECKPOINTS

    out, accelerator = Path(trainer.config.out), trainer.accelerator
    if accelerator.is_main_process:
        trainer.write_head("dry-run")
    accelerator.wait_for_everyone()
    seconds, share = _time_step(trainer, show)
    evaluation = "none"
    if trainer.evaluator is not None and accelerator.is_main_process:
        began = time.monotonic()
        trainer.evaluator.measure(out / "dry-run", show, DRY_EVALUATION_S)
        evaluation = f"about {(time.monotonic() - began) / trainer.evaluator.written_share:.1f} s for the first"
    trained = list(trainer.trained.values())
    count = sum(parameter.numel() for parameter in trained)
    checkpoints = (KEPT_CHECKPOINTS + 1) * 12 * count  # an older one stays until the new one is whole
    head = sum(file.stat().st_size for file in (out / "dry-run").iterdir())
    own = ", ".join(f"{size / 2**30:.2f} GiB on {place}" for place, size in peak_memory().items())
    memory = gather_object([f"{own} (process {accelerator.process_index})" if accelerator.num_processes > 1 else own])
    steps = trainer.config.optimizer.max_steps
    part = "" if share == 1 else f", with {share:.0%} of the windows of a step"
    return (
        f"{out / 'dry-run'}: an untrained head of {count / 1e6:.2f} M trained parameters\n"
        f"time: {seconds:.2f} s a step, {seconds * steps / 3600:.2f} h for {steps} steps, without evaluations\n"
        f"evaluation: {evaluation}\n"
        f"memory, evaluation included{part}: {'; '.join(memory)}\n"
        f"disk: {4 * head / 2**20:.2f} MiB of heads, {checkpoints / 2**20:.2f} MiB of checkpoints, at most"
    )


def _time_step(trainer: Trainer, show: Show) -> tuple[float, float]:
    """Return the seconds of a step, and how much of a step was measured: one window if all would take too long."""
    from accelerate.utils import gather_object

    c = trainer.config.optimizer
    num_windows = c.batch_size * c.gradient_accumulation_steps
    show("a step of one window, to warm up")
    trainer.step(1)
    show("a step of one window")
    seconds = max(gather_object([_seconds(partial(trainer.step, 1))])) * num_windows
    if num_windows == 1 or seconds > DRY_STEP_S:
        return seconds, 1 / num_windows
    show("a whole step")
    return _seconds(trainer.step), 1.0


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has held: of the host, and of each GPU that it has used."""
    import resource

    import torch

    gpus = {f"cuda:{number}": torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())}
    used = {name: peak for name, peak in gpus.items() if peak}
    return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024} | used


@train.command(name="eval")
def evaluate(
    head: Annotated[Path, typer.Argument(help="Folder of the head.")],
    model: Model,
    data: Annotated[Path, typer.Option(help="Prepared data, whose held-out documents are the prompts.")],
    method: Annotated[str, typer.Option(help="What was trained; by default the method that the head is for.")] = "",
    temperature: Annotated[list[float], typer.Option(help="Temperature, 0 for greedy; may be repeated.")] = [0.0, 1.0],  # noqa: B006
    num_prompts: Annotated[int, typer.Option(min=1, help="How many prompts to decode.")] = EvalConfig.num_prompts,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = EvalConfig.max_tokens,
    num_draft_tokens: Annotated[int, typer.Option(help="Most nodes of a tree, the root included.")] = 24,
    num_steps: Annotated[int, typer.Option(help="Levels of a tree; 0 takes all depths of a block head, else 5.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Threads = 0,
) -> None:
    """Measure a head by draft trees of the serving engine on held-out prompts."""
    config = EvalConfig(
        num_prompts=num_prompts, max_tokens=max_tokens, temperatures=tuple(temperature),
        num_draft_tokens=num_draft_tokens, num_steps=num_steps,
    )  # fmt: skip
    with progress() as shown:
        shown.show("importing torch")
        from eyas.drafters.draft_head import DraftHead
        from eyas.train.evaluate import Evaluator, heldout_prompts

        served = DraftHead(str(head), SERVED_BY.get(method, method)).method
        prompts = heldout_prompts(data, config)
        found = Evaluator(model, served, prompts, config, device, threads=threads).measure(head, shown.show)
    for temperature_, tau in found.tau.items():
        depths = " ".join(f"{share:.2f}" for share in found.acceptance_by_depth[temperature_])
        print(f"temperature {temperature_:g}: tau {tau:.3f}, accepted to each depth: {depths}")


@train.command()
def export(
    head: Annotated[str, typer.Argument(help="Folder of a head of Eyas.")],
    model: Model,
    out: Out,
    to: Annotated[
        str, typer.Option("--to", help="vllm or sglang, which then load it; eyas, safeailab, specforge or speculators.")
    ] = "eyas",
) -> None:
    """Write a head in the layout of another engine or project."""
    from eyas.train.export import export_head

    export_head(head, model, out, to)
    print(f"written to {out}")
