"""The playground in Chromium, against the demo's cluster."""

import contextlib
import json
import shlex
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.services.local.cluster import Cluster, free_port
from tests.support.services.browser import Page, browser_page

DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
IS_DONE = "document.querySelector('#status').textContent.startsWith('Done')"
HAS_RECORDED = "!document.querySelector('#recorded').hidden"
IS_REPLAYED = "document.querySelector('#replay').textContent === 'Replay' && !document.querySelector('#replay').disabled"
MARKUP = "# <img src=x onerror='document.title=1'><b>bold</b>\nclass Queue:\n"
# Keeps the bodies of requests, what is copied and what is saved.
RECORD = """(() => {
    const send = window.fetch;
    Object.assign(window, {bodies: [], copied: '', saved: null});
    window.fetch = (url, options) => {
        if (options?.body) window.bodies.push(JSON.parse(options.body));
        return send(url, options);
    };
    Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text; }}});
    const make = URL.createObjectURL;
    URL.createObjectURL = (blob) => { window.saved = blob; return make.call(URL, blob); };
})()"""
STEP = """{index: 1, method: null, tokens: [{id: 1, text: 'a', drafter: null}], nodes: [{accepted: true}], rows: 1,
    draft_ms: 0, wire_ms: 0, wait_ms: 2, verify_ms: 8}"""
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


def output(page: Page, lane: str = "#output") -> str:
    return str(page.run(f"[...document.querySelectorAll('{lane} .token')].map((one) => one.textContent).join('')"))


def number(page: Page, selector: str) -> float:
    return float(page.text(selector).removesuffix(f" {TIMES}"))


def module(page: Page, name: str, use: str) -> Any:
    """The value of an expression in which `m` is one of the page's modules."""
    return page.run(f"import(new URL('playground/{name}.js', document.baseURI)).then((m) => {use})")


def copied(page: Page, button: str) -> str:
    page.run(f"window.copied = ''; document.querySelector('#{button}').click()")
    return str(page.until("window.copied"))


def test_the_first_sight_is_a_recorded_race(opened: Page) -> None:
    opened.until(HAS_RECORDED)
    assert opened.text("#recorded").startswith("A recorded run: the demo model on ")
    assert number(opened, "#speedup") > 1
    assert opened.text("#same") == "✓ identical"
    assert DASH not in opened.text(".figures")
    assert output(opened) == output(opened, "#plain-output") != ""
    assert opened.run("document.querySelectorAll('#tree .node').length") > 2
    assert opened.run("document.querySelector('#temperature').value") == "0"
    assert not opened.run("document.querySelector('.settings').open")


def test_a_replay_fills_both_lanes_at_their_own_pace(opened: Page) -> None:
    opened.until(HAS_RECORDED)
    opened.run(
        "document.querySelector('#pace').value = '16'; document.querySelector('#pace').dispatchEvent(new Event('change'))"
    )
    assert opened.text("#replay") == "Skip"
    seen = "[...document.querySelectorAll('.output')].map((lane) => lane.querySelectorAll('.token:not(.ahead)').length)"
    drafted, plain = opened.until(f"(([d, p]) => d > p + 5 && p > 0 && [d, p])({seen})")
    assert drafted > plain
    opened.run("document.querySelector('#replay').click()")
    opened.until(IS_REPLAYED)
    assert opened.run("document.querySelectorAll('.ahead').length") == 0
    assert opened.text("#note-drafted").endswith(f"{TIMES} faster")


def test_rates_are_from_the_servers_step_times(opened: Page) -> None:
    """A burst of events takes no time in the browser and counts nothing."""
    made = f"m.Run.of(Array(40).fill({STEP}))"
    assert module(opened, "run", f"{made}.rate") == pytest.approx(100)
    assert module(opened, "run", f"{made}.at.slice(0, 3)") == [10, 20, 30]
    assert module(opened, "run", f"m.speedup({made}, {made})") == 1


def test_a_rate_below_one_comes_with_its_reasons(opened: Page) -> None:
    slow = STEP.replace("wait_ms: 2", "wait_ms: 32").replace("rows: 1", "rows: 3")
    use = "m.whySlower(m.Run.of(Array(9).fill({})), m.Run.of(Array(9).fill({})), {{temperature: 0.8}})"
    why = module(opened, "run", use.format(slow, STEP))
    assert "A verify step took 40 ms, 4.0 times a plain step of 10 ms, and gave 1.0 tokens" in why
    reasons = (
        "waited for its drafter in 80 %",
        "9 steps of 9 had no tree",
        "Other requests shared 9 steps",
        "temperature 0",
    )
    assert all(reason in why for reason in reasons)
    assert module(opened, "run", use.format(STEP, slow)) == ""


