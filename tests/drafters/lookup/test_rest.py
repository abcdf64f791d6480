"""REST: the datastore finds what a plain scan finds, and its frequencies become trees."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import DraftingConfig, MethodsConfig, RestConfig, TreeConfig
from eyas.datastore.build import build_datastore
from eyas.datastore.store import open_datastore
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import LocalDrafter
from eyas.drafters.registry import build_drafter
from eyas.drafters.rest import RestDrafter
from eyas.errors import CheckpointError, ConfigError
from eyas.request import NoiseKey
from eyas.sampling.noise import exponential_noise
from eyas.tree import DraftTree
from tests.drafters.lookup.corpora import GREEDY, commit, write_datastore, write_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=5)


@given(DOCUMENTS, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6), st.booleans())
def test_search_finds_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], asked: list[list[int]], wide: bool
) -> None:
    folder, vocab_size = tmp_path_factory.mktemp("store"), 70_000 if wide else 4
    build_datastore(documents, vocab_size, "v", folder)
    store = open_datastore(folder)
    queries = np.array([query + [0] * (4 - len(query)) for query in asked])
    lengths = np.array([len(query) for query in asked])
    ranges = store.search(queries, lengths)
    for query, first, last in zip(asked, ranges.first, ranges.last, strict=True):
        n = len(query)
        scan = [d[i + n : i + n + 3] for d in documents for i in range(len(d) - n + 1) if d[i : i + n] == query]
        rows = store.continuations(np.arange(first, last), np.full(last - first, n), 3).tolist()
        assert sorted([token for token in row if token != vocab_size] for row in rows) == sorted(scan)


@pytest.fixture
def target(tiny_target: str, tmp_path: Path) -> str:
    """The tiny target in a folder of its own, for its tokenizer."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in Path(tiny_target).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def build(target: str, store: Path, **eagle: float) -> LocalDrafter:
    methods = MethodsConfig(rest=RestConfig(str(store)))
    return build_drafter("rest", target, "", "float32", "cpu", TreeConfig(), DraftingConfig(**eagle), methods)  # type: ignore[arg-type]


def propose(drafter: LocalDrafter, tokens: list[int], noise: NoiseKey = GREEDY, nodes: int = 24) -> DraftTree:
    (draft,) = drafter.propose([commit(f"{tokens}{noise}{nodes}", tokens, noise=noise, budget=TreeBudget(nodes, 3))])
    assert isinstance(draft, DraftTree)
    return draft


def test_the_longest_suffix_wins_then_its_commonest_continuation(target: str, tmp_path: Path) -> None:
    corpus = [[3, 5, 6, 7], [3, 5, 6, 7], [3, 5, 6, 8], *[[4, 5, 6, 9]] * 9]
    drafter = build(target, write_datastore(Path(target), corpus, tmp_path / "store"))
    assert propose(drafter, [3, 5, 6], nodes=2).tokens == (6, 7)
    assert propose(drafter, [10, 5, 6], nodes=2).tokens == (6, 9)
    assert set(propose(drafter, [3, 5, 6]).tokens) == {6, 7, 8, 9}
    assert propose(drafter, [6, 11]) == DraftTree.root_only(11)


def test_a_document_ends_where_it_ends(target: str, tmp_path: Path) -> None:
    drafter = build(target, write_datastore(Path(target), [[3, 4, 5], [6, 7, 8, 9]], tmp_path / "store"))
    assert propose(drafter, [3, 4]).tokens == (4, 5)
    assert propose(drafter, [4, 5]) == DraftTree.root_only(5)
    assert propose(drafter, [6, 7]).tokens == (7, 8, 9)


def test_the_first_child_follows_the_target_noise_statistically(target: str, tmp_path: Path) -> None:
    """Over many seeds the best child is drawn from the frequencies, as the target would draw from them."""
    corpus = [*[[3, 4, 5]] * 3, [3, 4, 6]]
    store = write_datastore(Path(target), corpus, tmp_path / "store")
    drafter = build(target, store)
    counts = {5: 0, 6: 0}
    for seed in range(400):
        counts[propose(drafter, [3, 4], NoiseKey(seed, 1.0), nodes=2).tokens[1]] += 1
    assert abs(counts[5] - 300) < 4 * math.sqrt(400 * 0.75 * 0.25)
    assert propose(drafter, [3, 4], NoiseKey(1, 1.0, top_k=1), nodes=24).tokens == (4, 5), "filters hold for frequencies too"
    plain = build(target, store, shared_noise=False)
    assert all(propose(plain, [3, 4], NoiseKey(seed, 1.0), nodes=2).tokens[1] == 5 for seed in range(20))


def test_frequencies_use_unscaled_noise_until_calibrated(target: str, tmp_path: Path) -> None:
    store = write_datastore(Path(target), [*[[3, 4, 5, 7]] * 3, [3, 4, 6]], tmp_path / "store")
    found, plain = build(target, store, noise_scale=0.0), build(target, store)
    for seed in range(8):
        tree = propose(found, [3, 4], NoiseKey(seed, 1.0))
        assert set(tree.tokens) == {4, 5, 6, 7}
        assert tree == propose(plain, [3, 4], NoiseKey(seed, 1.0))


