"""The run folder: its name, agreed once for all ranks and all restarts; its lock; what a run leaves about itself."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import StatusWriter
from trainer.launch.safe_files import (
    UnsafeFile,
    describe_entry,
    make_folder,
    open_file,
    probe_write,
    refuse_unsafe_files,
    replace_file,
    resolve_links,
)
from trainer.launch.store_collectives import broadcast_from_main, run_on_all_ranks
from trainer.launch.typed_values import DamagedFile, read_yaml
from trainer.messages import Refusal, expand_home
from trainer.records.checkpoint.copies import NoCopies, name_below
from trainer.records.folder_lock import lock_folder, lock_holder, unlock_folder
from trainer.records.resume_rules import has_checkpoint, resolve_resume_path
from trainer.records.start_files import ConfigFields, EnvironmentFields

_VISIBLE_AFTER = 10.0  # seconds until a network file system shows one machine what another has written
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger(__name__)


# what an attempt leaves for the next one
_FIELDS: dict[str, Any] = {"config.yaml": ConfigFields, "environment.json": EnvironmentFields}


class RunFolder:
    """The folder of one run. The main rank writes to it and holds its lock; on other ranks the verbs do nothing."""

    def __init__(self, path: Path, held: int | None = None, made: bool = False):
        self.given_path = path  # by the user; on another machine other links may lead there
        self.path, self._lock = resolve_links(path), held
        self._is_new = made  # by this start
        self._status: StatusWriter | None = None  # of this attempt, once it has begun
        self._environment: dict[str, Any] | None = None  # what this attempt has written into environment.json

    @classmethod
    def open(
        cls,
        root: str,
        name: str | None,
        dir: str | None,
        resume: str,
        mirror: str | None,
        launch: Launch,
        label: str,
        check: Callable[[Path | None], None],
    ) -> RunFolder:
        """Decide on the folder, make it and lock it. Every rank calls it, the main one decides; Refusal on all.

        Where `mirror`, a URL, has a later checkpoint of this run, it is copied back.

        A name is generated where none is given, from the time and `label`. `resume` is auto, fresh or a path: that, or
        None, `check` may refuse before anything is made, unless there is a checkpoint of the run's own to go on from.
        """

        def decide() -> RunFolder:
            if launch.restarted_by_launcher and not launch.launcher_serves_store and name is None and dir is None:
                raise Refusal(
                    "give run.name: torchrun keeps no store here (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or "
                    "distributed.init_method), so after a restart a generated name would not be found again"
                )
            # what is to be continued is looked at before anything is made
            try:
                path, restarted = choose_path(expand_home(root), name, dir, label, launch)
                # who was started again re-enters the folder that it has made itself
                fresh = resume == "fresh" and not restarted and not launch.requeued
                copies = _open_copies(mirror, name_below(path, expand_home(root)))
                if fresh:
                    copies.refuse_leftovers()
                if fresh or not (has_checkpoint(path) or not copies.is_empty()):
                    check(resolve_resume_path(resume))  # a run of its own needs what it began with no more
            except OSError as error:  # a name longer than the file system takes, a folder that may not be looked into
                raise Refusal(f"the run's folder cannot be: {error.strerror}: {str(error.filename)[:200]}") from error
            folder = _open_locked(path, _lock_fresh if fresh else lock_folder)
            if not fresh:
                copies.restore_newer(folder.path / "checkpoints")
            return folder

        return cls._decide_together(launch, decide)

    @classmethod
    def open_empty(cls, path: Path, launch: Launch, check: Callable[[Path | None], None]) -> RunFolder:
        """Make and lock a folder that no later start goes on with; what lay there is gone. Every rank calls it."""

        def decide() -> RunFolder:
            check(None)
            return _open_locked(path, _lock_emptied)

        return cls._decide_together(launch, decide)

    @classmethod
    def _decide_together(cls, launch: Launch, decide: Callable[[], RunFolder]) -> RunFolder:
        opened: list[RunFolder] = []  # the main rank's, with the lock

        def decide_and_describe() -> dict[str, Any]:
            opened.append(decide())
            return {"path": str(opened[0].given_path), "holder": lock_holder(opened[0].path)}

        # the main rank decides for all, and what it refuses is refused everywhere
        verdict = broadcast_from_main(launch, "folder", decide_and_describe)
        # all look for its lock there: machines that share no folder would notice at the first checkpoint
        run_on_all_ranks(
            launch, "folder-seen", lambda: wait_until_visible(resolve_links(verdict["path"]), verdict["holder"])
        )
        return opened[0] if opened else cls(Path(verdict["path"]))

    def read_previous(self, name: str) -> dict[str, Any] | None:
        """What the attempt before left in config.yaml or environment.json; None where nothing can be used."""
        path = self.path / name
        try:
            return read_yaml(path, _FIELDS[name]) if path.is_file() else None
        except (OSError, DamagedFile) as error:
            log.warning("damaged, and not used: %s", error)
            return None

    def write_start_files(self, config: str, overrides: list[str], environment: dict[str, Any]) -> None:
        """Leave what was asked for: config.yaml as text (earlier ones move to config.1.yaml …), words, surroundings."""
        if self._lock is None:
            return
        path = self.path / "config.yaml"
        # a copy, not a rename: a crash in between must leave a config.yaml, without which nothing could be continued
        if path.exists():
            with open_file(path, "rb") as file:
                replace_file(_first_unused(self.path / f"config.{number}.yaml" for number in count(1)), file.read())
        replace_file(path, config)
        words = "".join(f"- {json.dumps(word, ensure_ascii=False)}\n" for word in overrides) or "[]\n"
        replace_file(self.path / "overrides.yaml", words)
        self._environment = {}
        self.add_to_environment(environment)

    def add_to_environment(self, facts: Mapping[str, Any]) -> None:
        """Add to environment.json what this attempt has found out; nothing before there is one."""
        if self._environment is not None:
            self._environment.update(facts)
            text = json.dumps(self._environment, indent=1, ensure_ascii=False)
            replace_file(self.path / "environment.json", f"{text}\n")

    def begin(self, resume_step: int, world_size: int, strategy: str) -> None:
        """The attempt has joined and goes on from this step: status.json says so, and counts it."""
        if self._lock is not None:
            self._status = StatusWriter(self.path, resume_step, world_size, strategy)
        self.report("running", resume_step)

    def report(self, state: str, step: int, reason: str | None = None) -> None:
        """Replace status.json; nothing before the attempt has begun. `state`: running, completed, preempted, failed."""
        if self._status is not None:
            self._status.write(state, step, reason)

    def undo_start(self, step: int, reason: str) -> None:
        """A start was refused: nothing stays of a folder that it made itself, another one says `failed`."""
        if self._is_new and not has_checkpoint(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
            self.close()  # only now: who waits for it must not go on in a folder that is removed
            with suppress(OSError):  # on NFS the lock's file stays while it is held; or somebody else has come
                self.path.rmdir()
        else:
            self.report("failed", step, reason)

    def close(self) -> None:
        """Release the lock. A process that is killed releases it as well."""
        if self._lock is not None:
            unlock_folder(self._lock)
            self._lock = None


def _open_copies(url: str | None, run: str) -> NoCopies:
    """The copies of a run's checkpoints below this URL; None: there is no mirror."""
    if url is None:
        return NoCopies()
    from trainer.records.checkpoint.remote_copies import RemoteCopies  # here: with torch

    return RemoteCopies(url, run)


