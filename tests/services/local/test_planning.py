"""The services that the options of `eyas serve` and `eyas run-batch` ask for, and which of two settings counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eyas.cli.main import load_command
from eyas.cli.options import SERVICE_KEYS, Setting, asked_settings, service_settings
from eyas.config.mtp_layouts import INDEX_FILE
from eyas.errors import CheckpointError, ConfigError
from eyas.services.local.cluster import running_cluster
from eyas.services.local.serve import plan
from eyas.text import tokenizer
from tests.support.tiers import tiered
from tests.support.tiny_mtp import write_mtp

# What each option is given, and what a file of options gives the same keys.
VALUES: dict[str, tuple[Any, Any]] = {
    "model": ("model", "other"),
    "draft_model": ("head", "other"),
    "method": ("medusa", "eagle3"),
    "served_model_name": (["one", "two"], "other"),
    "dtype": ("float32", "bfloat16"),
    "device": ("cpu", "cuda"),
    "num_draft_tokens": (9, 8),
    "num_steps": (3, 2),
    "top_k": (2, 1),
    "draft_placement": ("service", "auto"),
    "validate_head": ("never", "auto"),
    "generation_config": ("none", "auto"),
    "max_model_len": (99, 98),
    "max_num_seqs": (7, 6),
    "gpu_memory_utilization": (0.5, 0.4),
    "tensor_parallel_size": (2, 1),
    "quantization": ("awq", "fp8"),
    "tokenizer": ("folder", "other"),
    "chat_template": ("file", "other"),
    "tool_call_parser": ("none", "auto"),
    "reasoning_parser": ("none", "auto"),
    "special_tokens_in_content": ("text", "token"),
}
# Of --tokenizer, and of MODEL without it.
TOKENIZER = "router.models.0.tokenizer"
OPTIONS = sorted(SERVICE_KEYS.keys() - {"aliases"})


def expected(option: str, key: str) -> Any:
    """The value of a key when its option is given."""
    value = VALUES[option][0]
    return value[0] if option == "served_model_name" else value


def sections() -> dict[str, Any]:
    """The file's values of all keys, as sections of services."""
    found: dict[str, Any] = {"verifier": {}, "draft": {}, "router": {"models": [{"aliases": ["alias"]}]}}
    for option in OPTIONS:
        for key in SERVICE_KEYS[option]:
            *parents, name = key.split(".")
            place: Any = found
            for parent in parents:
                place = place[int(parent)] if parent.isdigit() else place.setdefault(parent, {})
            place[name] = VALUES[option][1]
    return found


FORMS = {
    "sections": sections(),
    "assignments": {
        "set": [f"{name}.{key}={json.dumps(value)}" for name, s in sections().items() for key, value in s.items()]
    },
}


def words(option: str) -> list[str]:
    """The words that give an option its value."""
    value = VALUES[option][0]
    flag = f"--{option.replace('_', '-')}"
    return [word for each in (value if isinstance(value, list) else [value]) for word in (flag, str(each))]


def planned(command: str, arguments: list[str]) -> dict[str, Any]:
    """The configs of the services that a command starts, by name."""
    with load_command(command).make_context(command, arguments) as context:
        given = context.params
        services = plan(given["model"], "head", "", given["served_model_name"] or (), asked_settings(context))
    return {service.name: service.load() for service in services}


def value_of(configs: dict[str, Any], key: str) -> Any:
    """The value of a key such as router.models.0.name."""
    service, *path = key.split(".")
    found = configs[service]
    for name in path:
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


