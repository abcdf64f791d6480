"""The site of the documentation: every page is in its menu, every link leads somewhere, and it builds strictly."""

import posixpath
import re
from collections.abc import Iterator

import pytest

from docs.site.__main__ import CONFIG, LINK, main, pages, pictures
from tests.support.repository import ROOT

LISTED = ("docs/decisions/", "docs/lab-notes/", "benchmarks/results/")
MENU = re.compile(r"^ +- .*?([\w./-]+\.md)$", re.MULTILINE)
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def broken_links() -> Iterator[str]:
    shown = pages().keys() | {picture.relative_to(ROOT).as_posix() for picture in pictures()}
    for page, text in pages().items():
        for _, link in LINK.findall(text):
            if posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) not in shown:
                yield f"{page}: {link}"


def test_the_menu_has_every_page_once() -> None:
    menu = MENU.findall(CONFIG.read_text(encoding="utf-8"))
    assert sorted(menu) == sorted(page for page in pages() if not page.startswith(LISTED) or "README" in page)


def test_every_link_of_the_site_leads_to_a_page() -> None:
    assert not list(broken_links())


def test_the_reference_names_routes_messages_and_options() -> None:
    assert "`POST /v1/chat/completions` | [ChatBody](#chatbody)" in pages()["docs/http-schema.md"]
    assert "| `Speculate` | stream of [SpeculateRequest](#speculaterequest)" in pages()["protos/eyas/v1/README.md"]
    assert "| `--draft-model` |" in pages()["docs/command-line.md"].partition("## eyas serve\n")[2].partition("## ")[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_else() -> None:
    pytest.importorskip("material", reason="needs the package mkdocs-material; run: pip install -e '.[docs]'")
    assert main() == 0, "see the output of mkdocs"
    built = sorted((ROOT / "build" / "site").rglob("*.html"))
    assert len(built) > len(pages())
    assert not [f"{page}: {found}" for page in built for found in LOADED.findall(page.read_text(encoding="utf-8"))]
