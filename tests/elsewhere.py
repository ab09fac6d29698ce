"""An accelerator that is not there: its tensors lie elsewhere, so torch says, and the CPU's kernels compute with them.
And a watch over what a program asks of it, or of a real one: what makes the host wait there, or could not work at all.

`python -m tests.elsewhere REPORT PROCESSES RUNS` runs the trainer on it, watched. In processes of its own: torch
keeps such a device for the rest of a process's life.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.run import type_words
from trainer.launch.rendezvous import Launch

KIND = "elsewhere"
COPIES = ("_to_copy", "copy_", "_copy_from")
# A number out of a tensor, a result whose size depends on values, a comparison whose answer is read.
READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount", "equal")
FEW = 1000  # numbers: an optimizer that is tried on so few before the first step takes no step of the run


class Finding(NamedTuple):
    """What was found, and how many optimizer steps this start of the run had done then."""

    what: str  # mixture, pageable, waiting copy, read
    operation: str
    step: int


class Watch(TorchDispatchMode):
    """Notes, of every operation with a tensor on an accelerator: two devices in one; a copy that the host waits for,
    or from memory that is not pinned; a value that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.copies: list[tuple[str, int]] = []  # that nobody waits for: from where; after how many steps
        self.step = 0

    def __enter__(self) -> Watch:
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self.step += sum(each.numel() for group in optimizer.param_groups for each in group["params"]) > FEW

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it takes itself apart, and what it does with its parts is seen
            return NotImplemented
        what = self._judged(func.overloadpacket.__name__, args, kwargs or {})
        if what:
            self.findings.append(Finding(what, str(func), self.step))
        return func(*args, **(kwargs or {}))

    def _judged(self, name: str, args: Any, kwargs: dict[str, Any]) -> str:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in COPIES:
            return self._judged_copy(tensors, args, kwargs)
        there = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        if not there:
            return ""
        if name in READS or (name in ("index", "index_put_") and any(one.dtype == torch.bool for one in tensors[1:])):
            return "read"
        # a number of the host's may go along: it is handed to the kernel
        if any(tensor.device != there[0].device and tensor.dim() for tensor in tensors):
            return "mixture"
        return ""

    def _judged_copy(self, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> str:
        if "device" in kwargs:
            start, goal = tensors[0].device, torch.device(kwargs["device"] or tensors[0].device)
        else:
            start, goal = tensors[-1].device, tensors[0].device
        ahead = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2] is True)
        if start.type == goal.type or "meta" in (start.type, goal.type):
            return ""
        if goal.type != "cpu" and not tensors[-1].is_pinned():
            return "pageable"
        if not ahead:
            return "waiting copy"
        self.copies.append((start.type, self.step))
        return ""


class Event:
    """The moment up to which copies have been asked for."""

    def __init__(self, **_: Any) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self._copies = len(Elsewhere.current.under_way)

    def synchronize(self) -> None:
        Elsewhere.current.arrive(self._copies)


class Stream(nullcontext[None]):
    """The streams of the device, which are all one: it does everything in order."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        Event().synchronize()

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Event) -> None: ...

    wait_stream = wait_event


STREAM = Stream()
MODULE = SimpleNamespace(  # what torch asks of `torch.elsewhere`
    Stream=Stream,
    Event=Event,
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    get_device_name=lambda index: "Nowhere 1",
    get_device_properties=lambda device: SimpleNamespace(uuid=os.getpid()),  # each process sees one of its own
    current_stream=lambda device=None: STREAM,
    stream=lambda stream: nullcontext(),
    is_bf16_supported=lambda including_emulation: False,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    # what is drawn there the CPU draws, and its generator is seeded anyway
    default_generators=(torch.default_generator,),
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    get_rng_state_all=lambda: [torch.get_rng_state()],
    set_rng_state_all=lambda states: torch.set_rng_state(states[0]),
)


class There(Tensor):
    """A tensor elsewhere; `here` has its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        words = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        there = Tensor._make_wrapper_subclass(cls, here.shape, **words, device=torch.device(KIND, 0))  # type: ignore
        there.here = here
        return there

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Elsewhere.current.computed(func, args, kwargs or {})


