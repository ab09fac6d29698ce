"""The lines that a run prints: what it is when it starts, how it ended, and the table of its metrics and its time."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.configuration.command_line import add_overrides, code_arguments, quote_path
from trainer.data.sampler import dataset_size
from trainer.jobs.resume_decision import resume_lines
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.devices import accelerator_names
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import read_status
from trainer.learning.freezing import count_trainable
from trainer.loop.trainer import Trainer
from trainer.messages import format_count, format_names, format_number, format_seconds
from trainer.parallel.batch_norm import local_batch_norms
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.records.checkpoint.manifest import CheckpointInfo
from trainer.records.checkpoint.store import list_complete, select_best
from trainer.records.console import format_metric
from trainer.records.metrics_reader import metrics_of, read_last_lines
from trainer.strategies.machine import Machine
from trainer.strategies.step_timing import STEP_PHASES, StepTimer

_NAMES = 5  # in a line
_METRICS = 12  # of an evaluation in the table at the end
_LABEL, _CELL = 24, 11  # columns of that table; three cells behind a label fit into 80
# methods of a LightningModule, and what says the same here
_LIGHTNING = {
    "configure_optimizers": "the optimizer is chosen with optimizer= and the rate's course with schedule=",
    "training_step": "the task says the loss, task=",
}


def start_lines(run: PreparedRun, start: CheckpointInfo | None) -> list[str]:
    """What the run is: data, network, devices and sizes as they were resolved, and notes."""
    strategy, machine = run.strategy, run.machine
    count, learn = sum(parameter.numel() for parameter in run.network.parameters()), count_trainable(run.network)
    frozen = f", of which {learn:,} are trained" if learn < count else ""
    warmup, steps = run.schedule.count_warmup(), run.length.steps
    late = "the run ends before schedule.warmup: no step has the full rate"
    if warmup <= steps:
        late = f"schedule.warmup is {warmup:,} of {steps:,} steps, {warmup / steps:.0%} of the run"
        if isinstance(run.schedule.warmup, int):
            late += "; in epochs (schedule.warmup=1ep) it stays the same part with another batch"
    evaluated = "none: the data has no evaluation set"
    if run.evaluation is not None:
        best = f"smallest {run.best_metric[1:]}" if run.best_metric.startswith("-") else f"largest {run.best_metric}"
        evaluated = f"{format_count(dataset_size(run.evaluation), 'sample')}; the best has the {best}"
    return [
        f"run folder  {run.folder.path}",
        f"strategy    {strategy.name} on {format_count(strategy.world.size, 'process')}; {format_devices(machine)}",
        *([f"auto        {run.auto.reason}"] if run.auto else []),
        f"precision   {format_precision(machine)}",
        f"network     {type(run.network).__name__}, {count:,} parameters{frozen}",
        *[f"optimizer   {rule}; {rule.count_parameters(run.network):,} parameters" for rule in run.rules],
        f"data        {format_data(run)}",
        f"evaluation  {evaluated}",
        f"batch       {run.batches}",
        f"length      {run.length}; schedule {run.schedule.label}",
        *([f"note        {late}"] if warmup > steps / 3 else []),
        *run.initial.lines,
        *([f"note        every rank builds the whole network first: {run.whole_because}"] if run.whole_because else []),
        *[
            f"note        {note}"
            for note in (*run.data.notes(), *strategy.notes(run.network), *lightning_notes(run.network))
        ],
        *slice_notes(run),
        *(resume_lines(run, start) if start else []),
    ]


def slice_notes(run: PreparedRun) -> list[str]:
    """What a micro-batch means that a plan has chosen, for layers that see one micro-batch at a time."""
    is_chosen = run.auto is not None and any("loop.micro_batch=" in override for override in run.auto.overrides)
    if not (is_chosen and local_batch_norms(run.network)):
        return []
    return [
        "note        loop.micro_batch=auto with BatchNorm: the curve depends on how much memory there is; set a number"
    ]


def format_data(run: PreparedRun) -> str:
    """How many samples there are to train on, and in how many classes where the data knows."""
    # of one epoch, with those that make up no whole batch
    samples = run.length.per_epoch * run.batches.total + run.length.left_out
    classes = getattr(run.data, "num_classes", None)
    in_classes = f" in {format_count(classes, 'class')}" if isinstance(classes, int) else ""
    return format_count(samples, "sample") + in_classes


def lightning_notes(network: nn.Module) -> list[str]:
    """The network's methods that Lightning would call and nobody calls here; not those of Lightning's own class."""
    name = type(network).__name__
    return [
        f"{name}.{method} is not called: {instead} (docs/migrating.md)"
        for method, instead in _LIGHTNING.items()
        # the class that defines the method; Lightning's own base class defines all of them
        for kind in [next((kind for kind in type(network).__mro__ if method in vars(kind)), None)]
        if kind is not None and kind.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
    ]


def format_devices(machine: Machine) -> str:
    """The devices in use of those that this machine has, and how to use them all."""
    used = machine.launch.local_world_size  # processes of this run on this machine
    if not machine.on_gpu:
        # too many threads of several processes on few cores are a usual mistake
        threads, cores = format_count(torch.get_num_threads(), "thread"), format_count(os.cpu_count() or 1, "core")
        return f"cpu, {format_count(used, 'process')} of {threads} on {cores}"
    # a launcher may show each process its own device alone
    seen = accelerator_names()
    if used > len(seen) and not machine.shares_devices:
        return f"{format_count(used, 'GPU')}, each seen by one process alone, {seen[0]}"
    more = "; all of them: processes=auto strategy=ddp"
    return f"{used} of {format_count(len(seen), 'GPU')}, {seen[0]}{more if used < len(seen) else ''}"


def format_precision(machine: Machine) -> str:
    """The resolved precision in words, and what TF32 makes of it."""
    precision = machine.resolved_precision
    if machine.float8:
        slow = "" if machine.compile else ", which pays with compile.mode=default"
        return f"{precision}; linear layers inside units multiply in float8 ({machine.float8}){slow}"
    if machine.kind != "cuda" or precision == "fp64":
        return f"{precision}; tf32=true changes nothing here" if machine.tf32 else precision
    if machine.tf32:
        return f"{precision}; what is multiplied in fp32 is rounded to TF32"
    return f"{precision}; tf32=true is faster and less exact" if precision == "fp32" else precision


def replaced_lines(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Which samples could not be read, by the names that each rank has."""
    # ranks that share samples (tensor, context) name them twice
    every = sorted(set(chain.from_iterable(of_ranks)))
    if not every:
        return []
    which = format_names(every, _NAMES)
    return [f"replaced    {format_count(len(every), 'sample')} that could not be read, others in their place: {which}"]


