"""Follows the grammars of running requests: masks for every node of a draft tree, trees without what a grammar rejects.

The state of a grammar is that of the committed tokens. Preemption does not touch it, and a request that comes from another
engine is followed again from its emitted tokens. Masks are computed in threads while the target computes the logits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeVar

from eyas.bounded_calls import BoundedCalls, Call
from eyas.drafters.base import Path
from eyas.engine.sequence import DraftReply
from eyas.errors import InvalidRequest
from eyas.grammar import Grammar, Matcher, TokenBits, bits_of
from eyas.request import Request
from eyas.sampling.acceptance import LogitRows
from eyas.sampling.token_masks import NodeMask, TokenMasks, TreeMasks
from eyas.tree import DraftTree, SampledProposal

ResultT = TypeVar("ResultT")

# Processor time that a tree may take, to prune it and for its masks. A slow grammar gets smaller trees, at worst none.
TREE_SECONDS = 0.05
# Processor time that one request may take of a step, beyond which it ends; and to follow the output that it brings along.
STEP_SECONDS, FOLLOW_SECONDS = 0.4, 2.0
# Time of a level of a growing tree that may go to masks, of all sessions together.
LEVEL_SECONDS = 0.003
# Weight of the latest mask in the mean time of a request's masks.
_RATE = 0.2
_CANNOT_FOLLOW = "structured_outputs does not match the tokens that the request brought along as its output"
_TOO_SLOW = f"structured_outputs takes too much work to follow (more than {STEP_SECONDS} s for a token); simplify it"


class GrammarManager:
    """The grammars of running requests. outputs: by request id. Not safe for use from several threads."""

    def __init__(self, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self.outputs: dict[str, FollowedOutput] = {}
        self._num_threads = min(4, os.cpu_count() or 1)
        self._calls = BoundedCalls(self._num_threads, "grammar")

    def followed(self, request: Request, grammar: Grammar) -> FollowedOutput:
        """A request's output from its first token on. Raises InvalidRequest if output that it brings does not match."""
        ends = frozenset(request.sampling.stop_token_ids)
        soft = ends if request.sampling.ignore_eos else ends | self._eos_ids
        start = len(request.prompt_ids) - request.num_emitted
        output = FollowedOutput(
            grammar,
            num_before=start,
            ends=ends | self._eos_ids,
            end_bits=bits_of(sorted(soft), self._vocab_size),
            last_bits=bits_of(sorted(ends | self._eos_ids), self._vocab_size),
        )
        output.restart(request.prompt_ids)
        return output

    def add(self, request_id: str, output: FollowedOutput) -> None:
        """Keep the output of a request until it is released."""
        self.outputs[request_id] = output

    def release(self, request_ids: Seq[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self.outputs.pop(request_id, None)

    def prune(self, replies: Iterable[DraftReply], max_nodes: Mapping[str, int]) -> list[DraftReply]:
        """Replies with the trees that the grammars leave, with the text that they force put in.

        max_nodes: by request id, nodes of its largest tree in this step, the root included.
        """
        pruned = []
        for reply in replies:
            request_id, tokens = reply.sequence.request.id, reply.sequence.tokens
            output, most = self.outputs.get(request_id), max_nodes.get(request_id, 1)
            if output is None or most <= 1 or reply.sequence.prefilling:
                pruned.append(reply)
                continue
            tree = reply.tree or DraftTree.root_only(tokens[-1])
            tree = output.pruned(tokens, tree, most, reply.sequence.num_remaining - 1)
            pruned.append(replace(reply, tree=tree, is_edited=tree is not reply.tree))
        return pruned

    def root_masks(self, tokens_of: Mapping[str, Seq[int]]) -> dict[str, bytes]:
        """By request id, bits of the tokens that may follow the committed ones; only of requests with a grammar.

        The next step uses them again.
        """
        followed = {id_: (self.outputs[id_], tokens) for id_, tokens in tokens_of.items() if id_ in self.outputs}
        calls = {id_: self._calls.submit(output.root_mask, tokens) for id_, (output, tokens) in followed.items()}
        return {request_id: root.bits.tobytes() for request_id, root in self._collect(calls, {}).items()}

    def path_masks(self, paths: Mapping[str, Seq[Path]]) -> Callable[[], Mapping[str, Seq[TokenBits | None]]]:
        """Implements PathMasks: sessions beyond what there is time for get none.

        Valid between `root_masks` and the next step.
        """
        spare, calls = LEVEL_SECONDS * self._num_threads, {}
        for request_id, own in paths.items():
            output = self.outputs.get(request_id)
            if output is not None and spare > 0:
                spare -= output.seconds * len(own)
                calls[request_id] = self._calls.submit(output.path_masks, own)
        return lambda: self._collect(calls, {})

    def start(self, batch: Iterable[LogitRows]) -> Callable[[], TokenMasks]:
        """Start to compute the masks of a step. Returns a function that waits for them."""
        calls = {}
        for rows in batch:
            output = self.outputs.get(rows.request.id)
            if output is not None and rows.tree is not None:
                calls[rows.request.id] = self._calls.submit(output.masks, rows.tokens, rows.tree)

        def wait() -> TokenMasks:
            errors: dict[str, str] = {}
            return TokenMasks(self._collect(calls, errors), errors)

        return wait

    def _collect(self, calls: Mapping[str, Call[ResultT]], errors: dict[str, str]) -> dict[str, ResultT]:
        """The results by request id; what has none is in `errors`. A late call ends its request in the next masks too."""
        results = dict[str, ResultT]()
        for request_id, call in calls.items():
            try:
                results[request_id] = self._calls.result(call, STEP_SECONDS)
            except TimeoutError:
                errors[request_id] = self.outputs[request_id].failed = _TOO_SLOW
            except InvalidRequest as error:
                errors[request_id] = str(error)
        return results


@dataclass(eq=False)
class FollowedOutput:
    """The output of one request.

    grammar: of the request. num_before: tokens before the first of the output. ends: tokens that end the output, which the
    grammar never sees. end_bits: those that may follow where the output may end, last_bits where it must. matcher: behind
    the first `num_tokens` tokens of the sequence. root: the mask behind the last token, once it is
    computed. known: masks behind paths below it. seconds: mean time of a mask. failed: why nothing more can be computed,
    else empty. late_at: when the thread's work on a tree is late. has_trees: whether drafted tokens are followed, which
    ends once they take too much work.
    """

    grammar: Grammar
    num_before: int
    ends: frozenset[int]
    end_bits: TokenBits
    last_bits: TokenBits
    matcher: Matcher = field(init=False)
    num_tokens: int = field(init=False)
    root: NodeMask | None = None
    known: dict[Path, NodeMask] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    late_at: float = 0.0
    has_trees: bool = True

    def restart(self, tokens: Seq[int]) -> None:
        """Follow all committed tokens from the first of the output. Raises InvalidRequest if they do not match."""
        self.matcher, self.num_tokens, self.root = self.grammar.matcher(), self.num_before, None
        late_at = time.thread_time() + FOLLOW_SECONDS
        while self.num_tokens < len(tokens):
            self._consume(tokens[self.num_tokens : self.num_tokens + 8])
            if time.thread_time() > late_at:
                raise InvalidRequest(_TOO_SLOW, "structured_outputs")

    def follow(self, tokens: Seq[int]) -> None:
        """Advance to the end of the committed tokens. Raises InvalidRequest if they do not match."""
        if self.failed:
            raise InvalidRequest(self.failed, "structured_outputs")
        if self.num_tokens < len(tokens):
            try:
                self._consume(tokens[self.num_tokens :])
            except InvalidRequest as error:
                self.failed = str(error)
                raise

    def _consume(self, tokens: Seq[int]) -> None:
        if self.matcher.consume(tokens) < len(tokens):
            raise InvalidRequest(_CANNOT_FOLLOW, "structured_outputs")
        self.num_tokens += len(tokens)
        self.root = None
        self.known.clear()

    def root_mask(self, tokens: Seq[int]) -> NodeMask:
        """What may follow the committed tokens."""
        self.follow(tokens)
        self.root = self.root or self._mask(self.matcher)
        return self.root

    def masks(self, tokens: Seq[int], tree: DraftTree) -> TreeMasks:
        """The mask of every node along its own path. None below an end, and at nodes that the grammar rejects.

        Raises InvalidRequest if the root has none: plain decoding ends there too.
        """
        masks: list[NodeMask | None] = [None] * len(tree)
        masks[0] = self.root_mask(tokens)
        self.late_at, unvisited = time.thread_time() + TREE_SECONDS, set[int]()
        try:
            self._visit(tree, 0, (), self.matcher, masks, unvisited)
        except InvalidRequest:
            unvisited.update(node for node, mask in enumerate(masks) if mask is None)
            self.has_trees = False
        return TreeMasks(masks, frozenset(unvisited))

    def path_masks(self, paths: Seq[Path]) -> list[TokenBits | None]:
        """The masks behind paths below the committed tokens; None for those that are rejected, and that come too late."""
        self.late_at = time.thread_time() + TREE_SECONDS
        return [self._path_mask(path) if self.has_trees and not self._is_late else None for path in paths]

    def _path_mask(self, path: Path) -> TokenBits | None:
        if self.failed or not self.ends.isdisjoint(path):
            return None
        try:
            matcher = self.matcher.fork()
            if matcher.consume(path) == len(path):
                self.known[path] = self._mask(matcher)
        except InvalidRequest:
            self.has_trees = False
        return self.known[path].bits if path in self.known else None

    def pruned(self, tokens: Seq[int], tree: DraftTree, max_nodes: int, max_depth: int) -> DraftTree:
        """The tree without what the grammar rejects, with the text that it forces; the given tree if nothing changes."""
        root_only = DraftTree.root_only(tree.tokens[0])
        if self.seconds:
            max_nodes = min(max_nodes, max(int(TREE_SECONDS / self.seconds), 1))
        if self.failed or not self.has_trees or max_nodes <= 1:
            return root_only
        self.late_at = time.thread_time() + TREE_SECONDS
        try:
            self.follow(tokens)
            if tree.sampled is not None:
                return self._pruned_sample(tree, tree.sampled, max_nodes)
            edited = _EditedTree(tree, max_nodes, max_depth)
            self._edit(edited, 0, 0, 0, self.matcher)
        except InvalidRequest:
            self.has_trees = False
            return root_only
        return edited.best()

    @property
    def _is_late(self) -> bool:
        return time.thread_time() > self.late_at

    def _mask(self, matcher: Matcher) -> NodeMask:
        """What may be drawn where a matcher is. Raises InvalidRequest if nothing may."""
        started = time.thread_time()
        bits, is_accepting = matcher.mask(), matcher.is_accepting
        seconds = time.thread_time() - started
        self.seconds += _RATE * (seconds - self.seconds)
        if bits.any():
            return NodeMask(bits | self.end_bits if is_accepting else bits)
        if not is_accepting:
            raise InvalidRequest(
                "structured_outputs asks for text that no token of the model continues; change it", "structured_outputs"
            )
        return NodeMask(self.last_bits, must_end=True)

    def _visit(
        self, tree: DraftTree, node: int, path: Path, matcher: Matcher, masks: list[NodeMask | None], unvisited: set[int]
    ) -> None:
        """Compute the masks of a node's descendants. Children that there is no time for are `unvisited`.

        path, matcher: of the node.
        """
        for child in tree.families.get(node, ()):
            token = tree.tokens[child]
            if self._is_late:
                unvisited.add(child)
            elif token not in self.ends and (behind := matcher.behind(token)):
                below = (*path, token)
                masks[child] = self.known.get(below) or self._mask(behind)
                self._visit(tree, child, below, behind, masks, unvisited)

    def _edit(self, edited: _EditedTree, place: int, node: int | None, depth: int, matcher: Matcher) -> None:
        """Add the children of a node of the drafted tree that match, and the token that the grammar forces there.

        place: of the node in the edited tree. node: in the drafted tree, None if it is not there.
        """
        if self._is_late:
            return
        children = edited.children(node)
        if depth < edited.max_depth and edited.has_room and (forced := matcher.forced()):
            children[forced[0]] = children.get(forced[0])
        for token, child in children.items():
            if token in self.ends:
                if matcher.is_accepting:
                    edited.add(token, place, child)
            elif behind := matcher.behind(token):
                self._edit(edited, edited.add(token, place, child), child, depth + 1, behind)

    def _pruned_sample(self, tree: DraftTree, sampled: SampledProposal, max_nodes: int) -> DraftTree:
        """A sampled tree without what stands below rejected nodes, and cut to its size.

        A node keeps all its children or none: to leave out some of them would change the distribution.
        """
        kept, open_ = [0], set[int]()
        self._keep(tree, 0, self.matcher, max_nodes, kept, open_)
        if len(kept) == len(tree):
            return tree
        kept.sort()
        numbers = {node: number for number, node in enumerate(kept)}
        probs = {numbers[node]: value for node, value in sampled.draft_probs.items() if node in open_}
        return replace(tree.pruned(kept), sampled=replace(sampled, draft_probs=probs))

    def _keep(self, tree: DraftTree, node: int, matcher: Matcher, max_nodes: int, kept: list[int], open_: set[int]) -> None:
        """Collect the children of nodes that match, and these nodes, as long as there is room and time."""
        children = tree.families.get(node, ())
        if len(kept) + len(children) > max_nodes or self._is_late:
            return
        open_.add(node)
        kept += children
        for child in children:
            token = tree.tokens[child]
            if token not in self.ends and (behind := matcher.behind(token)):
                self._keep(tree, child, behind, max_nodes, kept, open_)


@dataclass
class _EditedTree:
    """A draft tree that is written again, in an order in which parents come first. Scores never grow along a path."""

    tree: DraftTree
    max_nodes: int
    max_depth: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    scores: list[float] = field(init=False)
    num_forced: int = 0

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.scores = [self.tree.tokens[0]], [0], [0.0]

    @property
    def has_room(self) -> bool:
        """Whether forced tokens may be added."""
        return self.num_forced < self.max_nodes - 1

    def children(self, node: int | None) -> dict[int, int | None]:
        """The children of a drafted node by their tokens; of equal ones the first."""
        found: dict[int, int | None] = {}
        for child in self.tree.families.get(node, ()) if node is not None else ():
            found.setdefault(self.tree.tokens[child], child)
        return found

    def add(self, token: int, place: int, child: int | None) -> int:
        """Add a child of the node at `place`; a forced one, which is not in the drafted tree, is as good as its parent."""
        score = self.scores[place] if child is None else min(self.scores[place], self.tree.log_probs[child])
        self.num_forced += child is None
        self.tokens.append(token)
        self.parents.append(place)
        self.scores.append(score)
        return len(self.tokens) - 1

    def best(self) -> DraftTree:
        """The tree of the best nodes; the drafted one if it is the same."""
        order = sorted(range(1, len(self.tokens)), key=lambda place: -self.scores[place])
        kept = [0, *sorted(order[: self.max_nodes - 1])]
        whole = DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.scores), self.tree.grown_ahead)
        if self.num_forced == 0 and len(kept) == len(self.tree):
            return self.tree
        return whole.pruned(kept)
