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

from eyas.api.request import Request
from eyas.drafters.base import Path
from eyas.engine.sequence import DraftReply
from eyas.errors import InvalidRequest
from eyas.grammar.compiler import Matcher, OutputMatchers, TokenBits, bits_of
from eyas.grammar.timed_calls import BoundedCalls, Call
from eyas.protocol.tree import DraftTree, SampledProposal
from eyas.sampling.acceptance import LogitRows
from eyas.sampling.logit_rules import NodeMask, TokenMasks, TreeMasks

ResultT = TypeVar("ResultT")

# Processor time that a tree may take, to prune it and for its masks. A slow grammar gets smaller trees, at worst none.
TREE_SECONDS = 0.05
# Time that all trees of a step may take together, in equal shares. It bounds what other requests wait for them.
TREES_SECONDS = 0.1
# Processor time that one request may take of a step, beyond which it ends.
STEP_SECONDS = 0.4
# Time of a level of a growing tree that may go to masks, of all sessions together.
LEVEL_SECONDS = 0.003
# Weight of the latest mask in the mean time of a request's masks.
_RATE = 0.2
_DEAD_END = "structured_outputs asks for text that no token of the model continues; change it"
_TOO_SLOW = f"structured_outputs takes too much work to follow (more than {STEP_SECONDS} s for a token); simplify it"


