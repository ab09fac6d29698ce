"""The reference that `verify` compares with: does one process hold it, and one process of its own that makes it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from torch import Tensor

from trainer.configuration.command_line import add_overrides, quote_path
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.devices import available_host_memory, available_memory
from trainer.launch.launcher_environment import without_launcher_variables
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.learning.optimizer import state_per_parameter
from trainer.messages import Refusal, format_count
from trainer.parallel.meta_model import named_state
from trainer.verify.comparison import noise_floors, perturbation_size, tolerances_in
from trainer.verify.short_run import computing_in, detect_sample_layouts, train_and_record
from trainer.verify.training_record import TrainingRecord

# Bytes of a number in fp64. Measured with gpt_nano of width 512 and 2 and 10 blocks, by the peak of the process: 54.7
# for each parameter under AdamW and 38.8 under SGD with momentum; by this sum 56 and 40.
_FP64_BYTES, _FP32_BYTES = 8, 4
_LARGEST = 0.8  # of what is free; the others are for what a step computes
SMALLER = (
    "What works: a smaller network by a key of its own (its width, its vocabulary), a smaller job.batch where samples"
    " are large, or the reference on a machine with more memory (job.record)"
)


def memory_shortage(run: PreparedRun, largest: float = _LARGEST) -> str:
    """Why one process cannot train this network in fp64: the arithmetic; empty where it can.

    Where processes share their memory, and each has a copy of the network, all of theirs together must fit, too.
    """
    machine = run.machine
    # with ddp on CPUs each process has a whole copy in the same memory
    copies = machine.launch.local_world_size if machine.shares_devices and not run.sharded else 1
    numbers = _count_numbers({tensor for _, tensor in named_state(run.network)})
    trainable = _count_numbers({parameter for parameter in run.network.parameters() if parameter.requires_grad})
    per_parameter = state_per_parameter(run.make_optimizer) + (run.settings.ema.decay is not None)
    # what it is → how many numbers; on an accelerator the copy for the resume lies on the host
    parts = {"weights": numbers, "gradients": trainable, "optimizer": round(trainable * per_parameter)}
    copy = {"a copy for the resume": numbers + round(trainable * per_parameter)}
    if not machine.on_gpu:
        return _explain_shortage(parts | copy, copies, numbers, available_host_memory(), largest, "")
    spare = available_memory(machine.torch_device)
    on_device = _explain_shortage(parts, copies, numbers, spare, largest, " on the device")
    return on_device or _explain_shortage(copy, copies, numbers, available_host_memory(), largest, "")


def refuse_unbuildable(run: PreparedRun) -> None:
    """Refuse a network that no process can even build: of a shorter one all is built first, as in the run itself."""
    numbers, spare = _count_numbers({tensor for _, tensor in named_state(run.network)}), available_host_memory()
    if numbers * _FP32_BYTES > spare:
        raise Refusal(
            f"job=verify: the main process builds the whole network before it is shared out or shortened:"
            f" {_format_product(numbers, _FP32_BYTES)}, and {_format_bytes(spare)} are free. A machine with more"
            " memory, or a smaller network by a key of its own (its width, its vocabulary), works"
        )


def out_of_memory_message(run: PreparedRun, why: str, lack: str, layers: int | str | None) -> str:
    """The message where the reference ran out of memory. why: it had fewer layers; layers: what `job.layers` says."""
    advice = " job.layers=2, or null, makes a copy with fewer layers." if layers == "all" else ""
    short_text = f" even with fewer layers ({why})" if why else ""
    whole_text = f" All of it: {lack_of_all}." if (lack_of_all := memory_shortage(run, 0.0)) else ""
    return f"job=verify: the reference does not fit into one process{short_text}: {lack}.{whole_text}{advice} {SMALLER}"


def _explain_shortage(
    parts: dict[str, int], copies: int, numbers: int, spare: float, largest: float, where: str
) -> str:
    needed = sum(parts.values()) * _FP64_BYTES * copies
    if spare == inf or needed <= max(0.0, largest * spare) or not numbers:
        return ""
    per_number = {name: count * _FP64_BYTES / numbers for name, count in parts.items()}
    details = ", ".join(f"{name} {bytes_:.3g}" for name, bytes_ in per_number.items())
    product = _format_product(numbers, sum(per_number.values()))
    for_each = f" for each of {format_count(copies, 'process')}" if copies > 1 else ""
    return f"{product}{for_each} in fp64 ({details}), and {_format_bytes(max(spare, 0.0))} are free{where}"


def _format_product(numbers: int, each: float) -> str:
    return f"{format_count(numbers, 'number')} × {each:.3g} bytes = {_format_bytes(numbers * each)}"


def _format_bytes(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def _count_numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


Layers = int | Literal["all"] | None  # so many of each kind; None: all, or what one process can hold

_LAST = 2000  # characters of what a process that failed said last
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|cannot allocate memory|bad_alloc|MemoryError", re.I)


def make_reference_in_child(run: RunParts, samples: int, path: Path, layers: int | None) -> str:
    """Have the reference of a run with so many samples in a step written to a file.

    layers: so many of each kind; None: all. What is given back is how its memory ran out; empty where it did not.
    Refusal with its own account where something else fails.
    """
    # this run's words, but for those that say how many processes there are and what is compared
    replaced = ("processes=", "job.reference=", "job.batch=", "job.layers=")
    arguments = [word for word in run.arguments if not word.startswith(replaced)]
    added = f"job.batch={samples}", f"job.record={quote_path(path)}", f"job.layers={layers or 'all'}"
    here = os.pathsep.join(part for part in sys.path if part)  # what can be imported here can be imported there
    environment = without_launcher_variables(os.environ) | {"PYTHONPATH": here, "TRAINER_PARENT": str(os.getpid())}
    code, printed = run.run_alone(add_overrides(arguments, *added), environment)
    if not code:
        return ""
    output = printed.strip()[-_LAST:]
    if code == 2:  # a refusal, as this run might have had
        raise Refusal(output)
    if code == -signal.SIGKILL or _NO_MEMORY.search(output):
        return (output or "killed").splitlines()[-1]
    raise Refusal(f"job=verify: the same words on one process fail:\n{output}")


def read_reference(path: Path) -> TrainingRecord:
    """The reference that somebody has had made. Refusal where the file is none."""
    if not path.is_file():
        raise Refusal(f"job.reference={path}: there is no such file; job.record={path} writes it")
    with suppress(SafetensorError, KeyError):  # another file, or one of an older version
        if "fewer" in (reference := TrainingRecord.read(path)).facts:
            return reference
    raise Refusal(f"job.reference={path} is no reference, or an older version has written it; job.record={path} does")


def make_reference(run: PreparedRun, samples: int, path: Path, wanted: Layers) -> str:
    """Collective: the reference in a file, with fewer layers where one process cannot hold all; why it has fewer.

    samples: in a step. wanted: `job.layers`.
    """
    launch = run.machine.launch
    least = max(2, run.strategy.least_layers(launch.world_size))

    def make() -> str:
        """The main rank's."""
        layers, reason = choose_layers(run, wanted, least)
        lack = make_reference_in_child(run, samples, path, layers)
        if lack and wanted is None and layers is None:
            reason = f"the reference with all of them ran out of memory ({lack})"
            lack = make_reference_in_child(run, samples, path, least)
        if lack:
            raise Refusal(out_of_memory_message(run, reason, lack, wanted))
        return reason

    return str(broadcast_from_main(launch, "reference", make))


