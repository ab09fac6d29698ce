"""Take docs/tensorboard-*.png: what TensorBoard shows of two small runs, in a real browser.

    python scripts/screenshot.py                trains two runs on digits in a temporary folder
    python scripts/screenshot.py --runs runs    takes runs that are there

Needs Chromium and its driver (on Debian the package `chromium-driver`), and nothing from the network.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

CHECKOUT = Path(__file__).resolve().parent.parent
QUIET = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "hide-scrollbars"]
QUIET += ["disable-background-networking", "disable-component-update", "disable-sync", "disable-extensions"]
PATIENCE = 120.0  # seconds for TensorBoard to have read the runs, and for each page to be drawn
WORDS = ["model=cnn", "loop.epochs=8", "loop.log_every=2", "loop.histograms_every=1ep", "log=tensorboard"]
RUNS = {"first": ["optimizer.lr=0.003"], "slower": ["optimizer.lr=0.001"]}


class Page(NamedTuple):
    """One page of TensorBoard."""

    address: str
    size: tuple[int, int]  # of the window
    drawn: str  # in the browser's language: is `e` one of the things that make the page?
    least: int  # how many of them there are when it is drawn


LINE = "e.tagName == 'path' && (e.getAttribute('d') || '').length > 60"
PLAIN = "?darkMode=false&forceSVG=true"  # a browser without a GPU draws no WebGL
PAGES = {
    "curves": Page(f"{PLAIN}#scalars", (1300, 1070), LINE, 4),
    "pictures": Page(
        f"{PLAIN}&tagFilter=pictures&runFilter=^RUN#timeseries",
        (1500, 960),
        "e.tagName == 'IMG' && e.complete && e.naturalWidth > 0",
        3,
    ),
    "hparams": Page(f"{PLAIN}#hparams", (1900, 560), "/CELL-CONTENT$/.test(e.tagName) && e.textContent.trim()", 8),
    "histograms": Page(f"{PLAIN}&tagFilter=classifier|head&runFilter=^RUN#timeseries", (1500, 1040), LINE, 6),
}
# Elements lie in shadow trees, which a query does not enter.
COUNT = """
let found = 0;
const walk = root => root.querySelectorAll('*').forEach(look);
const look = e => { found += !!(DRAWN); if (e.shadowRoot) walk(e.shadowRoot); };
walk(document);
return found;
"""


def main() -> None:
    """Train where no runs are given, show them, and keep what the browser shows."""
    parser = argparse.ArgumentParser(description="Take pictures of TensorBoard.")
    parser.add_argument("--runs", type=Path, help="a folder of run folders; none: two are trained")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs")
    asked = parser.parse_args()
    # before anything is trained
    if shutil.which("chromedriver") is None:
        sys.exit("scripts/screenshot.py needs Chromium and its driver; on Debian: apt-get install chromium-driver")
    with TemporaryDirectory(prefix="screenshot-") as scratch:
        root = asked.runs or trained(Path(scratch) / "runs")
        run = min(path.name for path in root.iterdir())
        with tensorboard(root) as server, browser(Path(scratch) / "browser") as window:
            for name, page in PAGES.items():
                path = asked.out / f"tensorboard-{name}.png"
                take(window, server, page._replace(address=page.address.replace("RUN", run)), path)
                print(f"{path}: {path.stat().st_size // 1024} KiB")


def trained(root: Path) -> Path:
    """Two runs that differ in their rate; the folder that holds them."""
    for name, words in RUNS.items():
        command = [sys.executable, "-m", "trainer", *WORDS, *words, f"run.root={root}", f"run.name={name}"]
        subprocess.run(command, cwd=CHECKOUT, stdout=sys.stderr, check=True)
    return root


@contextmanager
def tensorboard(root: Path) -> Iterator[str]:
    """TensorBoard on these runs, as long as the context lasts; its address, once it has read them."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(root), "--port", "0", "--load_fast", "false"]
    with speaking(command, r"(http://localhost:\d+/)") as address:
        wanted = len({file.parent for file in root.rglob("events.out.tfevents.*")})
        until = time.monotonic() + PATIENCE
        while len(asked_of(f"{address}data/runs")) < wanted:
            if time.monotonic() > until:
                sys.exit(f"TensorBoard has not read {root} within {PATIENCE:g} s")
            time.sleep(0.5)
        yield address


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """A window of Chromium, as long as the context lasts; the address of its session (W3C WebDriver)."""
    with speaking(["chromedriver", "--port=0"], r"successfully on port (\d+)") as port:
        flags = [f"--{flag}" for flag in (*QUIET, f"user-data-dir={folder}")]
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}}
        sessions = f"http://localhost:{port}/session"
        session = f"{sessions}/{asked_of(sessions, wanted)['value']['sessionId']}"
        try:
            yield session
        finally:
            asked_of(session, method="DELETE")


@contextmanager
def speaking(command: list[str], said: str) -> Iterator[str]:
    """A server, as long as the context lasts; what it says of where it is."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        found = next((match[1] for line in server.stdout if (match := re.search(said, line))), None)
        if found is None:
            sys.exit(f"{command[0]} did not start")
        yield found
    finally:
        server.terminate()
        server.wait()


def take(window: str, server: str, page: Page, path: Path) -> None:
    """A page as a PNG of few colours, once all of it is drawn and nothing moves any more."""
    from PIL import Image

    width, height = page.size
    asked_of(f"{window}/window/rect", {"width": width, "height": height})
    asked_of(f"{window}/url", {"url": "about:blank"})  # or only what is behind # would change
    asked_of(f"{window}/url", {"url": server + page.address})
    script = {"script": COUNT.replace("DRAWN", page.drawn), "args": []}
    until, before, seen = time.monotonic() + PATIENCE, "", ""
    while not (seen and seen == before):
        if time.monotonic() > until:
            sys.exit(f"{path.name}: the page was not drawn within {PATIENCE:g} s")
        time.sleep(1)
        complete = asked_of(f"{window}/execute/sync", script)["value"] >= page.least
        before, seen = seen, asked_of(f"{window}/screenshot")["value"] if complete else ""
    with Image.open(io.BytesIO(base64.b64decode(seen))) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)


def asked_of(address: str, said: Any = None, method: str | None = None) -> Any:
    """What a server answers to this, in JSON."""
    request = Request(address, None if said is None else json.dumps(said).encode(), method=method)
    with urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
