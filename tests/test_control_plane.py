"""What ranks say to each other, as scripts/scale counts it: ranks as threads send what processes send."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.commands import ROOT, Command

WORDS = ["model=mlp", "model.width=32", "model.depth=2", "loop.steps=4", "loop.log_every=2", "loop.save_every=2"]
WORDS += ["loop.global_batch=1056", "log=[]", "device=cpu", "strategy=ddp"]
THREADS = """
import json, os, sys
from scripts.control_plane.counting import Ledger, make_repeatable
from scripts.control_plane.ranks_as_threads import run_as_threads
ledger = Ledger()
make_repeatable()
answers = run_as_threads(int(sys.argv[1]), sys.argv[3:], ledger)
open(sys.argv[2], "w").write(json.dumps([ledger.to_json(), answers]))
sys.stdout.flush()
os._exit(max(answers))
"""
PROCESSES = """
import sys
from pathlib import Path
from scripts.control_plane.ranks_as_processes import run_as_processes
sys.exit(max(run_as_processes(int(sys.argv[1]), sys.argv[3:], Path(sys.argv[2]))))
"""


def count_threads(size: int, place: Path) -> Counter[tuple[str, ...]]:
    """What a run sends whose ranks are threads."""
    file = place / "ledger.json"
    place.mkdir()
    ended = Command([sys.executable, "-c", THREADS, str(size), str(file), f"run.dir={place}/run", *WORDS], place).end()
    assert ended.code == 0, ended.screen
    ledger, answers = json.loads(file.read_text())
    assert answers == [0] * size
    return messages(ledger["rows"])


def count_processes(size: int, place: Path) -> Counter[tuple[str, ...]]:
    """What the same run sends whose ranks are processes."""
    place.mkdir()
    words = [str(size), str(place / "ledgers"), f"run.dir={place}/run", *WORDS]
    ended = Command([sys.executable, "-c", PROCESSES, *words], place).end()
    assert ended.code == 0, ended.screen
    files = [*(place / "ledgers").iterdir()]
    assert len(files) == size
    return messages([row for file in files for row in json.loads(file.read_text())["rows"]])


def messages(rows: list[list[object]]) -> Counter[tuple[str, ...]]:
    """How many messages there were of each kind, without those whose number depends on how long something takes."""
    counts: Counter[tuple[str, ...]] = Counter()
    for phase, purpose, way, count, *_ in rows:
        # gloo asks for an address when two ranks talk for the first time: under which name is a matter of chance
        by_gloo = way in ("get", "wait") and phase not in ("launch", "agreement")
        if way != "check" and "<lambda>" not in str(purpose):
            counts[("gloo", str(way)) if by_gloo else (str(phase), str(purpose), str(way))] += int(str(count))
    return counts


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 8])
def test_ranks_as_threads_send_what_processes_send(size: int, tmp_path: Path) -> None:
    threads, processes = count_threads(size, tmp_path / "threads"), count_processes(size, tmp_path / "processes")
    assert threads == processes
    assert {kind[0] for kind in threads} >= {"launch", "agreement", "votes", "line", "copies", "save", "resume", "end"}
    # the loop does not touch the store: what asks it before a step is over has another phase
    assert not [
        kind for kind in threads if kind[0] in ("step", "votes", "line", "copies") and kind[-1] in ("set", "add")
    ]


@pytest.mark.long
def test_no_kind_of_message_grows_faster_than_the_ranks(tmp_path: Path) -> None:
    few, many = count_threads(4, tmp_path / "few"), count_threads(16, tmp_path / "many")
    assert few.keys() == many.keys()
    # a tree or a ring of N ranks has N - 1 edges; gloo finds the other end of each once
    faster = {kind: (few[kind], many[kind]) for kind in few if many[kind] > few[kind] * (15 / 3)}
    assert not faster
    assert (ROOT / "scripts" / "scale").stat().st_mode & 0o111
