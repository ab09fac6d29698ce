"""The job `predict`: what a trained network answers to each sample of a set, or to new inputs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.jobs.network_outputs import Rows, Stopped, gather_outputs
from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.trained_run import (
    AVERAGE_PREFIX,
    LoadedRun,
    Split,
    Which,
    data_class_names,
    load_run,
    run_folder,
    wants_average,
)
from trainer.launch import failure
from trainer.learning.task import Task
from trainer.messages import BadData, Refusal, expand_home, format_count
from trainer.records.prediction_files import CSVWriter, SafetensorsWriter, open_drafts, write_json_line

_BEST = 5  # classes of an input whose probabilities are written
_SHOWN = 20  # inputs, or damaged ones, on the screen


def refuse_no_classes(task: Task) -> None:
    """Refuse a task whose outputs are no classes."""
    if type(task).probabilities is Task.probabilities:
        raise Refusal(
            f"job.inputs gives the class of each input, and {type(task).__name__} does not say how its outputs are"
            " classes: def probabilities(self, output), (samples, classes). job=predict without job.inputs writes the"
            " outputs of the data's own sets, and job=generate continues a text"
        )


def top_classes(task: Task, output: Any, damaged: Tensor) -> dict[str, Tensor]:
    """The best classes of each sample, (B, 5) or fewer, and whether it is one that could not be read, (B,)."""
    probabilities = task.probabilities(output)
    if probabilities is None or probabilities.dim() != 2:
        raise BadData(
            f"job.inputs gives the class of each input, and the network's output is none for {type(task).__name__}:"
            " expected scores (samples, classes)"
        )
    # (B, classes) → (B, 5)
    top = probabilities.topk(min(_BEST, probabilities.shape[1]), dim=1)
    return {"probability": top.values, "class": top.indices, "damaged": damaged}


class InputClassWriter:
    """Writes `file,class,probability`, and JSON with the best five classes; remembers what is for the screen.

    samples: has `name(i)`, and `error(i)` for one that could not be read.
    """

    def __init__(self, table: IO[bytes], lines: IO[bytes], samples: Any, names: Sequence[str]) -> None:
        self._table, self._lines = CSVWriter(table, ("file", "class", "probability")), lines
        self._samples, self._names = samples, names
        self._count = self._bad = 0  # inputs, and those that gave no answer
        self._shown: list[str] = []  # lines for the screen
        self._damaged: list[str] = []  # the same, of inputs that gave no answer

    def add(self, first: int, piece: Rows) -> None:
        """The rows of the inputs from this one on."""
        # one row for each sample: (k,) probabilities, (k,) class numbers, a flag
        rows = zip(*(piece[name].tolist() for name in ("probability", "class", "damaged")), strict=True)
        for at, (probabilities, numbers, damaged) in enumerate(rows, first):
            error = self._samples.error(at) if damaged else None
            if error is None and not all(map(math.isfinite, probabilities)):
                error = "the network's answer is not finite"
            named = {} if error else {self._name(n): _round(p) for n, p in zip(numbers, probabilities, strict=True)}
            self._write(self._samples.name(at), named, error)

    def _write(self, file: str, named: dict[str, float], error: str | None) -> None:
        # the best class first
        class_name, probability = next(iter(named.items()), (None, None))
        self._table.add((file, class_name or "", "" if probability is None else f"{probability:g}"))
        write_json_line(self._lines, {"file": file, "class": class_name, "probabilities": named, "error": error})
        self._count += 1
        self._bad += error is not None
        if error and self._bad <= _SHOWN:
            self._damaged.append(f"  {escape_unprintable(file)}: {escape_unprintable(error)}")
        elif not error and len(self._shown) <= _SHOWN:
            answers = ", ".join(f"{escape_unprintable(name)} {100 * p:.1f} %" for name, p in named.items())
            self._shown.append(f"{escape_unprintable(file)}  {answers}")

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)

    def lines(self) -> list[str]:
        """For the screen: the answers where they are few, and what could not be read."""
        read = self._count - self._bad
        many = [f"classified  {format_count(read, 'input')} of {self._count:,}"]
        more = [f"  … and {self._bad - _SHOWN:,} more; the error of each is in its row"] if self._bad > _SHOWN else []
        damaged = [f"damaged     {self._bad:,} of {format_count(self._count, 'input')}", *self._damaged, *more]
        return [*(self._shown if read <= _SHOWN else many), *(damaged if self._bad else [])]

    def refusal(self, what: str, path: Path) -> str:
        """Why there is no answer at all; empty where there is one."""
        if self._bad < self._count:
            return ""
        return f"{what}: none of {format_count(self._count, 'input')} could be read; the reason of each is in {path}"


def _round(probability: float) -> float:
    return float(f"{probability:.6g}")


def escape_unprintable(text: str) -> str:
    """A name for the screen: what would move a cursor, or is no text, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


