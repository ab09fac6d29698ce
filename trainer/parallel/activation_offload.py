"""Activation offload: what a unit keeps for its backward waits in the host's memory, and is back before that begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from typing_extensions import override

from trainer.launch.devices import uses_pinned_memory
from trainer.parallel.device_mesh import to_local
from trainer.parallel.pipeline.fake_forward import count_writes

_OVERWRITTEN = "a tensor that a backward needs was changed in place after it was kept (strategy.activation_offload)"


class HostCopies:
    """Copies to pinned memory of the host and back, on a stream of their own, beside what the device computes."""

    min_bytes = 2**20  # what is smaller stays: a copy costs some microseconds, whatever its size

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device)

    def can_copy(self, tensor: Tensor) -> bool:
        """Does it lie on the device, as one storage? Not what holds several tensors (float8, results under way)."""
        is_one = tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
        return is_one and tensor.device.type == self._device.type and not (tensor.is_conj() or tensor.is_neg())

    def to_host(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin to copy, behind what the device has been given to compute. Returns the copies, and what to wait for."""
        copies = [torch.empty_like(value, device="cpu", pin_memory=True) for value in values]
        return copies, self._copy(copies, values)

    def to_device(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The other way."""
        # room is made on the stream that computes with it and gives it back; what was there before is done by then
        values = [torch.empty_like(copy, device=self._device) for copy in copies]
        return values, self._copy(values, copies)

    def wait(self, event: Any) -> None:
        """What the device computes from now on comes after these copies. The host does not wait."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def _copy(self, goals: Sequence[Tensor], starts: Sequence[Tensor]) -> Any:
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            for goal, start in zip(goals, starts, strict=True):
                goal.copy_(start, non_blocking=True)
        return self._stream.record_event()


def make_host_copies(device: torch.device) -> HostCopies | None:
    """Copies between this device and the host; None where there is one memory, as on a CPU."""
    return HostCopies(device) if uses_pinned_memory(device) else None


class NoActivationOffload:
    """Everything stays where it is."""

    def apply(self, network: nn.Module, names: list[str]) -> None:
        """Let these units of a network offload what they keep, in place; names, values and losses stay."""


class ActivationOffload(NoActivationOffload):
    """The units of a rank in the order in which their forwards run, each with the one before it.

    What a unit has kept is sent when the next one begins, so that the copy is made while that one computes, and the
    last unit's stays. In the backward the first unit that wants something back has what the one before it kept
    fetched.
    """

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        # what is on the device, by the identity of its storage and by type: what several operators keep is sent once
        self.present: WeakValueDictionary[tuple[int, torch.dtype], KeptStorage] = WeakValueDictionary()
        self._last: Callable[[], UnitRun | None] = _nothing  # the run before; nothing where its backward is over

    @override
    def apply(self, network: nn.Module, names: list[str]) -> None:
        for name in names:
            unit = network.get_submodule(name)
            kind = type(unit)
            # another class, not a wrapper, which would be one level more in every name. The call and not the forward
            # is replaced, so that a compiled unit is compiled without it
            attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "offloaded_by": self}
            unit.__class__ = type(kind.__name__, (_Offloaded, kind), attributes)

    def run(self, unit: nn.Module, forward: Callable[[], Any]) -> Any:
        """A unit's forward."""
        before = self._last()
        if before:
            before.send()
        run = UnitRun(self, unit, before)
        with saved_tensors_hooks(run.keep, _restore):
            output = forward()
        if before:
            before.release()
        if run.kept:
            self._last = ref(run)
        return output


def make_offload(copies: HostCopies | None) -> NoActivationOffload:
    """What moves activations by these copies; nothing where there are none."""
    return ActivationOffload(copies) if copies else NoActivationOffload()


class _Offloaded(nn.Module):
    """The class that a unit gets."""

    offloaded_by: ClassVar[ActivationOffload]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return type(self).offloaded_by.run(self, lambda: call(*args, **kwargs))


