"""Compares Eyas with OpenVINO GenAI, llama.cpp and transformers on one processor: `python -m benchmarks.peers`.

All decode the same prompts with Gemma 3 270M, read as a GGUF file, and take turns in each case. The others have an
environment of their own. What is done is kept in the folder of the run, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Annotated, Any, Literal

import typer

from benchmarks.peers import worker
from benchmarks.scripts.gemma import fetch
from benchmarks.scripts.split_work import cpu_seconds
from eyas.bench.report import Report, Spread, Table, number
from eyas.config.gguf_files import local_folder
from eyas.errors import ConfigError, EyasError, Unavailable
from eyas.progress import Progress, progress
from eyas.text.tokenizer import Tokenizer, load_tokenizer

# The exporter wants an older transformers than Eyas, and more packages than it uses, so it comes without what it names.
PINNED = (
    "openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "optimum==2.3.0",
    "transformers==5.0.0", "huggingface-hub<1.22", "setuptools", "requests",
)  # fmt: skip
ALONE = ("optimum-intel==2.2.0", "xllamacpp==2026.10.11549")
EXPORT = str(Path(__file__).with_name("export.py"))
SOURCE = "argparse.py"
PROMPT_TOKENS = 64
MIB = 2**20

START, MEMORY = "start-up", "memory"
Kind = Literal["decode", "lookup", "prefill"]


@dataclass(frozen=True)
class Contender:
    """A library with weights.

    Attributes:
        precision: of the weights; Eyas with the same one is what it is compared with.
        own: whether it runs in the environment of the others.
    """

    library: str
    precision: worker.Precision
    loader: str
    weights: str
    own: bool

    @property
    def name(self) -> str:
        """Return the name in reports."""
        return f"{self.library}, {self.precision}"


EYAS = "Eyas"
CONTENDERS = (
    Contender(EYAS, "float32", "eyas", "gguf", False),
    Contender(EYAS, "bfloat16", "eyas", "gguf", False),
    Contender(EYAS, "int8", "eyas", "gguf", False),
    Contender("transformers", "float32", "transformers", "folder", False),
    Contender("transformers", "bfloat16", "transformers", "folder", False),
    Contender("OpenVINO", "float32", "openvino", "openvino-float32", True),
    Contender("OpenVINO", "int8", "openvino", "openvino-int8", True),
    Contender("llama.cpp Q4_K_M", "int8", "llama_cpp", "gguf", True),
)


NAMES = tuple(contender.name for contender in CONTENDERS)


@dataclass(frozen=True)
class Case:
    """Prompts of one length, and the number of tokens that each is continued by."""

    kind: Kind
    batch: int
    num_prompt: int
    num_tokens: int

    def __str__(self) -> str:
        what = {
            "decode": f"decode, batch {self.batch}",
            "lookup": "prompt lookup",
            "prefill": f"prefill of {self.num_prompt}",
        }
        return what[self.kind]


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement."""

    model: str
    threads: int
    num_tokens: int
    batches: tuple[int, ...]
    prefill_tokens: int
    repeats: int

    @property
    def cases(self) -> list[Case]:
        decodes = [Case("decode", batch, PROMPT_TOKENS, self.num_tokens) for batch in self.batches]
        return [*decodes, Case("prefill", 1, self.prefill_tokens, 1), Case("lookup", 1, 2 * PROMPT_TOKENS, self.num_tokens)]


