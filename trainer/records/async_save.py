"""When a checkpoint is written: at once, while the loop waits; or beside the next steps, from a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from trainer.devices import pins, spare_memory
from trainer.parallel.local_shard import held
from trainer.parallel.ranks import Ranks

_MOST = 0.5  # of the memory that a host has to spare: neighbouring ranks need some, and so does what is to come
PARTING = 5.0  # seconds that a save under way still gets after an error; a rank that is gone may hold it up for ever


class AtOnce:
    """The loop waits until a checkpoint is written. `ranks` agree about it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._error: BaseException | None = None

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds of each tensor, as it stays while it is written: here the tensors themselves."""
        return {name: held(one) for name, one in tensors.items()}

    def start(self, work: Callable[[], None]) -> bool:
        """Collective: begin; is it over, on every rank?"""
        self._do(work)
        return True

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error  # `wait` raises it

    def failed(self) -> bool:
        """Is it over, and did it fail? Never waits; other ranks may not know yet."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until it is over; its error, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def part(self) -> None:
        """After an error elsewhere: what is under way gets a little time, for nothing is wrong with it."""


class Beside(AtOnce):
    """A thread writes a copy in the host's memory, if there is room for one. One at a time; the memory is kept.

    What it does holds Python's lock nowhere for long: writing, hashing and waiting let go of it.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        """Collective. timeout: for which one rank's thread waits for the others'."""
        super().__init__(ranks.apart(timeout))
        self._kept: dict[str, Tensor] = {}
        self._ready: torch.Event | None = None  # when the device has copied all
        self._device: torch.device | None = None  # that copies; None: nothing need be waited for
        self._spare = True  # has the host memory for a copy
        self._thread = threading.Thread()

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the host's memory. From an accelerator they arrive while the host goes on; the thread waits."""
        own = super().copied(tensors)
        ahead = [one.device for one in own.values() if pins(one.device)]
        self._device = ahead[0] if ahead else None
        # what is kept of other tensors goes first; where there is no room for a copy the loop waits instead
        self._kept = {name: self._kept[name] for name, one in own.items() if self._fits(name, one)}
        needed = sum(one.nbytes for name, one in own.items() if name not in self._kept)
        self._spare = needed < _MOST * spare_memory()
        if not self._spare:
            self._kept, self._ready = {}, None
            return own
        self._kept = {name: self._room(name, one) for name, one in own.items()}
        for name, one in own.items():
            self._kept[name].copy_(one.detach(), non_blocking=pins(one.device))
        # later steps of the stream come after the copies, so they may change what was copied
        self._ready = torch.accelerator.current_stream(ahead[0]).record_event() if ahead else None
        return dict(self._kept)

    def _fits(self, name: str, one: Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (kept.shape, kept.dtype) == (one.shape, one.dtype)

    def _room(self, name: str, one: Tensor) -> Tensor:
        """Memory for a copy, in the tensor's own order: a copy into another one takes several times as long."""
        if name in self._kept:
            return self._kept[name]
        # pinned from the start: `pin_memory()` would copy what nobody has written yet, and need the room twice
        return torch.empty_like(one, device="cpu", requires_grad=False, pin_memory=pins(one.device))

    def start(self, work: Callable[[], None]) -> bool:
        """Begin; nobody waits. Nothing else may be under way."""
        ready, device = self._ready, self._device

        def later() -> None:
            if device is not None:
                torch.accelerator.set_device_index(device)  # each thread begins with device 0, which is another rank's
            if ready is not None:
                ready.synchronize()  # the copies are there
            work()

        self._thread = threading.Thread(target=self._do, args=(later,), name="saving", daemon=True)
        self._thread.start()
        if not self._spare:
            self._thread.join()  # it reads what the next step would change
        return False

    def failed(self) -> bool:
        """The same; what is under way has not failed yet."""
        return not self._thread.is_alive() and super().failed()

    def wait(self) -> None:
        """The same."""
        if self._thread.ident is not None:
            self._thread.join()
        super().wait()

    def part(self) -> None:
        """The same; longer than that it may take, but is not waited for."""
        if self._thread.ident is not None:
            self._thread.join(PARTING)