def left_out_lines(skipped: int) -> list[str]:
    """How many steps have taught nothing, because a loss or a gradient was not finite."""
    return [f"left out    {format_count(skipped, 'step')} whose loss or gradient was not finite"] if skipped else []


def end_lines(
    run: PreparedRun, metrics_of: dict[str, float] | None, step: int, done: bool, early: str | None = None
) -> list[str]:
    """How it ended, and what to do next. early: why it ended before the last step that was asked for."""
    folder = shlex.quote(str(run.folder.path))
    if not done:
        return [f"stopped and saved at step {step}; to go on:", f"  {resume_command(run)}"]
    # the loss stands in the table above
    parts = [f"{name} {value:.4f}" for name, value in (metrics_of or {}).items() if name not in ("loss", "ema_loss")]
    return [
        *([f"ended early: {early}"] if early else []),
        f"completed   step {step}" + (f", {', '.join(parts)}" if parts else ""),
        f"run folder  {folder}",
        *([f"curves      {curves_command(run)}"] if (run.folder.path / "tensorboard").is_dir() else []),
        f"next        {jobs_command(run)}",
    ]


def curves_command(run: PreparedRun) -> str:
    """What shows the curves, so that the run has its name there: beside the other runs, where they lie in one root."""
    path = run.folder.path
    if run.settings.run.dir is None:
        return f"tensorboard --logdir {shlex.quote(str(path.parent))}"
    # beside a folder that was named may lie anything, and TensorBoard would look through all of it
    if {",", ":"} & set(str(path)):  # which mean something in the other flag
        return f"tensorboard --logdir {shlex.quote(str(path))}"
    return f"tensorboard --logdir_spec {shlex.quote(f'{path.name}:{path}')}"


def jobs_command(run: PreparedRun) -> str:
    """The command for the metrics again, on one process; the jobs for predictions and the network stand behind it."""
    strategy = ["strategy=single"] if run.machine.launch.world_size > 1 else []
    arguments = shlex.join(
        [*code_arguments(run.arguments), f"run.dir={quote_path(run.folder.path.absolute())}", *strategy]
    )
    return f"python -m trainer {arguments} job=evaluate   (or job=predict, job=export)"


def best_lines(checkpoints: CheckpointManager) -> list[str]:
    """Which checkpoint is the best, and by which metric; nothing where no checkpoint has that metric."""
    best, metric = select_best(list_complete(checkpoints.folder), checkpoints.best), checkpoints.best.removeprefix("-")
    if best is None:
        return []
    return [f"best        {metric} {best.metrics[metric]:.4f} at step {best.step}: {shlex.quote(str(best.path))}"]


def resume_command(run: PreparedRun) -> str:
    """The command that continues this run."""
    launch = run.machine.launch
    arguments = [
        argument for argument in run.arguments if not argument.startswith(("run.dir=", "run.name=", "run.resume="))
    ]
    arguments = add_overrides(arguments, f"run.dir={quote_path(run.folder.path.absolute())}")
    return f"{launcher_command(launch)} -m trainer {shlex.join(arguments)}"


