"""Floating-point operations: how many a step has, counted on shapes; how many a device can do, by its data sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import first_tensor, map_tensors, tensors
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.devices import accelerator_names
from trainer.learning.task import Task
from trainer.messages import first_line
from trainer.parallel.pipeline.fake_forward import fake_tensors
from trainer.records.sinks import Log
from trainer.strategies.step_timing import NoUtilization, Utilization

# Dense matrix products, without sparsity, in 10¹² operations a second: in bf16, fp16, TF32, fp32, fp64. Where a name
# fits several lines, the first one counts; a number that no data sheet gives is missing. V100 and T4 have no units for
# bf16: as fp32. MI250X: of each half, which is a device to torch.
_PEAKS: dict[str, tuple[float | None, ...]] = {
    "B200": (2250, 2250, 1125, 75, 37),
    "GH200": (989.4, 989.4, 494.7, 66.9, 66.9),
    "H200 NVL": (835.5, 835.5, 417.7, 60, 60),
    "H200": (989.4, 989.4, 494.7, 66.9, 66.9),
    "H100 NVL": (835.5, 835.5, 417.7, 60, 60),
    "H100 PCIe": (756, 756, 378, 51, 51),
    "H100": (989.4, 989.4, 494.7, 66.9, 66.9),
    "A100": (312, 312, 156, 19.5, 19.5),
    "A30": (165, 165, 82, 10.3, 10.3),
    "A10": (125, 125, 62.5, 31.2, None),
    "L40S": (362, 362, 183, 91.6, None),
    "L40": (181, 181, 90.5, 90.5, None),
    "L4": (121, 121, 60, 30.3, 0.47),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6, 1.3),
    "V100": (15.7, 125, None, 15.7, 7.8),
    "T4": (8.1, 65, None, 8.1, 0.25),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4, 163.4),
    "MI250X": (191.5, 191.5, None, 47.9, 47.9),
}
_COLUMNS = {"bf16": 0, "fp16": 1, "tf32": 2, "fp32": 3, "fp64": 4}


def peak_flops(name: str, arithmetic: str) -> float | None:
    """Operations a second of the device of this name in bf16, fp16, tf32, fp32 or fp64; None: they are not known."""
    name_words = set(name.replace("-", " ").split())
    for known, peaks in _PEAKS.items():
        # of a part of a device no data sheet tells; a laptop's has the name of a larger one
        if set(known.split()) <= name_words and not name_words & {"MIG", "Laptop"}:
            peak = peaks[_COLUMNS[arithmetic]]
            return peak and peak * 1e12
    return None


def make_utilization(run: PreparedRun, example: tuple[Any, Any], log: Log) -> NoUtilization:
    """What measures the utilisation of the devices, on the main rank; nothing where a number for it is not known."""
    peak = _device_peak(run, log) if run.machine.launch.is_main else None
    if peak is None:
        return NoUtilization()
    try:
        flops = count_step_flops(run.task, run.network, example, run.batches.total)
    except Exception as error:  # whatever a forward does with what has no values
        log.say(f"note        no utilisation: a step's operations cannot be counted on shapes ({first_line(error)})")
        return NoUtilization()
    return Utilization(flops, peak * run.strategy.devices_used, example[0], log.say)


def _device_peak(run: PreparedRun, log: Log) -> float | None:
    """Operations a second that one device can do at most; None: not known."""
    machine, asked = run.machine, run.settings.loop.peak_flops
    if asked is not None or not machine.on_gpu:
        return asked
    # fp32 products run at the speed of TF32 where it is allowed
    tf32 = machine.tf32 and machine.kind == "cuda" and machine.resolved_precision == "fp32"
    peak = peak_flops(accelerator_names()[0], "tf32" if tf32 else machine.resolved_precision)
    if peak is None:
        name = accelerator_names()[0]
        log.say(f"note        no utilisation: the peak of {name} is not known; loop.peak_flops=… gives it")
    return peak


def count_step_flops(task: Task, network: nn.Module, example: tuple[Any, Any], samples: int) -> float:
    """Floating-point operations of forward and backward over so many samples like these; a multiply-add is two.

    Only products count (linear layers, convolutions, attention), as usual. Attention counts all pairs of tokens, also
    those that a causal mask leaves out. Whatever the forward raises where it cannot do without the values of weights.
    """
    task = task.with_whole_outputs()  # in chunks scores are computed again, which does not count
    size = first_tensor(example[1]).shape[0]
    if any(x.shape[:1] != (size,) for x in tensors(example)):
        raise ValueError("samples are no rows of its tensors, and may differ in size")
    try:
        # meta tensors have shapes alone: a whole global batch costs no more than one sample
        instead = {value: _without_values(value) for value in chain(network.parameters(), network.buffers())}
        return _count_flops(task, network, instead, map_tensors(example, partial(_resize_batch, size, samples)))
    except Exception:  # whatever a forward does with a batch without values: many of transformers look into masks
        # FakeTensors also have a device, which some forwards ask for
        instead = trainable_fakes(network, first_tensor(example[0]).device)
        return _count_flops(task, network, instead, map_tensors(example, torch.clone)) * samples / size


def _count_flops(task: Task, network: nn.Module, instead: Mapping[Tensor, Tensor], example: tuple[Any, Any]) -> int:
    """Operations over this batch, with shapes instead of the network's own tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode  # here: most runs have no use for it

    counter = FlopCounterMode(display=False, custom_mapping=_OWN_FORMULAS)
    # attention as products, whatever kernel a device has: some kernels compute a part of it twice, to keep less
    with counter, sdpa_kernel(SDPBackend.MATH):
        forward_backward_copy(task, network, instead, example)
    return counter.get_total_flops()


