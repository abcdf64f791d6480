"""Make the playground's recorded run and its pictures, with Chromium and the demo model: `make pictures`.

The parts are `record` (the run that the page shows first), `shots` (light, dark, phone) and `film` (the race and the killed
drafter as an animation). Each may be made alone: `python -m docs.pictures shots`. Times in the pictures are those of this
machine; make them while it is quiet.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from PIL import Image

from eyas.services.local.cluster import free_port
from tests.support.services.browser import Page, browser_page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = ROOT / "services" / "router" / "http" / "static" / "recorded.json"
NUM_RACES = 9
REQUEST = {"model": "demo", "temperature": 0, "top_p": 1, "max_tokens": 128, "seed": 7}
SETTINGS = {"stream": True, "return_speculation": True, "return_verify_steps": True}
EXAMPLE = "document.querySelector('#prompt').value"
IS_DONE = "document.querySelector('#status').textContent.startsWith('Done')"
HAS_RACED = "document.querySelector('#replay').textContent === 'Replay' && !document.querySelector('#replay').disabled"
FILM_WIDTH = 920
FILM_COLOURS = 96
# The page's panels and its background, in light colours.
PAGE_COLOURS = ((255, 255, 255), (247, 246, 243))
REPLAY_FRAME_S = 0.15
LONGEST_FRAME_S = 0.25
LONGEST_RUN_S = 240.0


@contextmanager
def served_demo() -> Iterator[str]:
    """Run `eyas serve --demo`; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "eyas.cli", "serve", "--demo", "--port", str(port), "--grpc-port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("Serving "):
                    break
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """Open the page in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser_page(Path(folder)) as page:
        page.show_as(1280, 900)
        page.open(url)
        page.until("document.querySelector('#model').value === 'demo'")
        yield page


# The recorded run


def steps_of(url: str, prompt: str, drafter: str) -> list[dict[str, Any]]:
    """Return the verify steps of one run of the example."""
    body = REQUEST | SETTINGS | {"prompt": prompt, "drafter": drafter}
    request = urllib.request.Request(f"{url}v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    steps = []
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[len(b"data: ") :])["choices"]
                steps += [step for choice in choices for step in choice.get("verify_steps", ())]
    return steps


def duration_ms(steps: list[dict[str, Any]]) -> float:
    """Return the server's time of some steps."""
    return sum((step["wait_ms"] or 0) + (step["verify_ms"] or 0) for step in steps)


