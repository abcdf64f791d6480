"""The files of the repository, as git lists them."""

import ast
import gc
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "eyas" / "v1"


@cache
def files() -> tuple[Path, ...]:
    """Every file that is committed or would be."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-c", "-o", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return tuple(sorted({path for name in names if name and (path := ROOT / name).is_file()}))


def python_files(*folders: str) -> list[Path]:
    """The Python files below `folders`, generated ones excluded."""
    tops = [ROOT / folder for folder in folders]
    return [p for p in files() if p.suffix == ".py" and GENERATED not in p.parents and any(top in p.parents for top in tops)]


@cache
def syntax(path: Path) -> ast.Module:
    """The parsed file."""
    was_enabled = gc.isenabled()
    gc.disable()  # else most of the time goes into looking for cycles among the nodes
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        if was_enabled:
            gc.enable()


def name(path: Path) -> str:
    """The path as a reader of the repository would write it."""
    return path.relative_to(ROOT).as_posix()