def test_times_are_written_in_fitting_units(opened: Page) -> None:
    written = {0.4: "0.4 ms", 9.96: "10 ms", 412.3: "412 ms", 999.6: "1.0 s", 65_000: "65.0 s", "null": DASH}
    assert {ms: module(opened, "format", f"m.time({ms})") for ms in written} == written


def test_a_run_shows_what_the_api_returns(opened: Page, demo_cluster: Cluster) -> None:
    run(opened, temperature=0.8)
    body = {"prompt": opened.run("document.querySelector('#prompt').value"), "max_tokens": 48, "temperature": 0.8, "seed": 7}
    choice = httpx.post(f"{demo_cluster.http}/v1/completions", json=body, timeout=250).json()["choices"][0]
    assert output(opened) == output(opened, "#plain-output") == choice["text"]
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
    assert opened.run("[...document.querySelectorAll('#legend .token')].some((o) => o.textContent === 'unknown')") is False
    assert opened.run("document.querySelectorAll('#results img, #results b').length") == 0
    assert opened.run("document.title") == "Eyas playground"
    with pytest.raises(AssertionError, match="TrustedHTML"):
        opened.run("document.querySelector('#output').innerHTML = '<b>x</b>'")


def test_after_an_error_nothing_of_the_old_run_stays(opened: Page) -> None:
    run(opened)
    fill(opened, max_tokens=1_000_000)
    opened.run("document.querySelector('#form').requestSubmit()")
    opened.until("!document.querySelector('#problem').hidden")
    assert "context length" in opened.text("#problem")
    assert not opened.run("document.querySelector('#run').disabled")
    figures = opened.run("[...document.querySelectorAll('.figures dd:not(.note)')].map((one) => one.textContent)")
    assert figures == [DASH] * 5
    assert opened.run("document.querySelectorAll('.token, #tree *, #nodes *, #timeline *').length") == 0
    assert opened.run("document.querySelector('#replay').disabled && document.querySelector('#why').hidden")


def test_a_link_holds_the_prompt_and_the_seed(opened: Page, demo_cluster: Cluster) -> None:
    prompt = '# 100 % of it\'s "text" & more\nclass Queue:\n'
    run(opened, prompt=prompt, temperature=0.8, seed="", max_tokens=24)
    text, link = output(opened), opened.run("location.href")
    assert f"with seed {opened.run('new URLSearchParams(location.hash.slice(1)).get(`seed`)')}." in opened.text("#status")
    opened.open(f"{demo_cluster.http}/?other")
    opened.open(link)
    opened.until("document.querySelector('#model').value === 'demo'")
    assert opened.text("#recorded").startswith("This link holds a prompt")
    assert opened.run("document.querySelector('#prompt').value") == prompt
    assert output(opened) == "", "nothing runs before the reader wants it"
    opened.run("document.querySelector('#form').requestSubmit()")
    opened.until(IS_DONE)
    assert output(opened) == text


def test_the_curl_command_gives_the_same_text(opened: Page) -> None:
    opened.run(RECORD)
    run(opened, prompt="# it's a 'test'\nclass Queue:\n", temperature=0.8, max_tokens=24)
    opened.run("sessionStorage.setItem('eyas-api-key', 'secret')")
    command = copied(opened, "copy-curl")
    opened.run("sessionStorage.removeItem('eyas-api-key')")
    assert "secret" not in command
    curl, url, *options = shlex.split(command)
    assert (curl, "Authorization: Bearer $EYAS_API_KEY" in options) == ("curl", True)
    answer = httpx.post(url, content=options[-1], headers={"Content-Type": "application/json"}, timeout=250)
    assert answer.json()["choices"][0]["text"] == output(opened)


