"""What holds for every test: which run, in which folder, and what all of them cost."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

# Before torch is imported anywhere: with more threads than cores, waiting costs more than computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Temporary folders lie in memory, where there is enough of it: the disk is meant by tests marked so.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

import pytest

from tests.nearest import nearest_tests

if TYPE_CHECKING:
    from tests.ranks import Processes

MOST_LANES, LANE_BYTES = 4, 5 * 2**30  # each has its own fork server and group, in 3 to 4 GB of memory
BUDGET, IMPORT = 600.0, 1.4  # seconds of processor time for the quick suite, where `import torch` takes so many
MOST = 1.5  # times the budget, beyond which CI fails
QUICK = 3.0  # seconds; a test that takes longer is to be long
NOTES = pytest.StashKey["Counter[str]"]()  # what each lane has to say, as numbers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the long tests too: more of what the others show")
    parser.addoption("--changed", metavar="REF", help="only long tests, of what changed since REF, the nearest first")
    parser.addoption("--minutes", type=float, help="begin no test after so many")
    parser.addoption(
        "--budget", action="store_true", help="fail beyond one and a half times the processor time allowed"
    )


# ------------------------------------------------------------------------------------------------------- which of them


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOTES] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long only a long test that is named runs."""
    if ref := config.option.changed:
        near = nearest_tests(config.rootpath, _changed_since(ref, config.rootpath))
        chosen = [item for item in items if _is_long(item) and not item.get_closest_marker("service")]
        chosen.sort(key=lambda item: near.index(str(item.path.relative_to(config.rootpath))))
    elif config.option.long or config.option.markexpr:
        chosen = items[:]
    else:
        chosen = [item for item in items if not _is_long(item) or _is_named(item, config)]
        config.stash[NOTES]["left out"] = len(items) - len(chosen)
    out = set(items) - set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = chosen


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None or item.get_closest_marker("service") is not None


def _is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Does a word of the command line name this very test, or the class that it is in?"""
    own = f"{item.path.resolve()}::{item.nodeid.partition('::')[2]}"
    parted = [word.partition("::") for word in config.args]
    words = [f"{(config.invocation_params.dir / file).resolve()}::{name}" for file, sign, name in parted if sign]
    return own in words or own.startswith(tuple(f"{word}{sign}" for word in words for sign in ("::", "[")))


def _changed_since(ref: str, root: Path) -> list[str]:
    """Files that differ from those of a commit."""
    git = ["git", "-C", str(root), "diff", "--name-only", ref]
    return subprocess.check_output(git, text=True).splitlines()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and say how many."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    import torch

    wanted = mark.args[0] if mark.args else mark.kwargs.get("count", 1)
    seen = torch.cuda.device_count()
    if seen < wanted:
        pytest.skip(f"needs {wanted} GPU{'s' if wanted > 1 else ''}, this machine has {seen}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Begin no test where time is over."""
    minutes = item.config.option.minutes
    if minutes is None or time.monotonic() - _began < 60 * minutes:
        return None
    item.config.stash[NOTES]["not begun"] += 1
    return True


# ------------------------------------------------------------------------------------------------ where, and with what


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many tests run at once: as many as there are cores, and one where the words choose some of them."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.markexpr
    return 0 if chosen else lanes()


def lanes() -> int:
    """How many tests this machine can run at once: by its cores, and by its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // LANE_BYTES, MOST_LANES))


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Four processes; they are started by the first test that asks for them."""
    from tests.ranks import Processes

    group = Processes()
    yield group
    group.close()


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """As pytest's own; on the disk for a test that means the disk."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with TemporaryDirectory(dir=gettempdir(), prefix="on-disk-") as folder:
        yield Path(folder)


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look at all of it again and again for garbage costs more than most tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """As it was: modules that count what they leave behind would complain as the interpreter ends."""
    gc.unfreeze()


# ------------------------------------------------------------------------------------------------------- what they cost

_began = time.monotonic()


@pytest.hookimpl(trylast=True)  # when fixtures have ended, also those of a last test that was not begun
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The processor time of this lane and of all that it has started."""
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].end_server()
    notes = session.config.stash[NOTES]
    notes["milliseconds"] = round(1000 * _processor_time())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["notes"] = dict(notes)
    elif session.config.option.budget and _cost(session.config)[0] > MOST * _cost(session.config)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A lane has ended: the times of all lanes add up; what one left out all of them did."""
    own = getattr(node, "workeroutput", {}).get("notes", {})
    notes = node.config.stash[NOTES]
    for name in ("milliseconds", "not begun"):
        notes[f"lanes' {name}"] += own.get(name, 0)
    notes["left out"] = own.get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many were left out and how they are run; what the suite has cost, and which tests cost most of it."""
    notes, say = config.stash[NOTES], terminalreporter.write_line
    if notes["left out"]:
        say(f"{notes['left out']} long tests were left out; with them: scripts/test --long")
    if late := notes["not begun"] + notes["lanes' not begun"]:
        say(f"{late} tests were not begun: {config.option.minutes:g} minutes were over")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        spent, allowed, torch = _cost(config)
        at_most = "" if config.option.long or config.option.changed else f"; at most {allowed:.0f} s are wanted"
        say(f"{spent:.0f} s of processor time where `import torch` takes {torch:.1f} s{at_most}")
        if not config.option.long and not config.option.changed:
            reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
            for each in sorted(reports, key=lambda each: -each.duration):
                if each.when == "call" and each.duration > QUICK:
                    say(f"{each.duration:.1f} s, so it may have to be long: {each.nodeid.partition('@')[0]}")


def _cost(config: pytest.Config) -> tuple[float, float, float]:
    """Seconds of processor time: what was spent, what is allowed on this machine, what `import torch` takes on it."""
    notes, torch = config.stash[NOTES], _import_torch()
    return (notes["milliseconds"] + notes["lanes' milliseconds"]) / 1000, BUDGET * torch / IMPORT, torch


@cache
def _import_torch() -> float:
    before = _processor_time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return _processor_time() - before


def _processor_time() -> float:
    """Of this process, and of all children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
