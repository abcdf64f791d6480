"""`python -m tests.ray.cluster.soak`: several breaths of the pools on a local Ray; every answer is plain decoding's, or it
ends with the failures and status 1."""

import sys
import tempfile
import time
from pathlib import Path

from tests.ray.cluster.application import running_application
from tests.ray.cluster.load import breathe, plainly

NUM_BREATHS = 4
LONGEST_SECONDS = 480.0


def main() -> None:
    """Breathe; stop early when the time is over."""
    asked = plainly(num_requests=16, max_tokens=64)
    num_answered, failures, started = 0, list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, running_application(Path(folder)) as application:
        for number in range(NUM_BREATHS):
            breath = breathe(application, asked)
            num_answered += breath.num_answered
            failures += breath.failures
            seconds = time.monotonic() - started
            print(f"breath {number + 1}: {num_answered} requests, {len(failures)} failures, {seconds:.0f} s", flush=True)
            if seconds > LONGEST_SECONDS:
                break
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
