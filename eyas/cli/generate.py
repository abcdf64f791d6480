"""`eyas generate` and `eyas chat`: text at a terminal or as JSON Lines, from a router or a local model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Request, SamplingParams
from eyas.cli import options
from eyas.client import Client, RetryPolicy
from eyas.config.drafting import NO_DRAFTS
from eyas.config.file_values import check_source
from eyas.config.gguf_files import SUFFIX
from eyas.errors import CheckpointError, ConfigError, EyasError, InvalidRequest, RequestFailed, Unavailable
from eyas.progress import progress
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.rpc.status import status_of

if TYPE_CHECKING:
    from eyas.llm import LLM

ROUTER = "127.0.0.1:50050"
CHAT_URL = "http://127.0.0.1:8000"
RETRY = RetryPolicy(budget_s=5.0)
WARM_UP_TOKENS = 16
ACCEPTED_STYLE = "bold green"
TARGET_STYLE = "yellow"
# A word like this one names a model; a prompt has other characters.
_MODEL = re.compile(r"[~.]{0,2}/?[\w.-]+(?:/[\w.-]+)+/?")


class JsonPrinter:
    """Printer of chunks as JSON Lines; the last line of each completion has its finish reason and statistics."""

    def start(self) -> None:
        """Start the clock of the rate."""
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
    """Printer of text as it comes, accepted draft tokens in a style of their own, and a legend and statistics after it.

    Completions are printed one after the other; the chunks of a later one wait.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: defaultdict[int, deque[TextChunk]] = defaultdict(deque)
        self._current = 0

    def start(self) -> None:
        """Start the clock of the rate."""
        self._started_at = time.perf_counter()

    def add(self, chunk: TextChunk) -> None:
        """Print a chunk once the completions before its own are done."""
        self._waiting[chunk.chunk.index].append(chunk)
        while self._waiting[self._current]:
            self._print(self._waiting[self._current].popleft())

    def _print(self, chunk: TextChunk) -> None:
        for text, is_draft_token in zip(chunk.token_texts, chunk.chunk.is_draft_token, strict=True):
            self._console.print(Text(text, ACCEPTED_STYLE if is_draft_token else TARGET_STYLE), end="")
        # Text that the last chunk releases counts as the target's own.
        self._console.print(Text(chunk.released_text, TARGET_STYLE), end="")
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


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL] [PROMPT]", help="Folder or hub id of a local model; the text to continue."),
]
Address = Annotated[
    str, typer.Option(envvar="EYAS_ADDRESS", help="host:port of a router; several, with commas, take turns on failures.")
]
Tls = Annotated[bool, typer.Option("--tls", envvar="EYAS_TLS", help="Connect to the router by TLS.")]
Ca = Annotated[str, typer.Option(envvar="EYAS_CA", help="PEM file that signed the router's certificate; implies --tls.")]
TlsName = Annotated[
    str,
    typer.Option(envvar="EYAS_TLS_NAME", help="Server name expected in the TLS certificate, if it differs from the host."),
]

RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes tokens of prompt and output less likely.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens with at least this share of the likeliest one's probability.")]
ModelName = Annotated[str, typer.Option(help="Name of the model; needed if the router serves several.")]


CHOSEN_BY_VERIFIERS = "a PROMPT without a MODEL goes to a router, whose verifiers have that set"
# Options that do nothing for a model in this process, and for a router.
UNREAD = {
    True: (
        ("address", "model", "api_key", "tls", "ca", "tls_name", "session"),
        "a MODEL runs in this process, without a router",
    ),
    False: (options.LLM_ARGUMENTS, CHOSEN_BY_VERIFIERS),
}


