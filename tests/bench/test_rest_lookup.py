"""The REST benchmark measures what it says."""

from pathlib import Path

from benchmarks.rest_lookup import TARGET, build, measure, tables
from eyas.config import EagleConfig, RestConfig, TreeConfig
from eyas.drafters.lookup.rest import load_rest


def test_a_datastore_is_built_opened_and_asked(tmp_path: Path) -> None:
    store = build(20_000, tmp_path)
    assert store.num_tokens >= 20_000
    assert store.megabytes * 1e6 >= 6 * 20_000
    rounds = measure(load_rest(str(tmp_path), TARGET, TreeConfig(), RestConfig(), EagleConfig()), 2, 1.0, num_rounds=5)
    assert 0 < rounds.p50 <= rounds.p99
    assert [len(table.rows) for table in tables(store, [rounds])] == [1, 1]
