"""What comes of a step's logits: accepted tokens by either rule, and what is told of them. Waits for the device once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from eyas.engine.draft_manager import noise_key
from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import Accepted, accept
from eyas.sampling.logprobs import ReportedLogprobs, answered, drawn_rows, told
from eyas.sampling.penalties import LogitRules
from eyas.sampling.rejection import rejection_sample
from eyas.sampling.sampler import Draw, sample
from eyas.tensors import download
from eyas.tree import DraftTree


@dataclass(frozen=True)
class AcceptanceResult:
    """accepted: of each work; None for a prompt chunk that is not the last. told: log-probabilities, by request id."""

    accepted: Sequence[Accepted | None]
    told: Mapping[str, ReportedLogprobs]


def accept_batch(works: Sequence[ScheduledSequence], logits: Tensor, rules: LogitRules) -> AcceptanceResult:
    """Draw a token at every node and walk every tree; logits float32 [R, V] of all wanted rows.

    All is computed on the device, whatever the works ask, and comes back in one copy.
    """
    drawn = rules.applied(drawn_rows(logits, works), works)
    draws = [Draw(noise_key(work.sequence.request), position) for work in works for position in work.drawn]
    tokens = sample(drawn, draws)
    trials = rejection_sample(works, drawn, draws)
    samples, verdicts, answers = download(tokens, trials.verdicts, answered(logits, works, tokens, trials))
    ids: list[int] = samples.astype(int).tolist()
    accepted = _accept(works, ids, trials.accepted(verdicts.astype(int).tolist(), ids), logits.shape[1])
    return AcceptanceResult(accepted, told(works, accepted, answers))


def _accept(
    works: Sequence[ScheduledSequence], tokens: Sequence[int], tried: Mapping[int, Accepted], vocab_size: int
) -> list[Accepted | None]:
    """Walk every tree with its own samples, but for the `tried` ones, by the row of their root. A sample outside the
    vocabulary stands for logits that are not numbers: it fails its sequence."""
    accepted: list[Accepted | None] = []
    row = 0
    for work in works:
        samples = tuple(tokens[row : row + len(work.drawn)])
        tree = work.tree or DraftTree.root_only(work.sequence.tokens[-1])
        outcome = (tried.get(row) or accept(tree, samples)) if samples else None
        if outcome is not None and outcome.tokens[-1] >= vocab_size:
            work.sequence.failure = "the target gave logits that are not numbers; its weights or dtype do not work here"
        accepted.append(outcome)
        work.sequence.samples = samples if work.tree is not None else ()
        row += len(samples)
    return accepted