@pytest.mark.parametrize("softness", [0.5, 2.0])
def test_the_scale_of_the_noise_is_found_while_serving(target: str, tmp_path: Path, softness: float) -> None:
    """The target draws from softmax(a / softness), a being the log-frequencies under its noise, at both levels.
    Of one session nothing is found."""
    counts = {(5, 7): 4, (5, 8): 2, (6, 7): 3, (6, 8): 3}
    corpus = [[3, 4, *path] for path, count in counts.items() for _ in range(count)]
    drafter = build(target, write_datastore(Path(target), corpus, tmp_path / "store"), noise_scale=0.0)
    assert isinstance(drafter, RestDrafter)
    draw, law = np.random.default_rng(0), {(): {5: 6, 6: 6}, (5,): {7: 4, 8: 2}, (6,): {7: 3, 8: 3}}
    for index in range(24):
        noises = [NoiseKey(1000 * index + session, 0.8) for session in range(20)]
        strange = commit("strange", [9, 10], noise=NoiseKey(index, 0.8), epoch=index)
        drafter.propose([strange, *(commit(f"{s}", [3, 4], noise=noise, epoch=index) for s, noise in enumerate(noises))])
        told = []
        for session, noise in enumerate(noises):
            path: tuple[int, ...] = ()
            for level in range(2):
                tokens = torch.tensor(list(law[path]))
                gumbel = -exponential_noise([noise.seed], [2 + level], tokens)[0].log().numpy()
                odds = np.exp((np.log(list(law[path].values())) / 0.8 + gumbel) / softness)
                path = (*path, int(draw.choice(tokens.numpy(), p=odds / odds.sum())))
            told.append(commit(f"{session}", [3, 4, *path], 2, noise, epoch=index))
        drafter.propose(told)
    assert (drafter._scale.value(0.8) < 0.8) == (softness < 1)
    assert (drafter._scale.value(0.8) > 1.3) == (softness > 1)
    assert drafter._scale.value(0.3) == 1.0, "nothing was seen at this temperature"


def test_unknown_text_does_not_change_the_calibration(target: str, tmp_path: Path) -> None:
    drafter = build(target, write_datastore(Path(target), [[3, 4, 5], [3, 4, 6]], tmp_path / "store"), noise_scale=0.0)
    assert isinstance(drafter, RestDrafter)
    for token, count in ((9, 0), (5, 1)):
        drafter.propose([commit(f"{token}", [3, 4], noise=NoiseKey(1, 0.8))])
        drafter.propose([commit(f"{token}", [3, 4, token], 2, noise=NoiseKey(1, 0.8))])
        assert sum(estimate.count for estimate in drafter._scale._estimates) == count  # type: ignore[attr-defined]
        drafter._scale._round = 0  # type: ignore[attr-defined]


def test_another_tokenizer_or_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    store = write_datastore(Path(target), [[3, 4, 5]], tmp_path / "store")
    write_tokenizer(Path(target), vocab_size=47)
    with pytest.raises(CheckpointError, match="written with another tokenizer"):
        build(target, store)
    build_datastore([[3, 4]], 49, "", tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"vocabulary of 49, target .* one of 48"):
        build(target, tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"set methods\.rest\.datastore"):
        build_drafter("rest", target, "", "float32", "cpu", TreeConfig(), DraftingConfig())
    with pytest.raises(ConfigError, match=r"no datastore in .*nowhere"):
        build(target, tmp_path / "nowhere")


def test_a_damaged_or_newer_datastore_is_refused(target: str, tmp_path: Path) -> None:
    store = write_datastore(Path(target), [[3, 4, 5]], tmp_path / "store")
    other = write_datastore(Path(target), [[3, 4, 5, 6]], tmp_path / "other")
    (store / "tokens.npy").write_bytes((other / "tokens.npy").read_bytes())
    with pytest.raises(ConfigError, match="do not belong together"):
        open_datastore(store)
    header = json.loads((other / "datastore.json").read_text())
    (other / "datastore.json").write_text(json.dumps(header | {"version": 2}))
    with pytest.raises(ConfigError, match="version 2"):
        open_datastore(other)


def test_the_command_builds_from_text_and_json_lines(target: str, tmp_path: Path) -> None:
    write_tokenizer(Path(target))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("t3 t4 t5")
    (corpus / "b.jsonl").write_text('{"text": "t6 t7"}\n\n{"token_ids": [8, 9, 10]}\n')
    arguments = ["datastore", "build", str(corpus), "--model", target, "--out", str(tmp_path / "store")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert open_datastore(tmp_path / "store").tokens.tolist() == [3, 4, 5, 48, 6, 7, 48, 8, 9, 10, 48]
    (corpus / "b.jsonl").write_text('{"txt": "t6"}\n')
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "b.jsonl, line 1" in result.output