class UnitRun:
    """What one forward of a unit has kept. It lives as long as some of that does."""

    def __init__(self, offload: ActivationOffload, unit: nn.Module, before: UnitRun | None) -> None:
        self._offload, self._unit = offload, unit
        # weak: what is kept goes when autograd has used it, and its run with it
        self._before: Callable[[], UnitRun | None] = ref(before) if before else _nothing
        self.kept: WeakSet[KeptStorage] = WeakSet()
        self._weights: set[int] | None = None  # storages of the unit's parameters
        self._event: Any = None  # of the copies that are under way
        self._is_wanted = False  # has the backward come here?

    # in the forward

    def keep(self, tensor: Tensor) -> KeptTensor | KeptView:
        """Autograd keeps a tensor: the hook that decides what is kept instead."""
        whole = tensor.detach()  # else what an operator gives would keep that operator, which keeps it
        local = to_local(whole)
        if isinstance(tensor, nn.Parameter) or not self._offload.copies.can_copy(local):
            return KeptTensor(whole)
        storage, numel = local.untyped_storage(), local.untyped_storage().nbytes() // local.element_size()
        reach = local.storage_offset() + sum(
            (n - 1) * step for n, step in zip(local.shape, local.stride(), strict=True)
        )
        if (
            reach >= numel
            or storage.nbytes() < self._offload.copies.min_bytes
            or id(storage) in self._weight_storages()
        ):
            return KeptTensor(whole)
        key, present = (id(storage), local.dtype), self._offload.present
        kept = present.get(key)
        if kept is None or kept.is_overwritten():
            # all of the storage, (numel,): autograd would keep what lies in it beside this tensor, too
            kept = present[key] = KeptStorage(self, local.as_strided((numel,), (1,), 0))
            self.kept.add(kept)
        return KeptView(self, kept, local, whole)

    def _weight_storages(self) -> set[int]:
        # asked for within the forward: before it, those of fully_shard were not gathered
        if self._weights is None:
            self._weights = {id(to_local(weight.detach()).untyped_storage()) for weight in self._unit.parameters()}
        return self._weights

    def send(self) -> None:
        """Begin to copy to the host what was kept; not once the backward has begun to use it."""
        if not self._is_wanted:
            self._move([kept for kept in self.kept if kept.copy is None and not kept.is_overwritten()], out=True)

    def release(self) -> None:
        """Give its memory on the device back to the operators that follow. They come after the copies."""
        self.wait()
        for kept in self.kept:
            if kept.copy is not None:
                kept.value = None
        present = self._offload.present  # an identity may be another storage's from now on
        for key in [key for key, kept in present.items() if kept.value is None]:
            del present[key]

    # in the backward

    def want(self) -> None:
        """The backward has come to this unit: the one before it is fetched while this one computes."""
        if not self._is_wanted:
            self._is_wanted = True
            self.fetch()
            if before := self._before():
                before.fetch()

    def fetch(self) -> None:
        """Begin to copy back what is on the host."""
        self._move([kept for kept in self.kept if kept.value is None], out=False)

    def wait(self) -> None:
        """What the device computes from now on comes after the copies that are under way."""
        if self._event is not None:
            self._offload.copies.wait(self._event)
            self._event = None

    def _move(self, kept: Sequence[KeptStorage], out: bool) -> None:
        if kept:
            self.wait()
            move = self._offload.copies.to_host if out else self._offload.copies.to_device
            moved, self._event = move([each.held for each in kept])
            for each, tensor in zip(kept, moved, strict=True):
                if out:
                    each.copy = tensor
                else:
                    each.value, each.copy, each.writes = tensor, None, count_writes(tensor)


class KeptStorage:
    """A storage in which tensors are kept: it is on the device, on the host, or on its way out, then on both."""

    def __init__(self, run: UnitRun, value: Tensor) -> None:
        self.run, self.writes = run, count_writes(value)
        self.value: Tensor | None = value  # (numel,) on the device
        self.copy: Tensor | None = None  # (numel,) on the host

    @property
    def held(self) -> Tensor:
        """It, wherever it is."""
        held = self.copy if self.value is None else self.value
        assert held is not None  # it is somewhere
        return held

    def is_overwritten(self) -> bool:
        """Was it written to since it was kept, before it could be sent?"""
        return self.value is not None and count_writes(self.value) != self.writes

    def __del__(self) -> None:
        self.run.wait()  # its memory must not be used anew while a copy is still written there


class KeptTensor:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._writes = tensor, count_writes(tensor)

    def restore(self) -> Tensor:
        """The tensor. An error if it was written to."""
        if count_writes(self._tensor) != self._writes:
            raise RuntimeError(_OVERWRITTEN)
        return self._tensor


class KeptView:
    """A tensor in a storage that may be sent away."""

    def __init__(self, run: UnitRun, kept: KeptStorage, local: Tensor, whole: Tensor) -> None:
        self._run, self._kept = run, kept
        self._layout = local.shape, local.stride(), local.storage_offset()
        self._split: dict[str, Any] | None = None  # of a DTensor, of which a rank holds a part
        if isinstance(whole, DTensor):
            self._split = {"device_mesh": whole.device_mesh, "placements": whole.placements}
            self._split |= {"shape": whole.shape, "stride": whole.stride()}

    def restore(self) -> Tensor:
        """The tensor, with the values and the strides that it had. An error if it was written to."""
        kept = self._kept
        self._run.want()
        if kept.value is None:  # of the unit before, which keeps it, too
            kept.run.fetch()
        kept.run.wait()
        if kept.is_overwritten():
            raise RuntimeError(_OVERWRITTEN)
        assert kept.value is not None
        local = kept.value.as_strided(*self._layout)
        return local if self._split is None else DTensor.from_local(local, run_check=False, **self._split)


def _restore(kept: KeptTensor | KeptView) -> Tensor:
    """Autograd needs a tensor that was kept."""
    return kept.restore()


def _nothing() -> None:
    return None
