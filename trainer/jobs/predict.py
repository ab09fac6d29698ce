"""The job `predict`: what a trained network answers to each sample of a set, in one file."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.data.data import Data
from trainer.data.stream import Batch
from trainer.home import at_home
from trainer.jobs.opened import OF_AVERAGE, Opened, Split, Which, as_average, opened, run_folder
from trainer.jobs.preparation import Job, RunParts
from trainer.launch import failure
from trainer.launch.durable import replace_file
from trainer.learning.task import Task
from trainer.parallel.buckets import wide
from trainer.refusal import Refusal


class Predict(Job):
    """Write `Task.predict` of every sample, in the order of the set, once, whatever the number of ranks."""

    def __init__(
        self,
        split: Split = "evaluation",
        checkpoint: Which = "best",
        weights: Literal["plain", "ema"] | None = None,
        out: str | None = None,
    ) -> None:
        self.split, self.checkpoint, self.weights, self.out = split, checkpoint, weights, out

    def __call__(self, run: RunParts) -> int:
        """Predict; the exit code."""
        average = as_average(run, self.weights)
        path = at_home(self.out or run_folder(run) / "predict" / "predictions.safetensors")
        if path.suffix != ".safetensors":
            raise Refusal(
                f"job.out={self.out}: predictions are a file of tensors; give a name that ends in .safetensors"
            )
        run.strategy.refuse_outputs("job=predict", run.machine.launch.world_size)
        with opened(run, "predict", self.split, self.checkpoint) as job:
            # in the view the network holds the weights that were asked for
            views = dict(job.placed.average.views())
            with views[OF_AVERAGE if average else ""], torch.no_grad():
                pieces = _answers(run, job)
            if pieces and run.machine.launch.is_main:
                if self.out is None:  # an older table would be one of other samples
                    path.with_suffix(".csv").unlink(missing_ok=True)
                write(path, pieces)
                shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in pieces[0].items())
                print(f"checkpoint  step {job.found.step} of {run_folder(run)}")
                print(f"written     {path}: {job.stream.size} samples ({self.split}), for each {shapes}")
                if rows := in_words(run.data, job.samples, pieces):
                    table = path.with_suffix(".csv")
                    replace_file(table, rows.encode())
                    print(f"written     {table}: the class of each")
        return failure.exit_code(pieces is not None, run.machine.launch)


class _Answers(Task):
    """A task of which an evaluation adds up answers: each rank puts its samples' rows among zeros, the sum has all.

    So predictions travel as sums do, under every strategy, also one whose ranks do not all hold the output.
    """

    def __init__(self, task: Task, most: int) -> None:
        self._task, self._most = task, most  # samples of all data ranks in one forward

    def expect(self, batch: Batch, first: int) -> None:
        """Which rows of a micro-batch come next; first: the number of its first sample."""
        # a rank without a sample of its own computes one that does not count: it may lie anywhere
        self._rows = (batch.indices - first).clamp(0, self._most - 1)  # (B,)

    def loss(self, output: Any, target: Any) -> Tensor:
        return torch.zeros(())

    def weight(self, target: Any) -> int:
        return 1

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        answers = self._task.predict(output)
        for name, answer in answers.items():
            if answer.shape[:1] != self._rows.shape:
                raise ValueError(
                    f"Task.predict gave {name} of shape {tuple(answer.shape)} for {len(self._rows)} samples; the first"
                    " dimension must be the samples"
                )
        return {f"answer/{name}": self._among_zeros(wide(answer)) for name, answer in answers.items()}

    def _among_zeros(self, answer: Tensor) -> Tensor:
        whole = answer.new_zeros((self._most, *answer.shape[1:]))  # as large for every micro-batch: shapes travel once
        return whole.index_copy(0, self._rows.to(whole.device), answer)


def _answers(run: RunParts, job: Opened) -> list[dict[str, Tensor]] | None:
    """Collective: of each micro-batch what the network answers, in the order of the set, on the main rank's CPU.

    None where a rank was asked to stop.
    """
    pieces: list[dict[str, Tensor]] = []
    answers = job.placed.task = _Answers(run.task, job.stream.most)
    # sums travel in the widest type; what is kept is as exact as the run
    first, real = 0, torch.float64 if run.machine.resolved_precision == "fp64" else torch.float32
    votes = run.strategy.votes()
    for batch, valid in job.stream.batches():
        votes.ask(job.stop.raised)
        answers.expect(batch, first)
        # the data ranks; every row once, among the zeros of the others
        totals = run.strategy.totals(job.placed.evaluate(batch, valid)).read()
        named = {name.removeprefix("answer/"): value for name, value in totals.items() if name.startswith("answer/")}
        rows = {name: value[: len(batch.span)] for name, value in named.items()}
        # the other ranks let go of it: the whole set need not fit into each of them
        if run.machine.launch.is_main:
            pieces.append({name: x.to(real) if x.is_floating_point() else x for name, x in rows.items()})
        first += len(batch.span)
        if any(votes.read()):
            return None
    return pieces


def write(path: Path, pieces: list[dict[str, Tensor]]) -> None:
    """One safetensors file of all pieces, and the number of each sample as `index`; whole, or not there."""
    from safetensors.torch import save

    named = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    samples = len(next(iter(named.values())))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save({"index": torch.arange(samples), **named}))


def in_words(data: Data, samples: Any, pieces: list[dict[str, Tensor]]) -> str:
    """A table for people, as CSV: each sample's number, its name where the set has names, the class that is predicted.

    Empty where the data does not name its classes, or where no answer is one number for each of them.
    """
    classes = len(data.class_names)
    outputs = [piece.get("output", torch.empty(0)) for piece in pieces]  # (B, classes)
    if not classes or any(output.shape[1:] != (classes,) for output in outputs):
        return ""
    predicted = data.as_words(torch.cat(outputs).argmax(1))
    # a set may offer name(i), as those of files do
    name = getattr(samples, "name", lambda index: "")
    table = StringIO(newline="")
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["index", "name", "class"])
    rows.writerows([index, name(index), word] for index, word in enumerate(predicted))
    return table.getvalue()