def _set_data(there: There, other: There) -> None:
    there.here = other.here
    Tensor.data.__set__(there, other)  # type: ignore[attr-defined]


There.data = property(Tensor.data.__get__, _set_data)  # type: ignore


class Elsewhere(TorchDispatchMode):
    """The device while it is there.

    What it copies to the host without being waited for arrives when somebody waits: who reads earlier reads -1.
    """

    current: Elsewhere

    def __init__(self) -> None:
        super().__init__()
        Elsewhere.current = self
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.arrived = 0

    def arrive(self, until: int) -> None:
        for goal, values in self.under_way[self.arrived : until]:
            goal.copy_(values)
        self.arrived = max(self.arrived, until)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if DTensor in types else self.computed(func, args, kwargs or {})

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return getattr(args[0], "pinned", False)
        if name == "_pin_memory":
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        known: dict[int, There] = {}

        def to_here(value: Any) -> Any:
            if isinstance(value, There):
                known[id(value.here)] = value
                return value.here
            if isinstance(value, torch.device) and value.type == KIND:
                return torch.device("cpu")
            return value

        words = tree_map(to_here, (args, kwargs))
        if words[1].pop("pin_memory", False):  # memory of the host without values: nobody waits for it
            room = func(*words[0], **words[1])
            room.pinned = True
            return room
        device = kwargs.get("device")
        stays = device is None or torch.device(device).type == KIND
        lies_there = (bool(known) and stays) or (device is not None and stays)
        if known and (not stays or name in ("_local_scalar_dense", "equal")):
            return self._to_host(func, name, words)
        if name == "copy_" and not isinstance(args[0], There):
            return args[0].copy_(self._to_host(torch.ops.aten.clone.default, "clone", (words[0][1:2], {})))
        result = func(*words[0], **words[1])

        def to_there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else There(value)

        return tree_map(to_there, result) if lies_there else result

    def _to_host(self, func: Any, name: str, words: Any) -> Any:
        values = func(*words[0], **words[1])
        if isinstance(values, Tensor) and values.is_meta:
            return values
        if not words[1].get("non_blocking"):
            self.arrive(len(self.under_way))  # whoever waits for one waits for all before it
            return values.clone() if isinstance(values, Tensor) else values
        goal = torch.full_like(values, -1)
        self.under_way.append((goal, values.clone()))
        return goal


def appear(sends: bool) -> None:
    """Let torch find the device from now on. `sends`: gloo, by another name, takes its tensors for those of the CPU."""
    _setup_privateuseone_for_python_backend(KIND, backend_module=MODULE)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) makes it here and then copies, as it seems
    if sends:
        dist.Backend.register_backend("there", dist.ProcessGroupGloo, devices=[KIND])
        dist.Backend.backend_capability["gloo"].append(KIND)


def trained(launch: Launch, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Do these runs one after the other; how each ended, and what was found in it."""
    appear(launch.world_size > 1)
    told: list[dict[str, Any]] = []
    for number, words in enumerate(runs):
        with (
            patch("torch.accelerator.current_stream", MODULE.current_stream),
            patch("torch.Stream", Stream),
            patch("trainer.parallel.activation_offload.HostCopies.min_bytes", 0),  # where a run offloads, all of it
            Elsewhere(),
            Watch() as watch,
        ):
            own = replace(launch, run_id=f"run-{number}" if launch.address else "")
            code, said = type_words(own, Path.cwd(), ["device=auto", *words], {})
        told.append({"code": code, "said": said, "findings": watch.findings, "copies": watch.copies})
    return told


def main(report: Path, size: int, runs: list[list[str]]) -> int:
    """The same on so many processes; rank 0 reports."""
    if size == 1:
        report.write_text(json.dumps(trained(Launch(), runs)))
        return 0
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            try:
                launch = Launch(rank, size, rank, size, 0, "run", f"127.0.0.1:{store.port}", launcher_serves_store=True)
                told = trained(launch, runs)
                if launch.is_main:
                    report.write_text(json.dumps(told))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks)


if __name__ == "__main__":
    place, count, words = sys.argv[1:]
    sys.exit(main(Path(place), int(count), json.loads(words)))
