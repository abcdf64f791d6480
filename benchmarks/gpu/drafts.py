"""EAGLE-3 draft rounds at the head shapes of Llama 3, captured and launched, and their cost table.

Weights are random bfloat16 ones. The floor of a round is the time that reading the head takes once for each level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.measuring import NUM_WARM_UPS, Part, Rates, Scale, median_ms
from benchmarks.gpu.steps import device_name
from eyas.bench.report import Table, number
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.eagle import EagleDrafter
from eyas.emulation.costs import DeviceCosts, PassCosts
from eyas.models.backends.cuda_graphs import Capture, CudaCapture, Out
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle_config import EagleHeadConfig, tensor_shapes
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree

TEMPERATURES = (0.0, 1.0)
ACCEPTED = 4  # tokens that a round commits
TREE = TreeConfig(num_draft_tokens=60, top_k=10)


@dataclass(frozen=True)
class Times:
    """Medians in ms of whole rounds: new pairs, all levels, finished trees on the host."""

    captured: float
    launched: float


@dataclass(frozen=True)
class Round:
    """Times by temperature.

    Attributes:
        floor: ms that reading the head's weights once for each level takes, at the rate of a copy.
        one_level: ms of a captured greedy round of a single level.
    """

    head: str
    sessions: int
    floor: float
    greedy: Times
    noised: Times
    one_level: float


def measure(device: torch.device, scale: Scale, rates: Rates, part: Part) -> None:
    """Every head, captured and launched, with its cost table."""
    part.results = list[Round]()
    part.waiting = [f"{name}, {sessions} sessions" for name in scale.heads for sessions in scale.sessions]
    try:
        for name, config in scale.heads.items():
            measure_head(name, make_head(config, device), scale, rates, part)
            rounds = [each for each in part.results if each.head == name]
            part.costs.append(cost_table(name, rounds, scale, device))
            torch.cuda.empty_cache()
    finally:
        part.tables = tables(part.results, rates)


def make_head(config: EagleHeadConfig, device: torch.device) -> EagleHead:
    """Return a head with random bfloat16 weights, made where they will be used."""
    made: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name not in ("fc.weight", "d2t", "t2d"):
            made[name] = 0.02 * torch.randn(shape, dtype=torch.bfloat16, device=device)
    made["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device="cpu")
    embedding, lm_head = made.pop("embed_tokens.weight"), made["lm_head.weight"]
    return EagleHead(config, made, embedding, lm_head, config.max_positions).to(device)


def measure_head(name: str, head: EagleHead, scale: Scale, rates: Rates, part: Part) -> None:
    """Every number of sessions."""
    device = head.embedding.device
    capture: Capture = CudaCapture(device) if device.type == "cuda" else run_again
    tree = replace(TREE, num_steps=scale.num_steps)
    floor = rates.floor_ms(tree.num_steps * level_bytes(head))
    for sessions in scale.sessions:
        with part.case(f"{name}, {sessions} sessions"):
            greedy, noised = (
                Times(*(round_ms(head, sessions, heat, tree, scale, each) for each in (capture, None)))
                for heat in TEMPERATURES
            )
            one_level = round_ms(head, sessions, 0.0, replace(tree, num_steps=1), scale, capture)
            part.results.append(Round(name, sessions, floor, greedy, noised, one_level))


def run_again(run: Callable[[], Out]) -> Callable[[], Out]:
    """Runs the function instead of capturing it, without CUDA."""
    return run


def level_bytes(head: EagleHead) -> int:
    """Return the weights that a level reads: all but the embedding, whose reads are a few rows."""
    return sum(parameter.nbytes for parameter in head.parameters() if parameter is not head.embedding)


def round_ms(
    head: EagleHead, count: int, temperature: float, tree: TreeConfig, scale: Scale, capture: Capture | None
) -> float:
    """Return the median in ms of rounds that commit a few tokens for each of `count` sessions and ask for a tree."""
    commits = ACCEPTED * (scale.repeats + NUM_WARM_UPS)
    config = DraftingConfig(max_kv_tokens=count * (scale.cached + commits))
    drafter = EagleDrafter(head, tree, config, capture=capture)
    sessions = [Session(row, temperature, tree, head) for row in range(count)]
    drafter.propose([session.commit(scale.cached) for session in sessions])

    def draft() -> None:
        trees = drafter.propose([session.commit(ACCEPTED) for session in sessions])
        assert all(isinstance(tree, DraftTree) and tree.num_drafted > 0 for tree in trees), "a round made no tree"

    return median_ms(draft, head.embedding.device, scale.repeats)


def cost_table(name: str, rounds: Sequence[Round], scale: Scale, device: torch.device) -> DeviceCosts:
    """Return what emulation and planning read: the first pass of a round by its new rows, a further level by its rows."""
    levels = [max(0.0, each.greedy.captured - each.one_level) / max(1, scale.num_steps - 1) for each in rounds]
    first = PassCosts(tuple(ACCEPTED * each.sessions for each in rounds), tuple(each.one_level for each in rounds))
    further = PassCosts(tuple(TREE.top_k * each.sessions for each in rounds), tuple(levels))
    passes = {"draft_round": first, "draft_level": further}
    return DeviceCosts(device_name(device), f"{name}, bfloat16", "measured", passes)  # type: ignore[arg-type]


class Session:
    """The commits of one session; all tokens are equal, and so are the feature rows of each commit."""

    def __init__(self, row: int, temperature: float, tree: TreeConfig, head: EagleHead) -> None:
        self._name, self._base = f"{row}", 0
        self._noise, self._budget = NoiseKey(row, temperature), TreeBudget(tree.num_draft_tokens, tree.num_steps)
        self._row = torch.randn(1, head.config.hidden, dtype=head.embedding.dtype, device=head.embedding.device)

    def commit(self, count: int) -> DraftContext:
        """Return the commit of `count` more tokens."""
        base, features = self._base, self._row.expand(count - (self._base == 0), -1)
        self._base += count
        return Commit(self._name, 0, base, (7,) * count, features, self._noise, self._budget)


def tables(rounds: Sequence[Round], rates: Rates) -> list[Table]:
    """Return one table for each temperature."""
    note = (
        f"ms of a whole round. Floor: bytes of the head's weights, once for each level, over {rates.bytes / 1e12:.2f} TB/s; "
        "keys and values not counted. Captured: one graph; launched: kernel by kernel."
    )
    cases: Mapping[str, Callable[[Round], Times]] = {
        "Draft rounds, greedy": lambda each: each.greedy,
        "Draft rounds, temperature 1, shared noise": lambda each: each.noised,
    }
    columns = ("head", "sessions", "floor", "captured", "over floor", "launched", "one level, greedy")
    return [
        Table(title, columns, tuple(_line(each, times(each)) for each in rounds), note) for title, times in cases.items()
    ]


def _line(each: Round, times: Times) -> tuple[str, ...]:
    numbers = (each.floor, times.captured, times.captured / each.floor, times.launched, each.one_level)
    return (each.head, f"{each.sessions}", *map(number, numbers))