def launcher_command(launch: Launch) -> str:
    """What stood before `-m trainer`, as far as a process can know: not how machines find each other."""
    if launch.world_size == 1 or launch.is_local_child:
        return "python"
    if not launch.restarted_by_launcher:
        return "<srun, mpirun … as before> python"
    if launch.world_size == launch.local_world_size:
        return f"torchrun --standalone --nproc-per-node {launch.local_world_size}"
    machines = launch.world_size // launch.local_world_size
    return f"torchrun --nnodes {machines} --nproc-per-node {launch.local_world_size} <rendezvous as before>"


def summary_lines(run: PreparedRun, trainer: Trainer, whole: float) -> list[str]:
    """What the main rank says of the run; whole: seconds since this start of it began."""
    folder, watch, step = run.folder.path, trainer.model.watch, trainer.progress.step
    status = read_status(folder) or {}
    # not the step less those that were done here: some may have been done twice
    before = status.get("resume_step", 0)
    return [
        *metric_lines(folder / "metrics.jsonl", trainer.checkpoints, evaluated=run.evaluation is not None),
        *time_lines(watch, whole, before, step),
        *throughput_lines(watch, whole, trainer.train_loader.global_batch),
        *goodput_lines(status),
        *summary_notes(before, ahead=run.strategy.device.type != "cpu"),
    ]


def metric_lines(path: Path, checkpoints: CheckpointManager, evaluated: bool) -> list[str]:
    """The metrics of the last evaluation, beside them those of the best checkpoint; and the last training loss."""
    # a kind that there is not would be looked for in the whole file, of gigabytes after millions of steps
    lines = read_last_lines(path, ["train", "eval"] if evaluated else ["train"])
    best = select_best(list_complete(checkpoints.folder), checkpoints.best)
    # one column for the last evaluation, one for the best checkpoint if there is one
    columns = [lines.get("eval", {}), *([best.metrics] if best and best.metrics else [])]
    rows: list[Sequence[str]] = []  # label, last, best
    if "eval" in lines:
        rows.append(("  after step", str(lines["eval"]["step"]), *([str(best.step)] if best else [])))
    names = list(metrics_of(columns[0]))
    for name in names[:_METRICS]:
        rows.append((f"  {name}", *(format_metric(name, column[name]) for column in columns if name in column)))
    if len(names) > _METRICS:
        rows.append((f"  and {len(names) - _METRICS} more in metrics.jsonl",))
    if "train" in lines:
        rows.append(("  training loss", format_number(lines["train"]["loss_mean"])))
    return _align([("metrics", "last", "best")[: 1 + len(columns)], *rows]) if rows else []


def time_lines(watch: StepTimer, whole: float, before: int, step: int) -> list[str]:
    """Where the time of this start went, which began after the step `before` and ends with this step."""
    # what no lap has taken is the beginning: data, network, joining, and the first step, which is like no other one
    spent = {"start": whole - sum(watch.laps.values()), **watch.laps}
    rows: list[Sequence[str]] = [
        (f"time, steps {before + 1}-{step}" if watch.steps else "time", "time", "share", "per step")
    ]
    for name, seconds in spent.items():
        # what is next to nothing is left out
        if seconds >= whole / 200:  # half a percent
            each = [format_seconds(seconds / watch.measured)] if name in STEP_PHASES else []
            rows.append((f"  {name}", format_seconds(seconds), f"{100 * seconds / whole:.0f} %", *each))
    return _align([*rows, ("  total", format_seconds(whole), "100 %")])


def throughput_lines(watch: StepTimer, whole: float, batch: int) -> list[str]:
    """Samples a second, over all ranks: of the steps alone, and of all the time."""
    if not watch.measured:
        return []
    # both are counted by the host: work that a GPU has still to do is seen by the second alone
    steady = watch.measured * batch / sum(watch.elapsed[name] for name in STEP_PHASES)
    return [f"throughput  {steady:,.0f} samples/s in the steps, {watch.steps * batch / whole:,.0f} overall"]


def goodput_lines(status: dict[str, Any]) -> list[str]:
    """How much of all starts' steps was of use, where some were done again after a failure."""
    executed, goodput = status.get("executed", 0), status.get("goodput", 1.0)
    again = executed - round(executed * goodput)
    if not again:
        return []
    return [f"goodput     {100 * goodput:.1f} %: {again:,} of {format_count(executed, 'step')} were done again"]


def summary_notes(before: int, ahead: bool) -> list[str]:
    """What the times do not say. before: the steps of earlier starts; ahead: the host runs ahead of a GPU."""
    return [
        *(
            [
                "note        the table is of this start only;"
                f" earlier starts did the first {format_count(before, 'step')}"
            ]
            if before
            else []
        ),
        *(
            ["note        the time is the host's, which runs ahead of the GPU; profile=true shows both"]
            if ahead
            else []
        ),
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with labels on the left, and their cells below each other."""
    # labels to the left, numbers to the right
    width = max(_LABEL, *(len(row[0]) for row in rows))
    return ["".join([f"{row[0]:<{width}}", *(f"{cell:>{_CELL}}" for cell in row[1:])]).rstrip() for row in rows]
