"""How a service tells of itself: given as settings, checked where they are constructed. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from eyas.errors import ConfigError

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class TelemetryConfig:
    """Metrics, traces and logs of one service. Where OTLP goes to is said by the usual OTEL_* environment variables.

    metrics_host, metrics_port: where Prometheus finds /metrics; port 0 takes a free one, none serves nothing.
    round_span_ratio: share of the rounds of a traced request that get spans of their own, on verifier and drafter.
    log_format: "text" or "json", one line per event. log_prompts: let prompts and their answers into logs and traces.
    """

    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    round_span_ratio: float = 0.01
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; it must lie in [0, 65535], or be null for no metrics")
        if not 0 <= self.round_span_ratio <= 1:
            raise ConfigError(f"round_span_ratio is {self.round_span_ratio}; it must lie in [0, 1]")
        if self.log_format not in get_args(LogFormat):
            raise ConfigError(f"log_format is {self.log_format!r}; it must be one of {', '.join(get_args(LogFormat))}")
