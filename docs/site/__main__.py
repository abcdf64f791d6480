"""`make docs`: build the site of the documentation, strictly, into build/site.

The site has the tree of the repository, so that links between pages work in both places. A link to a file that is no page
leads to the repository. A link to a folder leads to the folder's page, which is generated where there is none.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from docs.site.reference import command_line_page, http_page, protos_page

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
REPOSITORY = "https://github.com/eyas-project/eyas"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/*/*.md")
OTHER_PAGES = ("benchmarks/results/*.md", "deploy/helm/README.md", "models/demo/README.md")
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


@cache
def pages() -> dict[str, str]:
    """Return the text of every page of the site by its path, links rewritten."""
    paths = sorted(path for pattern in PAGES + OTHER_PAGES for path in ROOT.glob(pattern))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    texts |= {
        "docs/http-schema.md": http_page(),
        "docs/command-line.md": command_line_page(),
        "protos/eyas/v1/README.md": protos_page(ROOT / "protos"),
        "benchmarks/results/README.md": _list_of_reports(texts),
    }
    return {path: _rewritten(path, texts) for path in texts}


def pictures() -> Iterator[Path]:
    """Yield the pictures that pages show."""
    for folder in ("docs/pictures", "benchmarks/results"):
        yield from (path for path in sorted((ROOT / folder).iterdir()) if path.suffix in {".svg", ".png", ".gif"})


def _list_of_reports(paths: Iterable[str]) -> str:
    """Return a page that lists the reports of benchmarks."""
    reports = [posixpath.basename(path) for path in paths if posixpath.dirname(path) == "benchmarks/results"]
    return "\n".join(["# Benchmarks", "", *(f"- [{report.removesuffix('.md')}]({report})" for report in reports), ""])


def _rewritten(page: str, texts: Mapping[str, str]) -> str:
    return LINK.sub(lambda link: link[1] + _target(page, link[2], texts), texts[page])


def _target(page: str, link: str, texts: Mapping[str, str]) -> str:
    """Return where a relative link of a page leads on the site."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path in texts or link.endswith((".png", ".svg", ".gif")):
        return link
    if f"{path}/README.md" in texts:
        return f"{link.rstrip('/')}/README.md"
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path}" if (ROOT / path).exists() else link


def stage(folder: Path) -> None:
    """Write the pages, their pictures and the script of the search to a folder."""
    for path, text in pages().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    for picture in pictures():
        target = folder / picture.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    (folder / "assets").mkdir()
    shutil.copyfile(CONFIG.with_name("iframe-worker.js"), folder / "assets" / "iframe-worker.js")


def main() -> int:
    """Stage the pages and build the site; return the exit status of mkdocs."""
    shutil.rmtree(STAGE, ignore_errors=True)
    stage(STAGE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    status = subprocess.run(command, cwd=ROOT, env=quiet, check=False).returncode
    if status == 0:
        print(f"the site is in {SITE.relative_to(ROOT)}; open {SITE.relative_to(ROOT)}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
