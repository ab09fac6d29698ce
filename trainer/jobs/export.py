"""The job `export`: a trained network in one file that loads without this framework."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.data.class_names import refuse_other_classes
from trainer.data.data import Data, Preparation
from trainer.data.nested_tensors import cast_floats, map_tensors, tensors
from trainer.jobs.preparation import seeded_network
from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.trained_run import (
    Which,
    checkpoint_class_names,
    data_class_names,
    evaluation_example,
    load_network,
    read_samples,
    run_folder,
    select_checkpoint,
    wants_average,
)
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import make_folder, replace_file
from trainer.learning.task import Task
from trainer.messages import Refusal, expand_home, first_line
from trainer.parallel.meta_model import build_meta_model, is_meta_model
from trainer.parallel.optimizer_state import refuse_checkpoint_shapes
from trainer.records.checkpoint.base_weights import BASE_KEY
from trainer.records.checkpoint.manifest import read_manifest, read_state
from trainer.records.weight_files import write_weight_files
from trainer.records.weight_sources import open_checkpoint_weights


@dataclass(frozen=True)
class Program:
    """A module, what it is called with, and what people must know to call it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: str  # the input in words: "float32 (B, 3, 32, 32)"
    gives: str  # the output in words

    def save(self, path: Path) -> None:
        """Write it as torch.export does."""
        # sizes of a batch stay free, others are those of the example
        exported = torch.export.export(self.module, self.args, self.kwargs, dynamic_shapes=self._sizes())
        torch.export.save(exported, path)

    def save_onnx(self, path: Path) -> None:
        """Write it for other runtimes, by the package onnxscript."""
        torch.onnx.export(
            self.module,
            (*self.args, {}),  # a dict that comes last would be taken for the arguments with names; an input may be one
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
        free = torch.export.Dim.AUTO  # any size, or a fixed one where the module needs it
        return map_tensors(dict(given), lambda x: dict.fromkeys(range(1 if x.is_floating_point() else x.dim()), free))


class _WithPreparation(nn.Module):
    """From raw inputs to probabilities."""

    def __init__(self, task: Task, network: nn.Module, preparation: nn.Module, real: torch.dtype) -> None:
        super().__init__()
        self.network, self.preparation = network, preparation
        self._task, self._real = task, real

    def forward(self, inputs: Any) -> Tensor | None:
        # raw inputs → what the network is called with → scores → probabilities (B, classes)
        ready = cast_floats(self.preparation(inputs), self._real)
        return self._task.probabilities(self._task.forward(self.network, ready, None))


def prepared_program(run: RunParts, network: nn.Module) -> Program:
    """The network with the data's preparation before it and probabilities after it. Refusal if one is not known."""
    data_class, task_class = type(run.data), type(run.task)
    preparation = preparation_of(run.data)
    if preparation is None:
        raise Refusal(
            f"job.prepared=true: {data_class.__name__} does not say how it prepares a new sample; a method"
            " preparation(self) -> Preparation of the data says it, or job.prepared=false"
        )
    # without gradients: nobody learns through an exported program
    real = run.machine.parameter_dtype
    program = _WithPreparation(run.task, network, preparation.module, real).eval().requires_grad_(False)
    try:
        with torch.no_grad():
            probabilities = program(preparation.example)
    except (AttributeError, TypeError) as error:  # None has neither shape nor items
        what = f"{task_class.__name__}.forward does not work without targets"
        raise Refusal(f"job.prepared=true: {what}: {error}") from error
    if probabilities is None:
        raise Refusal(
            f"job.prepared=true: {task_class.__name__} has no probabilities of classes; a method"
            " probabilities(self, output) -> Tensor of the task gives them, or job.prepared=false"
        )
    return Program(program, (preparation.example,), {}, preparation.raw, f"probabilities (B, {probabilities.shape[1]})")


def preparation_of(data: Data) -> Preparation | None:
    """What the data says; None where a class of a lab has changed how samples are prepared, and not what it says."""
    # the class that defines each of them: whoever overrides augment or collate prepares samples in another way
    whose = {
        name: next(kind for kind in type(data).__mro__ if name in vars(kind))
        for name in ("preparation", "augment", "collate")
    }
    later = [name for name, kind in whose.items() if kind is not whose["preparation"]]
    stale = any(issubclass(whose[name], whose["preparation"]) for name in later)
    return None if stale else data.preparation()


def network_program(run: RunParts, network: nn.Module) -> Program:
    """The network as the task calls it, with samples as the data prepares them."""
    args, kwargs = _find_call(run, network)
    preparation = preparation_of(run.data)
    shapes = ", ".join(f"{x.dtype} {('B', *x.shape[1:])}" for x in tensors((args, kwargs)))
    takes = preparation.ready if preparation else shapes.replace("torch.", "").replace("'", "")
    return Program(network, args, kwargs, takes, "the network's output")


class _Call(Exception):
    """Carries what a network is called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args_given, self.kwargs_given = args, kwargs


def _find_call(run: RunParts, network: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task calls the network with for two samples of the set, as they come out of the data's augment."""

    def tell(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Call(args, kwargs)

    # two samples of this process alone: the network's own call shows what there is to trace, whatever the task does
    example = evaluation_example(run, read_samples(run, "evaluation", Launch()))
    inputs, targets = cast_floats(example, run.machine.parameter_dtype)
    # the exception leaves the task's forward as soon as it calls the network: nothing is computed
    hook = network.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        run.task.forward(network, inputs, targets)
    except _Call as call:
        return call.args_given, call.kwargs_given
    finally:
        hook.remove()
    raise Refusal(f"{type(run.task).__name__}.forward does not call the network: there is nothing to export")


class Export(Job):
    """Write the network of a checkpoint under its own names: weights alone, or code and weights.

    The main rank does it by itself, on the CPU: the others have nothing to do.
    """

    def __init__(
        self,
        format: Literal["safetensors", "pt", "pt2", "onnx", "huggingface"] = "safetensors",
        checkpoint: Which = "best",
        weights: Literal["plain", "ema"] | None = None,
        out: str | None = None,
        prepared: bool = False,
    ) -> None:
        self.format, self.checkpoint, self.weights, self.out = format, checkpoint, weights, out
        self.prepared = prepared

    def __call__(self, run: RunParts) -> int:
        """Export; the exit code."""
        if not run.machine.launch.is_main:
            return 0
        run.task = run.task.with_whole_outputs()
        # what was asked for is looked at first: building a network and tracing it takes a while
        if self.format == "onnx" and find_spec("onnxscript") is None:
            raise Refusal("job.format=onnx needs the package onnxscript: pip install -e '.[onnx]'")
        average = wants_average(run, self.weights)
        ending = "" if self.format == "huggingface" else f".{self.format}"  # a folder may have any name
        path = expand_home(self.out).resolve() if self.out else run_folder(run) / "export" / f"model{ending}"
        if ending and path.suffix != ending:
            raise Refusal(f"job.out={self.out}: job.format={self.format} wants a name that ends in {ending}")
        # only a program can prepare raw inputs
        if self.prepared and self.format not in _PROGRAMS:
            raise Refusal(
                f"job.prepared=true: job.format={self.format} holds weights and no program, which could prepare a"
                " sample; job.format=pt2 and onnx do"
            )
        names, checkpoint = class_names(run, self.checkpoint), select_checkpoint(run, self.checkpoint)
        # under other names until all is whole: files that are there can be used
        with TemporaryDirectory(dir=make_folder(path.parent), prefix=".") as scratch:
            kind, facts = self._write(run, checkpoint.path, average, names, Path(scratch) / path.name)
            size = _move_into_place(Path(scratch), path if self.format == "huggingface" else path.parent, path)
        which = "moving average" if average else "weights"
        print(f"checkpoint  step {checkpoint.step} of {run_folder(run)}, its {which}")
        print(f"written     {path}: {kind}, {size:,} bytes")
        if facts is not None:
            card = path.with_suffix(".json")
            replace_file(card, f"{json.dumps({'file': path.name} | facts, indent=2)}\n".encode())
            print(f"written     {card}: {', '.join(facts)}")
        return 0

    def _write(
        self, run: RunParts, checkpoint: Path, average: bool, names: list[str], path: Path
    ) -> tuple[str, dict[str, Any] | None]:
        """Write the network; the name of its class, and what is to stand beside it: how it is called, and what it says.

        path: a file; of a folder, and of several files, its folder counts, and is empty.
        """
        if self.format == "safetensors":
            return _weights(run, checkpoint, average, path.parent, path.stem), _describe_file(run.data, names)
        network = load_network(run, checkpoint, average, training=self.format not in _PROGRAMS)
        kind = type(network).__name__
        if self.format == "huggingface":
            write_huggingface(network, names, path.parent)
            return kind, None
        if self.format == "pt":
            torch.save({key: value.contiguous() for key, value in network.state_dict().items()}, path)
            return kind, _describe_file(run.data, names)
        program = prepared_program(run, network) if self.prepared else network_program(run, network)
        try:
            _PROGRAMS[self.format](program, path)
        except Exception as error:  # torch has a kind for everything that it cannot trace
            why = f"torch cannot write {kind} as a program: {type(error).__name__}: {first_line(error)}"
            raise Refusal(f"job.format={self.format}: {why}; job.format=safetensors and pt hold its weights") from error
        return kind, _describe_file(run.data, names, program.takes, program.gives)


def _describe_file(
    data: Data, names: list[str], takes: str | None = None, gives: str = "the network's output"
) -> dict[str, Any]:
    """What people must know to use the file, as JSON takes it. takes: by default what the data makes of a sample."""
    preparation = preparation_of(data)
    takes = takes or (preparation.ready if preparation else None)
    # null where the data does not say it
    facts = dict.fromkeys(("mean", "std", "image_size")) | (dict(preparation.facts) if preparation else {})
    return {"classes": names, **facts, "input": takes, "output": gives}


def class_names(run: RunParts, which: Which) -> list[str]:
    """What each class is called: as the checkpoint says it, else as the data does; by its number where it has no name.

    None where there are no classes. Refusal where the data has other classes than the checkpoint.
    """
    names, names_of_data = checkpoint_class_names(run, which), data_class_names(run.data)
    refuse_other_classes(names_of_data, names)
    names = names or names_of_data
    return names + [str(number) for number in range(len(names), getattr(run.data, "num_classes", None) or 0)]


def _move_into_place(draft: Path, folder: Path, path: Path) -> int:
    """Give each file its name in this folder; the bytes of all. Other files of the folder stay.

    path: what was asked for, one file or an index of several: of an earlier export neither may stay beside the other.
    """
    make_folder(folder)
    index = path.with_name(f"{path.name}.index.json")
    new = {file.name for file in draft.iterdir()}
    for stale in ({path, index} if path != folder else set()) - {folder / name for name in new}:
        stale.unlink(missing_ok=True)
    return sum(file.replace(folder / file.name).stat().st_size for file in sorted(draft.iterdir()))


def _weights(run: RunParts, checkpoint: Path, average: bool, folder: Path, name: str) -> str:
    """Write the weights of a checkpoint, a tensor at a time; the name of the network's class."""
    outline, _ = build_meta_model(partial(seeded_network, run))
    # every name has its values: load_state_dict wants those of tied weights, too
    kind, values = type(outline).__name__, outline.state_dict()
    merged: Any = getattr(outline, "merged", None)
    merges = callable(merged) and {*merged().state_dict()} != {*values}
    elsewhere = BASE_KEY in read_state(read_manifest(checkpoint))
    if not is_meta_model(outline) or merges or elsewhere:  # what is to be written needs the network's values
        del outline, values
        network = load_network(run, checkpoint, average, training=True)
        values = network.state_dict()
        write_weight_files(folder, name, values, values.__getitem__)
        return type(network).__name__
    weights = open_checkpoint_weights(checkpoint, average=average)  # verified byte by byte
    refuse_checkpoint_shapes({key: value.shape for key, value in values.items()}, weights.tensors)
    write_weight_files(folder, name, {key: weights.tensors[key] for key in values}, weights.read)
    return kind


def write_huggingface(network: nn.Module, names: list[str], path: Path) -> None:
    """The folder as the network writes it, with the names of the classes where transformers looks for them."""
    save = getattr(network, "save_pretrained", None)
    if not callable(save):
        raise Refusal(
            f"job.format=huggingface: {type(network).__name__} has no method save_pretrained(self, folder), as decoders"
            " and networks of transformers have it; job.format=pt2 writes code and weights of any network"
        )
    save(path)
    config = path / "config.json"
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    if names and any(kind.endswith("Classification") for kind in settings.get("architectures") or ()):
        settings |= {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


_PROGRAMS: dict[str, Callable[[Program, Path], None]] = {"pt2": Program.save, "onnx": Program.save_onnx}
