"""`make notes`: print the section of CHANGELOG.md for a version, as the notes of its release."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from eyas import __version__

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(version: str, changelog: str) -> str:
    """Return the section of a version. Raises ValueError if there is none, or if it is empty."""
    found = re.search(rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?$\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section {version!r}; rename Unreleased, and give it the date")
    return found[1].strip() + "\n"


def main(tag: str = "") -> None:
    """Print the notes of a tag such as v0.1.0, or of this version. Ends with a message if the tag is of another version."""
    version = tag.removeprefix("v") or __version__
    if version != __version__:
        sys.exit(f"the tag is {tag}, but eyas/__init__.py says {__version__}; change one of them")
    try:
        print(notes(version, CHANGELOG.read_text(encoding="utf-8")), end="")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
