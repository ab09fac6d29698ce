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

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.jobs.run_messages import add_overrides, quote_path
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.devices import available_host_memory, available_memory
from trainer.launch.launcher_environment import without_launcher_variables
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main
from trainer.learning.optimizer import Make
from trainer.messages import Refusal, format_count
from trainer.parallel.meta_model import named_tensors
from trainer.verify.comparison import exactness, floors, shake
from trainer.verify.short_run import exactly, surveyed, trial
from trainer.verify.training_record import Record

# Bytes of a number in fp64. Measured with gpt_nano of width 512 and 2 and 10 blocks, by the peak of the process: 54.7
# for each parameter under AdamW and 38.8 under SGD with momentum; by this sum 56 and 40.
_WIDE, _BUILT = 8, 4
_LARGEST = 0.8  # of what is free; the others are for what a step computes
SMALLER = (
    "What works: a smaller network by a key of its own (its width, its vocabulary), a smaller job.batch where samples"
    " are large, or the reference on a machine with more memory (job.record)"
)


def shortage(run: PreparedRun, largest: float = _LARGEST) -> str:
    """Why one process cannot train this network in fp64: the arithmetic; empty where it can.

    Where processes share their memory, and each has a copy of the network, all of theirs together must fit, too.
    """
    machine = run.machine
    copies = machine.launch.local_world_size if machine.shares_devices and not run.sharded else 1
    every = _numbers({tensor for _, tensor in named_tensors(run.network)})
    learned = _numbers({one for one in run.network.parameters() if one.requires_grad})
    memory = remembered(run.make_optimizer) + (run.settings.ema.decay is not None)
    # name → numbers; on an accelerator the copy for the resume lies on the host
    parts = {"weights": every, "gradients": learned, "optimizer": round(learned * memory)}
    copy = {"a copy for the resume": every + round(learned * memory)}
    if not machine.on_gpu:
        return _lack(parts | copy, copies, every, available_host_memory(), largest, "")
    there = _lack(parts, copies, every, available_memory(machine.torch_device), largest, " on the device")
    return there or _lack(copy, copies, every, available_host_memory(), largest, "")


def refuse_unbuilt(run: PreparedRun) -> None:
    """Refuse a network that no process can even build: of a shorter one all is built first, as in the run itself."""
    numbers, spare = _numbers({tensor for _, tensor in named_tensors(run.network)}), available_host_memory()
    if numbers * _BUILT > spare:
        raise Refusal(
            f"job=verify: the main process builds the whole network before it is shared out or shortened:"
            f" {_times(numbers, _BUILT)}, and {_size(spare)} are free. A machine with more memory, or a smaller"
            " network by a key of its own (its width, its vocabulary), works"
        )


def unheld(run: PreparedRun, why: str, lack: str, layers: int | str | None) -> str:
    """The refusal where the reference ran out of memory. why: it had fewer layers; layers: as somebody has asked."""
    few = " job.layers=2, or null, makes a copy with fewer layers." if layers == "all" else ""
    short = f" even with fewer layers ({why})" if why else ""
    whole = f" All of it: {there}." if (there := shortage(run, 0.0)) else ""
    return f"job=verify: the reference does not fit into one process{short}: {lack}.{whole}{few} {SMALLER}"


def remembered(make: Make) -> float:
    """How many numbers an optimizer remembers for each that it learns; two where a step over a few does not tell."""
    numbers = nn.Parameter(torch.zeros(32, 32))
    numbers.grad = torch.ones_like(numbers)
    with suppress(Exception):  # some take sparse gradients alone
        optimizer = make([{"params": [numbers]}])
        optimizer.step()
        kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return round(sum(x.numel() for x in kept) / numbers.numel(), 1)
    return 2.0


def _lack(parts: dict[str, int], copies: int, numbers: int, spare: float, largest: float, where: str) -> str:
    needed = sum(parts.values()) * _WIDE * copies
    if spare == inf or needed <= max(0.0, largest * spare) or not numbers:
        return ""
    shares = ", ".join(f"{name} {own * _WIDE / numbers:.3g}" for name, own in parts.items())
    several = f" for each of {format_count(copies, 'process')}" if copies > 1 else ""
    each = sum(parts.values()) * _WIDE / numbers
    return f"{_times(numbers, each)}{several} in fp64 ({shares}), and {_size(max(spare, 0.0))} are free{where}"


