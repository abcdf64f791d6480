"""Configuration is read from YAML and --set, and errors name the setting and the remedy."""

import re
from pathlib import Path

import pytest

from eyas.config import DraftConfig, RegistryConfig, RouterConfig, VerifierConfig, describe, load
from eyas.config.target_limits import check_ranks
from eyas.errors import ConfigError

VERIFIER = "served_model_name: m\nmodel: t\n"
ROUTER = "models: [{name: m, tokenizer: t}]\n"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    config = load(VerifierConfig, written(tmp_path, VERIFIER + "tree: {num_draft_tokens: 7}\n"))
    assert (config.served_model_name, config.tree.num_draft_tokens, config.tree.num_steps) == ("m", 7, 0)


def test_assignments_win_over_the_file(tmp_path: Path) -> None:
    config = load(
        VerifierConfig, written(tmp_path, VERIFIER), ["server.port=7000", "engine.max_num_seqs=2", "served_model_name=n"]
    )
    assert (config.server.port, config.engine.max_num_seqs, config.served_model_name) == (7000, 2, "n")


def test_assignments_alone_are_enough() -> None:
    config = load(DraftConfig, None, ["served_model_name=m", "model=t", "draft_model=h", "drafting.shared_noise=false"])
    assert (config.draft_model, config.drafting.shared_noise) == ("h", False)


def test_an_assignment_changes_an_entry_of_a_list(tmp_path: Path) -> None:
    file = written(tmp_path, ROUTER)
    (model,) = load(RouterConfig, file, ["models.0.tool_call_parser=hermes"]).models
    assert (model.name, model.tool_call_parser) == ("m", "hermes")
    for path in ("models.1.name", "models.name", "models.0.x.y"):
        with pytest.raises(ConfigError, match=r"models|unknown setting"):
            load(RouterConfig, file, [f"{path}=n"])


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (VerifierConfig, VERIFIER + "modle: x\n", "unknown setting modle; did you mean model"),
        (
            VerifierConfig,
            VERIFIER + "tree: {num_draft_token: 3}\n",
            r"unknown setting tree\.num_draft_token; did you mean tree\.num_draft_tokens",
        ),
        (RouterConfig, "models: [{name: m, tokeniser: t}]\n", r"unknown setting models\.0\.tokeniser; did you mean"),
        (VerifierConfig, "model: t\n", "served_model_name"),
        (VerifierConfig, VERIFIER + "tree: {num_draft_tokens: many}\n", r"tree\.num_draft_tokens"),
        (VerifierConfig, VERIFIER + "dtype: float8\n", "dtype"),
        (
            VerifierConfig,
            VERIFIER + "tree: {num_draft_tokens: 0}\n",
            r"config\.yaml: tree\.num_draft_tokens is 0; it must be at least 1",
        ),
        (VerifierConfig, VERIFIER + "server: {port: 65536}\n", r"server\.port is 65536; it must lie in \[0, 65535\]"),
        (VerifierConfig, "[1, 2]", "expected a mapping"),
        (VerifierConfig, "a: [", "cannot read config"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, kind: type, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(kind, written(tmp_path, text))


@pytest.mark.parametrize(
    ("kind", "text", "assignments"),
    [
        (RouterConfig, ROUTER, ["request_timeout_s=0", "stall_timeout_s=-1"]),
        (DraftConfig, VERIFIER + "draft_model: h\n", ["threads=-1", "drafting.ranking_temperature=-1"]),
        (
            VerifierConfig,
            VERIFIER,
            [
                "stuck_step_exit_timeout_s=5", "threads=-1", "registry.heartbeat_interval_s=9",
                "engine.max_kv_tokens=-1", "engine.gpu_memory_utilization=1.5", "engine.max_num_seqs=0",
                "engine.max_queued_requests=-1", "engine.max_model_len=-1",
                "draft_client.draft_timeout_s=0", "draft_client.draft_timeout_s=.nan",
                "draft_client.breaker_max_failures=0", "draft_client.breaker_reset_s=0",
                "draft_client.max_message_tokens=1",
                "server.graceful_shutdown_timeout_s=-1", "server.shutdown_delay_s=-1",
            ],
        ),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(tmp_path: Path, kind: type, text: str, assignments: list[str]) -> None:
    file = written(tmp_path, text)
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        with pytest.raises(ConfigError, match=rf"{re.escape(name)} is {value.removeprefix('.')}"):
            load(kind, file, [assignment])


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
def test_a_wrong_assignment_is_explained(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(VerifierConfig, written(tmp_path, VERIFIER), [assignment])


def test_strings_take_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", 'a "b": $c')
    file = tmp_path / "router.yaml"
    file.write_text(
        'models: [{name: "${env:REDIS_PASSWORD}", tokenizer: b}]\nregistry: {url: "redis://:${env:REDIS_PASSWORD}@h"}'
    )
    config = load(RouterConfig, file)
    assert config.registry.url == 'redis://:a "b": $c@h'
    assert config.models[0].name == 'a "b": $c'
    with pytest.raises(ConfigError, match=r"registry\.url names the environment variable NOT_THERE"):
        load(RouterConfig, file, ["registry.url=${env:NOT_THERE}"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(VerifierConfig, tmp_path / "absent.yaml")


def test_an_empty_file_misses_only_what_has_no_default(tmp_path: Path) -> None:
    assert load(VerifierConfig, written(tmp_path, ""), ["served_model_name=m", "model=t"]).model == "t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@host:1/0", "redis://***@host:1/0"),
        (
            "redis://host?username=secret&db=2&sentinel_password=secret",
            "redis://host?username=***&db=2&sentinel_password=***",
        ),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_the_description_names_every_setting_and_no_password(url: str, shown: str) -> None:
    lines = describe(VerifierConfig("m", "t", registry=RegistryConfig(url)))
    assert "tree.num_draft_tokens = 24" in lines
    assert f"registry.url = {shown}" in lines
    assert "secret" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "assignment", "message"),
    [
        (VERIFIER, "engine.max_num_seqs=0", r"^--set engine\.max_num_seqs: engine\.max_num_seqs is 0"),
        (VERIFIER, "engine.max_num_seqs=many", r"^--set engine\.max_num_seqs: engine\.max_num_seqs: Input should be"),
        (VERIFIER, "telemetry.log_format=xml", r"^--set .*: telemetry\.log_format: Input should be 'text' or 'json'"),
        (
            VERIFIER,
            "engine.max_num_seq=4",
            r"^--set .*: unknown setting engine\.max_num_seq; did you mean engine\.max_num_seqs",
        ),
        (VERIFIER + "engine: {max_num_seqs: 0}\n", "threads=1", r"config\.yaml: engine\.max_num_seqs is 0"),
        (VERIFIER + "engin: {max_num_seqs: 1}\n", "threads=1", r"config\.yaml: unknown setting engin; did you mean engine"),
    ],
)
def test_the_wrong_setting_names_its_own_source(tmp_path: Path, text: str, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(VerifierConfig, written(tmp_path, text), [assignment])


def test_heads_that_are_null_are_as_if_left_out() -> None:
    check_ranks(2, {"num_attention_heads": None, "num_key_value_heads": None})
    check_ranks(2, {"num_attention_heads": 4, "num_key_value_heads": None})
