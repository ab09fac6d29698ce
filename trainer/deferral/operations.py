"""A constructor's tensor operations, diverted: they take place on the meta device, and are taken down for the CPU.

Of torch's inner parts this file uses `TorchDispatchMode`, which the notes on extending PyTorch describe, and the
operators' schema: which argument is written to. Both are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.deferral.recording import Recorder
from trainer.deferral.replay import Operation, each
from trainer.tree import tensors

_CPU, _META = torch.device("cpu"), torch.device("meta")

# in-place operations that do not look at what was there; those into `out=` do not either
_FILLING = {"uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "zero_", "fill_"}
_OVERWRITING = _FILLING | {"bernoulli_", "copy_"}
_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# what operators change without saying so in their schema
_UNSAID = {("native_batch_norm", "running_mean"), ("native_batch_norm", "running_var")}


class Operations(TorchDispatchMode):
    """While it is entered, operations on the CPU are recorded and take place on the meta device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation, below autograd."""
        if self.recorder.busy:
            return func(*args, **(kwargs or {}))
        with self.recorder.at_work():
            special = [kind.__name__ for kind in types if kind not in (Tensor, torch.nn.Parameter)]
            if special:
                raise self.recorder.refusal(f"it uses tensors of class {special[0]}")
            return _Call(self.recorder, func, args, kwargs or {}).answer()


class _Call:
    """One operation, and where its tensors are: ours (recorded), real ones (constants), or of another device."""

    def __init__(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder, self.func, self.args, self.kwargs = recorder, func, args, kwargs
        self.name = func.__name__.partition(".")[0]
        self.given = list(tensors((args, kwargs)))
        self.generator: torch.Generator | None = kwargs.get("generator")  # never the default one: see `Functions`
        shaped = self.name.endswith("_like") or self.name.startswith("new_")
        self.by_shape = shaped and len(self.given) == 1  # looks at no values
        # tensors that are read; that are changed, out of what they were; that are overwritten
        self.read, self.changed, self.replaced = self._roles()
        for device in [kwargs.get("device"), *(tensor.device for tensor in self.given)]:
            if device is not None and device.type not in ("cpu", "meta"):
                raise recorder.refusal(f"it makes tensors on {device}")

    def _roles(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        read, changed, replaced = [], [], []
        schema = self.func._schema.arguments
        named = dict(zip((argument.name for argument in schema), self.args, strict=False)) | self.kwargs
        for argument in schema:
            found = list(tensors(named.get(argument.name)))
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written and (self.name, argument.name) not in _UNSAID:
                read += found
            elif written and (argument.kwarg_only or self.name in _OVERWRITING):
                replaced += found
            else:
                changed += found
        return read, changed, replaced

    def answer(self) -> Any:
        """The operation's result, after it has been recorded where that is due."""
        ours = [tensor for tensor in self.given if self.recorder.knows(tensor)]
        outside = [tensor for tensor in self.given if tensor.is_meta and not self.recorder.knows(tensor)]
        if ours and self.name == "set_" and any(isinstance(one, torch.UntypedStorage) for one in self.args):
            return self._around_storage(*self.args)
        if not self.given or self.by_shape:
            return self._untouched() if self._explicitly_meta(bool(outside)) else self._recorded()
        if outside and ours:
            raise self.recorder.refusal(
                f"{self.name} meets a tensor that the constructor itself put on the meta device"
            )
        if outside:
            return self._untouched()
        written = [tensor for tensor in (*self.changed, *self.replaced) if not self.recorder.knows(tensor)]
        if written and (self._random() or not ours):
            return self._on_memory_of_others()
        if written:
            return self._with_values()
        return self._recorded() if ours or self._random() else self._on_constants()

    def _explicitly_meta(self, like_outside: bool) -> bool:
        """Does the constructor ask for the meta device, as `torch.nn.utils.skip_init` does?"""
        device = self.kwargs.get("device")
        if device is None:
            return like_outside
        return device.type == "meta" and not self.recorder.inside

    def _random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    def _untouched(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def _on_memory_of_others(self) -> Any:
        """Real tensors that are changed in place: those around a NumPy array, or older than the network."""
        if self._random():
            raise self.recorder.refusal(f"{self.name} draws into a tensor whose memory is not torch's own, as NumPy's")
        return self._untouched()

    def _on_constants(self) -> Any:
        """Real tensors, which are left real; those that `torch.tensor` has just made come into the record."""
        result = self._untouched()
        if self.name == "lift_fresh" and result.untyped_storage().resizable():
            return self.recorder.adopt(result)
        return result

    def _around_storage(self, tensor: Tensor, storage: torch.UntypedStorage, *layout: Any) -> Tensor:
        """An empty tensor is laid around memory that is real, as `torch.load` does: a constant."""
        if storage.device.type != "cpu":
            raise self.recorder.refusal(f"it takes memory on {storage.device} into a tensor")
        value = torch.empty(0, dtype=tensor.dtype, device=_CPU).set_(storage, *layout)
        return tensor.set_(self.recorder.adopt(value.clone()))  # type: ignore[call-overload]

    def _with_values(self) -> Any:
        """Call it for real, on the values that its tensors have by now."""
        args, kwargs = each((self.args, list(self.kwargs.values())), self._value)
        kwargs = dict(zip(self.kwargs, kwargs, strict=True))
        result = self.func(*args, **(kwargs | {"device": _CPU} if "device" in kwargs else kwargs))
        given = [tensor.untyped_storage() for tensor in self.given]
        return each(
            result,
            lambda one: (
                self.recorder.adopt(one) if isinstance(one, Tensor) and one.untyped_storage() not in given else one
            ),
        )

    def _value(self, value: Any) -> Any:
        known = isinstance(value, Tensor) and self.recorder.knows(value)
        return self.recorder.value(value) if known else value

    # Taking it down.

    def _recorded(self) -> Any:
        operation = self._operation()
        if self.name in _FILLING:
            return self._recorded_in_place(operation)
        sizes = [tensor.untyped_storage().nbytes() for tensor in (*self.changed, *self.replaced)]
        try:
            result = self._on_meta()
        except (NotImplementedError, RuntimeError) as error:
            return self._without_meta(operation, error)
        for tensor in tensors(result):
            if not tensor.is_meta:
                return result
            known = self.recorder.knows(tensor)
            place = self.recorder.place(tensor)
            operation.results.append(None if known else place)
            if not known:
                operation.creates[place.storage] = tensor.untyped_storage().nbytes()
        resized = sizes != [tensor.untyped_storage().nbytes() for tensor in (*self.changed, *self.replaced)]
        if torch.Tag.inplace_view in self.func.tags and not resized:
            return result  # another view of the same memory
        if operation.creates or operation.writes or operation.overwrites:
            self.recorder.add(operation, self.generator)
        return result

    def _without_meta(self, operation: Operation, error: Exception) -> Any:
        """The meta device cannot do it, as a rule because the shape or the result depends on values."""
        if self._in_place() and torch.Tag.inplace_view not in self.func.tags:
            return self._recorded_in_place(operation)
        if self._random() or self.changed or self.replaced:
            raise self.recorder.refusal(f"{self.name} does not work without values: {error}") from error
        return self._with_values()

    def _in_place(self) -> bool:
        return any(self.args[0] is tensor for tensor in (*self.changed, *self.replaced))

    def _recorded_in_place(self, operation: Operation) -> Tensor:
        """It returns what it got, unchanged in shape."""
        operation.results = [None]
        self.recorder.add(operation, self.generator)
        return self.args[0]

    def _on_meta(self) -> Any:
        def there(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_meta:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
            return None if isinstance(value, torch.Generator) else value

        args, values = each((self.args, list(self.kwargs.values())), there)
        return self.func(*args, **self._on(_META, dict(zip(self.kwargs, values, strict=True))))

    def _operation(self) -> Operation:
        """The operation as it is to be called later, on the CPU."""
        recorder = self.recorder
        read = set() if self.by_shape else {recorder.place(one).storage for one in self.read if recorder.knows(one)}
        places = [recorder.place(tensor) for tensor in self.replaced]
        sizes = {recorder.place(one).storage: one.untyped_storage().nbytes() for one in (*self.changed, *self.replaced)}
        reads = read | {recorder.place(tensor).storage for tensor in self.changed}
        whole = {place.storage for place in places if place.fills(sizes[place.storage])} - reads
        args, values = each((self.args, list(self.kwargs.values())), self._kept)
        keywords = self._on(_CPU, dict(zip(self.kwargs, values, strict=True)))
        operation = Operation(self.func, args, keywords, reads, empty=self.name in _EMPTY)
        operation.writes = {storage: size for storage, size in sizes.items() if storage not in whole}
        operation.overwrites = {storage: sizes[storage] for storage in whole}
        operation.float_type = torch.get_default_dtype()
        operation.draws = self._random() and self.generator is None
        return operation

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None if isinstance(value, torch.Generator) else value  # which one is the record's business
        if self.by_shape:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        if self.recorder.knows(value):
            return self.recorder.place(value)
        return value.detach().clone()  # a constant; as it is now, whoever changes it later

    def _on(self, device: torch.device, keywords: dict[str, Any]) -> dict[str, Any]:
        names = {argument.name for argument in self.func._schema.arguments}
        where = {"device": device} if "device" in names and (self.by_shape or not self.given) else {}
        where |= {"device": device} if keywords.get("device") is not None else {}
        return keywords | where | ({"pin_memory": False} if keywords.get("pin_memory") else {})
