"""A short storm in which nothing may be lost; `make chaos` runs a long one. And the harness itself."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.__main__ import ChaosResult
from tests.chaos.answers import Mismatch, compare
from tests.chaos.faults import Fault, FaultLog
from tests.chaos.fleet import FleetSettings
from tests.chaos.overload import LoadLevel, OverloadResult
from tests.chaos.storm import StormResult, StormSettings, memory_use, storm
from tests.support.services.faulty_proxy import Proxy

SHORT = StormSettings(
    seed=7, verifier_kills=2, drafter_kills=6, num_clients=4, num_answers=6, most_tokens=50,
    longest_fault_s=1.0,
    fleet=FleetSettings(num_verifiers=2, drafters=("eagle3", "prompt_lookup", "sps", "hostile")),
)  # fmt: skip

# Distinct items, so that a difference has one explanation.
SEQUENCES = st.lists(st.integers(), min_size=2, max_size=40, unique=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # the fleet of a busy machine starts and dies slowly
def test_no_token_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    found = storm(SHORT, tmp_path)
    assert (found.num_wrong, found.num_lost, found.num_doubled) == (0, 0, 0), found.notes
    assert found.num_failed == found.num_blamed == 0, found.notes
    assert found.num_crashes == found.unreturned_slots == 0
    assert found.num_verifier_kills >= 2
    assert found.num_drafter_kills >= 6
    assert found.num_tokens > 0


@given(SEQUENCES, st.data())
def test_what_a_client_lost_is_counted(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    length = data.draw(st.integers(1, len(tokens) - start))
    assert compare(tokens, tokens) == Mismatch()
    assert compare(tokens, tokens[:start] + tokens[start + length :]) == Mismatch(num_lost=length)
    assert compare(tokens, tokens[: start + length] + tokens[start:]) == Mismatch(num_doubled=length)


@given(SEQUENCES, st.data())
def test_a_wrong_token_spoils_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    received = [*tokens[:at], max(tokens) + 1, *tokens[at + 1 :]]
    assert compare(tokens, received) == Mismatch(num_wrong=len(tokens) - at)


CALM = StormResult(
    seconds=1.0, num_requests=1, num_cancelled=0, num_tokens=1, num_characters=0, num_wrong=0, num_lost=0, num_doubled=0,
    failures={}, num_blamed=0, num_verifier_kills=1, num_drafter_kills=1, num_crashes=0, unreturned_slots=0, p99_gap_s=0.0,
    p99_lag_s=0.0, longest_unexplained_gap_s=0.0, gaps=(), memory=(), notes=(),
)  # fmt: skip


def test_a_wrong_answer_under_overload_breaks_a_promise() -> None:
    good = LoadLevel(1.0, 1, 1, 0, 0, 0, {}, 1.0, 0.0)
    assert ChaosResult(CALM, OverloadResult((good,), good)).broken_promises() == []
    found = ChaosResult(CALM, OverloadResult((good,), replace(good, num_wrong=2))).broken_promises()
    assert found == ["2 wrong answers under overload"]


def test_a_wait_is_blamed_on_the_fault_during_it() -> None:
    earlier, during = Fault("verifier delay", 1.0, ended=2.0), Fault("verifier kill -9", 2.5, ended=2.5)
    log = FaultLog(recent=[Fault("redis down", 0.0), earlier, during])
    log.blame(2.2, 3.0)
    assert [fault.longest_gap_s for fault in log.recent] == [0.0, 0.0, pytest.approx(0.8)]
    log.blame(2.1, 2.4)
    assert earlier.longest_gap_s == pytest.approx(0.3), "nothing else explains this one"
    log.blame(1.5, 3.5)
    assert earlier.longest_gap_s == pytest.approx(2.0), "it began before the other fault"


@pytest.mark.parametrize(
    ("mib_per_hour", "minutes", "grows"), [(0, 120, False), (4, 120, False), (40, 120, True), (40, 5, False), (600, 5, True)]
)
def test_memory_that_grows_breaks_a_promise(mib_per_hour: float, minutes: float, grows: bool) -> None:
    rng = random.Random(0)
    points = [(s, 100 + mib_per_hour * s / 3600 + rng.uniform(-2, 2)) for s in range(0, int(60 * minutes), 2)]
    use = memory_use("router", points)
    assert use.grows == grows, use
    found = ChaosResult(replace(CALM, memory=(use,)), None).broken_promises()
    assert found == [f"router takes {use.slope:.0f} MiB more per hour, above 8"] * grows


def test_a_proxy_breaks_connections() -> None:
    asyncio.run(break_connections())


async def break_connections() -> None:
    """An echo service behind a proxy, through every fault."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    service = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(("127.0.0.2", 0), service.sockets[0].getsockname()[:2], random.Random(0))
    await proxy.start()

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.2", proxy.port)
        assert await ask(reader, writer) == b"ping"
        return reader, writer

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"ping")
        return await asyncio.wait_for(reader.read(4), 10)

    reader, writer = await dial()
    proxy.damage()
    assert await ask(reader, writer) != b"ping"
    assert await ask(reader, writer) == b"ping"
    proxy.hold()
    answer = asyncio.create_task(ask(reader, writer))
    await asyncio.sleep(0.05)
    assert not answer.done()
    proxy.release()
    assert await answer == b"ping"
    proxy.silence()
    writer.write(b"lost")
    reader_2, writer_2 = await dial()  # a new connection works
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader_2.read()
    writer_2.close()
    writer.close()
    service.close()
    await proxy.close()
