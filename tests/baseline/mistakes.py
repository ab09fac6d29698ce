"""Mistakes that are made on purpose, one after the other, in a scratch checkout: which tests notice them?

    python -m tests.baseline.mistakes CHECKOUT RESULTS.json [NAME...]           those without a result, or without time
    python -m tests.baseline.mistakes CHECKOUT RESULTS.json --quick [NAME...]   those that lived, with the quick suite
    python -m tests.baseline.mistakes --table RESULTS.json [OTHER.json]         as a table; what OTHER.json has lost

Each file of `mistakes/` is a patch whose first line says what is wrong: planted ones, and fixes of the past taken back.
One at a time is applied to CHECKOUT, which is clean and no place of work, and is taken back. The tests are those that
its second line names, then those that lie nearest to the files of the patch by name and imports, at most eight files,
long ones included. A result is written after each; stop and begin again as you like. Where a patch no longer fits,
write it anew, in the code of today.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.nearest import nearest_tests

HERE = Path(__file__).resolve().parent / "mistakes"
PATIENCE = float(os.environ.get("PATIENCE", "240"))  # seconds for the nearest tests of a mistake
QUICK_PATIENCE = 1800  # for the quick suite
MOST = 8  # files of tests
GROUP: dict[str, Any] = {"start_new_session": True, "stdin": subprocess.DEVNULL}


def run_tests(checkout: Path, words: list[str], patience: float) -> dict[str, Any]:
    """Run them until one fails or time is over: what it was, and how long it took."""
    command = [str(checkout / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **GROUP)
    in_time, output = True, b""
    try:
        output, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired as error:
        in_time, output = False, error.stdout or b""
    finally:  # also where this program is to stop
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = output.decode(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.MULTILINE)
    passed = re.search(r"(\d+) passed", said)
    ended = {"seconds": round(time.monotonic() - began), "in_time": in_time}
    ended["passed"] = int(passed[1]) if passed else said.count(".")
    if failed or (in_time and process.returncode in (1, 2, 3, 4)):
        return {"died": failed[1] if failed else said.strip().splitlines()[-1][:200], **ended}
    return {"died": None, **ended}


def try_one(checkout: Path, patch: Path, quick: bool) -> dict[str, Any]:
    """Make the mistake, run the tests, and take it back; a test that fails without it, too, does not count."""
    git = ["git", "-C", str(checkout)]
    assert not subprocess.check_output([*git, "status", "--porcelain", "-uno"]), f"{checkout} has changes of its own"
    said = patch.read_text().splitlines()[1].partition("tests: ")[2].split()
    changed = re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), re.MULTILINE)
    said = [file for file in said if (checkout / file).exists()]
    tests = list(dict.fromkeys([*said, *nearest_tests(checkout, changed)[:MOST]]))[:MOST]
    words = ["-n", "auto"] if quick else ["-n", "0", "--long", *tests]
    while True:
        applied = subprocess.run([*git, "apply", "-C1", str(patch)], capture_output=True, text=True)
        if applied.returncode:
            return {"fits": False, "died": None, "tests": [], "why": applied.stderr.splitlines()[0]}
        try:
            found = run_tests(checkout, words, QUICK_PATIENCE if quick else PATIENCE)
        finally:
            subprocess.run([*git, "checkout", "-q", "--", "."], check=True)
        if not found["died"] or "::" not in found["died"]:
            break
        if not run_tests(checkout, ["-n", "0", found["died"]], PATIENCE)["died"]:
            break
        words += ["--deselect", found["died"]]
    return {"tests": "quick" if quick else tests, **found}


def table(results: dict[str, Any], other: dict[str, Any]) -> str:
    """A row for each mistake; with other results, whether that one lives now."""
    lines = ["| mistake | what is wrong | dies in | seconds |", "| --- | --- | --- | --- |"]
    for name, found in results.items():
        died = found["died"] or ("**lived**" if found.get("in_time") else "**lived so far**: time was over")
        if other.get(name, {}).get("died", found["died"]) is None and found["died"]:
            died += " — **lives now**"
        lines.append(f"| `{name}` | {found['what']} | {died} | {found.get('seconds', '')} |")
    return "\n".join([*lines, "", f"{sum(bool(x['died']) for x in results.values())} of {len(results)} died."])


def main() -> None:
    """Try what is asked for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; begin again as you like"))
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--table" in sys.argv:
        print(table(*[*(json.loads(Path(word).read_text()) for word in words), {}][:2]))
        return
    checkout, file, quick = Path(words[0]).resolve(), Path(words[1]).resolve(), "--quick" in sys.argv
    for patch in sorted(HERE.glob("*.patch")):
        results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        name, before = patch.stem, results.get(patch.stem)
        tried = before and (before["died"] or (before["tests"] == "quick" if quick else before.get("in_time")))
        if tried or (words[2:] and name not in words[2:]) or (quick and not before):
            continue
        results[name] = {"what": patch.read_text().splitlines()[0], **try_one(checkout, patch, quick)}
        rows = [f"{json.dumps(one)}: {json.dumps(found)}" for one, found in sorted(results.items())]
        file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        print(name, results[name]["died"] or "lived", f"{results[name].get('seconds')} s", flush=True)


if __name__ == "__main__":
    main()
