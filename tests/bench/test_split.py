"""`python -m benchmarks.split`: services as processes on emulated devices, and figures of their passes."""

import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.split.__main__ import measure
from benchmarks.split.delaying_proxy import DelayingProxy
from benchmarks.split.results import Decoded, Shares, SplitResults, SplitSettings, result, with_references
from benchmarks.split.timeline import Timeline
from eyas.api.request import VerifyStep, VerifyStepDetails
from eyas.bench.settings import MethodSpec
from eyas.config import TreeConfig
from eyas.emulation.costs import flat
from eyas.emulation.device import PassRecord
from eyas.errors import ConfigError
from eyas.progress import Progress
from tests.support.services.forks import forked_services


def record(began: float, ended: float, late: bool = False, label: str = "") -> PassRecord:
    return PassRecord("verify", label, 1, 0, began, began, ended, 1.0, late)


def decoded(num_steps: int, accepted: int, seconds: float, **flags: bool) -> Decoded:
    details = VerifyStepDetails((), (), (), wait_ms=30.0, round_trip_ms=40.0, draft_ms=25.0, num_rows=24)
    step = VerifyStep(23, 5, accepted, details=details, **flags)
    return Decoded(tuple(range(1 + num_steps * (accepted + 1))), (step,) * num_steps, 1.0, 1.0 + seconds)


def settings(**changes: object) -> SplitSettings:
    own = {"model": "t", "draft_model": "h", "methods": (MethodSpec("eagle3"),), "prompts": Path("p")}
    given = {**own, "verifier": "60ms", "drafter": "6ms", **changes}
    return SplitSettings(**given)  # type: ignore[arg-type]


def test_busy_shares_count_the_parts_inside_the_window() -> None:
    verifier = [record(0.0, 1.5), record(2.0, 3.0, late=True), record(5.0, 6.0)]
    shares = Shares.between(1.0, 3.0, verifier, [record(2.5, 4.0)])
    assert (shares.verifier, shares.drafter, shares.late) == (0.75, 0.25, 0.5)


def test_eta_is_the_rate_over_free_drafting() -> None:
    """Four tokens a step: 60 ms of pass and 40 ms besides give eta 0.6; plain decoding has a token per 60 ms."""
    shares = Shares(0.6, 0.3, 0.0)
    serial = result("serial", 0.0, 1, 0.0, [[decoded(10, 3, 1.0)]], shares, 0.060)
    plain = result("plain", 0.0, 1, 0.0, [[decoded(10, 0, 0.6)]], shares, 0.060)
    ahead = result("ahead", 0.0, 1, 0.0, [[decoded(10, 2, 0.6, grown_ahead=True)]], shares, 0.060)
    plain, serial, ahead = with_references([plain, serial, ahead])
    assert serial.eta == pytest.approx(0.6)
    assert serial.speedup == pytest.approx(2.4)
    assert (serial.host_ms, serial.wire_ms) == (pytest.approx(10), pytest.approx(15))
    assert ahead.eta == pytest.approx(30 / 0.6 / (4 / 0.060))
    assert (ahead.hit_rate, ahead.tau_hit, plain.eta) == (1.0, 3.0, None)


def test_trees_that_were_ready_are_counted_without_a_round_trip() -> None:
    """Ten steps: six trees ready, two hits that had a trip of 28 ms, and two misses."""
    hit, miss = decoded(2, 3, 0.2, grown_ahead=True).steps, decoded(2, 1, 0.2).steps
    late = replace(hit[0], details=replace(hit[0].details, round_trip_ms=28.0))  # type: ignore[type-var]
    ready = replace(hit[0], details=replace(hit[0].details, round_trip_ms=0.0, draft_ms=0.0))  # type: ignore[type-var]
    requests = [[Decoded(tuple(range(37)), (*[ready] * 6, *[late] * 2, *miss), 1.0, 1.7)]]
    ahead = result("ahead", 0.0, 1, 0.0, requests, Shares(0.6, 0.3, 0.0), 0.060)
    assert (ahead.prepared, ahead.hit_rate) == (0.6, 0.8)


def test_rates_are_pooled_over_time_as_tau_over_steps() -> None:
    """A request in 0.6 s and one in 1.4 s, each of 40 tokens: 80 tokens in 2 s; the mean of both rates would be 47.6."""
    found = result("serial", 0.0, 1, 0.0, [[decoded(10, 3, 0.6)], [decoded(10, 3, 1.4)]], Shares(0.6, 0.3, 0.0), 0.060)
    assert found.rate == pytest.approx(40.0)
    assert [found.rates.low, found.rates.high] == [pytest.approx(40 / 1.4), pytest.approx(40 / 0.6)]


