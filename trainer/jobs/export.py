"""The job `export`: a trained network in one file that loads without this framework."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainer.data.class_names import by_name
from trainer.data.data import Data
from trainer.jobs.exported_program import Program, plain, preparation_of, prepared
from trainer.jobs.preparation import Job, RunParts, seeded_network
from trainer.jobs.trained_run import Which, as_average, chosen, classes_of, names_there, run_folder
from trainer.launch.atomic_files import replace_file
from trainer.launch.no_symlinks import make_folder
from trainer.parallel.optimizer_state import fits
from trainer.records.weight_files import of_checkpoint
from trainer.refusal import Refusal
from trainer.user_paths import at_home

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
        prepared: bool = False,
    ) -> None:
        self.format, self.checkpoint, self.weights, self.out = format, checkpoint, weights, out
        self.prepared = prepared

    def __call__(self, run: RunParts) -> int:
        """Export; the exit code."""
        if not run.machine.launch.is_main:
            return 0
        # what was asked for is looked at first: building a network and tracing it takes a while
        average = as_average(run, self.weights)
        ending = "" if self.format == "huggingface" else f".{self.format}"  # a folder may have any name
        path = at_home(self.out).resolve() if self.out else run_folder(run) / "export" / f"model{ending}"
        if ending and path.suffix != ending:
            raise Refusal(f"job.out={self.out}: job.format={self.format} wants a name that ends in {ending}")
        if self.prepared and self.format not in _PROGRAMS:
            raise Refusal(
                f"job.prepared=true: job.format={self.format} holds weights and no program, which could prepare a"
                " sample; job.format=pt2 and onnx do"
            )
        names, found = class_names(run, self.checkpoint), chosen(run, self.checkpoint)
        network = trained(run, found.path, average)
        # under another name until it is whole: a file that is there can be used
        draft = make_folder(path.parent) / f".{secrets.token_hex(4)}-{path.name}"
        facts = self._write(run, network, names, draft)
        size = _put_in_place(draft, path)
        which = "moving average" if average else "weights"
        print(f"checkpoint  step {found.step} of {run_folder(run)}, its {which}")
        print(f"written     {path}: {type(network).__name__}, {size:,} bytes")
        if facts is not None:
            card = path.with_suffix(".json")
            replace_file(card, f"{json.dumps({'file': path.name} | facts, indent=2)}\n".encode())
            print(f"written     {card}: {', '.join(facts)}")
        return 0

    def _write(self, run: RunParts, network: nn.Module, names: list[str], path: Path) -> dict[str, Any] | None:
        """Write the network; what is to stand beside it: how it is called, and what its answers mean."""
        if self.format == "huggingface":
            _huggingface(run, network, names, path)
            return None
        if self.format in _WEIGHTS:
            _WEIGHTS[self.format](network, path)
            said = preparation_of(run.data)
            return _facts(run.data, names, said.ready if said else None, "the network's output")
        program = prepared(run, network) if self.prepared else plain(run, network)
        _PROGRAMS[self.format](program, path)
        return _facts(run.data, names, program.takes, program.gives)


def _facts(data: Data, names: list[str], takes: str | None, gives: str) -> dict[str, Any]:
    """What people must know to use the file, as JSON takes it."""
    said = preparation_of(data)
    facts = dict.fromkeys(("mean", "std", "image_size")) | (dict(said.facts) if said else {})
    return {"classes": names, **facts, "input": takes, "output": gives}


def class_names(run: RunParts, which: Which) -> list[str]:
    """What each class is called: as the checkpoint says it, else as the data does; by its number where it has no name.

    None where there are no classes. Refusal where the data has a class that the checkpoint does not know.
    """
    names, there = classes_of(run, which), names_there(run.data)
    if there:
        by_name(run.data, names)
    names = names or there
    return names + [str(number) for number in range(len(names), getattr(run.data, "num_classes", None) or 0)]


def _put_in_place(draft: Path, path: Path) -> int:
    """Give a file, or each file of a folder, its name; the bytes of all. Other files of that folder stay."""
    if not draft.is_dir():
        draft.replace(path)
        return path.stat().st_size
    make_folder(path)
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


def _safetensors(network: nn.Module, path: Path) -> None:
    from trainer.records.tensor_files import write_file

    # every name has its values: load_state_dict wants those of tied weights, too, which the format keeps apart
    write_file(path, network.state_dict())


def _pt(network: nn.Module, path: Path) -> None:
    torch.save({name: value.contiguous() for name, value in network.state_dict().items()}, path)


def _huggingface(run: RunParts, network: nn.Module, names: list[str], path: Path) -> None:
    """The folder as the task writes it; with the names of the classes, and how pictures are prepared."""
    path.mkdir(exist_ok=True)
    run.task.save_pretrained(network, path)
    said, config = preparation_of(run.data), path / "config.json"
    if said and said.processor:
        (path / "preprocessor_config.json").write_text(json.dumps(said.processor, indent=2) + "\n", encoding="utf-8")
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    if names and any(kind.endswith("Classification") for kind in settings.get("architectures") or ()):
        settings |= {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


_WEIGHTS: dict[str, Callable[[nn.Module, Path], None]] = {"safetensors": _safetensors, "pt": _pt}
_PROGRAMS: dict[str, Callable[[Program, Path], None]] = {"pt2": Program.save, "onnx": Program.save_onnx}
