"""The playground in Chromium, against the demo's cluster."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from eyas.services.cluster import Cluster
from tests.e2e.browser import Page, browser_page

IS_DONE = "document.querySelector('#status').textContent.startsWith('Done')"
MARKUP = "# <img src=x onerror='document.title=1'><b>bold</b>\nclass Queue:\n"
# Changes the seed of the plain run, as a server that loses tokens would change its output.
OTHER_SEED = """(() => {
    const send = window.fetch;
    window.fetch = (url, options) => send(url, options?.body?.includes('"none"')
        ? {...options, body: options.body.replace('"seed":7', '"seed":8')} : options);
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def opened(page: Page, demo_cluster: Cluster) -> Page:
    """The page, freshly loaded."""
    page.problems.clear()
    page.show_as(1280, 900)
    page.open(f"{demo_cluster.http}/")
    page.until("document.querySelector('#model').value === 'demo'")
    return page


def fill(page: Page, **values: object) -> None:
    for name, value in values.items():
        page.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")


def run(page: Page, **values: object) -> None:
    """Run the form's request to its end."""
    fill(page, **{"seed": 7, "max_tokens": 48, **values})
    page.run("document.querySelector('#form').requestSubmit()")
    page.until(IS_DONE)


def output(page: Page) -> str:
    return str(page.run("[...document.querySelectorAll('#output .token')].map((one) => one.textContent).join('')"))


def number(page: Page, selector: str) -> float:
    return float(page.text(selector))


def test_a_run_shows_what_the_api_returns(opened: Page, demo_cluster: Cluster) -> None:
    run(opened)
    body = {"prompt": opened.run("document.querySelector('#prompt').value"), "max_tokens": 48, "temperature": 0.8, "seed": 7}
    choice = httpx.post(f"{demo_cluster.http}/v1/completions", json=body, timeout=250).json()["choices"][0]
    assert output(opened) == choice["text"]
    assert opened.text("#same") == "✓ identical"
    assert opened.text("#same-note") == "48 of 48 tokens"
    assert number(opened, "#tau") > 1.5
    assert number(opened, "#speed-speculative") > 0 < number(opened, "#speed-plain")
    assert {"dspark", "the target's own"} <= set(
        opened.run("[...document.querySelectorAll('#legend .token')].map((o) => o.textContent)")
    )
    assert opened.run("document.querySelectorAll('#timeline .bar-plain').length") == 47
    assert opened.problems == []


def test_the_accepted_nodes_of_a_step_are_its_marked_text(opened: Page) -> None:
    run(opened, temperature=0)
    last = int(opened.run("document.querySelector('#step').max"))
    seen = ""
    for step in range(last + 1):
        opened.run(f"document.querySelector('#step').value = {step}")
        opened.run("document.querySelector('#step').dispatchEvent(new Event('input'))")
        marked = opened.run("[...document.querySelectorAll('#output .current')].map((one) => one.textContent).join('')")
        titles = opened.run(
            "[...document.querySelectorAll('.at-accepted title, .at-bonus title')].map((o) => o.textContent)"
        )
        path = [title.rpartition(", accepted")[0].rpartition(", ")[0] or title.rpartition(", bonus")[0] for title in titles]
        assert "".join(path) == marked
        seen += marked
    assert output(opened).endswith(seen)


def test_a_difference_is_shown_with_its_place(opened: Page) -> None:
    opened.run(OTHER_SEED)
    run(opened, temperature=1)
    assert opened.text("#same") == "✗ different"
    note = opened.text("#same-note")
    place = int(note.removeprefix("from token ").partition(":")[0])
    assert (
        opened.run("[...document.querySelectorAll('#output .token')].findIndex((o) => o.matches('.different'))") == place - 1
    )


def test_the_keyboard_runs_and_steps(opened: Page) -> None:
    fill(opened, seed=7, max_tokens=24)
    opened.run("document.querySelector('#prompt').focus()")
    opened.press("Enter", modifiers=2)
    opened.until(IS_DONE)
    opened.run("document.querySelector('#tree').focus()")
    for key, caption in (("Home", "Step 1 "), ("ArrowRight", "Step 2 "), ("ArrowLeft", "Step 1 "), ("ArrowLeft", "Step 1 ")):
        opened.press(key)
        assert opened.text("#caption").startswith(caption)
    opened.run("document.querySelector('#step').focus()")
    opened.press("ArrowRight")
    assert opened.text("#caption").startswith("Step 2 ")
    opened.run("document.querySelector('#tab-generate').focus()")
    opened.press("ArrowRight")
    opened.until("document.querySelectorAll('#workers article').length === 2")


def test_playing_grows_a_tree_before_its_verdict(opened: Page) -> None:
    run(opened, max_tokens=24)
    opened.run(
        "document.querySelector('#step').value = 0; document.querySelector('#step').dispatchEvent(new Event('input'))"
    )
    opened.run("document.querySelector('#play').click()")
    opened.until("document.querySelectorAll('#tree .sent').length > 0 && !document.querySelector('#tree .accepted')")
    opened.until("document.querySelectorAll('#tree .at-bonus').length === 1")
    opened.run("document.querySelector('#play').click()")
    assert opened.text("#play") == "Play"


def test_nothing_is_interpreted_as_markup(opened: Page) -> None:
    opened.run("document.querySelector('#compare').checked = false")
    run(opened, prompt=MARKUP, max_tokens=24)
    assert opened.text("#output .prompt") == MARKUP
    assert opened.run("document.querySelectorAll('#results img, #results b').length") == 0
    assert opened.run("document.title") == "Eyas playground"
    with pytest.raises(AssertionError, match="TrustedHTML"):
        opened.run("document.querySelector('#output').innerHTML = '<b>x</b>'")


def test_an_error_of_the_server_is_shown(opened: Page) -> None:
    fill(opened, max_tokens=1_000_000)
    opened.run("document.querySelector('#form').requestSubmit()")
    opened.until("!document.querySelector('#problem').hidden")
    assert "context length" in opened.text("#problem")
    assert not opened.run("document.querySelector('#run').disabled")


def test_every_control_has_a_name(opened: Page) -> None:
    run(opened, max_tokens=16)
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "combobox", "checkbox", "radio", "slider", "tab", "tabpanel"}
    controls = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
    assert len(controls) > 15
    assert not [node for node in controls if not node.get("name", {}).get("value")]


def test_no_width_scrolls_sideways(opened: Page) -> None:
    run(opened, max_tokens=16)
    for width in (360, 390, 820, 1440):
        opened.show_as(width, 800)
        assert opened.run("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("scheme", "choice", "is_dark"), [("light", "", False), ("dark", "", True), ("light", "dark", True)]
)
def test_colours_follow_the_system_or_the_switch(opened: Page, scheme: str, choice: str, is_dark: bool) -> None:
    opened.show_as(1280, 900, scheme)
    fill(opened, theme=choice)
    opened.run("document.querySelector('#theme').dispatchEvent(new Event('change'))")
    background = opened.run("getComputedStyle(document.body).backgroundColor")
    fill(opened, theme="")
    opened.run("document.querySelector('#theme').dispatchEvent(new Event('change'))")
    assert (background == "rgb(18, 21, 24)") == is_dark


def test_the_cluster_tab_shows_the_workers(opened: Page) -> None:
    run(opened, max_tokens=16)
    opened.run("document.querySelector('#tab-cluster').click()")
    opened.until("document.querySelectorAll('#workers article').length === 2")
    text = opened.text("#workers")
    assert all(word in text for word in ("dspark+prompt_lookup", "● closed", "● healthy", "prompt tokens", "waiting"))
    assert "127.0.0.1" not in text


@contextlib.contextmanager
def behind_a_prefix(base: str) -> Iterator[str]:
    """A proxy that serves `base` below /some/where/ only."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            path = self.path.removeprefix("/some/where")
            if path == self.path:
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kept = {"content-type": self.headers.get("content-type", "application/json")}
            answer = httpx.request(self.command, base + path, content=body, headers=kept, timeout=250)
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name in ("content-type", "content-security-policy"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = forward  # noqa: N815

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/some/where/"
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_works_behind_a_path_prefix(page: Page, demo_cluster: Cluster, tmp_path: Path) -> None:
    with behind_a_prefix(demo_cluster.http) as url:
        page.problems.clear()
        page.open(url)
        page.until("document.querySelector('#model').value === 'demo'")
        run(page, max_tokens=16)
        assert page.text("#same") == "✓ identical"
        assert page.problems == []