def generate(
    context: typer.Context,
    words: Words = None,
    address: Address = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="Randomness of sampling; 0 is greedy decoding.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: an equal one gives equal text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of the prompt.")] = 1,
    min_p: MinP = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at end-of-sequence tokens.")] = False,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 makes tokens of the output less likely.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0 makes frequent tokens of the output less likely.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN_ID=BIAS", help="Added to the logit of a token; may be repeated.")
    ] = None,
    bad_words: Annotated[list[str] | None, typer.Option("--bad-word", help="Text to avoid; may be repeated.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Report this many likeliest tokens per token; needs --json.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="As --logprobs, for the tokens of the prompt.")] = None,
    draft_model: options.DraftModel = "",
    method: options.Method = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    tokenizer: options.TokenizerOf = "",
    validate_head: options.ValidateHead = "auto",
    quantization: options.Quantization = "",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    config: options.ConfigFile = None,
    model: ModelName = "",
    api_key: options.ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    tls_name: TlsName = "",
    session: Annotated[str, typer.Option(help="Groups the requests of one conversation.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per chunk, and one with statistics.")] = False,
) -> None:
    """Stream the continuation of PROMPT; accepted draft tokens have a style of their own.

    With a MODEL it runs in this process, otherwise at a router. Without a PROMPT, standard input is the prompt. The options
    about weights, memory and drafting are for a MODEL in this process.
    """
    with _reported():
        source, prompt = _source_and_prompt(words or [], address)
        printer, sampling = _printer(context.params), _sampling(context.params)
        options.refuse_given(context, *UNREAD[bool(source)])
        chunks = (_local_chunks if source else _remote_chunks)(source or address or ROUTER, prompt, sampling, context.params)
        printer.start()
        for chunk in chunks:
            printer.add(chunk)
            if chunk.chunk.finish_reason == "error":
                raise RequestFailed(chunk.chunk.message)


def _local_chunks(source: str, prompt: str, sampling: SamplingParams, given: dict[str, Any]) -> Iterator[TextChunk]:
    """Load a model in this process; return the chunks of its continuation."""
    llm = _load(source, given)
    _warm_up(llm, prompt, sampling)
    return llm.chunks(prompt, sampling)


def _remote_chunks(address: str, prompt: str, sampling: SamplingParams, given: dict[str, Any]) -> Iterator[TextChunk]:
    """Return the chunks of a router. Raises ConfigError for options that only a local model has."""
    method = given["method"]
    if given["draft_model"] or method not in ("", NO_DRAFTS):
        raise ConfigError(f"{CHOSEN_BY_VERIFIERS}; name a MODEL, or leave out --draft-model, and --method but none")
    request, drafter = Request("", (), sampling, given["session"]), NO_DRAFTER if method else ""
    call = GenerateCall(request, prompt_text=prompt, model=given["model"], drafter=drafter)
    return _client(address, given).chunks(call)


def chat(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="[URL|MODEL]", help="Base URL of a router's HTTP API, or a local model.")
    ] = CHAT_URL,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="Randomness of sampling; 0 is greedy decoding.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: an equal one gives equal answers.")] = None,
    model: ModelName = "",
    api_key: options.ApiKey = "",
    draft_model: options.DraftModel = "",
    method: options.Method = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    tokenizer: options.TokenizerOf = "",
    chat_template: options.Template = "",
    validate_head: options.ValidateHead = "auto",
    quantization: options.Quantization = "",
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    config: options.ConfigFile = None,
) -> None:
    """Talk to a model: each line is a message. /reset forgets the conversation, /exit or Ctrl-D ends it."""
    with _reported():
        start = [{"role": "system", "content": system}] if system else []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        if "://" in source:
            options.refuse_given(context, (*options.LLM_ARGUMENTS, "draft_model", "method"), "a server chooses that itself")
            answer = _http_chat(source, context.params)
        else:
            options.refuse_given(context, ("model", "api_key"), "a local model needs no name and no key")
            answer = _local_chat(source, context.params, sampling)
        messages = list(start)
        for line in _lines():
            if line == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            pieces = []
            try:
                for piece in answer(messages):
                    print(piece, end="", flush=True)
                    pieces.append(piece)
            except EyasError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"\nerror: {error}", file=sys.stderr)
                messages.pop()  # the conversation goes on without this message
                continue
            print(flush=True)
            messages.append({"role": "assistant", "content": "".join(pieces)})


def _client(address: str, given: dict[str, Any]) -> Client:
    """Return a client with the TLS options of a command. Raises ConfigError."""
    if given["tls_name"] and not (given["tls"] or given["ca"]):
        name = given["tls_name"]
        raise ConfigError(f"--tls-name {name} needs TLS; add --tls, or --ca FILE with the CA certificate")
    return Client(
        address,
        api_key=given["api_key"],
        tls=given["tls"],
        ca_file=given["ca"],
        tls_server_name=given["tls_name"],
        retry=RETRY,
    )


def _source_and_prompt(words: list[str], address: str) -> tuple[str, str]:
    """Return the local model, empty for a router, and the prompt. Raises ConfigError, and CheckpointError for a missing
    folder.
    """
    source = words[0] if words and not address and (len(words) > 1 or _names_model(words[0])) else ""
    rest = words[1:] if source else words
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r} is one word too many; quote the prompt, and give a MODEL or --address, not both")
    if source:
        check_source(source)
    prompt = "".join(rest)
    if not rest and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ConfigError("there is no prompt; give one, or send it to standard input")
    return source, prompt


