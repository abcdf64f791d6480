"""Settings: read from YAML and --set, checked once, and every mistake named with its remedy."""

from pathlib import Path

import pytest

from eyas.config import DraftConfig, RegistryConfig, RouterConfig, ServerConfig, VerifierConfig, describe, load
from eyas.errors import ConfigError

VERIFIER = "model: m\ntarget: t\n"
ROUTER = "models: [{name: m, tokenizer: t}]\n"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    config = load(VerifierConfig, written(tmp_path, VERIFIER + "tree: {nodes: 7}\n"))
    assert (config.served_model_name, config.tree.num_draft_tokens, config.tree.num_steps) == ("m", 7, 5)


def test_assignments_win_over_the_file(tmp_path: Path) -> None:
    config = load(VerifierConfig, written(tmp_path, VERIFIER), ["server.port=7000", "engine.max_num_seqs=2", "model=n"])
    assert (config.server.port, config.engine.max_num_seqs, config.served_model_name) == (7000, 2, "n")


def test_assignments_alone_are_enough() -> None:
    config = load(DraftConfig, None, ["model=m", "target=t", "head=h", "drafting.shared_noise=false"])
    assert (config.draft_model, config.drafting.shared_noise) == ("h", False)


def test_models_of_a_router_are_read(tmp_path: Path) -> None:
    config = load(RouterConfig, written(tmp_path, ROUTER))
    assert [(model.name, model.tokenizer) for model in config.models] == [("m", "t")]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (VerifierConfig, VERIFIER + "modle: x\n", "unknown setting modle; did you mean model"),
        (VerifierConfig, VERIFIER + "tree: {nods: 3}\n", r"unknown setting tree\.nods; did you mean tree\.nodes"),
        (RouterConfig, "models: [{name: m, tokeniser: t}]\n", r"unknown setting models\.0\.tokeniser; did you mean"),
        (VerifierConfig, "target: t\n", "model"),
        (VerifierConfig, VERIFIER + "tree: {nodes: many}\n", r"tree\.nodes"),
        (VerifierConfig, VERIFIER + "dtype: float8\n", "dtype"),
        (VerifierConfig, VERIFIER + "tree: {nodes: 0}\n", r"config\.yaml: tree\.nodes is 0; it must be at least 1"),
        (VerifierConfig, VERIFIER + "engine: {num_slots: -1}\n", r"engine\.num_slots is -1"),
        (VerifierConfig, VERIFIER + "engine: {memory_fraction: 1.5}\n", r"engine\.memory_fraction is 1\.5"),
        (VerifierConfig, VERIFIER + "engine: {max_running: 0}\n", r"engine\.max_running is 0"),
        (VerifierConfig, VERIFIER + "engine: {max_waiting: -1}\n", r"engine\.max_waiting is -1"),
        (VerifierConfig, VERIFIER + "engine: {context_length: -1}\n", r"engine\.context_length is -1"),
        (VerifierConfig, VERIFIER + "registry: {heartbeat: 9}\n", r"registry\.heartbeat is 9"),
        (VerifierConfig, VERIFIER + "threads: -1\n", r"config\.yaml: threads is -1"),
        (VerifierConfig, VERIFIER + "link: {deadline: 0}\n", r"link\.deadline is 0.* must be above 0"),
        (VerifierConfig, VERIFIER + "link: {deadline: .nan}\n", r"link\.deadline is nan"),
        (VerifierConfig, VERIFIER + "link: {max_failures: 0}\n", r"link\.max_failures is 0"),
        (VerifierConfig, VERIFIER + "link: {reset: 0}\n", r"link\.reset is 0"),
        (VerifierConfig, VERIFIER + "link: {chunk_tokens: 1}\n", r"link\.chunk_tokens is 1; it must be at least 2"),
        (VerifierConfig, VERIFIER + "server: {port: 65536}\n", r"server\.port is 65536; it must lie in \[0, 65535\]"),
        (VerifierConfig, VERIFIER + "server: {drain_seconds: -1}\n", r"server\.drain_seconds is -1"),
        (VerifierConfig, VERIFIER + "server: {linger_seconds: -1}\n", r"server\.linger_seconds is -1"),
        (RouterConfig, ROUTER + "request_timeout: 0\n", "request_timeout is 0"),
        (RouterConfig, ROUTER + "stall_timeout: -1\n", "stall_timeout is -1"),
        (DraftConfig, "model: m\ntarget: t\nhead: h\nthreads: -1\n", "threads is -1"),
        (DraftConfig, "model: m\ntarget: t\nhead: h\neagle: {noise_scale: -1}\n", r"eagle\.noise_scale is -1"),
        (VerifierConfig, "[1, 2]", "expected a mapping"),
        (VerifierConfig, "a: [", "cannot read config"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, kind: type, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(kind, written(tmp_path, text))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("server.prt=1", r"did you mean server\.port"),
        ("port", "expected key=value"),
        ("model.x=1", "model is a value, not a group"),
        ("server.port=x", r"server\.port"),
        ("server.port=[", r"server\.port"),
    ],
)
def test_a_wrong_assignment_says_what_is_wrong(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(VerifierConfig, written(tmp_path, VERIFIER), [assignment])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(VerifierConfig, tmp_path / "absent.yaml")


def test_an_empty_file_misses_only_what_has_no_default(tmp_path: Path) -> None:
    assert load(VerifierConfig, written(tmp_path, ""), ["model=m", "target=t"]).model == "t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@host:1/0", "redis://***@host:1/0"),
        ("redis://host:1/0?username=secret&db=2&password=secret", "redis://host:1/0?username=***&db=2&password=***"),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_the_description_names_every_setting_and_no_password(url: str, shown: str) -> None:
    lines = describe(VerifierConfig("m", "t", registry=RegistryConfig(url)))
    assert "tree.num_draft_tokens = 24" in lines
    assert f"registry.url = {shown}" in lines
    assert "secret" not in "\n".join(lines)


def test_a_value_out_of_range_is_refused_without_a_file_too() -> None:
    with pytest.raises(ConfigError, match="port is -1"):
        ServerConfig(port=-1)