def main(
    model: Annotated[str, typer.Option(help="GGUF file; by default Gemma 3 270M is fetched.")] = "",
    work: Annotated[Path, typer.Option(help="Folder of all that is fetched, made and measured.")] = Path("build/peers"),
    num_tokens: Annotated[int, typer.Option(help="Tokens that each prompt is continued by.")] = 64,
    batch: Annotated[list[int], typer.Option(help="Prompts at once; may be repeated.")] = [1, 4, 16],  # noqa: B006
    prefill_tokens: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 2000,
    repeats: Annotated[int, typer.Option(help="Runs of each case.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of each; more than one wait for each other in processor time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Compare processor time, start-up and memory of Eyas and its peers."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ.pop("OMP_NUM_THREADS", None)
    file = Path(model) if model else fetch(work)
    settings = Settings(str(file), threads, num_tokens, tuple(batch), prefill_tokens, repeats)
    with progress() as shown:
        paths = weights(file, work, shown)
        measure(settings, paths, work, shown)
    found = Measurements(work / "results.jsonl", settings).found
    program = "python -m benchmarks.peers"
    Report.here("peers", program, "cpu", settings, found, tables(settings, found)).publish(out)


def weights(file: Path, work: Path, shown: Progress) -> dict[str, str]:
    """Return the paths of the model in each form, and the interpreter of the others; make what is not there."""
    shown.show("reading the GGUF file")
    folder = local_folder(file)
    if folder is None:
        raise ConfigError(f"{file} is no GGUF file; name one with --model")
    python = environment(work, shown)
    paths = {"gguf": str(file.resolve()), "folder": str(folder), "python": python}
    for name, bits in (("openvino-float32", "32"), ("openvino-int8", "8")):
        target = work / name
        if not target.exists():
            shown.show(f"exporting {name}")
            partial = work / f"{name}.partial"
            run([python, EXPORT, str(folder), str(partial), bits], work / "export.log")
            partial.rename(target)
        paths[name] = str(target.resolve())
    return paths


def environment(work: Path, shown: Progress) -> str:
    """Return the interpreter of the environment of the others, made by pip if it is not there, with this torch."""
    python = (work / "venv" / "bin" / "python").absolute()
    marker = work / "venv" / "packages.json"
    wanted = [f"torch=={version('torch')}", *PINNED, *ALONE]
    if not marker.exists() or json.loads(marker.read_text()) != wanted:
        shown.show("installing the other libraries, about 1 GB")
        log = work / "pip.log"
        run([sys.executable, "-m", "venv", str(work / "venv")], log)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary"]
        run([*pip, *(each for each in wanted if each not in ALONE)], log)
        run([*pip, "--no-deps", *ALONE], log)
        marker.write_text(json.dumps(wanted))
    return str(python)


def run(command: Sequence[str], log: Path) -> None:
    """Run a command. Raises Unavailable with the end of its log if it fails."""
    with log.open("ab") as output:
        status = subprocess.run(command, stdout=output, stderr=output).returncode
    if status:
        raise Unavailable(f"{command[0]} ended with status {status}; {log} ends with: {log.read_text()[-800:]}")


@dataclass(frozen=True)
class Measured:
    """A case of a contender, once.

    Attributes:
        value: processor time of all threads for a token, in ms: of a prefill for one of the prompt, else for one of the
            output. Seconds of a start, MiB of memory.
        per_s: such tokens in a second.
    """

    contender: str
    case: str
    repeat: int
    value: float
    per_s: float


class Measurements:
    """Measurements so far, in a file of lines. Raises ConfigError for a file of other settings."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        head = json.loads(json.dumps(asdict(settings)))
        if not file.exists():
            file.write_text(json.dumps(head) + "\n")
        whole = file.read_text().rpartition("\n")[0].splitlines()
        if json.loads(whole[0]) != head:
            raise ConfigError(f"{file} holds measurements with other settings; name another --work, or delete it")
        self.found = [Measured(**json.loads(line)) for line in whole[1:]]
        file.write_text("".join(line + "\n" for line in whole))

    def has(self, contender: Contender, case: str, repeat: int) -> bool:
        """Return whether a measurement is there."""
        return any((each.contender, each.case, each.repeat) == (contender.name, case, repeat) for each in self.found)

    def add(self, measured: Measured) -> None:
        """Keep a measurement."""
        self.found.append(measured)
        with self._file.open("a") as stream:
            stream.write(json.dumps(asdict(measured)) + "\n")


def measure(settings: Settings, paths: dict[str, str], work: Path, shown: Progress) -> None:
    """Measure what is not measured yet; the contenders take turns in each case. Each has one process, and one for lookup."""
    kept = Measurements(work / "results.jsonl", settings)
    tokenizer = load_tokenizer(paths["folder"])
    warm_up = prompts_of(Case("lookup", 1, PROMPT_TOKENS, 1), tokenizer)
    for lookup in (False, True):
        cases = [case for case in settings.cases if (case.kind == "lookup") == lookup]
        turns = [(case, repeat) for case in cases for repeat in range(settings.repeats)]
        left = [turn for turn in turns if any(not kept.has(each, str(turn[0]), turn[1]) for each in CONTENDERS)]
        if not left and all(kept.has(each, MEMORY, 0) for each in CONTENDERS):
            continue
        with ExitStack() as stack:
            processes = []
            for contender in CONTENDERS:
                shown.show(f"starting {contender.name}")
                started = time.perf_counter()
                processes.append(stack.enter_context(running(contender, settings, paths, work, lookup)))
                processes[-1].decode(warm_up, 1)
                if not kept.has(contender, START, 0):
                    kept.add(Measured(contender.name, START, 0, time.perf_counter() - started, 0.0))
                processes[-1].decode(warm_up, 4)
            for case, repeat in shown.track(left, "prompt lookup" if lookup else "decode and prefill"):
                prompts = prompts_of(case, tokenizer)
                for process in processes if repeat % 2 else processes[::-1]:
                    if not kept.has(process.contender, str(case), repeat):
                        kept.add(process.measure(case, repeat, prompts))
            for process in processes:
                if not kept.has(process.contender, MEMORY, 0):
                    kept.add(Measured(process.contender.name, MEMORY, 0, process.memory_mib, 0.0))


@dataclass(frozen=True)
class Process:
    """A running contender."""

    contender: Contender
    process: Popen[str]
    log: Path

    @property
    def memory_mib(self) -> float:
        """The most memory that it has had, files included that it has mapped."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024 / MIB

    def measure(self, case: Case, repeat: int, prompts: worker.Prompts) -> Measured:
        """Measure a case. Of decoding, the work for the prompts and the first tokens is measured first and taken off."""
        self.decode(prompts, 1)  # the first time at these shapes costs more
        first_cpu_s, first_s = self.decode(prompts, 1)
        if case.kind == "prefill":
            return Measured(
                self.contender.name, str(case), repeat, 1e3 * first_cpu_s / case.num_prompt, case.num_prompt / first_s
            )
        cpu_s, seconds = self.decode(prompts, case.num_tokens)
        num_later = case.batch * (case.num_tokens - 1)
        rate = num_later / max(seconds - first_s, 1e-9)
        return Measured(self.contender.name, str(case), repeat, 1e3 * (cpu_s - first_cpu_s) / num_later, rate)

    def decode(self, prompts: worker.Prompts, num_tokens: int) -> tuple[float, float]:
        """Return the processor time and the seconds that decoding took. Raises Unavailable for too few tokens."""
        cpu_s = cpu_seconds(self.process.pid)
        started = time.perf_counter()
        lengths = self.ask({"prompts": prompts, "num_tokens": num_tokens})["lengths"]
        if lengths != [num_tokens] * len(prompts):
            raise Unavailable(f"{self.contender.name} returned {lengths} tokens, not {num_tokens} of each prompt")
        return cpu_seconds(self.process.pid) - cpu_s, time.perf_counter() - started

    def ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Return the next answer. Raises Unavailable if the process has ended."""
        assert self.process.stdin
        assert self.process.stdout
        if request is not None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Unavailable(f"{self.contender.name} has ended; {self.log} ends with: {self.log.read_text()[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(contender: Contender, settings: Settings, paths: dict[str, str], work: Path, lookup: bool) -> Iterator[Process]:
    """Start a contender, and end it with the context."""
    python = paths["python"] if contender.own else sys.executable
    mode = "lookup" if lookup else "plain"
    words = [contender.loader, paths[contender.weights], contender.precision, str(settings.threads), mode]
    log = work / f"{re.sub(r'[^a-z0-9]+', '-', contender.name.lower())}.log"
    path = [] if contender.own else [str(Path().resolve()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    with log.open("w") as output:
        process = Popen(
            [python, worker.__file__, *words], stdin=PIPE, stdout=PIPE, stderr=output, text=True, env=environment
        )
    try:
        begun = Process(contender, process, log)
        begun.ask(None)
        yield begun
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def prompts_of(case: Case, tokenizer: Tokenizer) -> worker.Prompts:
    """Return the prompts of a case: parts of a file of Python's library; of a lookup, a part twice."""
    text = (Path(sysconfig.get_path("stdlib")) / SOURCE).read_text()
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    ids = list(tokenizer.encode_rendered(text))[PROMPT_TOKENS:]
    length = case.num_prompt - len(bos)
    if case.kind == "lookup":
        half = ids[: length // 2]
        return [[*bos, *half, *half, *half][: case.num_prompt]]
    return [[*bos, *ids[number * length : (number + 1) * length]] for number in range(case.batch)]


def tables(settings: Settings, found: Sequence[Measured]) -> list[Table]:
    """Return the tables of the report: processor time with ratios, and start-up with memory."""
    rows = []
    for case in map(str, settings.cases):
        spreads = {name: Spread.of([m.value for m in found if (m.contender, m.case) == (name, case)]) for name in NAMES}
        rates = {name: Spread.of([m.per_s for m in found if (m.contender, m.case) == (name, case)]) for name in NAMES}
        for each in CONTENDERS:
            ratio = spreads[each.name].median / spreads[f"{EYAS}, {each.precision}"].median
            rows.append((case, each.name, f"{spreads[each.name]}", f"{ratio:.2f}", number(rates[each.name].median)))
    single = {(m.contender, m.case): m.value for m in found}
    starts = [(name, number(single[name, START]), number(single[name, MEMORY])) for name in NAMES]
    note = (
        "Processor time of all threads for a token: median and range; of a prefill for a token of the prompt. The ratio is "
        f"to {EYAS} with that precision: above 1, {EYAS} is ahead. All decode the same {PROMPT_TOKENS} tokens a prompt "
        "greedily; the time of the first token is taken off. Prompt lookup decodes a prompt that repeats itself. llama.cpp "
        "multiplies by the 4 to 8 bits of the GGUF file and rounds rows to 8. The others have weights "
        "that were unpacked from it."
    )
    memory = (
        "Seconds from the start of the process to its first token, and the most memory that it had before prompt lookup, "
        "with the files that it has mapped."
    )
    return [
        Table("Processor time", ("case", "library", "ms a token", "ratio", "tokens a second"), tuple(rows), note),
        Table("Start-up and memory", ("library", "seconds", "MiB"), tuple(starts), memory),
    ]


if __name__ == "__main__":
    try:
        typer.run(main)
    except EyasError as error:
        sys.exit(f"error: {error}")
