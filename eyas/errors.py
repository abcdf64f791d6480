"""Every error that a user of Eyas can meet. A message says what is wrong, with which value, and how to fix it.

EyasError
|- InvalidRequest: UnknownModel, UnknownDrafter, PoisonRequest
|- ConfigError: MissingPackage
|- CheckpointError, InvalidTree
|- Overloaded: RateLimited
|- OutOfMemory
|- Unavailable: WorkerLost
|- TimedOut
|- Unauthenticated, PermissionDenied
`- RequestFailed
"""

from collections.abc import Mapping
from pathlib import Path

REPOSITORY = "https://github.com/eyas-project/eyas"


class EyasError(Exception):
    """Base of every error that Eyas raises on purpose."""


class InvalidRequest(EyasError):
    """A request that can never be served as it stands. param: the invalid parameter; empty if no single one is."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InvalidRequest):
    """A request for a model that is not served."""


class UnknownDrafter(InvalidRequest):
    """A request for a drafter that the verifier's discovery does not know. Without one it can be served."""


class PoisonRequest(InvalidRequest):
    """A request that verifiers did not survive, and that is therefore refused."""


class ConfigError(EyasError, ValueError):
    """A configuration that does not validate. It is a ValueError too, so that pydantic adds the location."""


class MissingPackage(ConfigError):
    """A package that one of Eyas's extras would bring. user: what needs it, the beginning of the message."""

    def __init__(self, user: str, package: str, extra: str) -> None:
        super().__init__(f"{user} needs the package {package}; run: {install_command(extra)}")


class CheckpointError(EyasError):
    """A checkpoint whose tensors or config do not fit."""


class InvalidTree(EyasError):
    """A draft tree that breaks the contract of `eyas.protocol.tree`."""


class Overloaded(EyasError):
    """No capacity for this request now. retry_after: seconds after which to try again; None if unknown."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """The quota of an API key is used up. headers: OpenAI's, about what is left of it."""

    def __init__(self, message: str, retry_after: float | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, retry_after)
        self.headers = headers or {}


class OutOfMemory(EyasError):
    """A device has too little memory. It says for what, how much was free, and which setting to lower."""


class Unavailable(EyasError):
    """The service that should answer is not there."""


class WorkerLost(Unavailable):
    """A worker that ended, or stays in one step, while it worked on the request: the request itself may be the reason."""


class TimedOut(EyasError):
    """A request that was not done in its time."""


class Unauthenticated(EyasError):
    """A call without a key, or with one that is not known."""


class PermissionDenied(EyasError):
    """A call with a known key that may not do this."""


class RequestFailed(EyasError):
    """A request that died of an internal error; the log has the traceback."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: into the checkout that is running, or else from the repository."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    return f"pip install 'eyas[{extra}] @ git+{REPOSITORY}'"


def first_line(message: str) -> str:
    """Return the beginning of a library's message."""
    return next(iter(message.strip().splitlines()), "")[:200]
