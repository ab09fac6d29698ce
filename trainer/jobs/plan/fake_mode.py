"""A mode in which a run's tensors have shapes and no values, so that a step of any size costs no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.overrides import TorchFunctionMode

from trainer.data.nested_tensors import tensors
from trainer.parallel.meta_model import allocate_empty, build_meta_model, named_state
from trainer.parallel.pipeline.fake_forward import FakeTensor, FakeTensorMode

# Tensors of at most so many numbers have values while a network is built, for constructors that read them.
MAX_NUMEL_WITH_VALUES = 2**16


class FakeRunMode(FakeTensorMode):
    """Inside it what is made has no values. What is computed from tensors that have values alone keeps them.

    So process groups, meshes and the order of the samples stay what they are. After torch's FakeTensorMode.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # torch would remember each tensor that it makes, by a weak reference, and what has one cannot be swapped
        self.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
        self._is_building = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """While a network is built: small tensors have values, because constructors may read them."""
        self._is_building = True
        try:
            yield
        finally:
            self._is_building = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and not issubclass(kind, (FakeTensor, nn.Parameter)) for kind in types):
            return NotImplemented  # DTensors come again as the tensors that they are made of
        known = list(tensors((list(args), kwargs)))
        if func is torch.ops.aten.equal.default and isinstance(known[0], FakeTensor):
            return True  # recomputing asks whether a forward changes a buffer; the tables of positions it does not
        # one tensor without values is enough: the result has none either
        if any(isinstance(tensor, FakeTensor) for tensor in known):
            return super().__torch_dispatch__(func, types, args, kwargs)
        device = torch.device(kwargs.get("device") or (known[0].device if known else "cpu"))
        is_allocation = bool(known) and device.type != "meta" and all(tensor.is_meta for tensor in known)
        if is_allocation and not self._is_building:  # in a constructor it is an error, as in torch: it reads values
            # a network on the meta device gets memory: a tensor of the same shape and strides, without values
            outline, dtype = known[0], kwargs.get("dtype") or known[0].dtype
            with self:
                return torch.empty_strided(outline.shape, outline.stride(), dtype=dtype, device=device)
        if known or device.type == "meta" or (self._is_building and _numbers(args) <= MAX_NUMEL_WITH_VALUES):
            return func(*args, **kwargs)  # outside of this mode: here it is off
        return super().__torch_dispatch__(func, types, args, kwargs)  # a factory: what it makes has no values


def _numbers(args: Any) -> int:
    """About how many numbers a factory of torch (empty, arange, linspace) would make with these arguments."""
    # sizes stand alone, torch.empty(2, 3), or as one list, torch.empty([2, 3])
    sizes = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else args
    return int(torch.Size(max(1, int(size)) for size in sizes if isinstance(size, (int, float))).numel())


def make_network(make: Callable[[], nn.Module], mode: FakeRunMode) -> nn.Module:
    """The network without values: on the meta device for who asks for an outline, else with memory as it seems."""
    is_outline = torch.get_default_device().type == "meta"
    # a constructor that reads what it makes fails on the meta device, and is called once more, outside of it
    with mode.building():
        network, reason = build_meta_model(make)
    if reason:
        return _without_values(network, mode)
    if is_outline:
        return network
    try:
        allocate_empty(network, torch.device("cpu"), torch.device("cpu"))
    except RuntimeError:  # a module with weak references to its weights (nn.LSTM), which cannot be replaced
        return make()  # inside the mode
    return network


def _without_values(network: nn.Module, mode: FakeRunMode) -> nn.Module:
    """Take the values that small tensors of a network have had while it was built, in place."""
    for tensor in {tensor for _, tensor in named_state(network) if not isinstance(tensor, FakeTensor)}:
        if tensor.is_meta:  # has no values already
            continue
        with mode:
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        empty = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
        torch.utils.swap_tensors(tensor, empty)  # in place: tied weights stay tied
    return network


def is_counted(tensor: Tensor, mode: FakeRunMode) -> bool:
    """Does this tensor stand for memory of the device in a trial of this mode?"""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device.type != "meta"


_propagating = [0]  # how many of DTensor's questions about shapes are under way; they nest


def is_propagating() -> bool:
    """Does DTensor ask for the shape of a whole result? It runs an operator for that, which no rank runs in a step."""
    return _propagating[0] > 0


@contextmanager
def torch_without_values(on_cpu: bool) -> Iterator[None]:
    """Inside, torch does what it could not without values, and `is_propagating` knows of DTensor's questions."""
    propagator: Any = _sharding_prop.ShardingPropagator
    changed: list[tuple[Any, str, Any]] = []

    def noticed(method: Callable[..., Any]) -> Callable[..., Any]:
        def propagate(*args: Any, **kwargs: Any) -> Any:
            _propagating[0] += 1
            try:
                return method(*args, **kwargs)
            finally:
                _propagating[0] -= 1

        return propagate

    # there are several such methods, and versions of torch differ in their names
    for name, method in list(vars(propagator).items()):
        if "propagate_tensor_meta" in name:
            changed.append((propagator, name, method))
            setattr(propagator, name, noticed(method))
    # DDP orders its buckets anew once, by numbers that ranks exchange; their sizes stay nearly the same
    changed.append((dist.Reducer, "_rebuild_buckets", dist.Reducer._rebuild_buckets))
    dist.Reducer._rebuild_buckets = lambda self: False  # type: ignore[method-assign]
    try:
        with nullcontext() if on_cpu else _GpuSoftmax():
            yield
    finally:
        for holder, name, before in changed:
            setattr(holder, name, before)


# ------------------------------------------------------------------------------------ softmax as GPUs compute it


class _GpuSoftmax(TorchFunctionMode):
    """Inside it, the log of a softmax under autocast takes no copy of the scores: a trial runs the operators of CPUs.

    A CPU converts scores of few bits to float32 first, and their gradient back at the end. On a GPU one kernel reads
    few bits and writes float32, and backward the other way. Of a GPT-2 the copies were a tenth of all memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and _converts(args[0]) and _is_plain(args, kwargs):
            scores = _LogSoftmax.apply(args[0], 1 if args[0].dim() > 1 else 0)  # (B, classes, …), or (classes)
            options = {name: kwargs[name] for name in ("weight", "ignore_index", "reduction")}
            return F.nll_loss(scores, args[1], **options)
        if func in (torch.log_softmax, Tensor.log_softmax, F.log_softmax) and "dim" in kwargs and _converts(args[0]):
            return _LogSoftmax.apply(args[0], kwargs["dim"])
        return func(*args, **kwargs)


def _converts(scores: Any) -> bool:
    """Would autocast convert this?"""
    low = isinstance(scores, Tensor) and scores.dtype in (torch.bfloat16, torch.float16)
    return low and not isinstance(scores, DTensor) and torch.is_autocast_enabled("cpu")


def _is_plain(args: Any, kwargs: Any) -> bool:
    """Is this cross entropy the negative log of one class for each sample, and nothing more?"""
    more = ("size_average", "reduce", "label_smoothing")
    return len(args) == 2 and not any(kwargs.get(name) for name in more) and not args[1].is_floating_point()


class _LogSoftmax(torch.autograd.Function):
    """One kernel for each direction. Without values bf16 may pass for fp16, the only one whose shapes torch knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.dtype = dim, x.dtype
        out = torch.ops.aten._log_softmax(x.view(torch.float16), dim, True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kernel = torch.ops.aten._log_softmax_backward_data
        return kernel(*gradients, *ctx.saved_tensors, ctx.dim, torch.float16).view(ctx.dtype), None
