"""What a run says of itself: where it was made, what it is when it starts, how it ended."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import __version__
from trainer.configuration.command_line import code_arguments
from trainer.data.class_names import read_class_names
from trainer.data.sampler import dataset_size
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.devices import accelerator_names
from trainer.launch.rendezvous import Launch
from trainer.learning.freezing import count_trainable
from trainer.loop.progress import Progress
from trainer.messages import format_count, format_names
from trainer.parallel.optimizer_state import EMA_PREFIX
from trainer.records.checkpoint.manager import Checkpoints
from trainer.records.checkpoint.manifest import Found
from trainer.records.checkpoint.store import committed, winner
from trainer.strategies.machine import Machine

_SHOWN = 5  # names in a line
# methods of a LightningModule, and what says the same here
_LIGHTNING = {
    "configure_optimizers": "the optimizer is chosen with optimizer= and the rate's course with schedule=",
    "training_step": "the task says the loss, task=",
}
PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard", "rich")


def describe(run: PreparedRun) -> dict[str, Any]:
    """Collective: environment.json: versions, hardware, git revision and what was resolved."""
    strategy, machine = run.strategy, run.machine
    hosts = strategy.world.all_gather_values(socket.gethostname())  # all ranks; each hears every name
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {
            "trainer": __version__,
            **{name: next((each.version for each in distributions(name=name)), None) for name in PACKAGES},
        },
        **{name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")},  # torch was built for
        "gpus": accelerator_names(),
        "cpus": os.cpu_count(),
        "git": _revision(),
        "strategy": strategy.name,
        "world_size": strategy.world.size,
        "precision": machine.resolved_precision,
        "devices": devices(machine),
        "hosts": sorted(set(hosts)),
        "horizon": run.length.steps,
        "best": run.best_metric,
        "classes": read_class_names(run.data),
    }


def start_lines(run: PreparedRun, start: Found | None) -> list[str]:
    """What a run is, as it was understood."""
    strategy, machine = run.strategy, run.machine
    count, learn = sum(parameter.numel() for parameter in run.network.parameters()), count_trainable(run.network)
    frozen = f", of which {learn:,} are trained" if learn < count else ""
    never_full = run.schedule.warmup > run.length.steps
    evaluated = format_count(dataset_size(run.evaluation), "sample") if run.evaluation is not None else ""
    return [
        f"run folder  {run.folder.path}",
        f"strategy    {strategy.name} on {format_count(strategy.world.size, 'process')}; {devices(machine)}",
        f"precision   {arithmetic(machine)}",
        f"network     {type(run.network).__name__}, {count:,} parameters{frozen}",
        *[f"optimizer   {rule}; {rule.covers(run.network):,} parameters" for rule in run.rules],
        f"data        {found(run)}",
        f"evaluation  {evaluated or 'none: the data has no evaluation set'}",
        f"batch       {run.batches}",
        f"length      {run.length}; schedule {run.schedule.label}",
        *(["note        the run ends before schedule.warmup: no step has the full rate"] if never_full else []),
        *run.initial.lines,
        *([f"note        every rank builds the whole network first: {run.whole_because}"] if run.whole_because else []),
        *[
            f"note        {note}"
            for note in (*run.data.notes(), *strategy.notes(run.network), *uncalled_notes(run.network))
        ],
        *([f"resuming    step {start.step} of {start.path}"] if start else []),
        *(["note        init_from is ignored, because the run resumes"] if start and run.settings.init_from else []),
        *average_notes(run.settings.ema.decay, start),
    ]


def found(run: PreparedRun) -> str:
    """How much there is to train on, and in how many classes where the data knows."""
    samples = run.length.per_epoch * run.batches.total + run.length.left_out
    classes = getattr(run.data, "num_classes", None)
    in_classes = f" in {format_count(classes, 'class')}" if isinstance(classes, int) else ""
    return format_count(samples, "sample") + in_classes


def uncalled_notes(network: nn.Module) -> list[str]:
    """Which of its methods Lightning would call, and nobody calls here; not those that Lightning's own class has."""
    name = type(network).__name__
    return [
        f"{name}.{method} is not called: {instead} (docs/migrating.md)"
        for method, instead in _LIGHTNING.items()
        for kind in [next((kind for kind in type(network).__mro__ if method in vars(kind)), None)]
        if kind is not None and kind.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
    ]


def average_notes(decay: float | None, start: Found | None) -> list[str]:
    """What becomes of the weights' moving average where the checkpoint and this run are not of one mind about it."""
    if start is None or (decay is None) == (not any(name.startswith(EMA_PREFIX) for name in start.tensors)):
        return []
    if decay is None:
        return ["note        the checkpoint's moving average is dropped: ema.decay=null"]
    return [f"note        ema.decay={decay:g}: the checkpoint has no moving average; it starts from the weights"]


