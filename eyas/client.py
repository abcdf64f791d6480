"""`eyas generate` and `eyas models`: a gRPC client of a router, and printers of text for a terminal or of JSON Lines."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import grpc
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.errors import ConfigError, InvalidRequest
from eyas.outputs import TextChunk, Totals
from eyas.request import Request, SamplingParams
from eyas.rpc.channel import Certificates, ChannelOptions, channel_credentials, open_sync_channel
from eyas.rpc.convert import generate_call_to_proto, models_from_proto, text_chunk_from_proto
from eyas.rpc.messages import GenerateCall, ModelInfo
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub

LIST_TIMEOUT_S = 10.0

ACCEPTED_STYLE = "bold green"
TARGET_STYLE = "yellow"


@dataclass(frozen=True)
class RouterClient:
    """A client of the router at `address`, host:port. api_key: empty for a router that requires none."""

    address: str
    options: ChannelOptions
    api_key: str = field(default="", repr=False)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that the router serves now. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.options) as channel:
            stub = GenerationStub(channel)
            response = stub.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S, metadata=self._metadata)
            return tuple(models_from_proto(response))

    def stream(self, call: GenerateCall) -> Iterator[TextChunk]:
        """Yield the chunks of a call; closing the iterator early cancels it. Raises grpc.RpcError."""
        with open_sync_channel(self.address, self.options) as channel:
            responses = GenerationStub(channel).Generate(generate_call_to_proto(call), metadata=self._metadata)
            try:
                yield from map(text_chunk_from_proto, responses)
            finally:
                responses.cancel()  # type: ignore[no-untyped-call]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


class JsonPrinter:
    """Prints chunks as JSON Lines; the last line of each completion has its finish reason and statistics."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()

    def add(self, chunk: TextChunk) -> None:
        """Print one chunk, and the statistics after the last."""
        inner = chunk.chunk
        line: dict[str, Any] = {
            "index": inner.index,
            "token_ids": inner.token_ids,
            "is_draft_token": inner.is_draft_token,
            "text": chunk.text,
        }
        for name in ("logprobs", "prompt_logprobs"):
            if logprobs := getattr(inner, name):
                line[name] = list(map(dataclasses.asdict, logprobs))
        if inner.verify_step:
            line["verify_step"] = dataclasses.asdict(inner.verify_step)
        if chunk.seed is not None:
            line["seed"] = chunk.seed
        print(json.dumps(line), flush=True)
        if chunk.totals:
            seconds = time.perf_counter() - self._started_at
            print(json.dumps({"index": inner.index} | _statistics(chunk.totals, inner.finish_reason, seconds)), flush=True)


