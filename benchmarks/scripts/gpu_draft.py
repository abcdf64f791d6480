"""Measures EAGLE-3 draft rounds at the head shapes of Llama 3 8B and 70B with random bfloat16 weights on a GPU, captured and
launched, against the time that reading the head takes. Writes a dated report: `python -m benchmarks.scripts.gpu_draft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.scripts.gpu_verify import COPIED_BYTES, NUM_WARM_UPS, copy_rate, cuda_device, median_ms
from eyas.bench.report import Report, Table, number
from eyas.config import DraftingConfig, TreeConfig
from eyas.draft_protocol import Commit, TreeBudget
from eyas.drafters.base import DraftContext
from eyas.drafters.eagle import EagleDrafter
from eyas.models.cuda.graphs import Capture, CudaCapture, Out
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle_config import EagleHeadConfig, HeadWiring, tensor_shapes
from eyas.request import NoiseKey
from eyas.tree import DraftTree

BATCHES = (1, 8, 32)
TEMPERATURES = (0.0, 1.0)
ACCEPTED = 4  # tokens that a round commits


@dataclass(frozen=True)
class Settings:
    """cached: tokens that each session has committed at first. repeats: measured rounds of each case."""

    tree: TreeConfig
    cached: int
    repeats: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Times:
    """Medians in ms of whole rounds: new pairs, all levels, finished trees on the host."""

    captured: float
    launched: float


@dataclass(frozen=True)
class Round:
    """Times by temperature. floor: ms that reading the head's weights once for each level takes, at the rate of a copy."""

    head: str
    batch: int
    floor: float
    greedy: Times
    noised: Times


def main(
    repeats: Annotated[int, typer.Option(help="Measured rounds of each case.")] = 20,
    cached: Annotated[int, typer.Option(help="Tokens that each session has committed at first.")] = 1100,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Draft rounds of depth 8 and width 10, at several batch sizes, greedy and with shared noise."""
    device = cuda_device()
    settings = Settings(TreeConfig(num_draft_tokens=60, num_steps=8, top_k=10), cached, repeats)
    rate = copy_rate(device, COPIED_BYTES)
    rounds: list[Round] = []
    for name, config in {"8B": llama_head(4096, 14336, 32), "70B": llama_head(8192, 28672, 64)}.items():
        rounds += measure(name, make_head(config, device), BATCHES, settings, rate)
        torch.cuda.empty_cache()
    program = "python -m benchmarks.scripts.gpu_draft"
    Report.here("gpu-draft", program, "cuda", settings, rounds, tables(rounds, rate)).publish(out)


def llama_head(hidden: int, intermediate: int, num_heads: int) -> EagleHeadConfig:
    """An EAGLE-3 head as wide as a Llama 3 of that hidden size, with the published draft vocabulary of 32,000."""
    return EagleHeadConfig(
        kind="eagle3", target_hidden=hidden, hidden=hidden, intermediate=intermediate, num_heads=num_heads, num_kv_heads=8,
        head_dim=128, num_layers=1, vocab_size=128256, draft_vocab_size=32000, rms_norm_eps=1e-5,
        rotary={"rope_type": "default", "rope_theta": 500000.0}, max_positions=8192, wiring=HeadWiring((2, 16, 29)),
    )  # fmt: skip


def make_head(config: EagleHeadConfig, device: torch.device) -> EagleHead:
    """A head with random bfloat16 weights, made where they will be used."""
    made: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name not in ("fc.weight", "d2t", "t2d"):
            made[name] = 0.02 * torch.randn(shape, dtype=torch.bfloat16, device=device)
    made["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device="cpu")
    embedding, lm_head = made.pop("embed_tokens.weight"), made["lm_head.weight"]
    return EagleHead(config, made, embedding, lm_head, config.max_positions).to(device)


def measure(name: str, head: EagleHead, batches: Sequence[int], settings: Settings, rate: float) -> list[Round]:
    """Every batch size, captured and launched; rate: bytes per second of memory."""
    device, rounds = head.embedding.device, []
    capture: Capture = CudaCapture(device) if device.type == "cuda" else run_again
    floor = 1e3 * settings.tree.num_steps * level_bytes(head) / rate
    with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
        for batch in progress.track(batches, description=f"measuring the {name} head"):
            greedy, noised = (
                Times(*(round_ms(head, batch, heat, settings, each) for each in (capture, None))) for heat in TEMPERATURES
            )
            rounds.append(Round(name, batch, floor, greedy, noised))
    return rounds


def run_again(run: Callable[[], Out]) -> Callable[[], Out]:
    """Runs the function instead of capturing it, without CUDA."""
    return run


def level_bytes(head: EagleHead) -> int:
    """Weights that a level reads: all but the embedding, whose reads are a few rows."""
    return sum(parameter.nbytes for parameter in head.parameters() if parameter is not head.embedding)


def round_ms(head: EagleHead, batch: int, temperature: float, settings: Settings, capture: Capture | None) -> float:
    """The median in ms of rounds that commit a few tokens for each session and ask for a tree."""
    commits = ACCEPTED * (settings.repeats + NUM_WARM_UPS)
    config = DraftingConfig(max_kv_tokens=batch * (settings.cached + commits))
    drafter = EagleDrafter(head, settings.tree, config, capture=capture)
    sessions = [Session(row, temperature, settings.tree, head) for row in range(batch)]
    drafter.propose([session.commit(settings.cached) for session in sessions])

    def draft() -> None:
        trees = drafter.propose([session.commit(ACCEPTED) for session in sessions])
        assert all(isinstance(tree, DraftTree) and tree.num_drafted > 0 for tree in trees), "a round made no tree"

    return median_ms(draft, head.embedding.device, settings.repeats)


class Session:
    """The commits of one session; all tokens are equal, and so are the feature rows of each commit."""

    def __init__(self, row: int, temperature: float, tree: TreeConfig, head: EagleHead) -> None:
        self._name, self._base = f"{row}", 0
        self._noise, self._budget = NoiseKey(row, temperature), TreeBudget(tree.num_draft_tokens, tree.num_steps)
        self._row = torch.randn(1, head.config.hidden, dtype=head.embedding.dtype, device=head.embedding.device)

    def commit(self, count: int) -> DraftContext:
        """The commit of `count` more tokens."""
        base, features = self._base, self._row.expand(count - (self._base == 0), -1)
        self._base += count
        return Commit(self._name, 0, base, (7,) * count, features, self._noise, self._budget)


def tables(rounds: Sequence[Round], rate: float) -> list[Table]:
    """The tables of the report."""
    note = (
        f"ms of a whole round. Floor: bytes of the head's weights, once for each level, over the copy rate, here "
        f"{rate / 1e12:.2f} TB/s; keys and values not counted. Captured: one graph; launched: kernel by kernel."
    )
    cases: Mapping[str, Callable[[Round], Times]] = {
        "Greedy": lambda each: each.greedy,
        "Temperature 1, shared noise": lambda each: each.noised,
    }
    columns = ("head", "batch", "floor", "captured", "over floor", "launched")
    return [
        Table(title, columns, tuple(_line(each, times(each)) for each in rounds), note) for title, times in cases.items()
    ]


def _line(each: Round, times: Times) -> tuple[str, ...]:
    numbers = (each.floor, times.captured, times.captured / each.floor, times.launched)
    return (each.head, f"{each.batch}", *map(number, numbers))


if __name__ == "__main__":
    typer.run(main)