def test_a_tree_is_copied_and_saved(opened: Page) -> None:
    opened.run(RECORD)
    run(opened, temperature=0)
    tree = json.loads(copied(opened, "tree-json"))
    assert len(tree["nodes"]) == opened.run("document.querySelectorAll('#nodes tr').length") > 1
    lines = copied(opened, "tree-text").splitlines()
    has_own = tree["tokens"][-1]["drafter"] is None
    assert len(lines) == len(tree["nodes"]) + has_own
    assert sum("✓" in line for line in lines) == sum(node["accepted"] for node in tree["nodes"]) - 1
    drawing = ET.fromstring(copied(opened, "tree-svg"))
    styled = [one for one in drawing.iter() if one.tag.endswith("}rect")]
    assert len(styled) == len(lines) + 1
    assert not [one for one in drawing.iter() if "class" in one.attrib or "var(" in str(one.attrib)]
    opened.run("document.querySelector('#save-svg').click()")
    assert ET.fromstring(opened.run("window.saved.text()")).tag == "{http://www.w3.org/2000/svg}svg"
    opened.run("document.querySelector('#save-run').click()")
    saved = json.loads(opened.run("window.saved.text()"))
    assert "".join(token["text"] for step in saved["plain"] for token in step["tokens"]) == output(opened)
    assert opened.problems == []


def test_a_chat_is_a_conversation(opened: Page) -> None:
    opened.run(RECORD)
    opened.run("document.querySelector('[value=\"chat/completions\"]').click()")
    run(opened, prompt="def first():", max_tokens=12)
    answer = output(opened)
    assert opened.run("document.querySelector('#prompt').value") == ""
    opened.run("document.querySelector('#status').textContent = ''")
    run(opened, prompt="def second():", max_tokens=12)
    messages = opened.run("window.bodies.at(-1).messages")
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert (messages[0]["content"], messages[1]["content"]) == ("def first():", answer)
    assert opened.run("document.querySelectorAll('#messages .message').length") == 4
    link = copied(opened, "copy-link")
    opened.open(link.replace("#", "?again#"))
    assert opened.run("document.querySelectorAll('#messages .message').length") == 2, (
        "the last question is to be asked again"
    )
    assert opened.run("document.querySelector('#prompt').value") == "def second():"
    opened.run("document.querySelector('#forget').click()")
    assert opened.run("document.querySelectorAll('#messages .message').length") == 0


def test_every_control_has_a_name(opened: Page) -> None:
    run(opened, max_tokens=16)
    opened.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "combobox", "checkbox", "radio", "slider", "tab", "tabpanel"}
    controls = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
    assert len(controls) > 25
    assert not [node for node in controls if not node.get("name", {}).get("value")]


def test_a_phone_shows_button_and_results_at_once(opened: Page) -> None:
    height = 740
    opened.show_as(360, height)
    opened.until(HAS_RECORDED)
    opened.run("scrollTo(0, 0)")
    for element in ("#run", "#speedup", "#same"):
        assert opened.run(f"document.querySelector('{element}').getBoundingClientRect().bottom") < height
    assert opened.run("document.querySelector('.lanes').getBoundingClientRect().top") < height


def test_no_width_scrolls_sideways(opened: Page) -> None:
    run(opened, max_tokens=16)
    for width in (360, 390, 820, 1440):
        opened.show_as(width, 800)
        assert opened.run("document.documentElement.scrollWidth") == width


def test_the_cluster_tab_shows_the_workers(opened: Page) -> None:
    run(opened, max_tokens=16)
    opened.run("document.querySelector('#tab-cluster').click()")
    opened.until("document.querySelectorAll('#workers article').length === 2")
    text = opened.text("#workers")
    assert all(word in text for word in ("dspark+prompt_lookup", "● closed", "● healthy", "prompt tokens", "waiting"))
    assert "127.0.0.1" not in text


@contextlib.contextmanager
def behind_a_prefix(base: str, port: int = 0) -> Iterator[str]:
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

    server = ThreadingHTTPServer(("127.0.0.1", port), Proxy)
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


def test_a_dead_server_is_named_and_tried_again(page: Page, demo_cluster: Cluster) -> None:
    port = free_port()
    with behind_a_prefix(demo_cluster.http, port) as url:
        page.open(url)
        page.until("document.querySelector('#model').value === 'demo'")
        page.until(HAS_RECORDED)
    fill(page, max_tokens=16)
    page.run("document.querySelector('#form').requestSubmit()")
    page.until("!document.querySelector('#problem').hidden")
    words = f"The server at 127.0.0.1:{port} does not answer. It may have been stopped, or the network is down. Trying again"
    assert page.text("#problem").startswith(words)
    assert output(page) == ""
    with behind_a_prefix(demo_cluster.http, port):
        page.until(IS_DONE)
        assert page.run("document.querySelector('#problem').hidden")
        assert page.text("#same") == "✓ identical"
