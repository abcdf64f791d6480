"""From the logits of a step to what each request gets: draw tokens at the nodes, then accept drafted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eyas.arrays import Ints
from eyas.device.transfer import download
from eyas.kernels.arguments import Draws
from eyas.kernels.by_device import sample
from eyas.sampling.acceptance import Details, DrawnRows, LogitRows, StepLogits, StepOutputs
from eyas.sampling.logit_rules import LogitRules, TokenMasks
from eyas.sampling.logprobs import compute_logprobs, drawn_logits, read_logprobs
from eyas.sampling.rejection import SiblingVerdicts, rejection_sample
from eyas.sampling.sharded import MAX_CANDIDATES

UNUSABLE_LOGITS = "the target gave logits that are not numbers; its weights or dtype do not work here"
NO_SAMPLES: Ints = np.zeros(0, np.int64)


def verify(
    batch: Sequence[LogitRows],
    rows: DrawnRows,
    output: StepLogits,
    rules: LogitRules,
    wait_for_masks: Callable[[], TokenMasks] = TokenMasks,
    meanwhile: Callable[[], object] = lambda: None,
    needs_samples: bool = True,
) -> StepOutputs:
    """Draw tokens at nodes and accept drafted ones, by the rule `rejection` in sampled trees and by `match` in others.

    Everything is computed on the device and comes back in one copy, so that the host waits for the device once.

    Args:
        batch: the requests of the step, in the order of their rows; empty if all of them want nothing but tokens.
        rows: where tokens are drawn.
        output: logits of all requests, or tokens of some.
        rules: what requests ask of their logits.
        wait_for_masks: returns the masks of grammars, which the host computes while the device computes the logits.
        meanwhile: other work of the host, called once before it waits.
        needs_samples: whether a token is needed at every node. Else kernels draw along accepted paths alone if they can.
    """
    vocab_size = output.logits.shape[1]
    if not batch:
        trees, draws = rows.trees, rows.draws
        if trees and not needs_samples:
            draws = draws.along(trees.above, trees.nodes.tokens)
        tokens = None if trees is None else tokens_of(output, draws)
        meanwhile()
        samples = NO_SAMPLES if tokens is None else download(tokens)[0].astype(np.int64)
        return _usable(StepOutputs.accepted(rows, samples), vocab_size)
    is_drawn = output.is_drawn or (False,) * len(batch)
    numbers = [number for number, drawn in enumerate(is_drawn) if not drawn]
    whole = [batch[number] for number in numbers]
    masks = wait_for_masks()
    logits = masks.applied(output.logits, whole)
    ruled = rules.applied(drawn_logits(whole, logits), whole, masks)
    is_here = np.repeat([not drawn for drawn in is_drawn], [each.num_drawn for each in batch])
    draws = rows.draws if is_here.all() else rows.draws.taken(np.flatnonzero(is_here))
    tokens = sample(ruled, draws)
    verdicts = rejection_sample(whole, ruled, draws)
    logprobs = compute_logprobs(whole, logits, tokens, verdicts)
    elsewhere = tokens[:0] if output.tokens is None else output.tokens
    meanwhile()
    own, cells, values, others = download(tokens, verdicts.cells, logprobs, elsewhere)
    samples = np.empty(len(is_here), np.int64)
    samples[is_here], samples[~is_here] = own, others
    outputs = accept_drafts(rows, samples, verdicts, cells.astype(np.int64), np.flatnonzero(is_here))
    pairs = zip(batch, outputs, strict=True) if masks.trees else ()
    cut = {number: masks.length(each.request.id, own.accepted) for number, (each, own) in enumerate(pairs)}
    if shorter := {number: length for number, length in cut.items() if length is not None}:
        outputs = outputs.shortened(shorter)
    return _with_details(numbers, whole, outputs, logits, masks, values)


def accept_drafts(rows: DrawnRows, samples: Ints, verdicts: SiblingVerdicts, cells: Ints, places: Ints) -> StepOutputs:
    """Apply the rule of each tree.

    Args:
        rows: where tokens were drawn.
        samples: drawn from the target, at each of N nodes.
        verdicts: on the children of sampled trees.
        cells: the cells of the verdicts, on the host.
        places: number of the node that each row is which the verdicts count, at most [N].
    """
    trees = rows.trees
    if trees is None or not verdicts.trees:
        return StepOutputs.accepted(rows, samples)
    names, wanted, emitted = trees.nodes.tokens.copy(), samples.copy(), samples.copy()
    for first, tree in verdicts.trees.items():
        own = slice(places[first], places[first] + len(tree))
        names[own], wanted[own] = np.arange(own.start, own.stop), -1
    for parent, children, line in zip(verdicts.parents, verdicts.children, cells.tolist(), strict=True):
        row = places[parent]
        passed = next((child for child, verdict in zip(children, line, strict=False) if verdict == 1), None)
        wanted[row] = -1 if passed is None else places[passed]
        emitted[row] = line[-1] if passed is None else trees.nodes.tokens[places[passed]]
    return StepOutputs.accepted(rows, samples, names, wanted, emitted)


def _usable(outputs: StepOutputs, vocab_size: int) -> StepOutputs:
    """Return the outputs, with an error for requests whose last token, `vocab_size`, stands for logits that are NaN."""
    if (outputs.tokens < vocab_size).all():
        return outputs
    accepted = [(number, output.accepted) for number, output in enumerate(outputs)]
    found = [number for number, own in accepted if own is not None and own.tokens[-1] >= vocab_size]
    return replace(outputs, details=dict.fromkeys(found, Details(error=UNUSABLE_LOGITS)))


def _with_details(
    numbers: Sequence[int],
    whole: Sequence[LogitRows],
    outputs: StepOutputs,
    logits: Tensor,
    masks: TokenMasks,
    logprobs: npt.NDArray[np.float64],
) -> StepOutputs:
    """Return the outputs with errors and log-probabilities.

    Args:
        numbers: of the requests in `whole` among all of the step.
        logits: of the rows of these requests [R, V].
        logprobs: as `compute_logprobs` gives them.
    """
    outputs = _usable(outputs, logits.shape[1])
    details = dict(outputs.details)
    accepted = [outputs[number].accepted for number in numbers]
    reported = read_logprobs(whole, accepted, logprobs)
    end = 0
    for number, rows, own, (prompt, values) in zip(numbers, whole, accepted, reported, strict=True):
        start, end = end, end + len(rows.prompt_tokens) + rows.num_drawn
        error = masks.error(rows.request.id, own)
        if error and not (number in details and bool(logits[start:end].isnan().any())):
            details[number] = Details(error=error, is_invalid=True)
        elif number not in details and (prompt or values):
            details[number] = Details(values, prompt)
    return replace(outputs, details=details)


def can_draw_in_parts(rows: LogitRows) -> bool:
    """Return whether parts of the vocabulary can be drawn from apart at these rows, with small exchanges between them.

    Large top-k, log-probabilities, grammars, penalties, biases, bans and the rule `rejection` need whole rows.
    """
    key = rows.request.noise_key
    is_sampled = rows.tree is not None and rows.tree.sampled is not None
    needs_rows = key.temperature > 0 and key.top_k > MAX_CANDIDATES
    return rows.request.wants_tokens_alone and not (needs_rows or is_sampled or rows.prompt_tokens)


def tokens_of(output: StepLogits, draws: Draws) -> Tensor:
    """Return the tokens of a step whose requests ask for nothing but a draw at each row, on the target's device."""
    return sample(output.logits, draws) if output.tokens is None else output.tokens
