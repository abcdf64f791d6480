"""From the logits of a step to what each request gets: draw a token at every node, then accept drafted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eyas.device.transfer import Ints, download
from eyas.kernels.arguments import Draw, Draws
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted, LogitRows, StepOutput, TreeOutputs, VerifyOutput, accept
from eyas.sampling.logit_rules import LogitRules, TokenMasks
from eyas.sampling.logprobs import compute_logprobs, drawn_rows, read_logprobs
from eyas.sampling.packed_trees import PackedTrees
from eyas.sampling.rejection import rejection_sample
from eyas.sampling.sampler import MAX_CANDIDATES, sample

UNUSABLE_LOGITS = "the target gave logits that are not numbers; its weights or dtype do not work here"


def nothing() -> None:
    """What the host does meanwhile, by default."""


def verify(
    batch: Sequence[LogitRows],
    output: StepOutput,
    rules: LogitRules,
    wait_for_masks: Callable[[], TokenMasks] = TokenMasks,
    meanwhile: Callable[[], None] = nothing,
    trees: PackedTrees | None = None,
) -> Sequence[VerifyOutput]:
    """Draw a token at every node and accept drafted ones, by the rule `rejection` in sampled trees and by `match` in others.

    batch: the requests of the step, in the order of their rows. output: logits of all of them, or tokens of some.
    wait_for_masks: returns the masks of grammars, which the host computes while the device computes the logits.
    meanwhile: other work of the host, called once before it waits. trees: those of the batch, if every request has one and
    they are packed; outputs are then found for all at once, unless some request asks for more than tokens.
    Everything is computed on the device and comes back in one copy, so that the host waits for the device once.
    """
    if output.tokens is None:
        return _verify_logits(batch, output.logits, rules, wait_for_masks(), None, meanwhile, trees)[0]
    kinds = list(zip(batch, output.is_drawn, strict=True))
    whole, drawn = ([rows for rows, is_drawn in kinds if is_drawn == kind] for kind in (False, True))
    outputs, tokens = _verify_logits(whole, output.logits, rules, wait_for_masks(), output.tokens, meanwhile)
    of_whole = iter(outputs)
    of_drawn = iter(_verify_tokens([rows.tree for rows in drawn], tokens, output.logits.shape[1]))
    return [next(of_drawn if is_drawn else of_whole) for is_drawn in output.is_drawn]


def verify_trees(
    trees: PackedTrees, draws: Draws, output: StepOutput, meanwhile: Callable[[], None] = nothing
) -> Sequence[VerifyOutput]:
    """`verify` of deterministic trees of requests that want tokens alone, for all at once.

    draws: at all nodes. output: logits of all of them, or tokens of all. meanwhile: as for `verify`.
    """
    tokens = sample(output.logits, draws) if output.tokens is None else output.tokens
    meanwhile()
    return _verify_packed(trees, download(tokens)[0].astype(np.int64), output.logits.shape[1])


def can_draw_in_parts(rows: LogitRows) -> bool:
    """Whether parts of the vocabulary can be drawn from apart at these rows, with small exchanges between them.

    Large top-k, log-probabilities, grammars, penalties, biases, bans and the rule `rejection` need whole rows.
    """
    key = rows.request.noise_key
    is_sampled = rows.tree is not None and rows.tree.sampled is not None
    needs_rows = key.temperature > 0 and key.top_k > MAX_CANDIDATES
    return rows.request.wants_tokens_alone and not (needs_rows or is_sampled or rows.prompt_tokens)


def tokens_of(output: StepOutput, draws: Sequence[Draw]) -> list[int]:
    """The tokens of a step whose requests ask for nothing but a draw at each row."""
    tokens: list[int] = (sample(output.logits, draws) if output.tokens is None else output.tokens).tolist()
    return tokens


def _verify_packed(trees: PackedTrees, drawn: Ints, vocab_size: int) -> Sequence[VerifyOutput]:
    """`_verify_tokens`, all at once where no logits are NaN."""
    if (drawn < vocab_size).all():
        return TreeOutputs(trees, drawn)
    return _verify_tokens(trees.batch.trees(), drawn, vocab_size)


def _verify_tokens(trees: Sequence[DraftTree | None], drawn: Ints, vocab_size: int) -> list[VerifyOutput]:
    """The outputs of requests that ask for nothing but the tokens that are drawn, by the rule `match`. A token `vocab_size`
    stands for logits that are NaN. trees: of each request; None inside a prompt."""
    outputs, end, tokens = list[VerifyOutput](), 0, drawn.tolist()
    for tree in trees:
        start, end = end, end + (0 if tree is None else len(tree))
        samples = tuple(tokens[start:end])
        accepted = None if tree is None else accept(tree, samples)
        if accepted is not None and accepted.tokens[-1] >= vocab_size:
            outputs.append(VerifyOutput(accepted, error=UNUSABLE_LOGITS))
        else:
            outputs.append(VerifyOutput(accepted, samples))
    return outputs


def _verify_logits(
    batch: Sequence[LogitRows],
    logits: Tensor,
    rules: LogitRules,
    masks: TokenMasks,
    drawn: Tensor | None,
    meanwhile: Callable[[], None],
    trees: PackedTrees | None = None,
) -> tuple[Sequence[VerifyOutput], Ints]:
    """The outputs of requests whose logits [R, V] are there. `drawn`: tokens of others, to be copied with them."""
    logits = masks.applied(logits, batch)
    ruled = rules.applied(drawn_rows(batch, logits), batch, masks)
    draws = _draws(batch)
    tokens = sample(ruled, draws)
    verdicts = rejection_sample(batch, ruled, draws)
    others, logprobs = tokens[:0] if drawn is None else drawn, compute_logprobs(batch, logits, tokens, verdicts)
    is_bare = not (masks.trees or masks.errors or verdicts.trees or len(logprobs))
    meanwhile()
    for rows in () if is_bare and trees is not None else batch:
        if rows.tree is not None:
            rows.tree.guesses  # noqa: B018  the walk down the tree reads them
    on_host = download(tokens, verdicts.cells, logprobs, others)
    drawn_here, drawn_elsewhere = on_host[0].astype(np.int64), on_host[3].astype(np.int64)
    if is_bare and trees is not None:
        return _verify_packed(trees, drawn_here, logits.shape[1]), drawn_elsewhere
    if is_bare:
        return _verify_tokens([rows.tree for rows in batch], drawn_here, logits.shape[1]), drawn_elsewhere
    samples = drawn_here.tolist()
    rejected = verdicts.accepted(on_host[1].astype(int).tolist(), samples)
    return _verify_whole(batch, logits, masks, samples, rejected, on_host[2]), drawn_elsewhere


def _draws(batch: Sequence[LogitRows]) -> Draws:
    positions = [rows.positions for rows in batch]
    at = np.array(list(chain.from_iterable(positions)), dtype=np.int64)
    return Draws([rows.request.noise_key for rows in batch], list(map(len, positions)), at)


def _verify_whole(
    batch: Sequence[LogitRows],
    logits: Tensor,
    masks: TokenMasks,
    samples: Sequence[int],
    rejected: Mapping[int, Accepted],
    logprobs: npt.NDArray[np.float64],
) -> list[VerifyOutput]:
    """The outputs of requests that may have masks, trees of the rule `rejection`, or log-probabilities.

    samples: of all drawn rows. rejected: outcomes of that rule, by the drawn row of the root. logprobs: of
    `compute_logprobs`.
    """
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
    reported = read_logprobs(batch, accepted, logprobs)
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
