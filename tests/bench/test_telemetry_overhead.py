"""The cost of telemetry can be measured: every step of an engine is reported, traced or not."""

from benchmarks.scripts.telemetry_overhead import decode, measure, table


def test_every_way_of_tracing_is_measured() -> None:
    costs = measure(decode(2, 8), 1)
    assert [cost.tracing for cost in costs] == ["metrics only", "every request", "every round"]
    assert all(0 < cost.engine <= cost.in_all for cost in costs)
    assert table(costs).rows[0][:2] == ("2", "metrics only")