class ScreenPrinter:
    """Prints text as it comes, accepted draft tokens in a style of their own, and a legend and statistics after it.

    Completions are printed one after the other; the chunks of a later one wait.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at = time.perf_counter()
        self._waiting: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
        self._current = 0

    def add(self, chunk: TextChunk) -> None:
        """Print a chunk once the completions before its own are done."""
        self._waiting[chunk.chunk.index].append(chunk)
        while self._waiting[self._current]:
            self._print(self._waiting[self._current].popleft())

    def _print(self, chunk: TextChunk) -> None:
        start = 0
        for length, is_draft_token in zip(chunk.text_lengths, chunk.chunk.is_draft_token, strict=True):
            style = ACCEPTED_STYLE if is_draft_token else TARGET_STYLE
            self._console.print(Text(chunk.text[start : start + length], style), end="")
            start += length
        # Text that the last chunk releases counts as the target's own.
        self._console.print(Text(chunk.text[start:], TARGET_STYLE), end="")
        if chunk.totals:
            self._current += 1
            legend = Text.assemble(("accepted draft tokens", ACCEPTED_STYLE), ", ", ("the target's own", TARGET_STYLE))
            self._console.print("\n")
            self._console.print(legend)
            self._console.print(_summary(chunk.totals, time.perf_counter() - self._started_at), style="dim")


def _summary(totals: Totals, seconds: float) -> str:
    stats = totals.stats
    steps = f", {stats.num_verify_steps} verify steps, tau {stats.acceptance_length:.2f}" if stats else ""
    return f"{totals.num_output_tokens} tokens{steps}, {totals.num_output_tokens / seconds:.1f} tokens/s"


def _statistics(totals: Totals, finish_reason: str | None, seconds: float) -> dict[str, Any]:
    statistics: dict[str, Any] = {
        "finish_reason": finish_reason,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_cached_tokens": totals.num_cached_tokens,
        "num_output_tokens": totals.num_output_tokens,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(totals.num_output_tokens / seconds, 3),
    }
    if totals.stats:
        statistics["stats"] = dataclasses.asdict(totals.stats) | {
            "acceptance_length": totals.stats.acceptance_length,
            "acceptance_by_depth": totals.stats.acceptance_by_depth,
        }
    return statistics


Address = Annotated[str, typer.Option(envvar="EYAS_ADDRESS", help="host:port of the router.")]
ApiKey = Annotated[str, typer.Option(envvar="EYAS_API_KEY", help="API key, if the router requires one.")]
Tls = Annotated[bool, typer.Option("--tls", envvar="EYAS_TLS", help="Use TLS.")]
Ca = Annotated[str, typer.Option(envvar="EYAS_CA", help="PEM file that signed the router's certificate; implies --tls.")]
TlsName = Annotated[
    str,
    typer.Option(envvar="EYAS_TLS_NAME", help="Server name expected in the TLS certificate, if it differs from the host."),
]


def generate(
    options: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    address: Address = "127.0.0.1:50050",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of the prompt.")] = 1,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this share of the likeliest token's probability.")
    ] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Do not stop at end-of-sequence tokens.")] = False,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens of the prompt and the output less likely.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 makes tokens of the output less likely.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0 makes frequent tokens of the output less likely.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="TOKEN_ID=BIAS", help="May be repeated.")] = None,
    bad_words: Annotated[list[str] | None, typer.Option("--bad-word", help="Text to avoid; may be repeated.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Report this many likeliest tokens per token; needs --json.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt; needs --json.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model; needed if the router serves several.")] = "",
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    tls_name: TlsName = "",
    session: Annotated[str, typer.Option(help="Groups the requests of one conversation.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per chunk, and one with statistics.")] = False,
) -> None:
    """Stream the continuation of PROMPT; accepted draft tokens have a style of their own."""
    with _reported():
        printer, sampling = _printer(options.params), _sampling(options.params)
        call = GenerateCall(Request("", (), sampling, session), prompt_text=prompt, model=model)
        for chunk in RouterClient(address, _channel_options(options.params), api_key).stream(call):
            printer.add(chunk)
            if chunk.chunk.finish_reason == "error":
                _fail(f"INTERNAL: {chunk.chunk.message}")


def models(
    options: typer.Context,
    address: Address = "127.0.0.1:50050",
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    tls_name: TlsName = "",
) -> None:
    """List the models that the router serves now."""
    with _reported():
        infos = RouterClient(address, _channel_options(options.params), api_key).models()
    table = Table("model", "context", "vocabulary", "target", "draft head")
    for info in infos:
        digests = (info.fingerprint[:12], info.features_fingerprint[:12] or "none")
        table.add_row(info.name, f"{info.max_model_len}", f"{info.vocab_size}", *digests)
    Console().print(table)


def _channel_options(options: dict[str, Any]) -> ChannelOptions:
    """The options of a channel to the router. Without --ca, TLS uses the system's trust store. Raises ConfigError."""
    if options["tls"] or options["ca"]:
        pem = Certificates("--ca", ca_file=options["ca"]).pem
        return ChannelOptions(credentials=channel_credentials(pem), server_name=options["tls_name"])
    if options["tls_name"]:
        raise ConfigError(f"--tls-name {options['tls_name']} needs TLS; add --tls, or --ca FILE with the CA certificate")
    return ChannelOptions()


def _printer(options: dict[str, Any]) -> JsonPrinter | ScreenPrinter:
    if options["as_json"]:
        return JsonPrinter()
    if options["logprobs"] is not None or options["prompt_logprobs"] is not None:
        raise InvalidRequest("log-probabilities are shown as JSON only; add --json")
    return ScreenPrinter(Console(highlight=False, soft_wrap=True))


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


@contextmanager
def _reported() -> Iterator[None]:
    """A failed call becomes one line on stderr and exit status 1, with the status of the call; Ctrl-C becomes 130."""
    try:
        yield
    except InvalidRequest as error:
        _fail(f"INVALID_ARGUMENT: {error}")
    except grpc.RpcError as error:
        _fail(f"{error.code().name}: {error.details()}{_hint(error.details() or '')}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(130) from None


def _hint(details: str) -> str:
    """What to check if nothing answers; gRPC does not say whether the other side speaks TLS."""
    if not details.startswith("failed to connect"):
        return ""
    return "; check that a router listens there (`eyas serve`), and whether it speaks TLS (--tls, --ca, --tls-name)"


def _fail(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)
