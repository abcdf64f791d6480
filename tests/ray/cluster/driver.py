"""`python -m tests.ray.cluster.driver CONFIG FOLDER`: a small Ray with `serve run CONFIG` on it, until stdin ends.

Writes a line of JSON to stdout whenever the replicas of an application have changed: {deployment: {state: number}}.
"""

import json
import select
import sys

import ray
from ray import serve
from ray.serve.scripts import run

POLL_SECONDS = 0.1
STORE_BYTES = 80 * 2**20
NUM_CPUS = 8  # slots for replicas, not cores


def main(config: str, folder: str) -> None:
    """Run until stdin ends."""
    ray.init(
        num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=True, _temp_dir=folder,
        namespace="serve",
    )  # fmt: skip
    try:
        run.main([config, "--non-blocking"], standalone_mode=False)
        last = None
        while not select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            last = tell(last)
        serve.shutdown()
    finally:
        ray.shutdown()


def tell(last: str | None) -> str:
    """Write what the replicas do, unless it is the same as the last time."""
    deployments = [pair for app in serve.status().applications.values() for pair in app.deployments.items()]
    line = json.dumps({name: dict(deployment.replica_states) for name, deployment in deployments})
    if line != last:
        print(line, flush=True)
    return line


if __name__ == "__main__":
    main(*sys.argv[1:])
