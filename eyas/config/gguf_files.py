"""Finds the folder of a checkpoint on this machine. A GGUF file is unpacked into one, once. Needs no torch.

So everything else reads folders: the loaders of targets and heads, the router's tokenizer, trainers and fingerprints.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from eyas.config.gguf_header import MAGIC, read_header
from eyas.errors import CheckpointError, MissingPackage

SUFFIX = ".gguf"
# What else a folder may hold weights in: then its GGUF files are others of the same model.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt")
# Part of what names the folder of a file. Another number unpacks all files again.
UNPACKED_FORMAT = 1
# Packages that reading GGUF files needs besides transformers.
PACKAGES = ("gguf", "accelerate")
# How llama.cpp names the part of a file that was split, and the file of a vision tower.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_TOWER = "mmproj"
# Begins the lines that the unpacker prints for this process.
MARK = "unpacking: "

log = logging.getLogger(__name__)


def local_folder(source: str | Path) -> Path | None:
    """Return the folder with a checkpoint's files, that of a GGUF file unpacked; None for what is not on this machine.

    Raises CheckpointError for a GGUF file that cannot be served, and MissingPackage for what reads it.
    """
    file = gguf_file(source)
    if file is not None:
        return _unpacked(file)
    return Path(source) if Path(source).is_dir() else None


def gguf_file(source: str | Path) -> Path | None:
    """Return the GGUF file that a path names: the file, or a folder with one and no other weights. None for others.

    Raises CheckpointError for a file that is missing or not a GGUF file, a part of one, and a folder with several.
    """
    try:
        return _found(Path(source))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {str(source)[:200]!r}: {error.strerror}; name a file or folder that can be read"
        ) from error


def _found(path: Path) -> Path | None:
    """Return the GGUF file at a path, as `gguf_file` does. Raises CheckpointError and OSError."""
    if path.is_dir():
        entries = sorted(path.iterdir())
        if any(entry.suffix in OTHER_WEIGHTS for entry in entries):
            return None
        found = [entry for entry in entries if _is_gguf(entry) and not entry.name.startswith(_TOWER)]
        if len(found) > 1 and not all(_PART.search(entry.name) for entry in found):
            names = ", ".join(entry.name for entry in found)
            raise CheckpointError(f"{path} holds {len(found)} GGUF files: {names}; name one of them, such as {found[0]}")
        path = found[0] if found else path
    if not _is_gguf(path):
        return None
    if not path.is_file():
        raise CheckpointError(
            f"no file at {str(path)!r}; give a GGUF file, a folder with a checkpoint, or a hub id (one that ends in {SUFFIX}"
            " is read as a file: fetch that repository, and name its folder)"
        )
    with path.open("rb") as stream:
        if (begins := stream.read(4)) != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file: it begins with {begins!r}, not with {MAGIC!r}; fetch it again"
            )
    if (part := _PART.search(path.name)) and int(part[2]) > 1:
        raise CheckpointError(
            f"{path} is part {int(part[1])} of {int(part[2])} of a split GGUF file; join them with llama.cpp's "
            f"llama-gguf-split --merge FIRST_PART {path.name[: part.start()]}{SUFFIX}, and name that"
        )
    return path


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def _unpacked(file: Path) -> Path:
    """Return the folder that a GGUF file is unpacked into; one process does that, once.

    Raises CheckpointError and MissingPackage.
    """
    try:
        folder = _folder_of(file)
        if folder.is_dir():
            return folder
        for package in PACKAGES:
            if find_spec(package) is None:
                raise MissingPackage(f"reading {file}", package, "gguf")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _unpack(file, folder, lock.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot unpack {file} into {Path(HF_HOME, 'eyas')}: {error}; name another place in the environment variable "
            "HF_HOME"
        ) from error
    return folder


def _folder_of(file: Path) -> Path:
    """Return where a file is unpacked: in the cache of Hugging Face, by path, size and time of its last change."""
    try:
        reader = version("transformers")
    except PackageNotFoundError as error:
        raise CheckpointError(
            f"{file} is a GGUF file, and transformers, which unpacks it, is not installed here; unpack it where "
            "transformers is installed, and name that folder here"
        ) from error
    state = file.stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {reader} {UNPACKED_FORMAT}"
    return Path(HF_HOME, "eyas", f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}")


def _unpack(file: Path, folder: Path, lock: int) -> None:
    """Unpack a file in a process of its own: torch stays out of a router, and its memory is free afterwards.

    lock: descriptor of the lock, which that process holds too, should this one end first. Raises CheckpointError with the
    reason that the process prints.
    """
    read_header(file)  # a damaged file needs no process
    log.warning("unpacking %s into %s, once", file, folder)
    scratch, started = folder.with_name(f"{folder.name}.partial"), time.monotonic()
    shutil.rmtree(scratch, ignore_errors=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        command = [sys.executable, "-P", "-m", "eyas.models.unpacking", str(file), str(scratch)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, pass_fds=[lock])
        if result.returncode:
            raise CheckpointError(_reason(file, result))
        _write_through(scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for warning in _marked(result):
        log.warning("%s: %s", file, warning)
    log.warning("unpacked %s in %.0f s", file, time.monotonic() - started)


def _write_through(folder: Path) -> None:
    """Write the files of a folder to the disk: one that is cut by a power failure would be trusted ever after."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _marked(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a process that unpacks has to say, without what libraries print."""
    return [line.removeprefix(MARK) for line in result.stdout.splitlines() if line.startswith(MARK)]


def _reason(file: Path, result: subprocess.CompletedProcess[str]) -> str:
    """Return why a process did not unpack a file."""
    if result.returncode < 0:
        return f"{file}: the unpacker was killed by signal {-result.returncode}, probably out of memory; see docs/models.md"
    if marked := _marked(result):
        return marked[-1]
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return f"{file} cannot be unpacked: {lines[-1] if lines else f'exit status {result.returncode}'}"
