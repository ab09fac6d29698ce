"""torch's key-value stores, as one process of a launch gets them: from a file, from itself, from another process."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from trainer.launch.polling import until, within
from trainer.refusal import Refusal, first_line

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"  # where nobody else's machine gets in
ANSWER = timedelta(seconds=10)  # in which a store that listens answers, however busy its machine is
ELSEWHERE = "end that program, or give all ranks another MASTER_PORT (or another port in distributed.init_method)"


def in_file(path: str, patience: timedelta) -> Store:
    """The store in a file that all processes see. Refusal where there can be none."""
    from torch.distributed import FileStore

    try:
        with open(path, "ab"):  # in a folder that is not there torch itself would try for as long as it may
            pass
    except OSError as error:
        raise Refusal(
            f"distributed.init_method=file://{path}: {error.strerror}; give a file in a folder that all processes share"
        ) from None
    store = FileStore(path, -1)  # -1: nobody counts its users and removes it
    store.set_timeout(patience)
    return store


def served(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that this process serves to `size` processes. Refusal where the port is not free."""
    from torch.distributed import TCPStore

    try:
        # torch itself would listen on all interfaces, and the store asks for no password
        door = socket.create_server((host, port)).detach() if host == LOOPBACK else None
        return TCPStore(
            host, port, size, True, patience, wait_for_workers=False, multi_tenant=True, master_listen_fd=door
        )
    except (RuntimeError, OSError) as error:  # of torch a DistNetworkError
        taken = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
        why = f"port {port} of this machine is in use" if taken else first_line(error)
        raise Refusal(f"cannot serve the store at {host}:{port}: {why}; {ELSEWHERE}") from error


def reached(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that another process serves, once somebody listens there. Refusal where that is no store."""
    from torch.distributed import TCPStore

    if until(lambda: _listens(host, port), patience.total_seconds()) is None:
        raise Refusal(f"cannot reach the store at {host}:{port}: nobody listens there")
    # where another program takes the connection and says nothing, torch waits whatever its timeout is
    store = partial(TCPStore, host, port, size, False, ANSWER, wait_for_workers=False, multi_tenant=True)
    try:
        answer = within(1.5 * ANSWER.total_seconds(), store)
    except (RuntimeError, TimeoutError) as error:
        why = f"what listens there is another program ({first_line(error)})"
        raise Refusal(f"cannot reach the store at {host}:{port}: {why}; {ELSEWHERE}") from error
    answer.set_timeout(patience)
    return answer


def _listens(host: str, port: int) -> bool | None:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:  # nobody does yet, or the host has no name yet
        return None
