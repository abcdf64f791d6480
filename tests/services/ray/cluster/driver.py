"""`python -m tests.services.ray.cluster.driver COMMAND CONFIG FOLDER`: `serve COMMAND CONFIG` on a Ray until stdin ends.

COMMAND is run or deploy; a line on stdin has it done again. Writes a line of JSON to stdout whenever the replicas of an
application have changed: {deployment: {state: number}}.
"""

import json
import select
import sys

import ray
from ray import serve
from ray.serve import scripts
from ray.serve._private import api

POLL_SECONDS = 2.0
STORE_BYTES = 80 * 2**20
NUM_CPUS = 4  # room for replicas, not cores
PROXY_SECONDS = 150  # Serve itself waits 60 s for its proxies, which is short beside other tests


def main(command: str, config: str, folder: str) -> None:
    """Run until stdin ends."""
    api.HTTP_PROXY_TIMEOUT = PROXY_SECONDS
    cluster = ray.init(
        num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES, include_dashboard=command == "deploy", dashboard_port=0,
        log_to_driver=True, _temp_dir=folder, namespace="serve",
    )  # fmt: skip
    commands = {
        "run": (scripts.run, [config, "--non-blocking"]),
        "deploy": (scripts.deploy, [config, "--address", f"http://{cluster.dashboard_url}"]),
    }
    call, words = commands[command]
    try:
        call.main(words, standalone_mode=False)
        last = None
        while (line := read_line()) != "":
            if line:
                call.main(words, standalone_mode=False)
            last = print_states(last)
        serve.shutdown()
    finally:
        ray.shutdown()


def read_line() -> str | None:
    """A line of stdin, "" at its end; None if none comes in a while."""
    return sys.stdin.readline() if select.select([sys.stdin], [], [], POLL_SECONDS)[0] else None


def print_states(last: str | None) -> str:
    """Write what the replicas do, unless it is the same as the last time."""
    deployments = [pair for app in serve.status().applications.values() for pair in app.deployments.items()]
    line = json.dumps({name: dict(deployment.replica_states) for name, deployment in deployments})
    if line != last:
        print(line, flush=True)
    return line


if __name__ == "__main__":
    main(*sys.argv[1:])
