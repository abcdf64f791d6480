#!/usr/bin/env bash
# Build the images eyas-router, eyas-engine and eyas-ray with docker, podman or buildah.
# Environment: REGISTRY (prefix of the names), TAG, BASE and PIP_EXTRA_INDEX_URL (build arguments).
set -euo pipefail
cd "$(dirname "$0")/../.."

for engine in docker podman buildah; do
	if command -v "$engine" >/dev/null && "$engine" info >/dev/null 2>&1; then break; fi
	engine=
done
if [ -z "$engine" ]; then
	echo "No container engine answers: install docker, podman or buildah, and start its daemon if it has one." >&2
	exit 1
fi

build() { # name, Dockerfile, further arguments
	local name=$1 file=$2
	shift 2
	"$engine" build --file "deploy/docker/$file" --tag "${REGISTRY:+${REGISTRY%/}/}$name:${TAG:-0.1.0}" \
		${BASE:+--build-arg BASE="$BASE"} ${PIP_EXTRA_INDEX_URL:+--build-arg PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL"} "$@" .
}

build eyas-router router.Dockerfile
build eyas-engine engine.Dockerfile
build eyas-ray engine.Dockerfile --build-arg EXTRAS='[cpu,ray]' --build-arg GROUPS='--group serving --group router'
