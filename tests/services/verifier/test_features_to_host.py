"""Features leave the verifier's device in one copy, however many sessions a message has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.device import transfer as tensors
from eyas.device.transfer import tensor_from_bytes, to_host
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from services.verifier import commits
from services.verifier.commits import split_commits


@pytest.mark.parametrize("sessions", [1, 64])
def test_all_sessions_share_one_copy_from_the_device(sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the `meta` device stand for those of a GPU; one session in nine sends nothing new."""
    lengths = [session % 9 for session in range(1, sessions + 1)]
    values, copies = torch.randn(sum(lengths), 4), list[Tensor]()

    def copied(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        return values

    monkeypatch.setattr(commits, "to_host", copied)
    contexts = [
        Commit(f"{i}", 0, 7, (5,) * n, torch.empty(n, 4, device="meta"), NoiseKey(0), TreeBudget(9, 9))
        for i, n in enumerate(lengths)
    ]
    messages = split_commits(contexts, 5)
    assert [tensor.shape for tensor in copies] == [values.shape]
    found: dict[str, list[Tensor]] = {}
    for message in messages:
        for piece in message:
            assert piece.features is not None
            found.setdefault(piece.session, []).append(tensor_from_bytes(piece.features))
    for context, own in zip(contexts, values.split(lengths), strict=True):
        sent = found.get(context.session, [])
        assert sum(map(len, sent)) == len(own)
        assert torch.equal(torch.cat([*sent, own[:0]]), own)


def test_features_on_the_host_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "to_host", lambda tensor: pytest.fail("a copy"))
    context = Commit("a", 0, 7, (5, 6), torch.zeros(2, 4), NoiseKey(0), TreeBudget(9, 9))
    assert split_commits([context], 5)


def test_a_copy_to_the_host_is_pinned_on_cuda() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(3, 5, device=device)
    found = to_host(values)
    assert torch.equal(found, values.cpu())
    assert found.is_pinned() == (device == "cuda")


def test_copies_go_on_where_no_memory_is_pinned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on locked memory must not end a step."""

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand advice")

    def unpinned(*args: Any, pin_memory: bool = False, **given: Any) -> Tensor:
        return refuse() if pin_memory else empty(*args, **given)

    empty, values = torch.empty, torch.randn(3, 5)
    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    monkeypatch.setattr(torch, "empty", unpinned)
    assert tensors.pinned_copy(values) is values
    found = tensors.pinned_like(values)
    assert (found.shape, found.dtype, found.is_pinned()) == (values.shape, values.dtype, False)
    warning = "copies to and from the GPU are slower, as no memory is pinned: CUDA error: out of memory"
    assert caplog.messages == [warning] * 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.equal(to_host(values.to(device)), values)
    assert torch.equal(tensors.upload(values.numpy(), device).cpu(), values)


def test_a_copy_to_the_host_outlives_later_ones() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first, second = (to_host(torch.full((1000, 1000), value, device=device)) for value in (1.0, 2.0))
    assert (first == 1).all()
    assert (second == 2).all()