def test_a_time_per_token_is_compared_with_that_of_one_verifier() -> None:
    """60 ms a pass, 12 ms a round of 2 levels: six verifiers find the drafter free, if they come in turn."""
    costs = flat("v", verify=60.0)
    alone = result("serial", 0.0, 1, 0.0, [[decoded(10, 3, 0.72)]], Shares(0.8, 0.2, 0.0), 0.060)
    many = result("serial", 0.0, 1, 0.0, [[decoded(10, 3, 0.9)]] * 4, Shares(0.7, 0.6, 0.0), 0.060, verifiers=4)
    drafter = flat("d", draft_round=6.0, draft_level=6.0)
    found = SplitResults((alone, many), costs, drafter, TreeConfig(8, 2, 4))
    [table] = [table for table in found.tables() if table.title == "One drafter for many verifiers"]
    assert [(row[3], *row[5:7], *row[8:]) for row in table.rows] == [
        ("1", "18", "1", "20%", "6.0"), ("4", "22.5", "1.25", "60%", "6.0")
    ]  # fmt: skip


def test_a_timeline_shows_passes_waits_and_the_wire() -> None:
    verifier = [record(0.0, 0.06), record(0.1, 0.16)]
    drafter = [record(0.065, 0.071), record(0.071, 0.09), record(0.1, 0.11, label="grow")]
    line = Timeline.of("one", Decoded((1,), (), 0.0, 1.0), verifier, drafter)
    bars = [(lane, what, round(begin, 3), round(seconds, 3)) for lane, what, begin, seconds in line.bars()]
    assert ("verifier", "wait", 0.06, 0.04) in bars
    assert ("wire", "wire", 0.06, 0.005) in bars
    assert ("wire", "wire", 0.09, 0.01) in bars
    assert ("drafter", "grow", 0.1, 0.01) in bars


def test_settings_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="must include serial"):
        settings(modes=("plain", "ahead"))
    with pytest.raises(ConfigError, match="scale is 0"):
        settings(scale=0)
    with pytest.raises(ConfigError, match="plain_tokens is 2"):
        settings(plain_tokens=2)


def test_a_proxy_outlives_a_service_that_is_not_there() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    proxy = DelayingProxy(port)
    proxy.start()
    with closing(proxy):
        host, _, own = proxy.address.partition(":")
        with socket.create_connection((host, int(own)), timeout=60) as refused:
            assert refused.recv(1) == b""
        late = socket.create_server(("127.0.0.1", port))
        with closing(late), socket.create_connection((host, int(own)), timeout=60) as caller:
            caller.sendall(b"x")
            late.settimeout(60)
            service, _ = late.accept()
            with closing(service):
                assert service.recv(1) == b"x"


def test_the_proxy_delays_both_ways_and_keeps_the_order() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        connection, _ = server.accept()
        with closing(connection):
            while data := connection.recv(1000):
                connection.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    proxy = DelayingProxy(server.getsockname()[1], delay_s=0.05)
    proxy.start()
    with closing(proxy), closing(server):
        host, _, port = proxy.address.partition(":")
        with socket.create_connection((host, int(port))) as caller:
            began = time.perf_counter()
            for piece in (b"one ", b"two ", b"three"):
                caller.sendall(piece)
            received = b""
            while len(received) < 13:
                received += caller.recv(1000)
            assert received == b"one two three"
            assert time.perf_counter() - began >= 0.1
        thread.join()


@pytest.mark.nightly
def test_a_split_runs_and_its_outputs_are_those_of_plain() -> None:
    own = settings(
        model="models/demo/target", draft_model="models/demo/eagle3", methods=(MethodSpec("", "models/demo/eagle3"),),
        prompts=Path("models/demo/prompts.jsonl"), num_prompts=1, max_tokens=12, temperatures=(0.8,), verifier="200ms",
        drafter="20ms", tree=TreeConfig(8, 3, 4), delays=(0.05,), dtype="float32", device="cpu", threads=1, verifiers=(2,),
    )  # fmt: skip
    with forked_services(), Progress() as progress:
        found, timelines = measure(own, progress)
    by_mode = {r.mode: r for r in found.results}
    assert {mode: r.identical for mode, r in by_mode.items()} == dict.fromkeys(("plain", "serial", "ahead"), "2 of 2")
    assert by_mode["serial"].tau > 1
    assert by_mode["serial"].verify_ms >= 199
    assert by_mode["serial"].round_trip_ms >= 2 * 10 + 2 * 20  # near the end trees have fewer levels
    assert 0 < (by_mode["serial"].eta or 0) < 1
    assert [line.title for line in timelines] == ["serial, temperature 0.8", "ahead, temperature 0.8"]
    shared = "One drafter for many verifiers"
    assert [table.title for table in found.tables()] == ["Efficiency", "Where the time goes", shared]