def choose_layers(run: PreparedRun, wanted: Layers, least: int) -> tuple[int | None, str]:
    """How many layers of each kind a proof is to have, None: all of them; and why so few."""
    if wanted is not None:
        return (None, "") if wanted == "all" else (int(wanted), f"job.layers={wanted}")
    reason = memory_shortage(run)
    if reason:
        refuse_unbuildable(run)
    return (least, reason) if reason else (None, "")


def record_reference(
    run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest
) -> tuple[TrainingRecord, bool]:
    """What this one process does in fp64, or in fp32 where it cannot; False: somebody asked to stop.

    ends: the step after which others resume, and the last one.
    """
    try:
        return _record_twice(run, ends, tolerance, stop, "fp64", "")
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"{error}".strip().partition("\n")[0]
        if _NO_MEMORY.search(reason):
            raise
    # what fails here as well is no question of the precision
    return _record_twice(run, ends, tolerance, stop, "fp32", reason)


def _record_twice(
    run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest, precision: str, reason: str
) -> tuple[TrainingRecord, bool]:
    """All of it twice, the second time with all weights moved by a last bit: so far does rounding alone carry it.

    because: why it is not done in a wider precision.
    """
    half, last = ends
    with computing_in(run, precision):
        layouts = detect_sample_layouts(run)
        record, perturbed = TrainingRecord(layouts=layouts), TrainingRecord(layouts=layouts)
        done = train_and_record(run, record, [last], stop, resume=half)
        done = done and train_and_record(run, perturbed, [last], stop, resume=half, shake=perturbation_size(precision))
    record.floors = noise_floors(record, perturbed, tolerances_in(precision, tolerance)) if done else {}
    record.facts = {"precision": precision, "because": reason, "samples": run.settings.loop.global_batch}
    return record, done