def _names_model(word: str) -> bool:
    """Return whether a word is a model's: a folder, a hub id, a GGUF file that exists or a word that may be one."""
    is_file = word.lower().endswith(SUFFIX) and (os.path.exists(word) or not re.search(r"\s", word))
    return os.path.isdir(word) or is_file or _MODEL.fullmatch(word) is not None


def _load(source: str, given: dict[str, Any]) -> LLM:
    """Load a local model, with a command's options. A missing folder is reported before torch is imported."""
    check_source(source)
    if given["draft_model"]:
        check_source(given["draft_model"])
    with progress() as shown:
        shown.show("importing torch")
        from eyas.llm import LLM

    method = given["method"] or None
    draft_model = (given["draft_model"] or None) if method != NO_DRAFTS else None
    return LLM(source, draft_model, method, **options.llm_arguments(given))


def _warm_up(llm: LLM, prompt: str, sampling: SamplingParams) -> None:
    """Compile what the first steps would: the rate leaves it out. The tokens are the prompt's, backwards: none is cached."""
    tokens = llm.get_tokenizer().encode(prompt)[: -WARM_UP_TOKENS - 1 : -1]
    few = min(WARM_UP_TOKENS, llm.llm_engine.max_model_len - len(tokens))
    if tokens and few > 0:
        short = dataclasses.replace(sampling, max_tokens=few, min_tokens=0, n=1, prompt_logprobs=None)
        llm.generate([{"prompt_token_ids": tokens}], short, use_tqdm=False)


Answer = Callable[[list[dict[str, str]]], Iterator[str]]


def _local_chat(source: str, given: dict[str, Any], sampling: SamplingParams) -> Answer:
    """Yield answers of a model in this process."""
    llm = _load(source, given)

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        for output in llm.stream(llm.chat_prompts(messages), sampling):
            yield output.outputs[0].text

    return answer


def _http_chat(url: str, given: dict[str, Any]) -> Answer:
    """Yield answers of a server of OpenAI's API. Raises Unavailable if none answers, InvalidRequest if it refuses."""
    endpoint = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    names = ("max_tokens", "temperature", "top_p", "seed", "model")
    body = {name: given[name] for name in names if given[name] not in (None, "")} | {"stream": True}
    headers = {"Content-Type": "application/json"}
    if given["api_key"]:
        headers["Authorization"] = f"Bearer {given['api_key']}"

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        data = json.dumps(body | {"messages": messages}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, data, headers)) as response:
                yield from _event_texts(response)
        except urllib.error.HTTPError as error:
            raise InvalidRequest(f"{endpoint} answers {error.code}: {_reason(error.read())}") from error
        except OSError as error:
            raise Unavailable(f"cannot reach {endpoint}: {error}; check that `eyas serve` listens there") from error

    return answer


def _event_texts(lines: Iterator[bytes]) -> Iterator[str]:
    """Yield the texts of a stream of events. Raises RequestFailed for an error event."""
    for line in lines:
        data = line.decode().strip().removeprefix("data:").strip() if line.startswith(b"data:") else ""
        if data and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""


def _reason(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def _lines() -> Iterator[str]:
    """Yield messages from standard input, with a prompt at a terminal, up to its end or /exit."""
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def _printer(given: dict[str, Any]) -> JsonPrinter | ScreenPrinter:
    if given["as_json"]:
        return JsonPrinter()
    if given["logprobs"] is not None or given["prompt_logprobs"] is not None:
        raise InvalidRequest("log-probabilities are shown as JSON only; add --json")
    return ScreenPrinter(Console(highlight=False, soft_wrap=True))


def _sampling(given: dict[str, Any]) -> SamplingParams:
    """Build the sampling parameters from the options of the same names."""
    named = {field.name: given[field.name] for field in dataclasses.fields(SamplingParams) if field.name in given}
    return SamplingParams(**(named | {"logit_bias": tuple(map(_bias, named["logit_bias"] or ()))}))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidRequest(f"logit bias {text!r} is not of the form TOKEN_ID=BIAS, such as 42=-5") from None


@contextmanager
def _reported() -> Iterator[None]:
    """Turn a failure into one line on stderr and exit status 1, with its status; Ctrl-C becomes 130."""
    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except EyasError as error:
        print(f"error: {status_of(error).name}: {error}{_hint(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(130) from None


def _hint(details: str) -> str:
    """Return what to check if nothing answers; gRPC does not say whether the other side speaks TLS."""
    if not details.startswith("failed to connect"):
        return ""
    return "; check that a router listens there (`eyas serve`), and whether it speaks TLS (--tls, --ca, --tls-name)"
