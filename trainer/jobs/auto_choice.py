"""What `strategy=auto` and `loop.micro_batch=auto` come to: decided once, by a plan, before any process group."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from trainer.configuration.command_line import add_overrides, quote_path
from trainer.jobs.plan.choice import choose_row, format_mib
from trainer.jobs.plan.devices import DEVICES, OWN
from trainer.jobs.run_parts import AutoChoice, RunParts
from trainer.launch.child_processes import import_path, run_program
from trainer.launch.devices import accelerator_names, available_memory_per_rank, total_memory
from trainer.launch.launcher_environment import without_launcher_variables
from trainer.launch.store_collectives import broadcast_from_main, gather_to_main
from trainer.launch.typed_values import DamagedFile, read_json
from trainer.learning.optimizer import state_per_parameter
from trainer.messages import Refusal, expand_home
from trainer.parallel.meta_model import build_meta_model, named_state
from trainer.records.resume_rules import has_checkpoint
from trainer.records.start_files import EnvironmentFields

SMALL_STATE = 0.01  # of a rank's memory; what takes less need not be divided
PLAN_SECONDS = 12.0  # for trials; starting the plan and reading the data come on top
OWN_SECONDS = 120.0  # the same where a slice is looked for, for the strategy that the user has named
_LAST = 300  # characters of what a plan that failed said last


@dataclass(frozen=True)
class _Question:
    """What a decision depends on."""

    run: RunParts
    keys: Sequence[str]  # that say auto
    memory: float  # bytes that each rank can have, by the rank that has least
    device: str  # the plan's name of the run's device

    @property
    def processes(self) -> int:
        return self.run.machine.launch.world_size


def choose(run: RunParts, keys: Sequence[str]) -> AutoChoice:
    """Collective: what these keys come to that say auto. The main rank plans, the others wait for its answer.

    Refusal where nothing fits, or where a micro-batch was left to a plan that cannot be made.
    """
    launch = run.machine.launch
    # each rank may have another amount: the smallest counts, so that none runs out before the others
    mine = available_memory_per_rank(run.machine.torch_device, launch.local_world_size)
    memory = gather_to_main(launch, "memory", mine)

    def decide() -> dict[str, Any]:
        began = monotonic()
        choice = _decide(_Question(run, keys, min(memory), planned_device(run)))
        return asdict(replace(choice, seconds=round(monotonic() - began, 3)))

    return AutoChoice(**broadcast_from_main(launch, "auto", decide))


def with_choice(arguments: Sequence[str], choice: AutoChoice) -> list[str]:
    """The command line as somebody would have typed it who had known the choice."""
    chosen = {override.partition("=")[0] for override in choice.overrides}
    kept = [word for word in arguments if word.partition("=")[0] not in chosen]
    return add_overrides(kept, *choice.overrides)


def _decide(question: _Question) -> AutoChoice:
    processes, memory, needs_plan = question.processes, question.memory, "loop.micro_batch" in question.keys
    before = _read_choice(question.run)
    # as many processes, and each still has what the choice takes, beside what is kept for all else
    free = memory - DEVICES[question.device].reserved * 2**30
    if before and before.processes == processes and (before.planned or {"peak": 0})["peak"] <= free:
        return replace(before, reason="as this run began")
    # of a small network there is nothing to divide
    if not needs_plan and (state := _state_bytes(question.run)) <= SMALL_STATE * memory:
        size = f"weights, gradients and optimizer take {format_mib(state)} of {format_mib(memory)} a process"
        return AutoChoice([], f"ddp, as {size}: there is little to divide", processes)
    plan, problem = _make_plan(question)
    if plan is None and needs_plan:
        raise Refusal(f"loop.micro_batch=auto: nothing can be planned: {problem}\nGive a number of samples instead")
    if plan is None:
        return AutoChoice([], f"ddp, without a plan: {problem}", processes)
    return _read_plan(plan, question.keys, before)


# ------------------------------------------------------------------------------------------ what the run has begun with


def _read_choice(run: RunParts) -> AutoChoice | None:
    """What an earlier start of this run has chosen; None where there is none to go on from."""
    keys = run.settings.run
    if keys.resume != "auto" or (keys.dir is None and keys.name is None):
        return None
    folder = expand_home(keys.dir if keys.dir is not None else f"{keys.root}/{keys.name}")
    with suppress(OSError, DamagedFile):  # who opens the folder says what is wrong with it
        if has_checkpoint(folder):
            environment, _ = read_json(folder / "environment.json", EnvironmentFields)
            return AutoChoice(**environment["auto"]) if environment.get("auto") else None
    return None


# ------------------------------------------------------------------------------------------------------------- the plan


def _state_bytes(run: RunParts) -> float:
    """Bytes of weights, gradients, optimizer state and average of the whole network."""
    network, _ = build_meta_model(run.make_network)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    numbers = sum(tensor.numel() for tensor in {tensor for _, tensor in named_state(network)})
    # a number each for its gradient, and for the bucket in which ddp sends it
    per_parameter = 2 + state_per_parameter(run.make_optimizer) + (run.settings.ema.decay is not None)
    return (numbers + per_parameter * trained) * run.machine.parameter_dtype.itemsize


def planned_device(run: RunParts) -> str:
    """The plan's name for this run's devices; for those that it has no data sheet of, whose memory is enough, `own`."""
    if not run.machine.on_gpu:
        return "cpu"
    # a data sheet is found by the model's name, and where there are several sizes by the memory
    name, memory = accelerator_names()[0], total_memory(run.machine.torch_device)
    near = {key: abs(device.memory * 2**30 - memory) for key, device in DEVICES.items() if device.name in name}
    return min(near, key=lambda key: near[key], default=OWN)


def _make_plan(question: _Question) -> tuple[dict[str, Any] | None, str]:
    """What `job=plan` says of this run; or why there is no plan.

    In a process of its own: torch keeps meshes and modes, and a process that has computed cannot be forked.
    """
    run, launch = question.run, question.run.machine.launch
    if not hasattr(os, "fork"):
        return None, "job=plan copies its process (fork), which this system cannot"
    # this run's words, but for those that say how many processes there are, what is done, and where
    replaced = ("processes=", "job=", "job.", "run.dir=", "run.name=", "device=", "distributed.")
    arguments = [word for word in run.arguments if not word.lstrip("+~").startswith(replaced)]
    chooses_strategy = "strategy" in question.keys
    seconds = PLAN_SECONDS if chooses_strategy else OWN_SECONDS
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        added = [
            *("job=plan", f"job.processes=[{question.processes}]", f"job.seconds={seconds:g}"),
            *(f"job.device={question.device}", f"job.memory={question.memory / 2**30:.6g}"),
            f"job.per_machine={launch.local_world_size}",
            *([] if chooses_strategy else ["job.strategies=[own]"]),
            f"run.dir={quote_path(folder)}",
            f"precision={run.machine.resolved_precision}",
            "device=cpu",  # tensors without values need no accelerator, and its driver would take memory
        ]
        environment = {
            **without_launcher_variables(os.environ),
            **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""),
            "PYTHONPATH": import_path(),
            "TRAINER_PARENT": str(os.getpid()),
        }
        code, printed = run_program(add_overrides(arguments, *added), environment)
        if code:
            return None, printed.strip()[-_LAST:] or f"job=plan ended with {code}"
        plan = json.loads((folder / "plan" / "plan.json").read_text())
    if not plan["rows"]:
        return None, "; ".join(dict.fromkeys(plan["refused"].values()))
    return plan, ""


def _read_plan(plan: Mapping[str, Any], keys: Sequence[str], before: AutoChoice | None = None) -> AutoChoice:
    """The row of a plan that a run takes. Refusal where none fits.

    keys: those that say auto. before: what an earlier start, on another number of processes, has chosen.
    """
    kept = [row["strategy"] for row in plan["rows"] if before and f"strategy={row['strategy']}" in before.overrides]
    try:
        row, _, reason = choose_row(plan["rows"], plan["refused"], plan["free"], plan["spare"], next(iter(kept), ""))
    except Refusal as refusal:
        raise Refusal(f"{keys[0]}=auto: {refusal}") from None
    return AutoChoice(row["words"].split(), reason, row["processes"], {"peak": float(row["peak"])})
