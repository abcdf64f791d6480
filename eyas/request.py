"""The module `eyas.api.request` under its name before 0.2, for programs that import it; goes in 0.3."""

from eyas.api.request import *  # noqa: F403
