"""One process at a time in a folder. The kernel releases the lock when the process ends, however it ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from trainer.messages import Refusal

WAIT_SECONDS = 2.0  # seconds; a run that was just stopped may still be leaving
LEASE_SECONDS = 100.0  # seconds; a file server keeps the locks of a machine that died for 90 (NFS 4's lease)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()  # descriptors with a lock
log = logging.getLogger(__name__)


def lock_folder(folder: Path, patience: float = WAIT_SECONDS, lease: float = LEASE_SECONDS) -> int:
    """Make a folder and take it for this process; what it returns goes to `unlock_folder`. Refusal names who has it."""
    descriptor = _open_lock_file(folder)
    _wait_for_lock(descriptor, folder, patience, lease)
    # whoever had it may have moved it aside, or removed it, and the lock that was waited for with it
    while not _is_current(descriptor, folder):
        unlock_folder(descriptor)
        descriptor = _open_lock_file(folder)
        _wait_for_lock(descriptor, folder, patience, lease)
    # only now, when it is ours: until then the file says who else has it
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
    os.fsync(descriptor)  # on network file systems other machines see it only then
    return descriptor


def _open_lock_file(folder: Path) -> int:
    """The file that is locked, in a folder that is made where there is none."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the folder was moved aside or removed just now
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            _held.add(descriptor)
            return descriptor


def _is_current(descriptor: int, folder: Path) -> bool:
    """Is the file that was opened still the one in the folder?"""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / ".lock", follow_symlinks=False))
    except FileNotFoundError:
        return False


def _wait_for_lock(descriptor: int, folder: Path, patience: float, lease: float) -> None:
    """Wait until the folder is free: a little, or as long as a dead machine's lock lasts. Refusal then."""
    start, warned = time.monotonic(), False
    # asked again and again, as flock itself knows no time after which it gives up
    while not _try_lock(descriptor):
        holder = lock_holder(folder)
        # on this machine a dead process's lock is gone; a file server cannot know yet that another machine is dead
        on_other_machine = holder.startswith("host ") and not holder.startswith(f"host {socket.gethostname()},")
        if time.monotonic() - start > (lease if on_other_machine else patience):
            unlock_folder(descriptor)
            raise Refusal(f"{folder} is in use by another run ({holder}); stop that one or give another run.name")
        if on_other_machine and not warned:
            why = "because the lock of a machine that died lasts so long"
            log.warning("%s is in use on another machine (%s); waiting up to %g s, %s", folder, holder, lease, why)
            warned = True
        time.sleep(0.05)


def lock_holder(folder: Path) -> str:
    """Who took a folder last, in words; empty where nobody did, or where it is not to be seen."""
    try:
        return (folder / ".lock").read_text(encoding="utf-8", errors="replace").strip()[:200]
    except OSError:
        return ""


def unlock_folder(descriptor: int) -> None:
    """Give the folder back."""
    _held.discard(descriptor)
    os.close(descriptor)


def unlock_all_folders() -> None:
    """Give back every folder that this process has."""
    for descriptor in list(_held):
        unlock_folder(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        log.warning("this file system has no locks: two runs in one folder would go unnoticed")
    return True


def _unlock_in_child() -> None:
    """In a forked child: a decoding process that outlives its parent must not keep the lock."""
    unlock_all_folders()


os.register_at_fork(after_in_child=_unlock_in_child)
