"""The module `eyas.text.chat_parser` under its name before 0.2, for programs that import it; goes in 0.3."""

from eyas.text.chat_parser import *  # noqa: F403
