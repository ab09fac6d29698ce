"""A network as a program in one file, by torch.export: pt2 and onnx."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.data import Data
from trainer.data.nested_tensors import changed, floats_as, tensors
from trainer.data.preparation import Preparation
from trainer.data.rank_slice import Slice
from trainer.data.reader import Loading
from trainer.data.stream import EvaluationStream
from trainer.jobs.preparation import RunParts
from trainer.jobs.trained_run import samples_of
from trainer.launch.rendezvous import Launch
from trainer.learning.task import Task
from trainer.refusal import Refusal


@dataclass(frozen=True)
class Program:
    """A module, what it is called with, and what people must know to call it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: str
    gives: str

    def save(self, path: Path) -> None:
        """Write it as torch.export does."""
        exported = torch.export.export(self.module, self.args, self.kwargs, dynamic_shapes=self._sizes())
        torch.export.save(exported, path)

    def save_onnx(self, path: Path) -> None:
        """Write it for other runtimes. Refusal where the package that torch needs for it is not there."""
        try:
            import onnxscript  # noqa: F401 (torch's exporter needs it, and says so in a long traceback)
        except ImportError as error:
            raise Refusal("job.format=onnx needs the package onnxscript: pip install -e '.[onnx]'") from error
        torch.onnx.export(
            self.module,
            self.args,
            path,
            kwargs=self.kwargs,
            dynamo=True,
            dynamic_shapes=self._sizes(),
            external_data=False,
            verbose=False,
        )

    def _sizes(self) -> Any:
        """By the names of the forward's parameters: of floats the first dimension may have any size, of others all may.

        Where the module fixes such a size, so does torch, without an error.
        """
        given = inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments
        free = torch.export.Dim.AUTO
        return changed(dict(given), lambda x: dict.fromkeys(range(1 if x.is_floating_point() else x.dim()), free))


class _Whole(nn.Module):
    """From raw inputs to probabilities."""

    def __init__(self, task: Task, network: nn.Module, preparation: nn.Module, real: torch.dtype) -> None:
        super().__init__()
        self.network, self.preparation = network, preparation
        self._task, self._real = task, real

    def forward(self, inputs: Any) -> Tensor | None:
        ready = floats_as(self.preparation(inputs), self._real)
        return self._task.probabilities(self._task.forward(self.network, ready, None))


def prepared(run: RunParts, network: nn.Module) -> Program:
    """The network between the data's own preparation and probabilities. Refusal where data or task cannot say them."""
    kind, task = type(run.data), type(run.task)
    said = preparation_of(run.data)
    if said is None:
        raise Refusal(
            f"job.prepared=true: {kind.__name__} does not say how it prepares a new sample; a method"
            " preparation(self) -> Preparation of the data says it, or job.prepared=false"
        )
    # answers are plain numbers: nobody learns through probabilities
    whole = _Whole(run.task, network, said.module, _real(run)).eval().requires_grad_(False)
    try:
        with torch.no_grad():
            shares = whole(said.example)
    except (AttributeError, TypeError) as error:  # None has neither shape nor items
        raise Refusal(f"job.prepared=true: {task.__name__}.forward does not work without targets: {error}") from error
    if shares is None:
        raise Refusal(
            f"job.prepared=true: {task.__name__} has no probabilities of classes; a method"
            " probabilities(self, output) -> Tensor of the task gives them, or job.prepared=false"
        )
    return Program(whole, (said.example,), {}, said.raw, f"probabilities (B, {shares.shape[1]})")


def preparation_of(data: Data) -> Preparation | None:
    """What the data says; None where a class of a lab has changed how samples are prepared, and not what it says."""
    whose = {
        name: next(kind for kind in type(data).__mro__ if name in vars(kind))
        for name in ("preparation", "augment", "collate")
    }
    later = [name for name, kind in whose.items() if kind is not whose["preparation"]]
    stale = any(issubclass(whose[name], whose["preparation"]) for name in later)
    return None if stale else data.preparation()


def plain(run: RunParts, network: nn.Module) -> Program:
    """The network as the task calls it, with samples as the data prepares them."""
    args, kwargs = floats_as(_called_with(run, network), _real(run))
    said = preparation_of(run.data)
    takes = said.ready if said else ", ".join(_shape(x) for x in tensors((args, kwargs)))
    return Program(network, args, kwargs, takes, "the network's output")


def _real(run: RunParts) -> torch.dtype:
    return torch.float64 if run.machine.resolved_precision == "fp64" else torch.float32


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {('B', *x.shape[1:])}".replace("'", "")


class _Called(Exception):
    """Carries what a network is called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args_given, self.kwargs_given = args, kwargs


def _called_with(run: RunParts, network: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task calls the network with for two samples of the set, as they come out of the data's augment."""

    def tell(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    # two samples of this process alone: the network's own call shows what there is to trace, whatever the task does
    alone = Slice(0, 1, torch.device("cpu"), run.settings.seed)
    samples = samples_of(run, "evaluation", Launch())
    inputs, targets = EvaluationStream(run.data, samples, alone, 2, 1, Loading(workers=0)).example()
    hook = network.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        run.task.forward(network, inputs, targets)
    except _Called as call:
        return call.args_given, call.kwargs_given
    finally:
        hook.remove()
    raise Refusal(f"{type(run.task).__name__}.forward does not call the network: there is nothing to export")
