"""The run folder: its name, agreed once for all ranks and all restarts; its lock; what a run leaves about itself."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.agreement import decided_by_main, everywhere
from trainer.launch.durable import probe, replace_file
from trainer.launch.launch import Launch
from trainer.launch.status import State, Status, read_status
from trainer.records.lock import holder, lock, unlock
from trainer.records.resume import has_checkpoint, read_config, start_path
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

_SIGHT = 10.0  # seconds until a network file system shows one machine what another has written
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RunFolder:
    """The folder of one run. The main rank writes to it and holds its lock; on other ranks the verbs do nothing."""

    def __init__(self, path: Path, held: int | None = None, restarted: bool = False):
        self.path = path
        self.restarted = restarted  # by the same launcher, so that it re-enters its own folder
        self._held = held
        self._status = Status(path) if held is not None else None

    @classmethod
    def open(
        cls,
        root: str,
        name: str | None,
        dir: str | None,
        resume: str,
        launch: Launch,
        label: str,
        check: Callable[[Path], None],
    ) -> RunFolder:
        """Decide on the folder, make it and lock it. Every rank calls it, the main one decides; Refusal on all.

        A name is generated where none is given, from the time and `label`. `resume` is auto, fresh or a path, which
        `check` may refuse before anything is made; it does not count where the folder has a checkpoint of its own.
        """
        memory = _Memory(launch.lasting_store(), launch)
        kept: list[RunFolder] = []

        def decide() -> dict[str, Any]:
            if launch.restarts and not launch.hosted and name is None and dir is None:
                raise Refusal(
                    "give run.name: torchrun keeps no store here (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or "
                    "distributed.init_method), so after a restart a generated name would not be found again"
                )
            try:
                start = start_path(resume)
                path, restarted = _choose(Path(root).expanduser(), name, dir, label, memory)
                if start is not None and not has_checkpoint(path):
                    check(start)
            except OSError as error:  # a name longer than the file system takes, a folder that may not be looked into
                raise Refusal(f"the run's folder cannot be: {error.strerror}: {str(error.filename)[:200]}") from error
            restarted = restarted or launch.requeued
            kept.append(_enter(path, fresh=resume == "fresh" and not restarted, restarted=restarted))
            return {"path": str(path), "restarted": restarted, "holder": holder(path)}

        verdict = decided_by_main(launch, "folder", decide)
        everywhere(launch, "folder-seen", lambda: _see(Path(verdict["path"]), verdict["holder"]))
        return kept[0] if kept else cls(Path(verdict["path"]), restarted=verdict["restarted"])

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        """Is there something to continue?"""
        return has_checkpoint(self.path)

    @property
    def last_status(self) -> dict[str, Any] | None:
        """What the attempt before left in status.json."""
        return (self._status.before or None) if self._status else read_status(self.path)

    @property
    def last_config(self) -> dict[str, Any] | None:
        """The configuration of the attempt before; None where there is none. ValueError where it cannot be read."""
        path = self.path / "config.yaml"
        return read_config(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def last_environment(self) -> dict[str, Any]:
        """environment.json of the attempt before; empty where there is none."""
        try:
            said = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def write_start(self, config: str, overrides: list[str], environment: dict[str, Any]) -> None:
        """Leave what was asked for: config.yaml as text (earlier ones move to config.1.yaml …), words, surroundings."""
        if self._held is None:
            return
        path = self.path / "config.yaml"
        if path.exists():
            numbers = (number for number in range(1, 10**6) if not (self.path / f"config.{number}.yaml").exists())
            shutil.copyfile(path, self.path / f"config.{next(numbers)}.yaml")
        replace_file(path, config)
        words = "".join(f"- {json.dumps(word, ensure_ascii=False)}\n" for word in overrides) or "[]\n"
        replace_file(self.path / "overrides.yaml", words)
        replace_file(self.path / "environment.json", json.dumps(environment, indent=1, ensure_ascii=False) + "\n")

    def status(
        self,
        state: State,
        *,
        step: int,
        resume_step: int,
        world_size: int,
        strategy: str,
        reason: str | None = None,
        root_rank: int | None = None,
    ) -> None:
        """Replace status.json; the number of the attempt and the goodput are worked out here."""
        if self._status is not None:
            self._status.write(
                state,
                step=step,
                resume_step=resume_step,
                world_size=world_size,
                strategy=strategy,
                reason=reason,
                root_rank=root_rank,
            )

    def close(self) -> None:
        """Release the lock. A process that is killed releases it as well."""
        if self._held is not None:
            unlock(self._held)
            self._held = None


def generated_name(label: str, now: float) -> str:
    """The name of a run that was given none: when, and what."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(now))}_{re.sub(r'[^A-Za-z0-9.-]+', '_', label)}"[:120]


class _Memory:
    """What the launcher's store remembers over all restarts of one launch; forgets everything without a store."""

    def __init__(self, store: Store | None, launch: Launch):
        self.store, self.prefix = store, f"trainer/{launch.run_id}/over-all-rounds"

    def first(self, key: str, value: str) -> str:
        """The value that was remembered first under this key: an earlier attempt's, or this one."""
        return self.store.compare_set(f"{self.prefix}/{key}", "", value).decode() if self.store else value


def _choose(root: Path, name: str | None, dir: str | None, label: str, memory: _Memory) -> tuple[Path, bool]:
    """The path, and whether an attempt before this one under the same launcher has chosen it already."""
    if dir is not None:
        path = Path(dir).expanduser().absolute()
    elif name is not None:
        path = _inside(root, name)
    else:
        path = _unused(_inside(root, generated_name(label, time.time())))
    mine = f"{secrets.token_hex(8)} {path}"
    agreed = memory.first("folder", mine)
    return Path(agreed.split(" ", 1)[1]), agreed != mine


def _inside(root: Path, name: str) -> Path:
    """root/name, if that is where it really lies."""
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise Refusal(
            f"run.name={name[:140]!r}: a name has 1 to 128 letters, digits, '.', '_' or '-'; give run.dir for a path"
        )
    path = root.absolute() / name
    if path.resolve() != root.resolve() / name:
        raise Refusal(
            f"run.name={name}: {path} leads out of {root.absolute()}, to {path.resolve()}; give run.dir for that"
        )
    return path


def _unused(path: Path) -> Path:
    """The path itself, or with a number behind it where another run began in the same second."""
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}_{number}")
    return candidate


def _enter(path: Path, fresh: bool, restarted: bool) -> RunFolder:
    """Make, probe and lock the folder; `fresh`: after what lies there has moved aside."""
    try:
        held = lock(path)
        if fresh and any(entry != ".lock" for entry in os.listdir(path)):
            os.rename(path, _aside(path))
            old, held = held, lock(path)
            unlock(old)
        for part in ("checkpoints", "logs"):
            (path / part).mkdir(exist_ok=True)
        probe(path)
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise Refusal(
            f"the run folder {path} cannot be written to: {reason}; another run.dir or run.root can"
        ) from None
    return RunFolder(path, held, restarted)


def _see(path: Path, wanted: str) -> None:
    """Refuse a folder that is another one here than on the main rank's machine: the first checkpoint would fail."""
    until = time.monotonic() + _SIGHT
    while holder(path) != wanted:
        if time.monotonic() > until:
            raise Refusal(
                f"the run folder {path} is not the main rank's: these machines share no such folder; give a run.dir or "
                "run.root on a file system that they all see"
            )
        time.sleep(0.05)


def _aside(path: Path) -> Path:
    return next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{n}")).exists())
