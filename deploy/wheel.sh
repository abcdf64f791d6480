#!/usr/bin/env bash
# Build sdist and wheel into dist/, the wheel from the sdist, and try the wheel in a fresh environment.
# Its dependencies are those of .venv, whose checkout of Eyas it must not import.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python fresh=$PWD/build/wheel
rm -rf dist build/lib build/bdist.* "$fresh"

"$python" -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/eyas-*.tar.gz

"$python" -m venv --without-pip "$fresh"
"$python" -m pip --python "$fresh/bin/python" install --quiet --no-deps dist/eyas-*.whl
own=$("$fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/dependencies.pth"

cd "$fresh"
unset PYTHONPATH
bin/python -c "
from importlib.resources import files
import eyas, eyas.llm, eyas.services.router
assert eyas.__file__.startswith('$own'), eyas.__file__
for package, name in (('eyas.models.heads', 'validation.txt'), ('eyas.services.router.http', 'static/playground.js')):
    assert files(package).joinpath(name).is_file(), name
"
bin/eyas --help >/dev/null
bin/eyas drafters >/dev/null
ls -1 ../../dist
