"""A constructor's calls of torch from Python: its tensors seem to be on the CPU and to have values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.deferral.recording import Recorder
from trainer.deferral.replay import Operation, each

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Functions(TorchFunctionMode):
    """While it is entered, recorded tensors say that they are on the CPU, and show values where they are asked."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call from Python."""
        recorder, kwargs = self.recorder, kwargs or {}
        if recorder.busy:
            return func(*args, **kwargs)
        if func in _ANSWERS and recorder.knows(args[0]):
            return _ANSWERS[func](recorder, func, args, kwargs)
        if func in _FROM_DATA and args and not isinstance(args[0], Tensor):
            args = _with_values(recorder, args)
        if kwargs.get("generator") is torch.default_generator:
            kwargs = kwargs | {"generator": None}  # of the operations' own objects nobody can say which generator it is
        recorded = len(recorder.operations)
        with recorder.calling(names_meta=_meta(kwargs.get("device"))):
            result = func(*args, **kwargs)
        initialised = getattr(func, "__module__", "") == "torch.nn.init" and isinstance(result, Tensor)
        if initialised and recorded == len(recorder.operations) and result.numel() and recorder.knows(result):
            # inside of a call the appearance does not hold: torch may have seen the meta device and done nothing
            raise recorder.refusal(f"nn.init.{func.__name__} does nothing on the meta device")
        return result


def _meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _with_values(recorder: Recorder, tree: Any) -> Any:
    """Arguments with the values of recorded tensors in place of these."""
    return each(tree, lambda one: recorder.value(one) if isinstance(one, Tensor) and recorder.knows(one) else one)


def _to(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Tensor:
    """`Tensor.to`: the CPU is where the tensor seems to be already."""
    if any(_meta(one) for one in (*args[1:], kwargs.get("device"))):
        raise recorder.refusal("it moves a tensor to the meta device")

    def there(one: Any) -> Any:
        return _META if isinstance(one, (str, torch.device)) and torch.device(one).type == "cpu" else one

    with recorder.calling(names_meta=False):
        return func(args[0], *map(there, args[1:]), **{name: there(value) for name, value in kwargs.items()})


def _new_tensor(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Tensor:
    """`Tensor.new_tensor`, which would put the data on its own device and lose them."""
    own, *data = args
    kwargs = {"dtype": own.dtype, "device": _CPU} | kwargs
    return torch.tensor(*_with_values(recorder, data), **kwargs)


def _of_value(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """What the value answers."""
    with recorder.at_work():
        result = func(recorder.value(args[0]), *args[1:], **kwargs)
    if hasattr(result, "flags"):
        result.flags.writeable = False  # a NumPy array; what is written to it would not reach the tensor
    return result


def _is_meta(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> bool:
    """No; but where `torch.nn.init` asks, it is in order to do nothing: its call is recorded as a whole, and it may.

    Truncated normal values are drawn again and again until all fit (torch 2.12 and later): followed step by step, all
    of them would be needed here, to know when that is.
    """
    function, given = _asking()
    tensor, *others = given.values() or [None]
    if tensor is not args[0] or any(isinstance(value, Tensor) for value in others):
        return False
    with recorder.at_work():
        generator = given.pop("generator", None)
        own = None if generator is torch.default_generator else generator
        place, size = recorder.place(tensor), tensor.untyped_storage().nbytes()
        operation = Operation(function, (place,), dict(list(given.items())[1:]), set(), results=[None])
        (operation.overwrites if place.fills(size) else operation.writes)[place.storage] = size
        operation.draws = own is None
        recorder.add(operation, own)
    return True


def _asking() -> tuple[Any, dict[str, Any]]:
    """The function of `torch.nn.init` that asks for an attribute, with its arguments; nothing where another asks."""
    frame = inspect.currentframe()
    for _ in range(3):  # this function, the answer, `__torch_function__`
        frame = frame.f_back if frame is not None else None
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.init":
        return None, {}
    names, _, _, values = inspect.getargvalues(frame)
    return frame.f_globals[frame.f_code.co_name], {name: values[name] for name in names}


def _address(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    raise recorder.refusal("it asks for a tensor's address")


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__  # what `tensor.name` calls


_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_ANSWERS: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    _getter("device"): lambda recorder, func, args, kwargs: _CPU,
    _getter("is_meta"): _is_meta,
    _getter("is_cpu"): lambda recorder, func, args, kwargs: True,
    Tensor.cpu: lambda recorder, func, args, kwargs: args[0],
    Tensor.to: _to,
    Tensor.new_tensor: _new_tensor,
    Tensor.tolist: _of_value,
    Tensor.numpy: _of_value,
    Tensor.__array__: _of_value,
    Tensor.__format__: _of_value,
    Tensor.__repr__: _of_value,
    Tensor.data_ptr: _address,
}
