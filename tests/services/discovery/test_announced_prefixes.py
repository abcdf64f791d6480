"""What a verifier announces of its prefix cache is what a router computes from a prompt; never more than was asked for."""

from dataclasses import replace

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.api.request import Request, SamplingParams
from eyas.cache.prefix_cache import PrefixCache
from eyas.config import EngineConfig, RegistryConfig, ServerConfig, TreeConfig
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.build import assemble_engine
from eyas.models.loading import load_target
from eyas.protocol.prefix_hash import BLOCK_TOKENS, MAX_BLOCKS, BlockHasher, block_hashes
from eyas.rpc.messages import GenerateCall, Lease
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.verifier.servicer import GenerationServicer
from eyas.v1 import generation_pb2_grpc
from tests.support.services.scripted_verifier import DEMO, MODEL, failure, until

runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), max_size=4)
tokens = runs.map(lambda parts: [token for token, count in parts for _ in range(count)])


@given(tokens, st.integers(0, 5 * BLOCK_TOKENS))
def test_hashes_come_the_same_in_one_piece_and_in_two(ids: list[int], cut: int) -> None:
    hasher = BlockHasher()
    pieces = (*hasher.update(ids[:cut]), *hasher.update(ids[cut:]))
    assert pieces == block_hashes(ids)
    assert len(pieces) == len(ids) // BLOCK_TOKENS


@given(tokens, tokens)
def test_sequences_share_as_many_hashes_as_whole_blocks(left: list[int], right: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    shared = sum(a == b for a, b in zip(block_hashes(left), block_hashes(right), strict=False))
    assert shared == same // BLOCK_TOKENS


def test_only_the_beginning_of_a_long_prompt_is_hashed() -> None:
    assert len(block_hashes(range((MAX_BLOCKS + 3) * BLOCK_TOKENS))) == MAX_BLOCKS


@given(st.lists(tokens, max_size=6))
def test_a_tree_announces_the_blocks_of_all_that_it_holds(sequences: list[list[int]]) -> None:
    cache = PrefixCache(sum(map(len, sequences)))
    for sequence in sequences:
        empty = cache.find(cache.no_slots)
        cache.release(cache.store(np.array(sequence, dtype=np.int64), cache.take(len(sequence)), empty), 0.0)
    found = cache.cached_blocks(1000)
    assert sorted(found) == sorted({block for sequence in sequences for block in block_hashes(sequence)})
    few = cache.cached_blocks(3)
    assert few == found[: len(few)]
    assert len(few) == min(3, len(found))


def test_held_and_recently_used_prefixes_are_announced_first() -> None:
    cache = PrefixCache(4 * 2 * BLOCK_TOKENS)
    prefixes = []
    for number in range(4):
        sequence = np.full(2 * BLOCK_TOKENS, number)
        prefixes.append(cache.store(sequence, cache.take(len(sequence)), cache.find(cache.no_slots)))
    for number, used in ((0, 10.0), (1, 30.0), (2, 20.0)):
        cache.release(prefixes[number], used)
    expected = [block for number in (3, 1, 2) for block in block_hashes([number] * 2 * BLOCK_TOKENS)]
    assert cache.cached_blocks(6) == expected


def test_many_salts_do_not_slow_the_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, salts, sequence = PrefixCache(50 * BLOCK_TOKENS), list[str](), np.arange(BLOCK_TOKENS)
    for number in (7, *range(50), 7):  # 7 is the oldest salt, and the last used one
        empty = cache.find(cache.no_slots, f"{number}")
        slots = cache.take(len(sequence))
        cache.release(cache.store(sequence, slots, empty, f"{number}"), 0.0)

    def hasher(salt: str) -> BlockHasher:
        salts.append(salt)
        return BlockHasher(salt)

    monkeypatch.setattr("eyas.cache.prefix_cache.BlockHasher", hasher)
    found = cache.cached_blocks(4)
    assert salts == ["7", "49", "48", "47"]
    assert found == [block for salt in salts for block in block_hashes(sequence.tolist(), salt)]


async def test_served_prompts_are_announced_and_wrong_targets_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.async_engine.ANNOUNCE_SECONDS", 0.01)
    engine = assemble_engine(
        load_target(DEMO, "float32", "cpu", ()), None, EngineConfig(max_kv_tokens=1024), TreeConfig(), None
    )
    prompt = tuple(range(3 * BLOCK_TOKENS))
    request = Request("r", prompt, SamplingParams(2, seed=1, ignore_eos=True))

    async def serve_once(loop: AsyncEngine) -> None:
        assert [chunk async for chunk in loop.generate(request)][-1].finish_reason == "length"
        await until(lambda: loop.prefix_hashes == frozenset(block_hashes(prompt)))
        assert (loop.load.max_num_seqs, loop.load.step_seconds) == (EngineConfig().max_num_seqs, 0.0)

    server = RpcServer(ServerConfig())
    async with AsyncEngine(engine) as loop:
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(loop, MODEL, None), server.aio)
        address = await server.start([])
        await serve_once(loop)
        code, details = await failure(address, GenerateCall(request, target_fingerprint="another"))
        await server.stop(0)
        assert (code, "has another target" in details) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_a_new_worker_ends_the_old_lease_of_its_address(url: str) -> None:
    old = Lease("draft", "10.0.0.1:7", "old", MODEL, prefix_hashes=frozenset({1, 2**32 - 1}))
    new = replace(old, role="verifier", incarnation="new")
    other = replace(old, role="verifier", address="10.0.0.2:7", incarnation="other")
    registries = [Registry(RegistryConfig(url, 60.0, 30.0)) for _ in range(3)]
    for registry, lease in zip(registries, (old, other, new), strict=True):
        await registry.publish(lambda lease=lease: lease)  # type: ignore[misc]
    assert await registries[0].leases("draft") == []
    assert await registries[0].leases("verifier") == [new, other]
    for registry in registries:
        await registry.withdraw()
        await registry.close()
