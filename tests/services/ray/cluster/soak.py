"""`python -m tests.services.ray.cluster.soak`: scale pools on a local Ray, then upgrade under load.

Ends with the failures and status 1 unless every answer equals plain decoding and every trace is complete.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.services.ray.cluster.application import RayApplication, running_application, write_model
from tests.services.ray.cluster.load import WORKERS, Asked, Outcome, plainly, scale_out_and_in, upgrade
from tests.services.ray.cluster.traces import torn

NUM_CYCLES = 4
# A replica serves until the one in its place does.
SURGE = [{"name": name, "max_surge_percent": 100} for name in ("Router", *WORKERS)]


def main() -> None:
    """Scale out and in, then upgrade."""
    failures: list[str] = []

    def watch(name: str, application: RayApplication, act: Callable[[RayApplication, Sequence[Asked]], Outcome]) -> None:
        done = act(application, asked)
        failures.extend(done.failures)
        counts = f"{done.num_answered} requests, {done.num_drafted} drafted tokens, {len(done.failures)} failures"
        print(f"{name}: {counts}, {time.monotonic() - started:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"))
        asked, started = plainly(model, num_requests=16, max_tokens=64), time.monotonic()
        with running_application(Path(folder), model, max_drafters=2) as application:
            for number in range(NUM_CYCLES):
                watch(f"cycle {number + 1}", application, partial(scale_out_and_in, largest=(2, 2), starting_pause=0.0))
        failures += trace_failures(application)
        with running_application(Path(folder), model, "deploy", SURGE, max_drafters=2) as application:
            watch("upgrade", application, upgrade)
        failures += trace_failures(application)
    sys.exit("\n".join(failures) or 0)


def trace_failures(application: RayApplication) -> list[str]:
    """The incomplete traces of an application that has ended."""
    spans, broken = application.collector.spans, torn(application.collector.spans)
    num_traces = len({one.span.trace_id for one in spans})
    print(f"{num_traces} traces of {len(spans)} spans, {len(broken)} torn", flush=True)
    return broken


if __name__ == "__main__":
    main()