def devices(machine: Machine) -> str:
    """The devices in use of those that this machine has, and how to use them all."""
    used = machine.launch.local_world_size
    if not machine.on_gpu:
        threads, cores = format_count(torch.get_num_threads(), "thread"), format_count(os.cpu_count() or 1, "core")
        return f"cpu, {format_count(used, 'process')} of {threads} on {cores}"
    seen = accelerator_names()
    if used > len(seen) and not machine.shares_devices:
        return f"{format_count(used, 'GPU')}, each seen by one process alone, {seen[0]}"
    more = "; all of them: processes=auto strategy=ddp"
    return f"{used} of {format_count(len(seen), 'GPU')}, {seen[0]}{more if used < len(seen) else ''}"


def arithmetic(machine: Machine) -> str:
    """The resolved precision in words, and what TF32 makes of it."""
    precision = machine.resolved_precision
    if machine.kind != "cuda" or precision == "fp64":
        return f"{precision}; tf32=true changes nothing here" if machine.tf32 else precision
    if machine.tf32:
        return f"{precision}; what is multiplied in fp32 is rounded to TF32"
    return f"{precision}; tf32=true is faster and less exact" if precision == "fp32" else precision


def replaced_lines(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Which samples could not be read, by the names that each rank has."""
    every = sorted(set(chain.from_iterable(of_ranks)))
    if not every:
        return []
    which = format_names(every, _SHOWN)
    return [f"replaced    {format_count(len(every), 'sample')} that could not be read, others in their place: {which}"]


def left_out_lines(skipped: int, progress: Progress) -> list[str]:
    """How much of what was read has taught nothing, because a loss, a gradient or a weight was not finite."""
    times, samples = format_count(progress.rollbacks, "time"), format_count(progress.left_out, "sample")
    return [
        *([f"left out    {format_count(skipped, 'step')} whose loss or gradient was not finite"] if skipped else []),
        *([f"went back   {times} to a checkpoint, and left out {samples}"] if progress.rollbacks else []),
    ]


def end_lines(
    run: PreparedRun, figures: dict[str, float] | None, step: int, done: bool, early: str | None = None
) -> list[str]:
    """How it ended, and what to do next. early: why it ended before the last step that was asked for."""
    folder = shlex.quote(str(run.folder.path))
    if not done:
        return [f"stopped and saved at step {step}; to go on:", f"  {command(run)}"]
    words = [f"{name} {value:.4f}" for name, value in (figures or {}).items() if name not in ("loss", "ema_loss")]
    return [
        *([f"ended early: {early}"] if early else []),
        f"completed   step {step}" + (f", {', '.join(words)}" if words else ""),
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
    """What is typed for the figures again, for answers in a file, for a file of the network, on one process."""
    spread = ["strategy=single"] if run.machine.launch.world_size > 1 else []
    own = shlex.join([*code_arguments(run.arguments), f"run.dir={quoted(run.folder.path.absolute())}", *spread])
    return f"python -m trainer {own} job=evaluate   (or job=predict, job=export)"


def best_lines(checkpoints: Checkpoints) -> list[str]:
    """Which checkpoint is the best, and by which figure; nothing where none has one."""
    chosen, figure = winner(committed(checkpoints.folder), checkpoints.best), checkpoints.best.removeprefix("-")
    if chosen is None:
        return []
    return [f"best        {figure} {chosen.figures[figure]:.4f} at step {chosen.step}: {shlex.quote(str(chosen.path))}"]


def command(run: PreparedRun) -> str:
    """The command that continues this run."""
    launch = run.machine.launch
    own = [word for word in run.arguments if not word.startswith(("run.dir=", "run.name=", "run.resume="))]
    overrides = [at for at, word in enumerate(own) if "=" in word and not word.startswith("-")]
    own.insert(overrides[-1] + 1 if overrides else len(own), f"run.dir={quoted(run.folder.path.absolute())}")
    # run.dir stands beside the other overrides: flags may not stand between them
    return f"{launcher(launch)} -m trainer {shlex.join(own)}"


def launcher(launch: Launch) -> str:
    """What stood before `-m trainer`, as far as a process can know: not how machines find each other."""
    if launch.world_size == 1 or launch.is_local_child:
        return "python"
    if not launch.restarted_by_launcher:
        return "<srun, mpirun … as before> python"
    if launch.world_size == launch.local_world_size:
        return f"torchrun --standalone --nproc-per-node {launch.local_world_size}"
    machines = launch.world_size // launch.local_world_size
    return f"torchrun --nnodes {machines} --nproc-per-node {launch.local_world_size} <rendezvous as before>"


def quoted(path: Path) -> str:
    """A path as a value of Hydra's grammar."""
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", str(path))
    return str(path) if plain else json.dumps(str(path), ensure_ascii=False)


def _revision() -> str | None:
    """The revision of the checkout that the run was started in, with a plus sign where files had been changed."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no revision in it
        return None
