"""The job `export`: a trained network in one file that loads without this framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainer.data.reader import Loading
from trainer.data.slice import Slice
from trainer.data.stream import EvaluationStream
from trainer.data.tree import changed
from trainer.home import at_home
from trainer.jobs.opened import Which, as_average, chosen, run_folder, samples_of
from trainer.jobs.preparation import Job, RunParts, seeded_network
from trainer.launch.launch import Launch
from trainer.parallel.state import fits
from trainer.records.weights import of_checkpoint
from trainer.refusal import Refusal

Format = Literal["safetensors", "pt", "pt2", "onnx", "huggingface"]


class Export(Job):
    """Write the network of a checkpoint under its own names: weights alone, or code and weights.

    The main rank does it by itself, on the CPU: the others have nothing to do.
    """

    def __init__(
        self,
        format: Format = "safetensors",
        checkpoint: Which = "best",
        weights: Literal["plain", "ema"] | None = None,
        out: str | None = None,
    ) -> None:
        self.format, self.checkpoint, self.weights, self.out = format, checkpoint, weights, out

    def __call__(self, run: RunParts) -> int:
        """Export; the exit code."""
        if not run.machine.launch.is_main:
            return 0
        # what was asked for is looked at first: building a network and tracing it takes a while
        average = as_average(run, self.weights)
        ending = "" if self.format == "huggingface" else f".{self.format}"  # a folder may have any name
        path = at_home(self.out or run_folder(run) / "export" / f"model{ending}")
        if ending and path.suffix != ending:
            raise Refusal(f"job.out={self.out}: job.format={self.format} wants a name that ends in {ending}")
        found = chosen(run, self.checkpoint)
        network = trained(run, found.path, average)
        write = _WRITERS[self.format]
        # under another name until it is whole: a file that is there can be used
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        write(run, network, draft)
        size = _put_in_place(draft, path)
        which = "moving average" if average else "weights"
        print(f"checkpoint  step {found.step} of {run_folder(run)}, its {which}")
        print(f"written     {path}: {type(network).__name__}, {size:,} bytes")
        return 0


def _put_in_place(draft: Path, path: Path) -> int:
    """Give a file, or each file of a folder, its name; the bytes of all. Other files of that folder stay."""
    if not draft.is_dir():
        draft.replace(path)
        return path.stat().st_size
    path.mkdir(exist_ok=True)
    files = [file.replace(path / file.name) for file in sorted(draft.iterdir())]
    draft.rmdir()
    return sum(file.stat().st_size for file in files)


def trained(run: RunParts, checkpoint: Path, average: bool) -> nn.Module:
    """The plain network in this process's memory, with the values of a checkpoint.

    One that learned by adapters says what it is without them, in a method `merged()`.
    """
    network = seeded_network(run)
    network = network.double() if run.machine.resolved_precision == "fp64" else network
    own = network.state_dict()
    # verified byte by byte; nothing is matched by guesses here, every name and shape must be the network's own
    weights = of_checkpoint(checkpoint, average=average)
    fits({name: value.shape for name, value in own.items()}, weights.tensors)
    weights.read_into(own)
    merged = getattr(network, "merged", None)
    return (merged() if callable(merged) else network).eval()


def _safetensors(run: RunParts, network: nn.Module, path: Path) -> None:
    from safetensors.torch import save

    # every name has its values: load_state_dict wants those of tied weights, too, which the format keeps apart
    path.write_bytes(save({name: value.clone().contiguous() for name, value in network.state_dict().items()}))


def _pt(run: RunParts, network: nn.Module, path: Path) -> None:
    torch.save({name: value.contiguous() for name, value in network.state_dict().items()}, path)


def _pt2(run: RunParts, network: nn.Module, path: Path) -> None:
    args, kwargs = _called_with(run, network)
    torch.export.save(
        torch.export.export(network, args, kwargs, dynamic_shapes=_any_batch(network, args, kwargs)), path
    )


def _onnx(run: RunParts, network: nn.Module, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401 (torch's exporter needs it, and says so in a long traceback)
    except ImportError as error:
        raise Refusal("job.format=onnx needs the package onnxscript: pip install -e '.[onnx]'") from error
    args, kwargs = _called_with(run, network)
    shapes = _any_batch(network, args, kwargs)
    torch.onnx.export(
        network, args, path, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False
    )


def _huggingface(run: RunParts, network: nn.Module, path: Path) -> None:
    """Those of transformers do it by themselves; others may have a method of that name."""
    save = getattr(network, "save_pretrained", None)
    if not callable(save):
        raise Refusal(
            f"job.format=huggingface: {type(network).__name__} has no method save_pretrained(self, folder);"
            " job.format=pt2 writes code and weights of any network"
        )
    path.mkdir(exist_ok=True)
    save(path)


_WRITERS: dict[str, Callable[[RunParts, nn.Module, Path], None]] = {
    "safetensors": _safetensors,
    "pt": _pt,
    "pt2": _pt2,
    "onnx": _onnx,
    "huggingface": _huggingface,
}


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


def _any_batch(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the names of the forward's parameters: every tensor's first dimension may have any size; of tokens all may.

    Where the network fixes such a size, so does torch, without an error.
    """
    given = inspect.signature(network.forward).bind(*args, **kwargs).arguments
    free = torch.export.Dim.AUTO
    return changed(dict(given), lambda x: dict.fromkeys(range(1 if x.is_floating_point() else x.dim()), free))
