"""A clock that a test sets."""


class Clock:
    """Stands still until `now` is set, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
