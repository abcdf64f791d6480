"""A service that cannot start exits with status 2 and one line without a traceback."""

import socket
import sys
from pathlib import Path
from subprocess import STDOUT

import pytest
from safetensors.torch import load_file, save_file

from tests.support.services.forks import Popen
from tests.support.tiny import DEMO, write_head

CONFIGS = Path("examples/configs/local")


def last_words(log: Path, service: str, *settings: str) -> str:
    """The line with which a service that cannot start ends its log."""
    words = [f"--config={CONFIGS / service}.yaml", *(f"--set={setting}" for setting in settings)]
    with log.open("wb") as file:
        status = Popen([sys.executable, "-m", f"eyas.services.{service}", *words], stdout=file, stderr=STDOUT).wait(250)
    output = log.read_text()
    assert status == 2, output
    assert "Traceback" not in output
    line = output.splitlines()[-1]
    assert line.startswith("error: "), output
    return line


AS_EAGLE = {"draft": ["method=eagle3"]}


def test_a_wrong_setting(tmp_path: Path) -> None:
    line = last_words(tmp_path / "log", "router", "stal_timeout=1")
    assert line.startswith("error: --set stal_timeout: unknown setting stal_timeout;")


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    assert "no tokenizer.json" in last_words(tmp_path / "log", "router", f"models=[{{name: demo, tokenizer: {tmp_path}}}]")


@pytest.mark.parametrize(("service", "key"), [("router", "server.port"), ("router", "http.port"), ("draft", "server.port")])
def test_a_port_in_use(service: str, key: str, tmp_path: Path) -> None:
    own = ["server.port=0", "http.port=0"] if service == "router" else []
    own += {"verifier": ["validate_head=never", "engine.max_kv_tokens=64"], "draft": ["drafting.max_kv_tokens=64"]}.get(
        service, []
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = last_words(tmp_path / "log", service, *own, f"{key}={port}", "registry.url=redis://127.0.0.1:1/0")
    assert line.startswith(f"error: cannot listen on 127.0.0.1:{port}: the port is in use")


@pytest.mark.parametrize("service", ["draft", "verifier"])
def test_a_head_made_for_another_target(service: str, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", vocab_size=4096, draft_vocab=64, hidden=32)
    assert "hidden" in last_words(tmp_path / "log", service, f"draft_model={head}", *AS_EAGLE.get(service, ()))


@pytest.mark.parametrize(("service", "tensor"), [("draft", "midlayer.mlp.up_proj.weight"), ("verifier", "fc.weight")])
def test_a_head_with_a_missing_tensor(service: str, tensor: str, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", vocab_size=4096, draft_vocab=64, hidden=256)
    save_file(
        {name: value for name, value in load_file(head / "model.safetensors").items() if name != tensor},
        head / "model.safetensors",
    )
    assert tensor in last_words(tmp_path / "log", service, f"draft_model={head}", *AS_EAGLE.get(service, ()))


def test_a_target_with_a_missing_tensor(tmp_path: Path) -> None:
    tensor, target = "model.layers.0.mlp.up_proj.weight", tmp_path / "target"
    target.mkdir()
    for file in (DEMO / "target").iterdir():
        (target / file.name).symlink_to(file.resolve())
    (target / "model.safetensors").unlink()
    tensors = load_file(DEMO / "target" / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert tensor in last_words(tmp_path / "log", "verifier", f"model={target}", 'draft_model=""')
