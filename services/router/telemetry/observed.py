"""One request as the router sees it pass: calls and chunks in, numbers and the attributes of its span out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span

from eyas.rpc.messages import GenerateCall, TextChunk
from eyas.telemetry.logs import About
from eyas.telemetry.tracing import trace_of

PROVIDER = "eyas"


@dataclass
class Observed:
    """A request on its way through the router."""

    call: GenerateCall
    span: Span
    about: About
    operation: str
    started: float
    model: str = ""
    first_token_at: float = 0.0
    num_first: int = 0
    num_output: int = 0
    failed: bool = False
    finals: list[TextChunk] = field(default_factory=list)
    texts: list[str] | None = None
    asked_text: str | None = None

    def prepared(self, call: GenerateCall) -> GenerateCall:
        """Take the call as it is sent on; gives it back with this request's trace."""
        self.model, self.call = call.model, replace(call, trace=trace_of(self.span) or call.trace)
        self.about.request_id = call.request.id
        return self.call

    def saw(self, chunk: TextChunk) -> None:
        """Count a chunk for the client."""
        num_tokens = len(chunk.chunk.token_ids)
        if num_tokens and not self.first_token_at:
            self.first_token_at, self.num_first = time.perf_counter(), num_tokens
        self.num_output += num_tokens
        if chunk.totals is not None:
            self.finals.append(chunk)
            self.failed |= chunk.chunk.finish_reason == "error"
        if self.texts is not None:
            self.texts.append(chunk.text)

    @property
    def labels(self) -> tuple[str, ...]:
        """Operation, provider and model, as the GenAI metrics want them."""
        return self.operation, PROVIDER, self.model

    def describe(self) -> None:
        """Give the span the attributes of the GenAI conventions, and what speculation did."""
        if not self.span.is_recording():
            return
        request, sampling = self.call.request, self.call.request.sampling
        self.span.update_name(f"{self.operation} {self.model}".rstrip())
        self.span.set_attributes(
            {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self.model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.conversation.id": request.session,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "gen_ai.usage.output_tokens": self.num_output,
                "gen_ai.response.finish_reasons": [str(final.chunk.finish_reason) for final in self.finals],
                "eyas.request.id": request.id,
            }
        )
        totals = [final.totals for final in self.finals if final.totals]
        stats = [one.stats for one in totals if one.stats]
        self.span.set_attributes(
            {
                "gen_ai.usage.cache_read.input_tokens": sum(one.num_cached_tokens for one in totals),
                "eyas.rounds": sum(one.num_rounds for one in stats),
                "eyas.accepted_tokens": sum(one.num_accepted for one in stats),
            }
        )
        if self.texts is not None:
            self.span.set_attributes({"eyas.prompt": str(self.prompt), "eyas.answer": "".join(self.texts)})

    @property
    def prompt(self) -> object:
        """What was asked: the text, or the token ids where it came as such."""
        return self.asked_text if self.asked_text is not None else list(self.call.request.prompt_ids)