_NAME = "predictions"
_ENDINGS = (".safetensors", ".csv", ".jsonl")


class Predict(Job):
    """Write the answers to a set, in its order, each sample once, whatever the number of ranks.

    Of a set of the data `Task.predict`, as tensors. inputs: new files instead, and the class of each of them.
    """

    def __init__(
        self,
        split: Split = "evaluation",
        checkpoint: Which = "best",
        weights: Literal["plain", "ema"] | None = None,
        out: str | None = None,
        inputs: str | None = None,
    ) -> None:
        self.split, self.checkpoint, self.weights, self.out, self.inputs = split, checkpoint, weights, out, inputs

    def __call__(self, run: RunParts) -> int:
        """Predict; the exit code."""
        average, launch = wants_average(run, self.weights), run.machine.launch
        run.task = run.task.with_whole_outputs()
        ending = ".safetensors" if self.inputs is None else ".csv"
        path = expand_home(self.out).resolve() if self.out else run_folder(run) / "predict" / f"{_NAME}{ending}"
        if path.suffix != ending:
            what = "a file of tensors" if self.inputs is None else "a table, and a .jsonl beside it"
            raise Refusal(f"job.out={self.out}: what is written is {what}; give a name that ends in {ending}")
        run.strategy.refuse_outputs("job=predict", launch.world_size)
        if self.inputs is None:
            write = self._write_outputs
        else:
            refuse_no_classes(run.task)
            write = self._write_classes
        done, refused = True, ""  # refused: why there is no answer
        with load_run(run, "predict", self.checkpoint, self.split, self.inputs) as loaded:
            # as in an evaluation: inside a view the network holds its weights, or their average
            views = dict(loaded.model.average.views())
            with views[AVERAGE_PREFIX if average else ""], torch.no_grad():
                try:
                    # what the main rank found counts for all
                    refused = run.strategy.world.broadcast_value(write(run, loaded, path))
                except Stopped:
                    done = False
        if refused:
            raise Refusal(refused)
        return failure.exit_code(done, launch)

    def _write_outputs(self, run: RunParts, loaded: LoadedRun, path: Path) -> str:
        """Collective: a file of tensors, and a table of the classes where the data names them."""
        # what is kept is as exact as the run
        real = torch.float64 if run.machine.resolved_precision == "fp64" else torch.float32
        pieces = gather_outputs(run.strategy, loaded, partial(_predict_rows, run.task), real)
        if not run.machine.launch.is_main:
            return _take_part(pieces)
        table = path.with_suffix(".csv")  # only if the data names its classes
        with open_drafts(path, table) as (file, rows):
            folder = self._empty_folder(path.with_suffix(""))
            tensors = SafetensorsWriter(file, loaded.loader.size, folder)
            names = SetClassWriter(CSVWriter(rows, ("index", "name", "class")), run.data)
            for first, piece in pieces:
                tensors.add(first, piece)
                names.add(first, piece, loaded.samples)
            written = [path] if not tensors.is_apart else []
            self._remove_others(path, *written, *([table] if names.is_complete else []))
        shapes = ", ".join(f"{name} {shape}" for name, (_, shape) in tensors.rows.items() if name != "index")
        print(f"checkpoint  step {loaded.checkpoint.step} of {run_folder(run)}")
        count = f"{loaded.loader.size} samples ({self.split})"
        if tensors.is_apart:
            print(
                f"written     {folder}: {count}, a file for each, because their shapes differ; the first has {shapes}"
            )
        else:
            print(f"written     {path}: {count}, for each {shapes}")
        if names.is_complete:
            print(f"written     {table}: the class of each")
        return ""

    def _write_classes(self, run: RunParts, loaded: LoadedRun, path: Path) -> str:
        """Collective: the classes of new inputs, as a table and as JSON; why it is refused, where none can be read."""
        pieces = gather_outputs(run.strategy, loaded, partial(top_classes, run.task), torch.float64)
        if not run.machine.launch.is_main:
            return _take_part(pieces)
        lines = path.with_suffix(".jsonl")  # a row of JSON beside each row of the table
        with open_drafts(path, lines) as (table, rows):
            classified = InputClassWriter(table, rows, loaded.samples, loaded.classes or data_class_names(run.data))
            for first, piece in pieces:
                classified.add(first, piece)
            self._remove_others(path, path, lines)
        print(f"checkpoint  step {loaded.checkpoint.step} of {run_folder(run)}")
        for line in (*classified.lines(), f"written     {path} and {lines.name}: a row for each input"):
            print(line)
        return classified.refusal(f"job.inputs={self.inputs}", path)

    def _empty_folder(self, folder: Path) -> Path:
        """The folder for outputs that differ in shape, without older ones. Refusal where it is somebody else's."""
        if self.out is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            raise Refusal(f"job.out={self.out}: {folder} is there, where outputs that differ in shape would be written")
        return folder

    def _remove_others(self, path: Path, *written: Path) -> None:
        """Of older predictions in the run's folder nothing may stay beside new ones: it would be of other samples."""
        for ending in _ENDINGS if self.out is None else ():
            if (old := path.with_suffix(ending)) not in written:
                old.unlink(missing_ok=True)


