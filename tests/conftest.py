"""What holds for every test: the order, the reason of a skip, and one group of processes for all that need ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

# Before torch is imported anywhere: with more threads than cores, waiting costs more than computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.compositions import remembered

if TYPE_CHECKING:
    from tests.ranks import Processes

LEFT_OUT = pytest.StashKey[int]()
MOST_LANES, LANE_BYTES = 4, 5 * 2**30  # each has its own group of processes, in 3 to 4 GB of memory


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Four processes; they are started by the first test that asks for them."""
    from tests.ranks import Processes

    group = Processes()
    yield group
    group.close()


@pytest.fixture(scope="session", autouse=True)
def compositions() -> Iterator[None]:
    """What Hydra composes is composed once."""
    with remembered:
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the long tests too: more of what the others show")
    parser.addoption("--some", metavar="SEED", help="a share of the long tests, drawn by this word")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many tests run at once: as many as there are cores, and one where the words choose some of them."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.markexpr
    return 0 if chosen else lanes()


def lanes() -> int:
    """How many tests this machine can run at once: by its cores, and by its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // LANE_BYTES, MOST_LANES))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap tests first, so that a plain mistake shows in seconds; without --long only one that is named runs long."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if config.getoption("long") or config.getoption("-m"):
        return
    some = config.getoption("some")
    left_out = [item for item in items if item.get_closest_marker("long") and not _wanted(item, config, some)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):  # one of several lanes, and all of them leave out the same
        config.workeroutput["left_out"] = len(left_out)


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look at all of it again and again for garbage costs more than most tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """As it was: modules that count what they leave behind would complain as the interpreter ends."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A lane has ended: what it left out is told by who speaks for all lanes."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def _wanted(item: pytest.Item, config: pytest.Config, some: str | None) -> bool:
    """Is a long test named, or drawn by the word? Which ones are drawn depends on the word and their names alone."""
    one_in = item.get_closest_marker("long").kwargs.get("one_in", 6)
    drawn = some is not None and crc32(f"{some} {item.nodeid}".encode()) % one_in == 0
    return drawn or _named(item, config)


def _named(item: pytest.Item, config: pytest.Config) -> bool:
    """Does a word of the command line name this very test, or the class that it is in?"""
    own = f"{item.path.resolve()}::{item.nodeid.partition('::')[2]}"
    parted = [word.partition("::") for word in config.args]
    words = [f"{(config.invocation_params.dir / file).resolve()}::{name}" for file, sign, name in parted if sign]
    return own in words or own.startswith(tuple(f"{word}{sign}" for word in words for sign in ("::", "[")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many were left out, and how they are run."""
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} long tests were left out; with them: scripts/test --long")


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
