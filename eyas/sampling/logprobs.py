"""Log-probabilities of tokens, as requests ask for them with `logprobs` and `prompt_logprobs`.

They come from the raw logits, before biases, penalties, temperature and filters, as clients of OpenAI's API and of vLLM
expect. Tokens that a grammar does not allow have no probability and are not reported.

Legend: N drawn rows of a step, R all rows of its logits, V vocabulary, k reported tokens, T trees, L levels of the deepest
tree with the root's, A reported positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.api.request import TokenLogprob
from eyas.arrays import Ints
from eyas.device.transfer import upload
from eyas.kernels.by_device import rank
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import Accepted, LogitRows
from eyas.sampling.rejection import SiblingVerdicts

# Rows that are ranked at once: a long prompt must not need its own size of temporary tensors.
BLOCK = 64


def compute_logprobs(batch: Seq[LogitRows], logits: Tensor, samples: Tensor, verdicts: SiblingVerdicts) -> Tensor:
    """Compute on the device what `read_logprobs` turns into values, without waiting for it.

    Args:
        batch: the requests of the step, in the order of their rows.
        logits: all rows of the step [R, V].
        samples: the target's sample at every drawn row, int64 [N].
        verdicts: of the trees that the rule `rejection` decides.

    Returns float64 [A, 1 + 2 k]: the token's log-probability, those of the k likeliest tokens, and their ids. First come the
    prompt tokens, then L rows for each request that asked for its output.
    """
    device = logits.device
    asking = [rows for rows in batch if rows.prompt_tokens or rows.request.sampling.logprobs is not None]
    if not asking:
        return torch.zeros(0, 1, dtype=torch.float64, device=device)
    wanted = [upload(_prompt_rows(rows, start), device) for rows, start in _with_starts(batch) if rows.prompt_tokens]
    if any(map(_reports_output, batch)):
        wanted.append(_path_rows(batch, samples, verdicts))
    if not wanted:
        return torch.zeros(0, 1, dtype=torch.float64, device=device)
    k = max(max(_num_prompt_top(rows) if rows.prompt_tokens else 0, _num_top(rows)) for rows in batch)
    computed = []
    for row, token in torch.split(torch.cat(wanted, 1), BLOCK, 1):
        scores = torch.log_softmax(logits[row], dim=-1)
        chosen, top = scores.gather(-1, token.clamp(max=logits.shape[1] - 1)[:, None]), rank(scores, k)
        computed.append(torch.cat([chosen.double(), top.scores.double(), top.ids.double()], 1))
    return torch.cat(computed)


def read_logprobs(
    batch: Seq[LogitRows], accepted: Seq[Accepted | None], computed: npt.NDArray[np.float64]
) -> list[tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]]:
    """Turn what `compute_logprobs` gave, once it is on the host, into the values of each request: of
    `LogitRows.prompt_tokens`, and of the accepted tokens."""
    if not len(computed):
        return [((), ())] * len(batch)
    lines = iter(computed.tolist())
    prompts = [tuple(_entry(token, next(lines), _num_prompt_top(rows)) for token in rows.prompt_tokens) for rows in batch]
    levels = 1 + max((rows.tree.depth for rows in batch if rows.tree and _reports_output(rows)), default=0)
    outputs = []
    for rows, outcome in zip(batch, accepted, strict=True):
        path = [next(lines) for _ in range(levels)] if _reports_output(rows) else []
        tokens = outcome.tokens if outcome is not None else ()
        outputs.append(tuple(_entry(token, line, _num_top(rows)) for token, line in zip(tokens, path, strict=False)))
    return list(zip(prompts, outputs, strict=True))


def drawn_logits(batch: Seq[LogitRows], logits: Tensor) -> Tensor:
    """Return the rows of a step's logits [R, V] at which a token is drawn [N, V]: all but those of prompt tokens."""
    asking = [rows for rows in batch if rows.prompt_tokens]
    if not asking:
        return logits
    firsts = [(rows, start + len(rows.prompt_tokens)) for rows, start in _with_starts(batch)]
    wanted = [row for rows, first in firsts for row in range(first, first + rows.num_drawn)]
    return logits[upload(wanted, logits.device)]


