"""Dockerfiles are pinned, run as non-root, copy only existing files, and expose the ports of the chart."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from eyas.config import DraftConfig, RouterConfig, VerifierConfig
from tests.deploy.charts import containers, rendered
from tests.deploy.images.dockerfile import of, sources, steps
from tests.support.repository import ROOT

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@each_file
def test_images_are_pinned_and_run_as_non_root(file: Path) -> None:
    assert of(file, "ARG")[0].startswith("BASE="), "the base can be chosen"
    assert all(text.startswith("${BASE}") for text in of(file, "FROM"))
    installs = [text for text in of(file, "RUN") if " pip install" in text]
    assert installs
    assert all("--constraint constraints.txt" in text or "--no-deps" in text for text in installs)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", of(file, "USER")[-1])
    last = [step.instruction for step in steps(file)]
    assert last.index("USER") < last.index("HEALTHCHECK")
    assert "RUN" not in last[last.index("USER") :]


@each_file
def test_copied_files_exist_and_are_not_ignored(file: Path) -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for source in [source for text in of(file, "COPY") for source in sources(text)]:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, rule) or source.startswith(f"{rule}/") for rule in allowed), source


def test_pins_of_images_are_those_of_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["serve"]]
    groups = project["dependency-groups"]
    assert {item for group in groups.values() for item in group if isinstance(item, str)} <= set(extras)


def test_images_listen_where_the_chart_looks() -> None:
    exposed = {file.stem: set(of(file, "EXPOSE")[0].split()) for file in FILES}
    for place, container in containers(rendered("defaults")):
        if container["name"] != "redis":
            image = re.sub(r".*eyas-(\w+):.*", r"\1", container["image"])
            assert {str(port["containerPort"]) for port in container["ports"]} <= exposed[image], place


@each_file
def test_images_install_the_services_as_part_of_the_package(file: Path) -> None:
    """eyas/services is a link, so both folders must be there when pip builds the package."""
    text = file.read_text()
    for copy in ("COPY eyas eyas", "COPY services services"):
        assert text.index(copy) < min(found.start() for found in re.finditer(r"pip install .*(?:--no-deps \.|\"\.\$)", text))


def test_pods_run_modules_that_the_images_have() -> None:
    """The images have the installed package only, not the folder `services` of the repository."""
    found = [container["command"] for _, container in containers(rendered("defaults")) if container["name"] != "redis"]
    assert [command[:2] for command in found] == [["python", "-m"]] * 3
    (package,) = {of(file, "CMD")[0].split('"')[5].rpartition(".")[0] for file in FILES}
    assert {command[2].rpartition(".")[0] for command in found} == {package}


def test_every_service_has_an_image() -> None:
    assert {config.__name__ for config in (RouterConfig, VerifierConfig, DraftConfig)} == {
        f"{container['name'].title()}Config"
        for _, container in containers(rendered("defaults"))
        if container["name"] != "redis"
    }


def test_a_missing_container_engine_is_reported(tmp_path: Path) -> None:
    bash = "/bin/bash"
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dirname").symlink_to("/usr/bin/dirname")
    result = subprocess.run(
        [bash, str(DOCKER / "build.sh")], env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "install docker, podman or buildah" in result.stderr