class SetClassWriter:
    """The class of each sample, where the data names its classes and each answer has one number for each of them."""

    def __init__(self, table: CSVWriter, data: Data) -> None:
        self._table, self._data = table, data
        self.is_complete = bool(data.class_names)  # has every row so far had a class?

    def add(self, first: int, piece: Rows, samples: Any) -> None:
        """The rows of the samples from this one on."""
        output = piece.get("output")  # (n, classes)
        if not self.is_complete or output is None or output.shape[1:] != (len(self._data.class_names),):
            self.is_complete = False
            return
        # a data set may have name(i), as those of files do
        name = getattr(samples, "name", lambda index: "")
        predicted = self._data.as_words(torch.from_numpy(output).argmax(1))
        for index, class_name in enumerate(predicted, first):
            self._table.add((index, name(index), class_name))


def _predict_rows(task: Task, output: Any, target: Any) -> dict[str, Tensor]:
    """What the task keeps of an output, a row for each sample. ValueError where it is something else."""
    kept = task.predict(output)
    # all of them must have the same samples
    sizes = {name: rows.shape[:1] for name, rows in kept.items()}
    for name, rows in kept.items():
        if rows.dim() < 1 or sizes[name] != next(iter(sizes.values())):
            raise ValueError(
                f"Task.predict gave {name} of shape {tuple(rows.shape)}; the first dimension must be the samples"
            )
    return kept


def _take_part(pieces: Iterator[Any]) -> str:
    """Collective: a rank that writes nothing takes part in gathering; the main rank writes."""
    for _ in pieces:
        pass
    return ""
