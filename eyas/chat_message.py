"""The module `eyas.text.chat_message` under its name before 0.2, for programs that import it; goes in 0.3."""

from eyas.text.chat_message import *  # noqa: F403