def test_every_option_of_a_service_has_a_value_here() -> None:
    assert VALUES.keys() == set(OPTIONS)
    assert all(first != second for first, second in VALUES.values())


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "model"])
@pytest.mark.parametrize("form", tiered(FORMS, ("sections",)))
def test_an_option_goes_before_whole_sections_of_a_file(option: str, form: str, tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text(json.dumps(FORMS[form]))
    configs = planned("serve", ["model", "--config", str(file), *words(option)])
    for name in OPTIONS:
        for key in SERVICE_KEYS[name]:
            wanted = expected(name, key) if name in (option, "model") else VALUES[name][1]
            if key == TOKENIZER:
                wanted = expected("tokenizer" if option == "tokenizer" else "model", key)
            assert value_of(configs, key) == wanted, key
    aliases = ("two",) if option == "served_model_name" else ("alias",)
    assert value_of(configs, "router.models.0.aliases") == aliases


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_options_of_a_file_go_before_its_sections(command: str, tmp_path: Path) -> None:
    known = {param.name for param in load_command(command).params}
    options = {name: VALUES[name][0] for name in OPTIONS if name in known}
    (file := tmp_path / "options.yaml").write_text(json.dumps({**sections(), **options}))
    configs = planned(
        command, ["model", "--config", str(file)] if command == "serve" else ["f.jsonl", "--config", str(file)]
    )
    for name in options:
        for key in SERVICE_KEYS[name]:
            assert value_of(configs, key) == expected("tokenizer" if key == TOKENIZER else name, key), key


def test_set_has_the_last_word(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("verifier: {threads: 2}\n")
    arguments = [
        "model",
        "--config",
        str(file),
        "--top-k",
        "3",
        "--set",
        "draft.tree.top_k=4",
        "--set",
        "verifier.threads=1",
    ]
    configs = planned("serve", arguments)
    assert (configs["verifier"].tree.top_k, configs["draft"].tree.top_k, configs["verifier"].threads) == (3, 4, 1)


def test_empty_sections_of_a_file_set_nothing(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("router:\nverifier: {engine: , tree: {}}\n")
    configs = planned("serve", ["model", "--config", str(file), "--max-num-seqs", "3", "--top-k", "2"])
    assert (configs["verifier"].engine.max_num_seqs, configs["verifier"].tree.top_k) == (3, 2)


def test_lookups_run_in_a_service_if_asked() -> None:
    for asked in (service_settings({"draft_placement": "service"}), [Setting("verifier.draft_placement=service")]):
        services = plan("model", "", "suffix", settings=asked)
        assert [service.name for service in services] == ["draft", "verifier", "router"]


def test_places_that_a_cluster_chooses_are_refused() -> None:
    for setting, remedy in (
        ("router.http.port=9", "use --port of the command instead"),
        ("verifier.server.port=9", "leave it out"),
        ("router.registry.url=redis://x", "leave it out"),
    ):
        services = plan("model", method="none", settings=[Setting(setting)])
        with pytest.raises(ConfigError, match=f"has no effect .*{remedy}"), running_cluster(services, 1):
            pass


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {"verifier": ("", "mtp"), "draft": ("", "mtp")}),
        (["verifier.draft_model=X", "draft.draft_model=X"], {"verifier": ("X", ""), "draft": ("X", "")}),
        (["verifier.method=none"], {"verifier": ("", "none")}),
        (["verifier.engine.tensor_parallel_size=2"], {"verifier": ("", "none")}),
    ],
)
def test_the_default_is_taken_if_no_setting_names_another(
    settings: list[str], expected: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path / "target", "glm4_moe")
    loaded: dict[str, Any] = {each.name: each.load() for each in plan(folder, settings=list(map(Setting, settings)))}
    assert loaded.keys() == {*expected, "router"}
    assert {name: (loaded[name].draft_model, loaded[name].method) for name in expected} == expected


def test_a_model_that_cannot_be_a_hub_id_is_named() -> None:
    with pytest.raises(CheckpointError, match="'foo bar' is neither a folder nor a hub id"):
        plan("foo bar")


def test_a_models_index_is_fetched_to_see_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a first start, which has no weights yet, is as the later ones."""
    names = load_file(Path(write_mtp(tmp_path / "target", "glm4_moe"), "model.safetensors"))
    files = {"config.json": tmp_path / "target" / "config.json", INDEX_FILE: tmp_path / "index.json"}
    files[INDEX_FILE].write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    monkeypatch.setattr(tokenizer, "hf_hub_download", lambda source, name: files[name])
    assert [service.name for service in plan("some/model")] == ["draft", "verifier", "router"]