def _times(numbers: int, each: float) -> str:
    return f"{format_count(numbers, 'number')} × {each:.3g} bytes = {_size(numbers * each)}"


def _size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


Layers = int | Literal["all"] | None  # so many of each kind; None: all, or what one process can hold

_LAST = 2000  # characters of what a process that failed said last
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|cannot allocate memory|bad_alloc|MemoryError", re.I)


def made_apart(run: RunParts, samples: int, path: Path, layers: int | None) -> str:
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
    said = printed.strip()[-_LAST:]
    if code == 2:
        raise Refusal(said)
    if code == -signal.SIGKILL or _NO_MEMORY.search(said):
        return (said or "killed").splitlines()[-1]
    raise Refusal(f"job=verify: the same words on one process fail:\n{said}")


def given(path: Path) -> Record:
    """The reference that somebody has had made. Refusal where the file is none."""
    if not path.is_file():
        raise Refusal(f"job.reference={path}: there is no such file; job.record={path} writes it")
    with suppress(SafetensorError, KeyError):
        if "fewer" in (reference := Record.read(path)).facts:
            return reference
    raise Refusal(f"job.reference={path} is no reference, or an older version has written it; job.record={path} does")


def have_made(run: PreparedRun, samples: int, path: Path, asked: Layers) -> str:
    """Collective: the reference in a file, with fewer layers where one process cannot hold all; why it has fewer.

    samples: in a step. asked: `job.layers`.
    """
    launch = run.machine.launch
    least = max(2, run.strategy.least_layers(launch.world_size))

    def made() -> str:
        """The main rank's."""
        layers, why = how_few(run, asked, least)
        lack = made_apart(run, samples, path, layers)
        if lack and asked is None and layers is None:
            why = f"the reference with all of them ran out of memory ({lack})"
            lack = made_apart(run, samples, path, least)
        if lack:
            raise Refusal(unheld(run, why, lack, asked))
        return why

    return str(broadcast_from_main(launch, "reference", made))


def how_few(run: PreparedRun, asked: Layers, least: int) -> tuple[int | None, str]:
    """How many layers of each kind a proof is to have, None: all of them; and why so few."""
    if asked is not None:
        return (None, "") if asked == "all" else (int(asked), f"job.layers={asked}")
    why = shortage(run)
    if why:
        refuse_unbuilt(run)
    return (least, why) if why else (None, "")


def recorded(run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest) -> tuple[Record, bool]:
    """What this one process does in fp64, or in fp32 where it cannot; False: somebody asked to stop.

    ends: the step after which others resume, and the last one.
    """
    try:
        return _twice(run, ends, tolerance, stop, "fp64", "")
    except (RuntimeError, TypeError, ValueError) as error:
        because = f"{error}".strip().partition("\n")[0]
        if _NO_MEMORY.search(because):
            raise
    # what fails here as well is no question of the precision
    return _twice(run, ends, tolerance, stop, "fp32", because)


def _twice(
    run: PreparedRun, ends: Sequence[int], tolerance: float, stop: StopRequest, precision: str, because: str
) -> tuple[Record, bool]:
    """All of it twice, the second time with all weights moved by a last bit: so far does rounding alone carry it.

    because: why it is not done in a wider precision.
    """
    half, last = ends
    with exactly(run, precision):
        layouts = surveyed(run)
        record, shaken = Record(layouts=layouts), Record(layouts=layouts)
        done = trial(run, record, [last], stop, resume=half)
        done = done and trial(run, shaken, [last], stop, resume=half, shake=shake(precision))
    record.floors = floors(record, shaken, exactness(precision, tolerance)) if done else {}
    record.facts = {"precision": precision, "because": because, "samples": run.settings.loop.global_batch}
    return record, done