def operator_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations of a call of this operator; 0 for one that is no product."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    own = _OWN_FORMULAS.get(func.overloadpacket)
    formula = shape_wrapper(own) if own else flop_registry.get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def forward_backward_copy(
    task: Task, network: nn.Module, instead: Mapping[Tensor, Tensor], example: tuple[Any, Any]
) -> None:
    """A forward and a backward of a copy of the network, with other tensors in the place of its own.

    What the forward keeps in its modules stays in the copy; gradients are those of the other tensors.
    """
    copy = deepcopy(network, {id(value): other for value, other in instead.items()}).train()
    inputs, targets = example
    with torch.random.fork_rng(devices=[]):
        loss = task.loss(task.forward(copy, inputs, targets), targets)
        total = torch.stack(list(loss.values())).sum() if isinstance(loss, dict) else loss
        total.backward()


def trainable_fakes(network: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
    """For each tensor of a network a FakeTensor, which gets a gradient if the tensor would."""
    fakes = fake_tensors(network, device)
    for value, fake in fakes.items():
        fake.requires_grad_(value.requires_grad)
    return fakes


def _without_values(value: Tensor) -> Tensor:
    """A tensor or parameter of the same shape, without values."""
    shape = torch.empty_like(value, device="meta")
    return nn.Parameter(shape, value.requires_grad) if isinstance(value, nn.Parameter) else shape


def _resize_batch(size: int, samples: int, tensor: Tensor) -> Tensor:
    """The shape of so many samples, from a tensor of `size` of them; of one that belongs to all it stays."""
    length = samples if tensor.dim() and tensor.shape[0] == size else tensor.shape[:1].numel()
    return torch.empty((length, *tensor.shape[1:])[: tensor.dim()], dtype=tensor.dtype, device="meta")


def _convolution_backward(
    gradient: Sequence[int], x: Sequence[int], weight: Sequence[int], *arguments: Any, **_: Any
) -> int:
    """As much as the forward for each gradient that is asked for; torch's own formula knows no groups of channels."""
    transposed, wanted = arguments[4], arguments[7]
    positions = x if transposed else gradient  # (B, C, …): where the kernel is applied
    return 2 * prod(weight) * positions[0] * prod(positions[2:]) * sum(wanted[:2])


# torch counts a grouped convolution as if it had one group
_OWN_FORMULAS = {torch.ops.aten.convolution_backward: _convolution_backward}
