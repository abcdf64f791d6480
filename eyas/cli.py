"""The `eyas` command: a client of a running router, benchmarks and checks. Knows the wire, no model and no torch."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import grpc
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.bench.command import bench
from eyas.check.command import check
from eyas.check.drafters import drafters
from eyas.errors import InvalidRequest
from eyas.request import Request, SamplingParams
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import GenerateCall, TextChunk, Totals
from eyas.rpc.wire import call_to_message, chunk_from_message, models_from_message
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub

FORESEEN_STYLE = "bold green"
TARGET_STYLE = "yellow"
LIST_SECONDS = 10.0

Address = Annotated[str, typer.Option(envvar="EYAS_ADDRESS", help="host:port of the router.")]
ApiKey = Annotated[str, typer.Option(envvar="EYAS_API_KEY", help="For a router that asks for one.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
app.add_typer(check, name="check")
app.command()(drafters)


@app.callback()
def _eyas() -> None:
    """Eyas: large language models served faster, saying exactly what they would have said."""


@app.command()
def generate(
    options: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    address: Address = "127.0.0.1:50050",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to emit.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of the prompt.")] = 1,
    min_p: Annotated[float, typer.Option(help="Draw from tokens with this share of the likeliest one's probability.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Do not stop before so many tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Do not stop at end-of-sequence tokens.")] = False,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids tokens of prompt and output.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 avoids tokens of the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0 avoids frequent tokens of the output.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="TOKEN_ID=BIAS", help="May be repeated.")] = None,
    bad_words: Annotated[list[str] | None, typer.Option("--bad-word", help="Text to avoid; may be repeated.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens to tell of, per token; needs --json.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt; needs --json.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model; may be left out where one is served.")] = "",
    api_key: ApiKey = "",
    session: Annotated[str, typer.Option(help="Groups the requests of one conversation.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per chunk, and one with statistics.")] = False,
) -> None:
    """Stream the continuation of PROMPT; tokens that the drafter foresaw are shown differently."""
    printer = JsonPrinter() if as_json else ScreenPrinter(Console(highlight=False, soft_wrap=True))
    with _reported():
        if not as_json and (logprobs is not None or prompt_logprobs is not None):
            raise InvalidRequest("log-probabilities are shown as JSON only; add --json")
        call = GenerateCall(Request("", (), _sampling(options.params), session), prompt_text=prompt, model=model)
        for chunk in _stream(address, call, api_key):
            printer.add(chunk)
            if chunk.chunk.finish_reason == "error":
                _fail(f"INTERNAL: {chunk.chunk.message}")


@app.command()
def models(address: Address = "127.0.0.1:50050", api_key: ApiKey = "") -> None:
    """List the models that can be asked for now."""
    with _reported(), open_sync_channel(address) as channel:
        stub, metadata = GenerationStub(channel), _metadata(api_key)
        infos = models_from_message(stub.ListModels(ListModelsRequest(), timeout=LIST_SECONDS, metadata=metadata))
    table = Table("model", "context", "vocabulary", "target", "draft head")
    for info in infos:
        facts = (str(info.context_length), str(info.vocab_size), info.fingerprint[:12], info.head_fingerprint[:12] or "none")
        table.add_row(info.name, *facts)
    Console().print(table)


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """Of the options, those that are parameters by name; lists that were not given are None."""
    named = {field.name: options[field.name] for field in dataclasses.fields(SamplingParams) if field.name in options}
    lists = {name: named[name] or () for name in ("stop", "bad_words")}
    return SamplingParams(**(named | lists | {"logit_bias": tuple(map(_bias, named["logit_bias"] or ()))}))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidRequest(f"logit bias {text!r} is not of the form TOKEN_ID=BIAS, such as 42=-5") from None


class JsonPrinter:
    """Chunks as JSON Lines; the last line of each completion holds the finish reason and the statistics."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk, and the statistics after the last."""
        inner = chunk.chunk
        line: dict[str, Any] = {"index": inner.index, "token_ids": inner.token_ids, "foreseen": inner.foreseen}
        line["text"] = chunk.text
        for name in ("logprobs", "prompt_logprobs"):
            if told := getattr(inner, name):
                line[name] = list(map(dataclasses.asdict, told))
        if inner.round:
            line["round"] = dataclasses.asdict(inner.round)
        if chunk.seed is not None:
            line["seed"] = chunk.seed
        print(json.dumps(line), flush=True)
        if chunk.totals:
            seconds = time.perf_counter() - self._started
            print(json.dumps({"index": inner.index} | _final(chunk.totals, inner.finish_reason, seconds)), flush=True)


class ScreenPrinter:
    """Text as it comes, in two styles, with a legend and the statistics below it. Completions come one after the other;
    chunks of a later one are held back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.perf_counter()
        self._held: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
        self._turn = 0

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk in its turn, and the legend after the last of a completion."""
        self._held[chunk.chunk.index].append(chunk)
        while self._held[self._turn]:
            self._print(self._held[self._turn].popleft())

    def _print(self, chunk: TextChunk) -> None:
        for text in _styled(chunk):
            self._console.print(text, end="")
        if chunk.totals:
            self._turn += 1
            self._console.print("\n")
            self._console.print(
                Text.assemble(("foreseen by the drafter", FORESEEN_STYLE), ", ", ("the target's own", TARGET_STYLE))
            )
            self._console.print(_summary(chunk.totals, time.perf_counter() - self._started), style="dim")


def _styled(chunk: TextChunk) -> Iterator[Text]:
    """The chunk's text, token by token; text released at the end counts as the target's own."""
    at = 0
    for length, foreseen in zip(chunk.text_lengths, chunk.chunk.foreseen, strict=True):
        yield Text(chunk.text[at : at + length], FORESEEN_STYLE if foreseen else TARGET_STYLE)
        at += length
    yield Text(chunk.text[at:], TARGET_STYLE)


def _summary(totals: Totals, seconds: float) -> str:
    rounds = f", {totals.stats.num_rounds} rounds, tau {totals.stats.acceptance_length:.2f}" if totals.stats else ""
    return f"{totals.num_output_tokens} tokens{rounds}, {totals.num_output_tokens / seconds:.1f} tokens/s"


def _final(totals: Totals, finish_reason: str | None, seconds: float) -> dict[str, Any]:
    final: dict[str, Any] = {
        "finish_reason": finish_reason,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_cached_tokens": totals.num_cached_tokens,
        "num_output_tokens": totals.num_output_tokens,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(totals.num_output_tokens / seconds, 3),
    }
    if totals.stats:
        final["stats"] = dataclasses.asdict(totals.stats) | {
            "acceptance_length": totals.stats.acceptance_length,
            "acceptance_by_depth": totals.stats.acceptance_by_depth,
        }
    return final


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _stream(address: str, call: GenerateCall, api_key: str) -> Iterator[TextChunk]:
    """Chunks of a call; leaving early cancels it."""
    with open_sync_channel(address) as channel:
        answers = GenerationStub(channel).Generate(call_to_message(call), metadata=_metadata(api_key))
        try:
            yield from map(chunk_from_message, answers)
        finally:
            answers.cancel()  # type: ignore[no-untyped-call]


@contextmanager
def _reported() -> Iterator[None]:
    """A failed call becomes one line on stderr and exit status 1; Ctrl-C becomes 130."""
    try:
        yield
    except InvalidRequest as error:
        _fail(f"INVALID_ARGUMENT: {error}")
    except grpc.RpcError as error:
        _fail(f"{error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(130) from None


def _fail(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
