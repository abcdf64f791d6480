"""A draft service small enough to check by eye, and what a verifier would say to it. The drafter counts upwards."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from eyas.config import DraftClientConfig, DraftQueueConfig, ServerConfig
from eyas.device.transfer import tensor_to_bytes
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.protocol.commit import Commit, NoiseKey, ResyncRequired, TensorBytes, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DrafterInfo, ModelInfo
from eyas.services.draft.servicer import DraftServicer
from eyas.services.draft.worker import DraftWorker
from eyas.services.lifecycle import worker_server
from eyas.services.verifier.draft_client import RemoteDrafter
from eyas.v1 import draft_pb2_grpc

VOCAB = 100
WIDTH = 4
TREE = TreeBudget(max_nodes=4, max_depth=3)
INFO = DrafterInfo(
    ModelInfo("toy", "f00d", VOCAB, 1000), "toy", needs_features=True, needs_samples=False, feature_size=WIDTH
)

NEEDS = DrafterNeeds(features=True)
# Waits for answers however slow the machine is.
PATIENT = DraftClientConfig(draft_timeout_s=30.0)
RemoteT = TypeVar("RemoteT", bound=RemoteDrafter)


def feature(position: int, token: int) -> Tensor:
    """A feature row that encodes its position and token."""
    return torch.tensor([position, token, 0.5, -1.0])


def context(session: str, tokens: Sequence[int], base: int = 0, budget: TreeBudget = TREE, epoch: int = 0) -> DraftContext:
    """The commit that brings tokens[base:], with the features that belong to it."""
    rows = [feature(i, tokens[i]) for i in range(max(base - 1, 0), len(tokens) - 1)]
    features = torch.stack(rows) if rows else torch.empty(0, WIDTH)
    return Commit(session, epoch, base, tuple(tokens[base:]), features, NoiseKey(7), budget)


def packed(commit: DraftContext) -> Commit[TensorBytes]:
    """The commit as a draft service gets it."""
    features = None if commit.features is None else tensor_to_bytes(commit.features)
    return commit._replace(features=features)  # type: ignore[arg-type,return-value]


class ToyDrafter(LocalDrafter):
    """Drafts a chain that counts up from the root; remembers tokens and checks that features belong to them.

    `before` runs ahead of every propose; `spoil` may change the trees.
    """

    needs = DrafterNeeds(features=True)

    def __init__(
        self, before: Callable[[], object] = lambda: None, spoil: Callable[[DraftTree], DraftTree] = lambda tree: tree
    ) -> None:
        self.sessions: dict[str, list[int]] = {}
        self._before = before
        self._spoil = spoil

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._before()
        return [self._draft(context) for context in contexts]

    def release(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self.sessions.pop(session, None)

    def _draft(self, context: DraftContext) -> Draft:
        tokens = self.sessions.setdefault(context.session, [])
        if context.start_position != len(tokens):
            return ResyncRequired(context.session, context.epoch, len(tokens))
        tokens += context.tokens
        positions = range(max(context.start_position - 1, 0), len(tokens) - 1)
        expected = [feature(i, tokens[i]) for i in positions]
        assert context.features is not None
        assert torch.equal(context.features, torch.stack(expected) if expected else torch.empty(0, WIDTH))
        root = context.tokens[-1]
        if not context.budget.wants_tree:
            return DraftTree.root_only(root)
        length = min(context.budget.max_nodes, context.budget.max_depth + 1)
        return self._spoil(DraftTree.chain([(root + i) % VOCAB for i in range(length)]))


@contextmanager
def serving(
    drafter: LocalDrafter,
    info: DrafterInfo = INFO,
    port: int = 0,
    peers: Peers | None = None,
    queue: DraftQueueConfig | None = None,
) -> Iterator[str]:
    """A real draft service in a thread; gives its address. Leaving kills it: no drain, no farewell."""
    with serving_all([(drafter, info)], port, peers, queue) as address:
        yield address


@contextmanager
def serving_all(
    drafters: Sequence[tuple[LocalDrafter, DrafterInfo]],
    port: int = 0,
    peers: Peers | None = None,
    queue: DraftQueueConfig | None = None,
) -> Iterator[str]:
    """The same with several drafters."""
    started: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def main() -> None:
        server = worker_server(ServerConfig(port=port), peers or Peers())
        stop = asyncio.Event()
        with ExitStack() as stack:
            workers = [stack.enter_context(DraftWorker(drafter, info, queue=queue)) for drafter, info in drafters]
            draft_pb2_grpc.add_DraftServicer_to_server(DraftServicer(workers), server.aio)
            started.append((await server.start(["eyas.v1.Draft"]), asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()
            await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60), "the toy service did not start"
    address, loop, stop = started[0]
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def connect(
    address: str,
    config: DraftClientConfig = PATIENT,
    needs: DrafterNeeds = NEEDS,
    kind: type[RemoteT] = RemoteDrafter,  # type: ignore[assignment]
) -> closing[RemoteT]:
    """A verifier's side of a draft service, once it is connected."""
    remote = kind(address, needs, config)
    eventually(lambda: remote.connected)
    return closing(remote)


@contextmanager
def drafting(
    drafter: LocalDrafter, method: str, kind: type[RemoteT], needs: DrafterNeeds, config: DraftClientConfig = PATIENT
) -> Iterator[RemoteT]:
    """A real draft service for the tiny target, as a verifier sees it that collects `needs`. No request may be lost."""
    own = drafter.needs
    sizes = own.features, own.samples, own.feature_size, drafter.can_sample, drafter.has_lookups
    info = DrafterInfo(ModelInfo("tiny", "f", 48, 256), method, *sizes)
    with serving(drafter, info) as address, connect(address, config, needs, kind) as remote:
        yield remote
        assert remote.num_lost == 0


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds; fail if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition never held"
        time.sleep(0.005)
