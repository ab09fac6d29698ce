"""Copies of a run's checkpoints below a URL: listed, written, read back and removed, through fsspec.

A copy is whole if it has its manifest.json, which is written last and removed first. Its files are those of the folder,
so it can be copied back by any tool.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.messages import Refusal, first_line
from trainer.records.checkpoint.copies import NoCopies
from trainer.records.checkpoint.manifest import (
    MANIFEST_FILE,
    CorruptCheckpoint,
    Manifest,
    check_hashes,
    check_sizes,
    read_manifest,
)
from trainer.records.checkpoint.store import DRAFT, list_complete, move_into_place
from trainer.records.disk import Disk

KEY = "checkpoint.mirror"
_NAME = re.compile(r"step-\d+")
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # protocol → our extra that brings its package

log = logging.getLogger(__name__)


class RemoteCopies(NoCopies):
    """The copies of one run's checkpoints."""

    def __init__(self, url: str, run: str) -> None:
        """`run`: the name of its folder. OSError, or an error of the file system's package, comes with the calls."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        # listings are not cached: another machine may have written since
        self._files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self.base = f"{root.rstrip('/')}/{run}"
        self.place = f"{url.rstrip('/')}/{run}"  # for people
        # object stores have no folders; and making one would make a bucket out of a mistyped name
        self._has_folders = not isinstance(self._files, AsyncFileSystem)

    def list_names(self) -> list[str]:
        """The names of all copies, whole or not."""
        try:
            paths = self._files.ls(self.base, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return sorted(name for name in names if _NAME.fullmatch(name))

    def read_manifests(self) -> dict[str, Manifest | None]:
        """The manifest of each copy by its name; None of one that is not whole, or not as it was written."""
        return {name: self._read_manifest(name) for name in self.list_names()}

    def _read_manifest(self, name: str) -> Manifest | None:
        with TemporaryDirectory() as scratch, suppress(FileNotFoundError, CorruptCheckpoint):
            content = self._files.cat_file(f"{self.base}/{name}/{MANIFEST_FILE}")
            (Path(scratch) / MANIFEST_FILE).write_bytes(content)
            return replace(read_manifest(Path(scratch)), path=Path(name))
        return None

    def upload(self, folder: Path, manifest: Manifest) -> None:
        """Copy a checkpoint from this folder; it is whole when this returns, and at no moment before."""
        target = f"{self.base}/{manifest.path.name}"
        self.remove(manifest.path.name)  # what an interrupted copy, or an earlier save of this step, has left
        if self._has_folders:
            self._files.makedirs(target, exist_ok=True)
        # the manifest only after all that it names is there
        for file in (*manifest.files, MANIFEST_FILE):
            self._files.put_file(str(folder / file), f"{target}/{file}")
            size = self._files.info(f"{target}/{file}")["size"]
            if size != (folder / file).stat().st_size:
                raise OSError(f"{target}/{file} has {size:,} bytes there, {(folder / file).stat().st_size:,} here")

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first: half of it is never taken for a checkpoint."""
        target = f"{self.base}/{name}"
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{target}/{MANIFEST_FILE}")
        with suppress(FileNotFoundError):
            self._files.rm(target, recursive=True)

    def is_empty(self) -> bool:
        with self._refused():
            return not self.list_names()

    def restore_newer(self, folder: Path) -> None:
        newest_here = max((manifest.step for manifest in list_complete(folder)), default=-1)
        with self._refused():
            manifests = [manifest for manifest in self.read_manifests().values() if manifest]
        problems = []
        for manifest in sorted(manifests, key=lambda each: -each.step):
            if manifest.step <= newest_here:
                return
            try:
                self._download(manifest, folder)
            except Exception as error:  # a damaged copy, or one that goes while it is read: the one before it may do
                problems.append(f"{manifest.path.name}: {first_line(error)}")
                log.warning("checkpoint %s/%s is skipped: %s", self.place, manifest.path.name, first_line(error))
            else:
                print(f"restored    step {manifest.step} from {self.place}", flush=True)
                return
        if problems:  # nothing is here either, and a run that starts over would be a surprise
            raise Refusal(
                f"{KEY}: none of the checkpoints in {self.place} can be used; another run.name starts over:\n"
                + "\n".join(f"  {problem}" for problem in problems)
            )

    def _download(self, manifest: Manifest, folder: Path) -> None:
        """Copy back, verify every byte, and give it its name."""
        draft = folder / f"{DRAFT}{manifest.path.name}-{secrets.token_hex(4)}"
        draft.mkdir(parents=True)
        try:
            for file in (*manifest.files, MANIFEST_FILE):
                self._files.get_file(f"{self.base}/{manifest.path.name}/{file}", str(draft / file))
            copied = read_manifest(draft)
            check_sizes(copied)
            check_hashes(copied, copied.files)
            move_into_place(draft, folder / manifest.path.name, Disk())
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def refuse_leftovers(self) -> None:
        with self._refused():
            names = self.list_names()
        if names:
            raise Refusal(
                f"{KEY}: an earlier run has copies in {self.place} ({', '.join(names[-3:])}), and run.resume=fresh"
                " begins another one: give another run.name, or remove them"
            )

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Inside, whatever a package makes of a network that is gone, or of a key that is wrong, is a Refusal."""
        try:
            yield
        except Exception as error:
            raise Refusal(
                f"{KEY}: {self.place} cannot be read: {type(error).__name__}: {first_line(error)}\nWithout it nobody"
                " knows whether there is a checkpoint to go on from; checkpoint.mirror=null does without"
            ) from error


def refuse_unknown_url(url: str | None) -> None:
    """Refuse a URL that no installed package can write to."""
    if url is None:
        return
    from fsspec.core import split_protocol
    from fsspec.registry import known_implementations

    protocol, _ = split_protocol(url)
    known: Mapping[str, Any] = known_implementations
    if protocol is None or protocol in ("file", "local", "memory"):
        return
    if protocol not in known:
        raise Refusal(f"{KEY}={url}: {protocol}:// is unknown; s3://, gs://, az:// or file:///folder")
    # looked for and not imported, which takes seconds and concerns the main rank alone
    package = known[protocol]["class"].partition(".")[0]
    if find_spec(package) is None:
        wanted = f"-e '.[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else package
        raise Refusal(f"{KEY}={url} needs the package {package}: pip install {wanted}")
