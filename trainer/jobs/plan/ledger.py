"""A ledger of the memory that a step takes: every storage that is made, when it goes, and what it was for.

torch has `FSDPMemTracker` and `MemTracker` for this. On tensors without values they count optimizer state several times
(pytorch/pytorch#166989, #183970), hence this.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from trainer.data.nested_tensors import tensors
from trainer.jobs.plan.fake_mode import FakeRunMode, is_counted, is_propagating
from trainer.jobs.plan.roofline import Roofline
from trainer.jobs.plan.traffic import Traffic
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.device_mesh import to_local
from trainer.parallel.dispatch_mode import TorchDispatchMode
from trainer.parallel.unused_parameters import is_searching

KINDS = ("weights", "gradients", "optimizer", "activations", "gathered", "buffers")
_CERTAIN = ("weights", "gradients", "optimizer", "buffers")  # what is known of a storage for good


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most."""

    bytes: int
    by_kind: Mapping[str, int]  # of KINDS
    moment: str  # the phase, and the module that computes
    modules: list[tuple[str, int]]  # whose activations are alive then: name, bytes; the largest first


class Ledger(TorchDispatchMode):
    """Sees every operator inside it: the storages it makes, the bytes it sends, what it computes."""

    def __init__(self, mode: FakeRunMode, traffic: Traffic, roofline: Roofline) -> None:
        super().__init__()
        self.phase, self.traffic, self.roofline = "build", traffic, roofline
        self._mode = mode
        self._numbers: dict[int, int] = {}  # of storages that are alive: identity → number in order of their making
        self._bytes: dict[int, int] = {}  # of those, by number
        self._kinds: dict[int, str] = {}  # what a storage is for; activations where it is not known
        self._makers: dict[int, str] = {}  # the module in whose forward it was made
        self._events: list[tuple[int, int, str]] = []  # bytes more or less, number of the storage, moment
        self._names: dict[nn.Module, str] = {}
        self._running = [""]  # modules whose forward is under way, the innermost last
        self._backward_at = ""  # the module whose output the backward has read last

    def label_network(self, network: nn.Module) -> None:
        """Know the modules of a network by their names, and its tensors by what they are."""
        self._names = {module: name for name, module in network.named_modules()}
        self.label(network.parameters(), "weights")
        self.label(network.buffers(), "buffers")

    def label(self, tensors: Iterable[Any], kind: str) -> None:
        """Say what the storages of these tensors are for."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and is_counted(local := to_local(tensor), self._mode):
                number = self._storage_number(local)
                if kind in _CERTAIN or self._kinds.get(number) not in _CERTAIN:
                    self._kinds[number] = kind

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What is made inside is for this, where nobody says something else of it."""
        first = len(self._makers)
        yield
        for number in range(first, len(self._makers)):
            self._kinds.setdefault(number, kind)

    def label_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Have gradients and optimizer state labelled in each step of this optimizer."""

        def before(*_: Any) -> None:
            # by now each has its final storage: DDP's and FSDP's reductions are over
            self.label((p.grad for group in optimizer.param_groups for p in group["params"]), "gradients")

        def after(*_: Any) -> None:
            # most of it is made in the first step, and keeps its storages in the second
            self.label(tensors(list(optimizer.state.values())), "optimizer")

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def peak(self) -> Peak:
        """The moment at which most was alive, by what is known in the end of what each storage was for."""
        # first pass: when the sum of all changes is largest
        now, most, at = 0, 0, 0
        for index, (change, _, _) in enumerate(self._events):
            now += change
            if now > most:
                most, at = now, index
        # second pass: which storages were alive then, and what they were for
        alive: Counter[int] = Counter()
        for change, number, _ in self._events[: at + 1]:
            alive[number] += change
        totals: Counter[str] = Counter()  # bytes by kind
        makers: Counter[str] = Counter()  # bytes of activations by module
        for number, size in alive.items():
            kind = self._kinds.get(number, "activations")
            totals[kind] += size
            if kind == "activations" and size:
                makers[self._makers[number] or "outside of modules"] += size
        moment = self._events[at][2] if self._events else ""
        return Peak(most, {kind: totals[kind] for kind in KINDS}, moment, makers.most_common(3))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # they come again as the tensors that they are made of
        self._note_backward(args)
        out = func(*args, **(kwargs or {}))
        if not is_propagating() and not is_searching():
            sent = self.traffic.record(func, args, out, self.phase)
            if sent is not None:
                self.label(sent, "gathered")
            else:
                self.roofline.record(func, args, kwargs or {}, out)
            for tensor in tensors(out):
                if is_counted(tensor, self._mode):  # a view's storage is known already, and is not entered again
                    self._storage_number(tensor)
        return out

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_
        resize, ledger = self._resize, self

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            ledger.record_size(storage)
            return done

        # FSDP gives memory back and takes it again by this method of a storage, which no operator shows
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        # of all modules at once; one without a name in the network counts as the one around it
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _enter_module(self, module: nn.Module, *_: Any) -> None:
        self._running.append(self._names.get(module, self._running[-1]))

    def _leave_module(self, *_: Any) -> None:
        if len(self._running) > 1:  # the first entry stands for what no module computes
            self._running.pop()

    def _storage_number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; a new one is entered."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the storage lives
        if key not in self._numbers:
            number = self._numbers[key] = len(self._makers)
            self._makers[number], self._bytes[number] = self._running[-1], 0
            weakref.finalize(storage, self._record_release, key)  # called when the last tensor of it goes
            self._record_change(number, storage.nbytes())
        return self._numbers[key]

    def record_size(self, storage: Any) -> None:
        """A storage that is known has been given memory, or has given it back."""
        number = self._numbers.get(id(storage))
        if number is not None:
            if self._kinds.get(number) not in _CERTAIN:
                self._kinds[number] = "gathered"  # weights that a unit of FSDP computes with
            self._record_change(number, storage.nbytes())

    def _record_release(self, key: int) -> None:
        self._record_change(self._numbers.pop(key), 0)

    def _record_change(self, number: int, size: int) -> None:
        """A storage has this size from now on."""
        # a storage that is resized to the size that it has is no event
        if change := size - self._bytes[number]:
            self._bytes[number] = size
            self._events.append((change, number, self._moment()))

    def _moment(self) -> str:
        if self.phase != "forward and backward":
            return self.phase
        if not in_backward():
            return f"forward of {self._running[-1] or 'the network'}"
        return f"backward, at the output of {self._backward_at or 'the network'}"

    def _note_backward(self, args: Any) -> None:
        """How far has the backward come? Its operators run in no module's call, but they read what modules made."""
        if not in_backward():
            self._backward_at = ""
        for tensor in tensors(list(args)) if in_backward() else ():
            # gradients are made in no module, nor are weights
            if maker := self._makers.get(self._numbers.get(id(tensor.untyped_storage()), -1), ""):
                self._backward_at = maker
                return
