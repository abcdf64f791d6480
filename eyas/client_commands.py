"""`eyas generate` and `eyas models`: ask a router over gRPC."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import grpc
import typer
from rich.console import Console
from rich.table import Table

from eyas.client import JsonPrinter, Printer, RouterClient, ScreenPrinter, tls_options
from eyas.errors import ConfigError, InvalidRequest
from eyas.request import Request, SamplingParams
from eyas.rpc.channel import ChannelOptions
from eyas.rpc.messages import GenerateCall

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
        for chunk in RouterClient(address, _line(options.params), api_key).stream(call):
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
        infos = RouterClient(address, _line(options.params), api_key).models()
    table = Table("model", "context", "vocabulary", "target", "draft head")
    for info in infos:
        facts = (
            str(info.max_model_len),
            str(info.vocab_size),
            info.fingerprint[:12],
            info.features_fingerprint[:12] or "none",
        )
        table.add_row(info.name, *facts)
    Console().print(table)


def _line(options: dict[str, Any]) -> ChannelOptions:
    """How the router is spoken to. Raises ConfigError."""
    if options["tls"] or options["ca"]:
        return tls_options(options["ca"], options["tls_name"])
    if options["tls_name"]:
        raise ConfigError(f"--tls-name {options['tls_name']} is for TLS; add --tls, or --ca with who signed the certificate")
    return ChannelOptions()


def _printer(options: dict[str, Any]) -> Printer:
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
    """A failed call becomes one line on stderr and exit status 1; Ctrl-C becomes 130."""
    try:
        yield
    except InvalidRequest as error:
        _fail(f"INVALID_ARGUMENT: {error}")
    except ConfigError as error:
        _fail(str(error))
    except grpc.RpcError as error:
        _fail(f"{error.code().name}: {error.details()}{_hint(error.details() or '')}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(130) from None


def _hint(details: str) -> str:
    """gRPC does not say that the other side speaks TLS, or that it does not."""
    unreached = details.startswith("failed to connect")
    return "; is the address right, and does the router speak TLS (--tls, --ca, --tls-name)?" if unreached else ""


def _fail(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)
