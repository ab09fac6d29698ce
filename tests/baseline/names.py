"""What a user can type and a lab can import: what of it has gone, come or changed since names.json was written.

python -m tests.baseline.names            the differences of this checkout
python -m tests.baseline.names --write    write names.json anew
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CHECKOUT, FILE = HERE.parent.parent, HERE / "names.json"
PAGES = ("docs/extending.md", "docs/own-strategy.md", "docs/python.md", "tests/labs", "tests/lab", "recipes")
IMPORT = re.compile(r"^\s*from (trainer(?:\.\w+)*) import ([\w, ]+)$", re.MULTILINE)
# how a process ends, by tests/test_signals.py and tests/test_endings.py; 0 and 2 are tried here
EXIT_CODES = {"0": "done", "1": "failed", "2": "refused", "75": "stopped as asked and saved"}


def said(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on stdout."""
    ended = subprocess.run([sys.executable, "-m", "trainer", *words], cwd=CHECKOUT, capture_output=True, text=True)
    return ended.returncode, ended.stdout


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration as one level: loop.steps → null."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key != "defaults":  # of Hydra
            found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def options() -> dict[str, Any]:
    """Of each group and option its keys, with their defaults."""
    found: dict[str, Any] = {}
    for file in sorted((CHECKOUT / "conf").rglob("*.yaml")):
        if file.parent.name != "conf":
            group = file.parent.relative_to(CHECKOUT / "conf")
            found[f"{group}={file.stem}"] = flat(yaml.safe_load(file.read_text()) or {})
    return found


def imported(then: dict[str, str]) -> dict[str, str]:
    """The names that pages and labs import from inside of the package, now or then: those that lead somewhere."""
    files = [file for page in PAGES for file in ([CHECKOUT / page] if "." in page else (CHECKOUT / page).rglob("*.py"))]
    lines = [line for file in files if file.exists() for line in IMPORT.findall(file.read_text())]
    names = {f"{module}.{name.strip()}" for module, many in lines for name in many.split(",")}
    return dict.fromkeys((name for name in sorted(names | then.keys()) if leads_somewhere(name)), "")


def leads_somewhere(dotted: str) -> bool:
    """Can it be imported?"""
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def public() -> dict[str, str]:
    """`trainer.__all__`: parameters of each, and of classes their public members."""
    trainer, found = import_module("trainer"), {}
    for name in trainer.__all__:
        thing = getattr(trainer, name)
        found[name] = _parameters(thing)
        for member in dir(thing) if isinstance(thing, type) else ():
            if not member.startswith("_") and not hasattr(tuple, member) and not hasattr(Exception, member):
                found[f"{name}.{member}"] = _parameters(getattr(thing, member))
    return found


def _parameters(thing: Any) -> str:
    try:
        return ", ".join(inspect.signature(thing).parameters) if callable(thing) else ""
    except ValueError:
        return ""


def collect(then: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All of it, as this checkout has it."""
    _, help_text = said("--help")
    codes = {code: meaning for code, meaning in EXIT_CODES.items() if code in ("1", "75")}
    codes |= {str(said(word)[0]): EXIT_CODES[code] for word, code in (("--version", "0"), ("no_such_key=1", "2"))}
    return {
        "keys": flat(yaml.safe_load(said("--cfg", "job")[1])),
        "options": options(),
        "flags": dict.fromkeys(sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_text))), ""),
        "exit codes": codes,
        "public": public(),
        "imported": imported(then.get("imported", {})),
    }


def differences(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What has gone, come, or has another value."""
    lines = [f"gone     {prefix}{name}" for name in then if name not in now]
    lines += [f"new      {prefix}{name}" for name in now if name not in then]
    for name in then.keys() & now.keys():
        if isinstance(then[name], dict) and isinstance(now[name], dict):
            lines += differences(then[name], now[name], f"{prefix}{name}: ")
        elif then[name] != now[name]:
            lines.append(f"changed  {prefix}{name}: {then[name]} → {now[name]}")
    return sorted(lines)


def main() -> None:
    """Compare, or write."""
    then = {} if "--write" in sys.argv else json.loads(FILE.read_text())
    now = collect(then)
    if not then:
        parts = (f"{json.dumps(part)}: {json.dumps(now[part], indent=0, ensure_ascii=False)}" for part in now)
        FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        return
    for part, names in then.items():
        print(f"{part}: {len(names)} then, {len(now[part])} now")
        print("\n".join(f"  {line}" for line in differences(names, json.loads(json.dumps(now[part])))))


if __name__ == "__main__":
    main()
