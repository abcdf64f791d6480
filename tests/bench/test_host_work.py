"""The benchmark of a step's host work measures every part of it."""

from benchmarks.scripts import host_work


def test_every_part_of_a_step_takes_time() -> None:
    found = [host_work.measure(num, context=20, steps=4) for num in (1, 3)]
    for num, each in zip((1, 3), found, strict=True):
        assert each.num_sequences == num
        assert 0 < each.least <= each.median
        assert all(ms > 0 for ms in each.parts.values()), each.parts
    assert len(host_work.table(found).rows) == 2
