"""REST: the datastore finds what a plain scan finds, and its frequencies become trees."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import DraftingConfig, MethodsConfig, RestConfig, TreeConfig
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.lookup.datastore import build_datastore, corpus_files, open_datastore
from eyas.errors import CheckpointError, ConfigError
from eyas.protocol.commit import NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import GREEDY, commit, write_datastore, write_tokenizer

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
    """A copy of the tiny target, which gets a tokenizer."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in Path(tiny_target).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def build(target: str, store: Path, **eagle: float) -> LocalDrafter:
    methods = MethodsConfig(rest=RestConfig(str(store)))
    return DraftHead("", "rest").build_drafter(target, "float32", "cpu", TreeConfig(), DraftingConfig(**eagle), methods)  # type: ignore[arg-type]


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


def test_another_tokenizer_or_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    store = write_datastore(Path(target), [[3, 4, 5]], tmp_path / "store")
    write_tokenizer(Path(target), vocab_size=47)
    with pytest.raises(CheckpointError, match="written with another tokenizer"):
        build(target, store)
    build_datastore([[3, 4]], 49, "", tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"vocabulary of 49, target .* one of 48"):
        build(target, tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"set methods\.rest\.datastore"):
        DraftHead("", "rest").build_drafter(target, "float32", "cpu", TreeConfig(), DraftingConfig())
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
    (corpus / "c.bin").write_bytes(b"\xff\x00")
    arguments = ["datastore", "build", str(corpus), "--model", target, "--out", str(tmp_path / "store")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert open_datastore(tmp_path / "store").tokens.tolist() == [3, 4, 5, 48, 6, 7, 48, 8, 9, 10, 48]
    bad = ['{"txt": "t6"}', '{"text": 7}', "{", "[1]", '{"token_ids": [48]}', '{"token_ids": 3}', '{"text": "\\ud800"}']
    (corpus / "b.jsonl").write_bytes(
        "\n".join([*bad, '{"text": "t6 t7"}', '{"txt": 1}', ""]).encode() + b'{"text": "\xff"}\n'
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert open_datastore(tmp_path / "store").tokens.tolist() == [3, 4, 5, 48, 6, 7, 48]
    for counted in ("2 rows left out: no known field", "2 rows left out: wrong text", "2 rows left out: wrong token_ids"):
        assert counted in result.output
    (corpus / "b.jsonl").write_text('{"txt": "t6"}\n')
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "b.jsonl can be used; line 1" in result.output.replace("\n", " ")
    result = CliRunner().invoke(app, [*arguments[:2], str(corpus / "c.bin"), *arguments[3:]])
    assert (result.exit_code, "c.bin as text" in result.output.replace("\n", " ")) == (1, True)


def test_folders_yield_files_that_are_not_excluded(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.txt", "b.py", "deep/b.py"):
        (tmp_path / name).write_text("t3")
    names = tmp_path / "names.json"
    names.write_text('["deep/b.py", "names.json"]')
    assert corpus_files([tmp_path], names) == [tmp_path / "a.txt", tmp_path / "b.py"]
    with pytest.raises(ConfigError, match="holds no files"):
        corpus_files([tmp_path / "deep" / "b.py"], names)
    names.write_text('"b.py"')
    with pytest.raises(ConfigError, match="holds no list of paths"):
        corpus_files([tmp_path], names)
