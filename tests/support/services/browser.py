"""Chromium without a window, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import websocket

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
TIMEOUT_S = 60.0


class Page:
    """A page. problems: what its console reported as an error, violations of its security policy included."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Return the result of a command. Events that arrive before it are kept or dropped."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(json.dumps(params["entry"]))

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the first value of an expression that is true in JavaScript."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {value!r}: {self.problems}"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key. modifiers: 2 is Ctrl."""
        code = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Home": 36, "End": 35}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def show_as(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Write a picture of the window as PNG, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


def chromium() -> str:
    """Return the path of Chromium; skip the test without it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here; install the Debian package chromium")


@contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """Start Chromium with its profile in `folder`, and yield its first page."""
    log = folder / "chromium.log"
    command = [chromium(), *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    environment = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            with closing(websocket.create_connection(_target(process, folder), suppress_origin=True)) as socket:
                socket.settimeout(TIMEOUT_S)
                yield Page(socket)
        finally:
            process.terminate()


def _target(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for the DevTools port; return the address of the first page."""
    ports, deadline = folder / "DevToolsActivePort", time.monotonic() + TIMEOUT_S
    while not (ports.is_file() and ports.read_text().strip()):
        assert process.poll() is None, (folder / "chromium.log").read_text()
        assert time.monotonic() < deadline, "Chromium does not start"
        time.sleep(0.05)
    port = ports.read_text().split()[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