class GrammarManager:
    """The grammars of running requests. outputs: by request id. Not safe for use from several threads."""

    def __init__(self, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self.outputs: dict[str, FollowedOutput] = {}
        self._num_threads = min(4, os.cpu_count() or 1)
        self._calls = BoundedCalls(self._num_threads, "grammar")

    def add(self, request: Request, matchers: OutputMatchers) -> None:
        """Follow the output of a request until it is released. matchers: behind the output that it brings along."""
        ends = frozenset(request.sampling.stop_token_ids)
        soft = ends if request.sampling.ignore_eos else ends | self._eos_ids
        self.outputs[request.id] = FollowedOutput(
            matchers.committed,
            matchers.drafted,
            num_tokens=len(request.prompt_ids),
            ends=ends | self._eos_ids,
            end_bits=bits_of(sorted(soft), self._vocab_size),
            last_bits=bits_of(sorted(ends | self._eos_ids), self._vocab_size),
        )

    def release(self, request_ids: Seq[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self.outputs.pop(request_id, None)

    def prune(self, replies: Iterable[DraftReply], max_nodes: Mapping[str, int]) -> list[DraftReply]:
        """Return replies with the trees that the grammars leave, with the text that they force put in.

        max_nodes: by request id, nodes of its largest tree in this step, the root included.
        """
        trees = dict[str, tuple[DraftReply, DraftTree]]()
        for reply in replies:
            request_id, sequence = reply.sequence.request.id, reply.sequence
            if request_id in self.outputs and max_nodes.get(request_id, 1) > 1 and not sequence.prefilling:
                trees[request_id] = reply, reply.tree or DraftTree.root_only(sequence.tokens[-1])
        seconds, calls = self._tree_seconds(len(trees)), dict[str, Call[DraftTree]]()
        for request_id, (reply, tree) in trees.items():
            depth, tokens = len(reply.sequence.slots) - len(reply.sequence.tokens) - 1, reply.sequence.tokens
            prune = self.outputs[request_id].pruned
            calls[request_id] = self._calls.submit(prune, tokens, tree, max_nodes[request_id], depth, seconds)
        found = self._collect_drafts(calls)
        pruned = []
        for reply in replies:
            request_id = reply.sequence.request.id
            if request_id in trees:
                tree = found.get(request_id) or DraftTree.root_only(reply.sequence.tokens[-1])
                reply = reply._replace(tree=tree, is_edited=tree is not reply.tree)
            pruned.append(reply)
        return pruned

    def _tree_seconds(self, num_trees: int) -> float:
        """Return the processor time that each of a step's trees may take."""
        return min(TREE_SECONDS, TREES_SECONDS * self._num_threads / max(num_trees, 1))

    def _collect_drafts(self, calls: Mapping[str, Call[ResultT]]) -> dict[str, ResultT]:
        """Return the results of work for drafts, by request id. A late call is the last one of its request."""
        results = dict[str, ResultT]()
        for request_id, call in calls.items():
            try:
                results[request_id] = self._calls.result(call, STEP_SECONDS)
            except TimeoutError:
                self.outputs[request_id].drafted = None
        return results

    def root_masks(self, tokens_of: Mapping[str, Seq[int]]) -> dict[str, bytes]:
        """Return, by request id, bits of the tokens that may follow the committed ones; only of requests with a grammar.

        The next step uses them again.
        """
        followed = {id_: (self.outputs[id_], tokens) for id_, tokens in tokens_of.items() if id_ in self.outputs}
        calls = {id_: self._calls.submit(output.root_mask, tokens) for id_, (output, tokens) in followed.items()}
        return {request_id: root.bits.tobytes() for request_id, root in self._collect(calls, {}).items()}

    def path_masks(self, paths: Mapping[str, Seq[Path]]) -> Callable[[], Mapping[str, Seq[TokenBits | None]]]:
        """Return masks as PathMasks does: sessions beyond what there is time for get none.

        Valid between `root_masks` and the next step.
        """
        spare, seconds, calls = LEVEL_SECONDS * self._num_threads, self._tree_seconds(len(paths)), {}
        for request_id, own in paths.items():
            output = self.outputs.get(request_id)
            if output is not None and spare > 0:
                spare -= output.seconds * len(own)
                calls[request_id] = self._calls.submit(output.path_masks, own, seconds)
        return lambda: self._collect_drafts(calls)

    def start(self, batch: Iterable[LogitRows]) -> Callable[[], TokenMasks]:
        """Start to compute the masks of a step. Returns a function that waits for them."""
        structured = [rows for rows in batch if rows.request.id in self.outputs]
        trees = {rows.request.id: (rows.tokens, rows.tree) for rows in structured if rows.tree is not None}
        seconds = self._tree_seconds(sum(tree.num_drafted > 0 for _, tree in trees.values()))
        calls = {
            request_id: self._calls.submit(self.outputs[request_id].masks, tokens, tree, seconds)
            for request_id, (tokens, tree) in trees.items()
        }

        def wait() -> TokenMasks:
            errors: dict[str, str] = {}
            return TokenMasks(self._collect(calls, errors), errors)

        return wait

    def _collect(self, calls: Mapping[str, Call[ResultT]], errors: dict[str, str]) -> dict[str, ResultT]:
        """Return the results by request id; what has none is in `errors`. A late call ends its request in the next masks
        too.
        """
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

    Attributes:
        committed: follows its first `num_tokens` tokens, prompt included.
        drafted: the same for draft trees, None once they take too much work.
        ends: tokens that end the output, which the grammar never sees.
        end_bits: those that may follow where the output may end, last_bits where it must.
        root: the mask behind the last token, once it is computed.
        known: masks behind paths below it.
        seconds: mean time of a mask.
        failed: why nothing more can be computed, else empty.
        late_at: when the thread's work on a tree is late.
    """

    committed: Matcher
    drafted: Matcher | None
    num_tokens: int
    ends: frozenset[int]
    end_bits: TokenBits
    last_bits: TokenBits
    root: NodeMask | None = None
    known: dict[Path, NodeMask] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    late_at: float = 0.0

    def follow(self, tokens: Seq[int]) -> None:
        """Advance to the end of the committed tokens. Raises InvalidRequest if that takes too much work."""
        if self.failed:
            raise InvalidRequest(self.failed, "structured_outputs")
        latest = tokens[self.num_tokens :]
        if not latest:
            return
        self.num_tokens, self.root = len(tokens), None
        self.known.clear()
        try:
            num_followed = self.committed.consume(latest)
        except InvalidRequest as error:
            self.failed = str(error)
            raise
        assert num_followed == len(latest), "only tokens that the grammar allows are drawn"
        try:
            if self.drafted and self.drafted.consume(latest) < len(latest):
                self.drafted = None
        except InvalidRequest:
            self.drafted = None

    def root_mask(self, tokens: Seq[int]) -> NodeMask:
        """Return what may follow the committed tokens."""
        self.follow(tokens)
        root = self.root or self._mask(self.committed)
        if root is None:
            raise InvalidRequest(_DEAD_END, "structured_outputs")
        self.root = root
        return root

    def masks(self, tokens: Seq[int], tree: DraftTree, seconds: float) -> TreeMasks:
        """Return the mask of every node along its own path. None below an end, and at nodes that the grammar rejects.

        seconds: processor time for all but the root's mask.

        Raises InvalidRequest if the root has none: plain decoding ends there too.
        """
        masks: list[NodeMask | None] = [None] * len(tree)
        masks[0] = self.root_mask(tokens)
        self.late_at, unvisited = time.thread_time() + seconds, set[int]()
        try:
            if tree.num_drafted and self.drafted is not None:
                self._visit(tree, 0, (), self.drafted, masks, unvisited)
            else:
                unvisited.update(range(1, len(tree)))
        except InvalidRequest:
            unvisited.update(node for node, mask in enumerate(masks) if mask is None)
            self.drafted = None
        return TreeMasks(masks, frozenset(unvisited))

    def path_masks(self, paths: Seq[Path], seconds: float) -> list[TokenBits | None]:
        """Return the masks behind paths below the committed tokens; None for those that are rejected, and that come too
        late.

        seconds: processor time for all of them.
        """
        self.late_at = time.thread_time() + seconds
        return [None if self._is_late else self._path_mask(path) for path in paths]

    def _path_mask(self, path: Path) -> TokenBits | None:
        if self.failed or self.drafted is None or not self.ends.isdisjoint(path):
            return None
        try:
            matcher = self.drafted.fork()
            if matcher.consume(path) == len(path) and (mask := self._mask(matcher)):
                self.known[path] = mask
        except InvalidRequest:
            self.drafted = None
        return self.known[path].bits if path in self.known else None

    def pruned(self, tokens: Seq[int], tree: DraftTree, max_nodes: int, max_depth: int, seconds: float) -> DraftTree:
        """Return the tree without what the grammar rejects, with the text that it forces; the given tree if nothing changes.

        seconds: processor time; what there is no time for is left out.
        """
        root_only = DraftTree.root_only(tree.tokens[0])
        if self.seconds:
            max_nodes = min(max_nodes, max(int(seconds / self.seconds), 1))
        if self.failed or self.drafted is None or max_nodes <= 1:
            return root_only
        self.late_at = time.thread_time() + seconds
        try:
            self.follow(tokens)
            if self.drafted is None:
                return root_only
            if tree.sampled is not None:
                return self._pruned_sample(tree, tree.sampled, max_nodes)
            edited = _EditedTree(tree, max_nodes, max_depth)
            self._edit(edited, 0, 0, 0, self.drafted)
        except InvalidRequest:
            self.drafted = None
            return root_only
        return edited.best()

    @property
    def _is_late(self) -> bool:
        return time.thread_time() > self.late_at

    def _mask(self, matcher: Matcher) -> NodeMask | None:
        """Return what may be drawn where a matcher is, None if nothing may. Raises InvalidRequest if that takes too much
        work.
        """
        started = time.thread_time()
        bits, is_accepting = matcher.mask(), matcher.is_accepting
        seconds = time.thread_time() - started
        self.seconds += _RATE * (seconds - self.seconds)
        if bits.any():
            return NodeMask(bits | self.end_bits if is_accepting else bits)
        return NodeMask(self.last_bits, must_end=True) if is_accepting else None

    def _visit(
        self, tree: DraftTree, node: int, path: Path, matcher: Matcher, masks: list[NodeMask | None], unvisited: set[int]
    ) -> None:
        """Compute the masks of a node's descendants. Children that there is no time for are `unvisited`, dead ends too.

        Args:
            path, matcher: of the node.
        """
        for child in tree.families.get(node, ()):
            token = tree.tokens[child]
            if self._is_late:
                unvisited.add(child)
            elif token not in self.ends and (behind := matcher.behind(token)):
                below = (*path, token)
                masks[child] = self.known.get(below) or self._mask(behind)
                if masks[child] is None:
                    unvisited.add(child)
                else:
                    self._visit(tree, child, below, behind, masks, unvisited)

    def _edit(self, edited: _EditedTree, place: int, node: int | None, depth: int, matcher: Matcher) -> None:
        """Add the children of a node of the drafted tree that match, and the token that the grammar forces there.

        Args:
            place: of the node in the edited tree.
            node: in the drafted tree, None if it is not there.
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
        """Return a sampled tree without what stands below rejected nodes, and cut to its size.

        A node keeps all its children or none: to leave out some of them would change the distribution.
        """
        kept, open_ = [0], set[int]()
        assert self.drafted is not None
        self._keep(tree, 0, self.drafted, max_nodes, kept, open_)
        if len(kept) == len(tree):
            return tree
        kept.sort()
        numbers = {node: number for number, node in enumerate(kept)}
        probs = {numbers[node]: value for node, value in sampled.draft_probs.items() if node in open_}
        return tree.pruned(kept).with_sampled(replace(sampled, draft_probs=probs))

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
        """Return whether forced tokens may be added."""
        return self.num_forced < self.max_nodes - 1

    def children(self, node: int | None) -> dict[int, int | None]:
        """Return the children of a drafted node by their tokens; of equal ones the first."""
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
        """Return the tree of the best nodes; the drafted one if it is the same."""
        order = sorted(range(1, len(self.tokens)), key=lambda place: -self.scores[place])
        kept = [0, *sorted(order[: self.max_nodes - 1])]
        whole = DraftTree.of(self.tokens, self.parents, self.scores, self.tree.grown_ahead)
        if self.num_forced == 0 and len(kept) == len(self.tree):
            return self.tree
        return whole.pruned(kept)
