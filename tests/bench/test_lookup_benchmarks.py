"""The benchmarks of drafters without a model run and write their tables."""

from pathlib import Path

from benchmarks.scripts import lookup_rounds, rest_lookup
from eyas.config import DraftingConfig, RestConfig, TreeConfig
from eyas.drafters.lookup.rest import load_rest
from eyas.models.checkpoint import Checkpoint


def test_a_datastore_is_built_opened_and_searched(tmp_path: Path) -> None:
    store, tree = rest_lookup.build(20_000, tmp_path), TreeConfig(num_steps=5)
    assert store.num_tokens >= 20_000
    assert store.megabytes * 1e6 >= 6 * 20_000
    drafter = load_rest(str(tmp_path), Checkpoint(rest_lookup.TARGET), tree, RestConfig(), DraftingConfig())
    rounds = rest_lookup.measure(drafter, tree, 2, 1.0, repeats=5)
    assert 0 < rounds.p50 <= rounds.p99
    assert rounds.cpu > 0
    assert [len(table.rows) for table in rest_lookup.tables(store, [rounds])] == [1, 1]


def test_every_part_of_a_round_takes_time() -> None:
    costs = lookup_rounds.measure(TreeConfig(16, 4), num_sessions=3, repeats=4)
    assert [cost.what for cost in costs] == ["prompt_lookup", "lookahead", "merging the two"]
    assert all(cost.ms > 0 for cost in costs)
    assert len(lookup_rounds.table(costs).rows) == 3
