"""Does a network fit into the memory of one process, as `verify` trains it: the arithmetic, in words."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import inf

import torch
from torch import Tensor, nn

from trainer.devices import spare_memory, spare_on
from trainer.formatting import counted
from trainer.jobs.preparation import Prepared
from trainer.learning.optimizer import Make
from trainer.parallel.local_shard import named_tensors
from trainer.refusal import Refusal

# Bytes of a number in fp64. Measured with gpt_nano of width 512 and 2 and 10 blocks, by the peak of the process: 54.7
# for each parameter under AdamW and 38.8 under SGD with momentum; by this sum 56 and 40.
_WIDE, _BUILT = 8, 4
_LARGEST = 0.8  # of what is free; the others are for what a step computes
SMALLER = (
    "What works: a smaller network by a key of its own (its width, its vocabulary), a smaller job.batch where samples"
    " are large, or the reference on a machine with more memory (job.record)"
)


def shortage(run: Prepared, largest: float = _LARGEST) -> str:
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
        return _lack(parts | copy, copies, every, spare_memory(), largest, "")
    there = _lack(parts, copies, every, spare_on(machine.place), largest, " on the device")
    return there or _lack(copy, copies, every, spare_memory(), largest, "")


def refuse_unbuilt(run: Prepared) -> None:
    """Refuse a network that no process can even build: of a shorter one all is built first, as in the run itself."""
    numbers, spare = _numbers({tensor for _, tensor in named_tensors(run.network)}), spare_memory()
    if numbers * _BUILT > spare:
        raise Refusal(
            f"job=verify: the main process builds the whole network before it is shared out or shortened:"
            f" {_times(numbers, _BUILT)}, and {_size(spare)} are free. A machine with more memory, or a smaller"
            " network by a key of its own (its width, its vocabulary), works"
        )


def unheld(run: Prepared, why: str, lack: str, layers: int | str | None) -> str:
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
    several = f" for each of {counted(copies, 'process')}" if copies > 1 else ""
    each = sum(parts.values()) * _WIDE / numbers
    return f"{_times(numbers, each)}{several} in fp64 ({shares}), and {_size(max(spare, 0.0))} are free{where}"


def _times(numbers: int, each: float) -> str:
    return f"{counted(numbers, 'number')} × {each:.3g} bytes = {_size(numbers * each)}"


def _size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