def refuse_unwritable(root: str, name: str | None, dir: str | None, launch: Launch) -> None:
    """Collective: refuse a run folder that could not be made, before anything is read or built for it."""
    word = f"run.root={root}" if dir is None else f"run.dir={dir}"
    new = name if name and _NAME.fullmatch(name) else ".a-run"  # what is no name is refused with its own words

    def look() -> None:
        path = resolve_links(expand_home(dir) if dir is not None else expand_home(root) / new)
        there = next(each for each in (path, *path.parents) if os.path.exists(each))
        try:
            # a real one: by the mode bits root may write into /proc and on read-only disks. What is there is probed
            # when it is locked
            if there != path or not there.is_dir():
                # a folder that is made and removed again
                os.rmdir(mkdtemp(prefix=".probe-", dir=there))
        except OSError as error:
            reason = error.strerror if there.is_dir() else "it is no folder"
            raise Refusal(
                f"{word}: the run folder cannot be made in {there}: {reason}; give another run.dir or run.root"
            ) from None

    broadcast_from_main(launch, "place", look)


def generate_name(label: str, now: float) -> str:
    """The name of a run that was given none: when, and what."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(now))}_{re.sub(r'[^A-Za-z0-9.-]+', '_', label)}"[:120]


def choose_path(root: Path, name: str | None, dir: str | None, label: str, launch: Launch) -> tuple[Path, bool]:
    """The path of a run, and whether an attempt before this one under the same launcher has chosen it already."""
    if dir is not None:
        path = expand_home(dir).absolute()
    elif name is not None:
        path = _path_in_root(root, name)
    else:
        path = _path_in_root(root, generate_name(label, time.time()))
        # with a number behind it where another run began in the same second
        path = _first_unused(chain([path], (path.with_name(f"{path.name}_{number}") for number in count(2))))
    # what was put there first over all restarts of one launch counts: an earlier attempt's choice, or this one
    mine, store = f"{secrets.token_hex(8)} {path}", launch.launcher_store()
    agreed = store.compare_set(f"trainer/{launch.run_id}/folder", "", mine).decode() if store else mine
    return Path(agreed.split(" ", 1)[1]), agreed != mine


def _path_in_root(root: Path, name: str) -> Path:
    """root/name, where the name can be one."""
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise Refusal(
            f"run.name={name[:140]!r}: a name has 1 to 128 letters, digits, '.', '_' or '-'; give run.dir for a path"
        )
    return root.absolute() / name


def _first_unused(paths: Iterable[Path]) -> Path:
    """The first of these that does not exist."""
    return next(path for path in paths if not os.path.lexists(path))


def _lock_fresh(path: Path) -> int:
    """Lock the folder, after what lies there has moved aside."""
    held = lock_folder(path)
    if not any(entry != ".lock" for entry in os.listdir(path)):
        return held
    try:
        os.rename(path, _first_unused(path.with_name(f"{path.name}.{number}") for number in count(1)))
        return lock_folder(path)
    finally:  # the old lock moved with its folder; it goes only when the new one is held
        unlock_folder(held)


def _lock_emptied(path: Path) -> int:
    """Lock the folder, and remove what lies there."""
    held = lock_folder(path)
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            # never through a link: what it leads to belongs to somebody else
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()
    return held


def _open_locked(path: Path, take: Callable[[Path], int]) -> RunFolder:
    """Make, lock and probe the folder; `take` locks it, and does with what lies there what is to be done."""
    named, path = path, resolve_links(path)
    made = not path.exists()
    try:
        # first of all: whoever has the lock may rename and write here
        held = take(path)
        refuse_unsafe_files(path)
        for below in ("checkpoints", "logs"):
            make_folder(path / below)
        # now, and not at the first checkpoint, an hour later
        probe_write(path)
    except UnsafeFile:
        raise
    except (OSError, ValueError) as error:
        if os.path.islink(path / ".lock"):
            raise UnsafeFile(path / ".lock", describe_entry(path / ".lock")) from None
        reason = getattr(error, "strerror", error)
        raise Refusal(f"the run folder {path} cannot be written to: {reason}; give another run.dir") from None
    return RunFolder(named, held, made)


def wait_until_visible(path: Path, wanted: str, patience: float = _VISIBLE_AFTER) -> None:
    """Refuse a folder that is another one here than on the main rank's machine: the first checkpoint would fail."""
    until = time.monotonic() + patience
    while lock_holder(path) != wanted:
        if time.monotonic() > until:
            raise Refusal(
                f"the run folder {path} is not the main rank's: these machines share no such folder; give a run.dir or "
                "run.root on a file system that they all see"
            )
        time.sleep(0.05)
