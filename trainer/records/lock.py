"""One process at a time in a folder. The kernel releases the lock when the process ends, however it ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from trainer.refusal import Refusal

PATIENCE = 2.0  # seconds; a run that was just stopped may still be leaving
LEASE = 100.0  # seconds; a file server keeps the locks of a machine that died for 90 (NFS 4's lease)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()


def lock(folder: Path) -> int:
    """Make a folder and take it for this process; what is returned goes to `unlock`. Refusal names who has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    _held.add(descriptor)
    _wait(descriptor, folder)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
    os.fsync(descriptor)  # on network file systems other machines see it only then
    return descriptor


def _wait(descriptor: int, folder: Path) -> None:
    """Wait until the folder is free: a little, or as long as a dead machine's lock lasts. Refusal then."""
    began, said = time.monotonic(), False
    while not _taken(descriptor):
        who = holder(folder)
        elsewhere = who.startswith("host ") and not who.startswith(f"host {socket.gethostname()},")
        if elsewhere and not said:
            said = True
            logging.getLogger(__name__).warning(
                "%s is in use on another machine (%s); waiting up to %g s, because the lock of a machine that died "
                "lasts so long",
                folder,
                who,
                LEASE,
            )
        if time.monotonic() - began > (LEASE if elsewhere else PATIENCE):
            unlock(descriptor)
            who = who or "an unknown process"
            raise Refusal(f"{folder} is in use by another run ({who}); stop that one or give another run.name")
        time.sleep(0.05)


def holder(folder: Path) -> str:
    """Who took a folder last, in words; empty where nobody did, or where it is not to be seen."""
    try:
        return (folder / ".lock").read_text(encoding="utf-8", errors="replace").strip()[:200]
    except OSError:
        return ""


def unlock(descriptor: int) -> None:
    """Give the folder back."""
    _held.discard(descriptor)
    os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logging.getLogger(__name__).warning("this file system has no locks: two runs in one folder would go unnoticed")
    return True


def _forget() -> None:
    """In a forked child: a decoding process that outlives its parent must not keep the lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)
