"""A toy is trained by the words of a command; what it leaves is compared with what one process left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run import far, lines, run
from tests.strategies import networks
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager

CONF = Path(__file__).resolve().parent / "conf"
COMMON = """trust=[tests] model=toy data=toy task=toy seed=3 precision=fp64 optimizer=adamw optimizer.lr=0.01
optimizer.fused=true schedule=constant loader.workers=0 loop.steps=8 loop.global_batch=48 loop.eval_batch=33
loop.max_norm=1 loop.log_every=1 loop.eval_every=null loop.save_every=null strategy=single"""
SGD = "optimizer=sgd optimizer.lr=0.05 optimizer.fused=true"
MUON = "optimizer=muon optimizer.lr=0.01 optimizer.scaling=jordan optimizer.adamw_lr=0.003 optimizer.fused=null"
DATA = {networks.Next: networks.TokenData}  # what a task learns from, where it is no ToyData


@dataclass(frozen=True)
class Seen:
    """What a run has left in its folder."""

    folder: Path

    def each(self, key: str) -> list[Any]:
        """One number a step, of those that this start has done."""
        return [line[key] for line in lines(self.folder, "train")]

    @cached_property
    def losses(self) -> list[float]:
        return self.each("loss")

    @cached_property
    def norms(self) -> list[float]:
        return self.each("grad_norm")

    @cached_property
    def figures(self) -> dict[str, float]:
        """Of the evaluation at the end."""
        return {name: value for name, value in lines(self.folder, "eval")[-1].items() if name not in ("kind", "time")}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All that the last checkpoint holds: weights, buffers, their average, the optimizer's memory."""
        with CheckpointManager(self.folder / "checkpoints", Ranks(), keep=9) as checkpoints:
            found = checkpoints.newest()
            assert found is not None
            held = {name: torch.empty(fact.shape, dtype=fact.dtype) for name, fact in found.tensors.items()}
            checkpoints.read(found, held)
        return held

    def checkpoint(self, step: int) -> Path:
        (found,) = (path for path in (self.folder / "checkpoints").iterdir() if path.name.endswith(f"-{step:08d}"))
        return found


def name_of(kind: Callable[..., Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def typed(words: str = "", model: Any = networks.Net, task: Any = networks.Plain, **more: Any) -> list[str]:
    """The words of a command: the last of several for one key counts. model: a class, or the words of a decoder.

    task: None where the words say which, and which data.
    """
    parts: dict[str, str] = {}
    if isinstance(model, str):
        parts["+model.words"] = f"'{model}'"
        model = networks.decoder
    data = more.pop("data", None) or DATA.get(task, networks.ToyData)
    kinds = {"model": model} if task is None else {"model": model, "task": task, "data": data}
    parts |= {f"{group}._target_": name_of(kind) for group, kind in kinds.items()}
    if task is networks.Next and "packed" in more:
        parts |= {"+task.pack": "true", "data._target_": name_of(networks.PackedData)}
    for word in f"{COMMON} {words}".split():
        key, _, value = word.partition("=")
        if key == "optimizer":  # an option of a group forgets what was said of another one
            parts = {
                name: said for name, said in parts.items() if not name.startswith("optimizer.") or value == "adamw"
            }
        parts[key] = value
    return ["--config-dir", str(CONF), *(f"{key}={value}" for key, value in parts.items())]


_done: dict[str, Seen] = {}


class Train:
    """Runs a case on so many ranks, or remembers how it ended: a reference is computed once a session."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.count = 0

    def __call__(self, words: str = "", ranks: int = 1, **parts: Any) -> Seen:
        case = typed(words, **parts)
        key = f"{ranks} {case}"
        if key not in _done:
            _done[key] = Seen(self.run(case, ranks, 0).folder)
        return _done[key]

    def run(self, case: list[str], ranks: int, code: int | None) -> Any:
        self.count += 1
        # what is compiled is not: pytest makes errors of torch's own warnings
        alone = ranks == 1 and "strategy=single" in case and "compile.mode=default" not in case
        how: Any = "here" if alone else "group"
        return run([*case, f"run.dir={self.count}"], ranks, how, place=self._place, code=code)

    def refused(self, words: str = "", ranks: int = 1, code: int | None = 2, **parts: Any) -> str:
        """What it says where it does not work."""
        return self.run(typed(words, **parts), ranks, code).out


def alike(seen: Seen, reference: Seen, start: int = 0, within: float = 1e-10) -> None:
    """A run, from this step on, and all that its checkpoint holds are those of another run."""
    for field in ("loss", "grad_norm", "loss_mean"):
        assert far(seen.each(field), reference.each(field)[start:]) < within, field
    assert seen.each("sample_digest") == reference.each("sample_digest")[start:]
    assert seen.figures == pytest.approx(reference.figures, abs=10 * within)
    own, other = seen.tensors, reference.tensors
    assert own.keys() == other.keys()
    for name, value in own.items():
        assert (value.shape, value.dtype) == (other[name].shape, other[name].dtype), name
        torch.testing.assert_close(value, other[name], rtol=0, atol=within, msg=partial(_named, name))


def _named(name: str, said: str) -> str:
    return f"{name}: {said}"


def same_bits(seen: Seen, reference: Seen, start: int = 0) -> None:
    """The same to the last bit."""
    for field in ("loss_hex", "grad_norm", "sample_digest"):
        assert seen.each(field) == reference.each(field)[start:], field
    assert seen.figures == reference.figures
    assert seen.tensors.keys() == reference.tensors.keys()
    assert [name for name, value in seen.tensors.items() if not torch.equal(value, reference.tensors[name])] == []
