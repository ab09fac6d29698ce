"""What a rank computes in a step, and how long a device needs for it: by measured times, else by the roofline."""

from __future__ import annotations

from collections import defaultdict
from math import ceil
from typing import Any

from torch.utils.flop_counter import flop_registry

from trainer.data.nested_tensors import tensors
from trainer.jobs.plan.devices import Device

# What no kernel computes: questions about tensors, views under another name, memory that nobody fills.
_FREE = (
    "prim::",
    "profiler::",
    "aten::_unsafe_view",
    "aten::empty",
    "aten::as_strided",
    "aten::detach",
    "aten::new_empty",
)
_COPIES = (
    *("clone", "cat", "stack", "copy_", "_to_copy", "embedding", "index", "gather"),
    *("split_with_sizes_copy", "all_gather_copy_in", "chunk_cat", "_chunk_cat", "_foreach_copy_"),  # of FSDP
)
# By the beginning of an operator's name, the kind of operator that was measured; the first one that fits counts.
_KINDS = {
    "convolution": "conv",
    "_scaled_dot_product": "attention",
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm"), "mm"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm", "cudnn_batch_norm", "batch_norm"), "batch norm"),
    **dict.fromkeys(("native_group_norm",), "group norm"),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), "layer norm"),
    **dict.fromkeys(("_softmax", "_log_softmax", "nll_loss"), "softmax"),
    **dict.fromkeys(("sum", "mean", "amax", "linalg_vector_norm", "_foreach_norm"), "sum"),
    **dict.fromkeys(("gelu", "silu", "sigmoid", "tanh", "exp", "erf", "hardswish", "mish"), "gelu"),
    **dict.fromkeys(("max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive", "upsample"), "pool"),
    **dict.fromkeys(_COPIES, "copy"),
    "_fused_": "optimizer",
}
LIST_BATCH = 128  # about so many tensors of a list one kernel of a GPU takes


class Work:
    """The operators and the seconds of a step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels: defaultdict[str, float] = defaultdict(float)  # seconds by phase
        self._calls: defaultdict[str, int] = defaultdict(int)  # the same

    @property
    def operators(self) -> int:
        """How many there were since `take` was last called."""
        return sum(self._calls.values())

    def take(self) -> dict[str, float]:
        """Seconds by phase that have been counted since this was last called."""
        seconds = {phase: self._device.together(took, self._calls[phase]) for phase, took in self._kernels.items()}
        self._kernels.clear()
        self._calls.clear()
        return seconds

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, phase: str) -> None:
        """Add an operator up."""
        if func.is_view or func.name().startswith(_FREE):
            return
        # every input is read and every result written once, as if no cache kept anything between operators
        touched = [*tensors((list(args), kwargs)), *tensors(out)]
        if not touched:
            return
        # matrix products, convolutions and attention have a formula; all else counts by its bytes alone
        formula = flop_registry.get(func.overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        moved = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in touched}.values())
        # of a list of tensors a CPU computes one after another, a GPU many by one kernel
        calls = max(1, len(args[0])) if args and isinstance(args[0], list | tuple) and not flops else 1
        calls = calls if self._device.is_host else ceil(calls / LIST_BATCH)
        self._calls[phase] += calls
        kind = operator_kind(func, args)
        self._kernels[phase] += calls * self._device.seconds(kind, flops / calls, moved / calls, touched[0].dtype)


def operator_kind(func: Any, args: Any) -> str:
    """The kind of operator that the doctor measures to which this one belongs."""
    name = func.name().partition("::")[2].partition(".")[0]
    backward = " backward" if "backward" in name else ""
    kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), "")
    if kind == "conv":
        weight = args[2] if backward else args[1]  # (out, in / groups, …)
        groups = args[9] if backward else args[8]
        kind = "conv grouped" if groups > 1 else "conv 1x1" if weight.shape[2:].numel() == 1 else "conv"
    if not kind:
        return "in place" if name.endswith("_") else "elementwise"
    return kind + (backward if kind not in ("mm", "softmax", "sum", "pool", "copy", "optimizer") else "")
