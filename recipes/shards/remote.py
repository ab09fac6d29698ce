"""Reads files below a URL through fsspec, again and again where a network or a server fails for a while."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.messages import BadData, Refusal, first_line

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 20.0  # seconds before a request is sent again
# what no second request mends
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

Result = TypeVar("Result")


class DamagedShard(Exception):
    """A shard is missing, or is not what was indexed: nothing of it, or of a block of it, can be read."""


class Remote:
    """The files below a URL, by their paths below it. Each process has connections of its own."""

    def __init__(self, root: str, attempts: int = 6) -> None:
        """attempts: of each request; the waits between them grow."""
        self.root, self._attempts = root.rstrip("/"), attempts
        self.is_local = "://" not in self.root or self.root.startswith("file://")

    def files(self) -> tuple[Any, str]:
        """The file system of fsspec, and the root's path in it. Refusal where a package for its kind is missing."""
        from fsspec.core import url_to_fs  # here, because only shards need it

        try:
            # fsspec keeps one for each process: after a fork there is a new one, with new connections
            return url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            extra = "pip install -e '.[s3]'" if self.root.startswith("s3:") else "install the package that it names"
            raise Refusal(f"{self.root} cannot be opened: {first_line(error)}; {extra}") from error

    def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of a file, or those from `start` to `stop`."""
        files, root = self.files()
        content = self.insist(path, lambda: files.cat_file(f"{root}/{path}", start=start, end=stop))
        # a simple web server answers with the whole file, whatever range was asked for
        ignored = start is not None and stop is not None and len(content) > stop - start
        return content[start:stop] if ignored else content

    def write(self, path: str, content: bytes) -> None:
        """Write a file, which is never there in part: this process may be killed."""
        files, root = self.files()
        target = f"{root}/{path}"
        if not self.is_local:  # an object is there when all of it is
            self.insist(path, lambda: files.pipe_file(target, content))
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        draft = Path(f"{target}.{os.getpid()}")
        draft.write_bytes(content)
        draft.rename(target)

    def insist(self, path: str, request: Callable[[], Result]) -> Result:
        """What a request about a file gives, tried several times.

        FileNotFoundError and PermissionError at once; BadData where the last attempt fails as well.
        """
        for attempt in range(self._attempts):
            try:
                return request()
            except (*_FINAL, Refusal, DamagedShard):
                raise
            except Exception as error:  # each kind of storage has exceptions of its own for a connection that broke
                if _is_past_the_end(error):
                    raise DamagedShard(
                        f"{self.root}/{path} is damaged: it is shorter than when it was indexed"
                    ) from error
                if attempt + 1 == self._attempts:
                    raise BadData(
                        f"{self.root}/{path} could not be read in {self._attempts} attempts: {type(error).__name__}:"
                        f" {first_line(error)}. Start the same command again when the storage answers"
                    ) from error
                # ranks that failed together do not come back together
                time.sleep(min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * random.SystemRandom().uniform(0.5, 1.5))
        raise AssertionError("no attempt at all")


def _is_past_the_end(error: Exception) -> bool:
    """Were bytes asked for that a file does not have? S3 says EINVAL, a web server 416."""
    return getattr(error, "errno", None) == errno.EINVAL or getattr(error, "status", None) == 416
