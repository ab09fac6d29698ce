"""Pickles of plain data: a file that asks for anything else is refused before anything of it is called."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.messages import Refusal, first_line

_TUPLES = 1000  # a published file has about ten
_OPCODES = 10_000_000  # of the published ones the largest has less than a million


def read_plain(path: Path) -> Any:
    """What the file holds: numbers, text, bytes, lists, tuples, dicts, and arrays of bytes as uint8 tensors.

    Text of Python 2 is given as bytes. Refusal for a file that holds or asks for anything else; nothing that it names
    is ever looked up.
    """
    try:
        content = path.read_bytes()
        _refuse_bombs(content)
        return _with_tensors(_Plain(io.BytesIO(content), encoding="bytes").load(), {})
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # a made-up file may fail in any way
        raise Refusal(
            f"{path} is damaged, or holds more than arrays, bytes, numbers, lists and dicts ({first_line(error)});"
            " nothing that it asks for was run"
        ) from error


def _refuse_bombs(content: bytes) -> None:
    """Refuse a few bytes that would fill the memory or overrun the stack: nothing is built for it."""
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise pickle.UnpicklingError("a place that nothing before it needs")  # memory up to there would be taken
        if count > _OPCODES:  # each of them may make an object that is a hundred times as large
            raise pickle.UnpicklingError(f"more than {_OPCODES:,} operations")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _TUPLES:
            raise pickle.UnpicklingError(f"more than {_TUPLES} tuples")  # one within the other they overrun the stack


class _Array:
    """Stands for numpy's array of bytes: keeps the shape and the bytes that a pickle gives."""

    shape: tuple[int, ...] = ()
    content = b""

    def __setstate__(self, state: Any) -> None:
        """numpy: (version, shape, type, in Fortran's order, bytes)."""
        _, shape, kind, fortran, content = state
        self.fill(shape, kind, fortran, content)

    def fill(self, shape: Any, kind: Any, fortran: Any, content: Any) -> None:
        if not isinstance(kind, _Type) or kind.name != "u1" or fortran or not isinstance(content, bytes | bytearray):
            raise pickle.UnpicklingError("an array that is not one of bytes, row after row")
        self.shape, self.content = tuple(int(size) for size in shape), bytes(content)
        if math.prod(self.shape) != len(self.content):
            raise pickle.UnpicklingError(f"{len(self.content)} bytes for an array of {self.shape}")

    def tensor(self) -> Tensor:
        """The array as uint8. Of a bytearray, because a tensor may be written to and bytes may not."""
        if not self.content:
            return torch.empty(self.shape, dtype=torch.uint8)
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).view(self.shape)


class _Type:
    """Stands for numpy's type of numbers: keeps its name."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.decode("latin-1") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: bytes have none."""


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.fill(shape, kind, order not in ("C", b"C"), content)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("an encoding other than latin1")
    return text.encode("latin-1")


class _Maker:
    """What a pickle may call, and cannot change."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a change of what makes its arrays")


# By the names under which numpy and Python put arrays of bytes into pickles, old and new: what stands for them here.
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Maker(_reconstruct),
    ("numpy.core.numeric", "_frombuffer"): _Maker(_from_buffer),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Maker(_encode),
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a pickle calls by name comes from here and from nowhere else; nothing is imported."""
        known = _KNOWN.get((module.replace("numpy._core", "numpy.core"), name))
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known


def _with_tensors(value: Any, done: dict[int, Any]) -> Any:
    """The same with every array as a tensor; what is neither that nor plain is refused.

    done: what has been made of an object already, by its identity: it may stand in many places.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if id(value) not in done:
        done[id(value)] = _made(value, done)
    return done[id(value)]


def _made(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, _Array):
        return value.tensor()
    if isinstance(value, dict):
        return {_with_tensors(key, done): _with_tensors(item, done) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, done) for item in value)
    raise pickle.UnpicklingError(f"a {type(value).__name__}")
