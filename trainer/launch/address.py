"""`distributed.init_method`: where the processes of a launch meet. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from trainer.refusal import Refusal, nearest

FORMS = "env://, tcp://host:port or file:///path"
_SCHEMES = ("env", "tcp", "file")
_BEGINNING = b"refcount/"  # of every file that torch's FileStore has written to, behind a length


@dataclass(frozen=True)
class Meeting:
    """A meeting place, and who this process is there if that is said with it."""

    address: str = ""  # host:port, or file:///path; empty: what the launcher left in the environment
    rank: int | None = None
    world_size: int | None = None


def meeting(written: str) -> Meeting:
    """Read `env://`, `tcp://host:port` or `file:///path`, the latter two also with `?rank=R&world_size=W`.

    Refusal with what was expected, as a sentence without its subject.
    """
    scheme, slashes, _ = written.partition("://")
    if scheme not in _SCHEMES or not slashes:
        near = nearest(scheme.split(":")[0], _SCHEMES).replace("'?", "://'?").replace("' or", "://' or")
        raise Refusal(f"{FORMS}{near}")
    try:
        url = urlsplit(written)
        port = url.port
    except ValueError as error:
        raise Refusal(f"{FORMS} ({error})") from None
    if scheme == "env" and (url.netloc or url.path or url.query):
        raise Refusal("env:// alone: rank, size and address are those of the environment")
    rank, world_size = _query(url)
    if scheme == "env":
        return Meeting()
    if scheme == "tcp":
        if not url.hostname or not port or url.path not in ("", "/"):
            raise Refusal("tcp://host:port, the address of rank 0")
        return Meeting(f"{url.hostname}:{port}", rank, world_size)
    if url.netloc or not url.path.startswith("/") or url.path.endswith("/"):
        raise Refusal(f"file:/// and the absolute path of a file: file://{os.path.abspath(url.netloc + url.path)}")
    return Meeting(f"file://{unquote(url.path)}", rank, world_size)


def shared_file(address: str) -> Path | None:
    """The file of a meeting place that is one. Refusal where it cannot be used: torch itself would try for ever.

    What a dead run left in it does no harm (rendezvous.py); a file that is something else does.
    """
    if not address.startswith("file://"):
        return None
    path, why = Path(address.removeprefix("file://")), ""
    try:
        with path.open("ab+") as file:  # makes it, as the store would
            file.seek(0)
            start = file.read(32)
        if start and _BEGINNING not in start:
            why = "it holds something that no run left there"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise Refusal(f"distributed.init_method={address}: {why}; give a file in a folder that all processes share")
    return path


def _query(url: SplitResult) -> tuple[int | None, int | None]:
    """rank and world_size out of `?rank=R&world_size=W`; both or none."""
    said = dict(parse_qsl(url.query, keep_blank_values=True))
    if not said:
        return None, None
    if said.keys() != {"rank", "world_size"} or not all(text.isascii() and text.isdecimal() for text in said.values()):
        raise Refusal("?rank=R&world_size=W behind the address, both whole numbers, or nothing")
    rank, world_size = int(said["rank"]), int(said["world_size"])
    if rank >= world_size:
        raise Refusal(
            f"a rank below the world size: ranks count from 0, so the last of {world_size} is {world_size - 1}"
        )
    return rank, world_size
