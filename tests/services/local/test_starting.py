"""What `eyas serve` finds out and says before services are ready, and while they work."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.config import ServedModel, load
from eyas.config.drafting import LOOKUPS, METHOD_FACTS
from eyas.config.router import RouterConfig
from eyas.config.serving import DraftConfig
from eyas.device.host import PHASE_PREFIX
from eyas.drafters.registry import METHODS
from eyas.engine.engine import EngineLoad
from eyas.errors import CheckpointError, ConfigError
from eyas.services.local.cluster import OWN_PAGES, Child, ServiceSettings, with_own_pages
from eyas.services.local.preflight import check_settings
from eyas.services.local.serve import phase, plan
from eyas.services.verifier.load_log import LoadLog
from eyas.telemetry import metrics
from eyas.telemetry.metrics import counter

TARGET = "models/demo/target"
IDLE = EngineLoad(0, 0, 100)
LOGGED = """
2026-11-28 12:00:00,000 INFO eyas.device.host: start: loading
  a line of a traceback
{"timestamp": "2026", "level": "INFO", "logger": "eyas.device.host", "message": "start: compiling"}
"""
# Settings that are refused before a process starts, and what the error says.
REFUSED = {
    "--method eagle3": "verifier: settings: drafter 'eagle3' needs a draft head of EAGLE-3; none was named; "
    "set draft_model, or --draft-model",
    "--method eagle9": "unknown drafter 'eagle9'; known: eagle1, ",
    "--method medusa+eagle3": "both drafters of 'medusa+eagle3' need a head",
    "--max-model-len 9999": "max_model_len is 9999, but 'models/demo/target' is made for 2048 tokens",
    "--tensor-parallel-size 3": "3 ranks cannot share 4 attention heads over 2 key-value heads evenly",
    "--quantization awq": "quantization is 'awq', but the weights of 'models/demo/target' are plain",
    "--gpu-memory-utilization 2": "engine.gpu_memory_utilization is 2.0; it must lie in (0, 1]",
    "--dtype float8": "verifier: --dtype: dtype: Input should be 'auto', 'float32'",
    "--device gpu": "device 'gpu' cannot be used here",
    "--draft-model nowhere/at/all": "no checkpoint folder at 'nowhere/at/all'",
    "--chat-template nowhere": "router: cannot read the chat_template nowhere",
    "--tool-call-parser x": "tool_call_parser: Input should be 'auto', 'none'",
    "--served-model-name a --served-model-name a": "models has the name 'a' twice",
    "--set router.api_keys.file=nowhere": "router: api_keys.file: cannot read nowhere",
    "--set router.models=[]": "router: models is empty",
    "--set verifier.engine.emulated_device=x": "'x' is no cost table",
    "--set verifier.peers.token_file=nowhere": "verifier: peers.token_file: cannot read nowhere",
    "--method suffix --set verifier.engine.acceptance=rejection": "suffix cannot sample drafts",
    "--set verifer.tree.num_steps=8": "no service 'verifer' is started; did you mean verifier.tree.num_steps=8?",
    "--set verifier.engine.max_num_seq=8": "unknown setting engine.max_num_seq; did you mean engine.max_num_seqs?",
    '--set router.tls={"cert_file":"c.pem","key_file":"k.pem"}': "router: services started together do not speak TLS",
    '--set verifier.peers={"cert_file":"c","key_file":"k","ca_file":"a"}': "verifier: services started together do not",
    "--set router.tls.key_file=k.pem": "cert_file and key_file go together",
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_are_refused_before_processes_start(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("eyas.services.local.cluster.Child.start", lambda self: pytest.fail("a process was started"))
    result = CliRunner().invoke(app, ["serve", TARGET, "--port", "0", "--grpc-port", "31999", *words.split()])
    assert result.exit_code == 1
    assert REFUSED[words] in result.stderr
    assert not list(tmp_path.glob("eyas-*"))


def test_settings_of_draft_services_are_checked_alike() -> None:
    for settings, reason in (
        ({"method": "none"}, "nothing drafts for m; set draft_model, or a method that needs none"),
        ({}, "nothing drafts for m"),
        ({"method": "sps"}, "drafter 'sps' needs a causal LM with the target's vocabulary; none was named"),
        ({"method": "suffix", "drafting": {"quantization": "fp8"}}, "drafter 'suffix' has no head for it"),
        ({"method": "suffix", "drafting": {"emulated_device": "x"}}, "'x' is no cost table"),
        ({"method": "suffix", "model": "./nowhere"}, "no checkpoint folder at './nowhere'"),
    ):
        given = {"served_model_name": "m", "model": TARGET} | settings
        with pytest.raises((ConfigError, CheckpointError), match=reason):
            check_settings(load(DraftConfig, None, [f"{key}={json.dumps(value)}" for key, value in given.items()]), {})


def test_keys_of_a_router_are_looked_for_in_its_environment() -> None:
    config = load(RouterConfig, None, [f"models=[{{name: m, tokenizer: {TARGET}}}]", "api_keys.env=KEYS"])
    check_settings(config, {"KEYS": "one"})
    with pytest.raises(ConfigError, match="KEYS"):
        check_settings(config, {})


def test_the_names_of_methods_are_those_that_are_built() -> None:
    assert METHODS.keys() == METHOD_FACTS.keys()
    assert not [name for name in LOOKUPS if METHODS[name].features]
    with pytest.raises(ConfigError, match="each alias, needs a name of its own"):
        RouterConfig((ServedModel("a", TARGET, aliases=("b",)), ServedModel("b", TARGET)))


def test_new_messages_are_whole_lines_of_text_or_json(tmp_path: Path) -> None:
    child = Child("verifier", "", [sys.executable, "-c", ""], tmp_path / "log")
    child.process.wait()
    child.log.write_text(f"{LOGGED}2026 INFO x: unfini")
    messages = child.new_messages()
    assert [message for message in messages if message.startswith(PHASE_PREFIX)] == ["start: loading", "start: compiling"]
    assert phase(messages) == "compiling"
    with child.log.open("a") as file:
        file.write("shed\n")
    assert (child.new_messages(), child.new_messages(), phase([])) == (["unfinished"], [], "")
    child.log.unlink()
    assert (child.new_messages(), child.last_log_lines(3)) == ([], [])


def test_origins_of_pages_can_be_switched_off(tmp_path: Path) -> None:
    router = plan(TARGET)[-1]
    file = tmp_path / "router.yaml"
    file.write_text("http: {cors_allow_origins: []}")

    def origins(settings: ServiceSettings) -> tuple[str, ...]:
        config = with_own_pages(settings).load()
        assert isinstance(config, RouterConfig)
        return config.http.cors_allow_origins

    assert list(origins(router)) == OWN_PAGES
    assert origins(router.add("http.cors_allow_origins=[]")) == ()
    assert origins(replace(router, file=file)) == ()


def test_the_line_about_load_is_silent_when_idle() -> None:
    now, registry = [0.0], CollectorRegistry()
    requests, steps = (counter(each, registry) for each in (metrics.VERIFIER_REQUESTS, metrics.VERIFIER_VERIFY_STEPS))
    tokens = counter(metrics.VERIFIER_GENERATED_TOKENS, registry)
    log = LoadLog(registry, lambda: now[0])
    assert log.line(IDLE) == ""
    now[0] = 10.0
    requests.labels("OK").inc()
    requests.labels("CANCELLED").inc()
    tokens.inc(20)
    steps.labels("tree").inc(4)
    steps.labels("plain").inc()
    counter(metrics.VERIFIER_VERIFY_STEP_TOKENS, registry).inc(11)
    drafted = counter(metrics.VLLM_DRAFT_TOKENS, registry).labels("m")
    drafted.inc(20)
    counter(metrics.VLLM_ACCEPTED_TOKENS, registry).labels("m").inc(6)
    expected = "2 requests done, 3 running, 1 waiting; 2.0 tokens/s, tau 2.20, 30% of the drafted tokens accepted"
    assert log.line(EngineLoad(3, 1, 100)) == expected
    now[0] = 20.0
    assert log.line(IDLE) == ""
    assert log.line(EngineLoad(1, 0, 100)).startswith("0 requests done, 1 running")
    tokens.inc()
    drafted.inc(20)  # of a step that is not counted yet
    assert "tau" not in log.line(IDLE)
    requests.labels("RESOURCE_EXHAUSTED").inc()
    counter(metrics.VERIFIER_REJECTED_REQUESTS, registry).labels("RESOURCE_EXHAUSTED").inc()
    assert log.line(IDLE) == "", "refused requests are not done"


def test_the_demo_is_checked_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", "--demo", "--set", "verifier.engine.max_model_len=9999"])
    assert "max_model_len is 9999, but 'models/demo/target' is made for 2048 tokens" in result.stderr