def accepted_paths(trees: Mapping[int, DraftTree], samples: Tensor, verdicts: SiblingVerdicts) -> tuple[Tensor, Tensor]:
    """Walk at least one tree on the device as `StepOutputs.accepted` does on the host.

    Returns the drawn row of each accepted node of a tree, the last one repeated, and what is emitted after it; both int64
    [T, L].

    Every node gets a pointer to the first of its children that passed, or to itself; L - 1 steps along the pointers walk
    all trees at once. Does not wait for the device.

    Args:
        trees: by the drawn row of the root. Log-probabilities of a path must be computed before its tokens reach the host,
            because a step waits for the device only once.
        samples: the target's samples, int64 [N].
    """
    size, width, device = len(samples), verdicts.cells.shape[1], samples.device
    # `values` holds the samples, then the verdicts. By row: where the verdicts on its children begin, and its bonus.
    first_verdict = {row: size + family * width for family, row in enumerate(verdicts.parents)}
    bonus, drafted = np.arange(size), np.zeros(size, dtype=np.int64)
    bonus[list(first_verdict)] = [first + width - 1 for first in first_verdict.values()]
    for start, tree in trees.items():
        drafted[start : start + len(tree)] = tree.tokens
    nodes = np.concatenate([_nodes(tree, start, first_verdict) for start, tree in trees.items()], axis=1)
    rows, parents, cells, passing = upload(nodes, device)
    values = torch.cat([samples, verdicts.cells.flatten()])
    first = torch.full_like(samples, size)
    first.scatter_reduce_(0, parents, torch.where(values[cells] == passing, rows, size), "amin")
    following = torch.where(first < size, first, torch.arange(size, device=device))
    ends, guesses = upload(np.stack([bonus, drafted]), device)
    emitted = torch.where(first < size, guesses[following], values[ends])
    path = [upload(list(trees), device)]
    for _ in range(max(tree.depth for tree in trees.values())):
        path.append(following[path[-1]])
    walked = torch.stack(path, 1)
    return walked, emitted[walked]


def _nodes(tree: DraftTree, start: int, first_verdict: Mapping[int, int]) -> Ints:
    """Return, for each drafted node, its row, its parent's row, the value that decides on it, and that value if it passes
    [4, n].

    A node's verdict decides on it, or its parent's sample if the tree has no verdicts.
    """
    columns = []
    for parent, children in tree.families.items():
        first = first_verdict.get(start + parent)
        for order, child in enumerate(children):
            decides = (start + parent, tree.tokens[child]) if first is None else (first + order, 1)
            columns.append((start + child, start + parent, *decides))
    return np.array(columns, dtype=np.int64).reshape(-1, 4).T


def _with_starts(batch: Seq[LogitRows]) -> Iterator[tuple[LogitRows, int]]:
    """Yield each request's rows with the first of them in the step's logits."""
    start = 0
    for rows in batch:
        yield rows, start
        start += len(rows.prompt_tokens) + rows.num_drawn


def _prompt_rows(rows: LogitRows, start: int) -> Ints:
    """Return the rows of the logits and the prompt tokens that they predict, [2, A]."""
    return np.stack([np.arange(start, start + len(rows.prompt_tokens)), np.array(rows.prompt_tokens, dtype=np.int64)])


def _path_rows(batch: Seq[LogitRows], samples: Tensor, verdicts: SiblingVerdicts) -> Tensor:
    """Return rows of the logits and the tokens drawn there, along the accepted path of each request that asked, [2, A]."""
    trees: dict[int, DraftTree] = {}
    num_prompt_rows: list[int] = []
    drawn = 0
    for rows, start in _with_starts(batch):
        if rows.tree is not None and _reports_output(rows):
            trees[drawn] = rows.tree
            num_prompt_rows.append(start + len(rows.prompt_tokens) - drawn)
        drawn += rows.num_drawn
    walked, emitted = accepted_paths(trees, samples, verdicts)
    return torch.stack([walked + upload(num_prompt_rows, samples.device)[:, None], emitted]).flatten(1)


def _reports_output(rows: LogitRows) -> bool:
    return rows.request.sampling.logprobs is not None and rows.tree is not None


def _num_top(rows: LogitRows) -> int:
    return rows.request.sampling.logprobs or 0


def _num_prompt_top(rows: LogitRows) -> int:
    return rows.request.sampling.prompt_logprobs or 0


def _entry(token: int, line: Seq[float], num_top: int) -> TokenLogprob:
    """Return a line of `compute_logprobs`, cut to as many likeliest tokens as the request asked for."""
    k = len(line) // 2
    top = [logprob for logprob in line[1 : 1 + num_top] if logprob > -math.inf]
    return TokenLogprob(token, line[0], tuple(map(int, line[1 + k : 1 + k + len(top)])), tuple(top))
