"""The mirror of a run: a thread of the main rank copies each checkpoint to a URL, while training goes on."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Self

from trainer.messages import first_line
from trainer.records.checkpoint.manifest import MANIFEST_FILE, Manifest
from trainer.records.checkpoint.remote_copies import KEY, RemoteCopies
from trainer.records.checkpoint.store import DRAFT, list_complete, select_surplus

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds until a copy that failed is tried again
LAST_DELAY = 2.0  # the same at the end of a run
PATIENCE = 60.0  # seconds in which the end of a run tries again what fails; what goes well has as long as it takes
PATIENCE_AFTER_ERROR = 30.0  # seconds that a run which has failed waits for copies
log = logging.getLogger(__name__)


class NoMirror:
    """Checkpoints stay where they are."""

    def update(self, rejected: Collection[Path] = ()) -> None:
        """Checkpoints have come or gone. rejected: those that were found corrupt; they count for nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The run has ended."""


class CheckpointMirror(NoMirror):
    """Keeps the copies of a folder's checkpoints: the newest `keep` and the best one, as in the folder.

    What fails is tried again and never stops a run. A thread works from the first `update` on.
    """

    def __init__(self, url: str, run: str, folder: Path, keep: int, best: str) -> None:
        self._url, self._run, self._folder, self._keep, self._best = url, run, folder, keep, best
        self._changed, self._ending = Event(), Event()
        self._deadline = 0.0  # by the clock, once the run has ended
        self._problem = ""  # why the last try has failed
        self._copies: RemoteCopies | None = None  # once it was reached
        self._remote: dict[str, Manifest | None] | None = None  # what is there; None: not known
        self._rejected: Collection[Path] = ()  # of the folder
        # copies that the start has passed over, as they are later than what it goes on from; None: not looked yet
        self._damaged: set[str] | None = None
        self._thread = Thread(target=self._work, name="mirror", daemon=True)

    def update(self, rejected: Collection[Path] = ()) -> None:
        """Begin to copy what is new. Never waits."""
        self._rejected = frozenset(rejected)
        self._changed.set()
        if not self._thread.is_alive() and not self._ending.is_set():
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last copy; after an error of the run only for a while. Says what is not there."""
        if not self._thread.is_alive():
            return
        self._deadline = monotonic() + (PATIENCE if kind is None else 0.0)
        self._ending.set()
        self._changed.set()
        if kind is None or issubclass(kind, Exception):  # who interrupts twice does not want to wait
            self._thread.join(None if kind is None else PATIENCE_AFTER_ERROR)
        if self._thread.is_alive():
            log.warning("note        %s: the newest checkpoint may not be there; it is in %s", KEY, self._folder)
        elif self._problem:
            log.warning("note        %s: %s; the checkpoints are in %s", KEY, self._problem, self._folder)
        elif self._copies is not None:
            print(f"mirrored    {self._copies.place}", flush=True)

    def _work(self) -> None:
        """The thread: copies whenever something has changed, and once more at the end."""
        delay = FIRST_DELAY
        while True:
            self._changed.wait()
            self._changed.clear()
            ending = self._ending.is_set()  # read before: what comes later is seen in the next round
            try:
                self._synchronize()
            except Exception as error:  # whatever a package makes of a network that is gone, or of a key that is wrong
                if not self._problem:
                    log.warning(
                        "note        %s: %s: %s; the run goes on, and it is tried again",
                        *(KEY, type(error).__name__, first_line(error)),
                    )
                self._problem, self._remote = f"{type(error).__name__}: {first_line(error)}", None
                self._changed.set()
                if ending and monotonic() > self._deadline:
                    return
                self._wait(LAST_DELAY if ending else delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                if self._problem:
                    log.warning("note        %s works again; nothing was lost", KEY)
                self._problem, delay = "", FIRST_DELAY
                if ending:
                    return

    def _wait(self, seconds: float) -> None:
        """Before the next try; the end of the run ends a long one."""
        if self._ending.is_set():
            Event().wait(seconds)
        else:
            self._ending.wait(seconds)

    def _synchronize(self) -> None:
        """Copy what is missing, the newest first; then the surplus goes, as it does in the folder."""
        copies = self._copies = self._copies or RemoteCopies(self._url, self._run)
        if self._remote is None:
            self._remote = copies.read_manifests()
        remote = self._remote
        while True:
            # anew after each copy: newer ones may have come meanwhile, and older ones may be gone
            here = {manifest.path.name: manifest for manifest in list_complete(self._folder, self._rejected)}
            if self._damaged is None:
                newest = max((manifest.step for manifest in here.values()), default=-1)
                self._damaged = {name for name, manifest in remote.items() if manifest and manifest.step > newest}
            # what is damaged takes no place of what is whole, neither here nor there
            whole = {name: copy for name, copy in remote.items() if copy and name not in self._damaged}
            every = {**whole, **here}
            newest_first = sorted(every.values(), key=lambda manifest: -manifest.step)
            surplus = {path.name for path in select_surplus(newest_first, self._keep, self._best)}
            missing = [name for name in here if name not in surplus and not _is_same(whole.get(name), here[name])]
            if not missing:
                break
            name = max(missing, key=lambda name: here[name].step)
            remote[name] = None  # until it is whole
            self._upload(copies, here[name])
            remote[name] = here[name]
            self._damaged.discard(name)
        # only after the new ones are there; what is not whole was left by a start that died
        for name in [name for name, manifest in remote.items() if manifest is None or name in surplus]:
            copies.remove(name)
            del remote[name]

    def _upload(self, copies: RemoteCopies, manifest: Manifest) -> None:
        """Copy one checkpoint. Links hold its files meanwhile, because a run that saves often removes it soon."""
        held = self._folder / f"{DRAFT}mirror-{secrets.token_hex(4)}"
        held.mkdir()
        try:
            for file in (*manifest.files, MANIFEST_FILE):
                os.link(manifest.path / file, held / file)
            source = held
        except OSError:  # a file system without links
            source = manifest.path
        try:
            copies.upload(source, manifest)
        finally:
            shutil.rmtree(held, ignore_errors=True)


def _is_same(copy: Manifest | None, manifest: Manifest) -> bool:
    """Is this the copy of that checkpoint, and not of an earlier save of the same step?"""
    return copy is not None and (copy.files, copy.metrics) == (manifest.files, manifest.metrics)