def compact(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with no more digits than the page shows."""
    for step in steps:
        for name in ("draft_ms", "wire_ms", "wait_ms", "verify_ms"):
            step[name] = None if step[name] is None else round(step[name], 2)
        for node in step["nodes"]:
            node["prob"] = None if node["prob"] is None else round(node["prob"], 3)
    return steps


def machine() -> str:
    """Return the processor in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"the demo model on {len(models)} cores ({models[0]}), no GPU"


def record(url: str) -> None:
    """Run the race several times and keep the one with the median speedup."""
    with opened(url) as page:
        prompt = page.run(EXAMPLE)
    races = [(steps_of(url, prompt, ""), steps_of(url, prompt, "none")) for _ in range(NUM_RACES)]
    speedups = [duration_ms(plain) / duration_ms(drafted) for drafted, plain in races]
    chosen = speedups.index(statistics.median(speedups))
    drafted, plain = map(compact, races[chosen])
    run = {"object": "eyas.race", "date": str(date.today()), "machine": machine(), "endpoint": "completions"}
    run |= {"request": REQUEST | {"prompt": prompt}, "drafted": drafted, "plain": plain}
    RECORDED.write_text(json.dumps(run, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{RECORDED}: speedups {sorted(round(each, 2) for each in speedups)}, {RECORDED.stat().st_size} bytes")


# Pictures


def shots(url: str) -> None:
    """Take pictures of a run: light, dark, and on a phone."""
    for name, width, height, scheme, scale in (
        ("playground", 1280, 1180, "light", 1.0),
        ("playground-dark", 1280, 1180, "dark", 1.0),
        ("playground-phone", 390, 844, "light", 2.0),
    ):
        with opened(url) as page:
            page.show_as(width, height, scheme, scale)
            page.run("document.querySelector('#seed').value = 7; document.querySelector('#form').requestSubmit()")
            page.until(IS_DONE)
            page.until(HAS_RACED)
            page.run("scrollTo(0, 0)")
            buffer = HERE / f"{name}.png"
            page.screenshot(buffer)
            Image.open(buffer).convert("RGB").quantize(128).save(buffer, optimize=True)


def anchored(picture: Image.Image) -> Image.Image:
    """Return a picture whose palette has the page's own colours of large areas, which few colours tint otherwise."""
    values = picture.getpalette() or []
    colours = [tuple(values[place : place + 3]) for place in range(0, len(values), 3)]
    free = set(range(len(colours)))
    for own in PAGE_COLOURS:
        nearest = min(
            free, key=lambda place: sum((one - other) ** 2 for one, other in zip(own, colours[place], strict=True))
        )
        colours[nearest] = own
        free.remove(nearest)
    picture.putpalette([value for colour in colours for value in colour])
    return picture


class Film:
    """Frames of a page with the seconds that each is shown."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._seconds: list[float] = []

    def until(self, expression: str, at_most_s: float, faster: float = 1.0) -> None:
        """Film until an expression is true. faster: how many times the animation is faster than the page was."""
        started = last = time.monotonic()
        while not self._page.run(expression) and time.monotonic() - started < at_most_s:
            self._shoot()
            now = time.monotonic()
            self._seconds[-1] = min((now - last) / faster, LONGEST_FRAME_S)
            last = now

    def replay(self) -> None:
        """Film the replay of a race, frame by frame at its own pace, however slow this machine takes pictures."""
        self._page.run(
            "window.requestAnimationFrame = (draw) => { window.draw = draw; return 1; }; window.began = performance.now();"
            "document.querySelector('#replay').click()"
        )
        ms = 0.0
        while not self._page.run(HAS_RACED):
            self._page.run(f"window.draw(window.began + {ms})")
            self.hold(REPLAY_FRAME_S)
            ms += REPLAY_FRAME_S * 1000

    def hold(self, seconds: float) -> None:
        """Show the page as it is."""
        self._shoot()
        self._seconds[-1] = seconds

    def _shoot(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            self._page.screenshot(Path(file.name))
            picture = Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB")
        height = round(picture.height * FILM_WIDTH / picture.width)
        self._frames.append(picture.resize((FILM_WIDTH, height), Image.Resampling.LANCZOS))
        self._seconds.append(0.0)

    def save(self, file: Path) -> None:
        """Write the frames as a GIF with one palette, and unchanged ones as one."""
        some = self._frames[:: max(len(self._frames) // 8, 1)]
        sheet = Image.new("RGB", (some[0].width, sum(frame.height for frame in some)))
        for place, frame in enumerate(some):
            sheet.paste(frame, (0, place * frame.height))
        palette = anchored(sheet.quantize(FILM_COLOURS, method=Image.Quantize.MAXCOVERAGE))
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self._frames]
        durations = [max(round(seconds * 100), 4) * 10 for seconds in self._seconds]
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
        print(f"{file}: {len(frames)} frames, {sum(durations) / 1000:.1f} s, {file.stat().st_size} bytes", flush=True)


def film(url: str) -> None:
    """Film a race, then a run in which the drafter is killed, up to the moment when the text has drafts again."""
    with opened(url) as page:
        page.show_as(1200, 740, "light")
        page.run("document.querySelector('#seed').value = 7; document.querySelector('#form').requestSubmit()")
        page.until(IS_DONE)
        page.until(HAS_RACED)
        scene = Film(page)
        scene.replay()
        scene.hold(2.0)
        page.run("document.querySelector('#kill').click()")
        scene.until("!!document.querySelector('#death.back')", LONGEST_RUN_S, faster=4.0)
        scene.hold(3.0)
        scene.save(HERE / "playground.gif")


PARTS: dict[str, Callable[[str], None]] = {"record": record, "shots": shots, "film": film}


def main() -> None:
    """Make the parts that the command line names, or all."""
    with served_demo() as url:
        for name in sys.argv[1:] or PARTS:
            PARTS[name](url)


if __name__ == "__main__":
    main()
