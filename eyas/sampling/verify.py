"""From the logits of a step to what each request gets: draw a token at every node, then accept drafted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from eyas.sampling.acceptance import Accepted, LogitRows, VerifyOutput, accept
from eyas.sampling.logprobs import compute_logprobs, drawn_rows, read_logprobs
from eyas.sampling.penalties import LogitRules
from eyas.sampling.rejection import rejection_sample
from eyas.sampling.sampler import Draw, sample
from eyas.sampling.token_masks import TokenMasks
from eyas.tensors import download

UNUSABLE_LOGITS = "the target gave logits that are not numbers; its weights or dtype do not work here"


def verify(
    batch: Sequence[LogitRows], logits: Tensor, rules: LogitRules, wait_for_masks: Callable[[], TokenMasks] = TokenMasks
) -> list[VerifyOutput]:
    """Draw a token at every node and accept drafted ones, by the rule `rejection` in sampled trees and by `match` in others.

    batch: the requests of the step, in the order of their rows. logits: float32 [R, V] of all of them.
    wait_for_masks: returns the masks of grammars, which the host computes while the device computes the logits.
    Everything is computed on the device and comes back in one copy, so that the host waits for the device once.
    """
    masks = wait_for_masks()
    logits = masks.applied(logits, batch)
    ruled = rules.applied(drawn_rows(batch, logits), batch, masks)
    draws = [Draw(rows.request.noise_key, position) for rows in batch for position in rows.positions]
    tokens = sample(ruled, draws)
    verdicts = rejection_sample(batch, ruled, draws)
    on_host = download(tokens, verdicts.cells, compute_logprobs(batch, logits, tokens, verdicts))
    samples: list[int] = on_host[0].astype(int).tolist()
    rejected = verdicts.accepted(on_host[1].astype(int).tolist(), samples)

    accepted: list[Accepted | None] = []
    sampled: list[tuple[int, ...]] = []
    row = 0
    for rows in batch:
        sampled.append(tuple(samples[row : row + len(rows.positions)]))
        if rows.tree:
            accepted.append(masks.cut(rows.request.id, rejected.get(row) or accept(rows.tree, sampled[-1])))
        else:
            accepted.append(None)
        row += len(rows.positions)
    reported = read_logprobs(batch, accepted, on_host[2])
    outputs, start = [], 0
    for rows, of_request, own, (prompt, output) in zip(batch, accepted, sampled, reported, strict=True):
        end = start + len(rows.prompt_tokens) + len(rows.positions)
        error = masks.error(rows.request.id, of_request)
        is_unusable = of_request is not None and of_request.tokens[-1] >= logits.shape[1]  # stands for logits that are NaN
        if is_unusable and (not error or bool(logits[start:end].isnan().any())):
            outputs.append(VerifyOutput(of_request, error=UNUSABLE_LOGITS))
        elif error:
            outputs.append(VerifyOutput(of_request, error=error, is_invalid=True))
        else:
            outputs.append(VerifyOutput(of_request, own, output, prompt))
        start = end
    return outputs
