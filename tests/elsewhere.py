"""An accelerator that is not there: its tensors lie elsewhere, so torch says, and the CPU's kernels compute with them.

`python -m tests.elsewhere REPORT KIND RUNS` runs the trainer on it, watched. In a process of its own: torch keeps such
a device for the rest of a process's life.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests import inside
from tests.watch import PHASES, Watch
from trainer.refusal import Refusal

KIND = "elsewhere"


class Event:
    """The moment up to which copies have been asked for."""

    def __init__(self) -> None:
        self._copies = len(Elsewhere.current.under_way)

    def synchronize(self) -> None:
        Elsewhere.current.arrive(self._copies)


class Stream:
    """The one stream of the device."""

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        Event().synchronize()

    def is_capturing(self) -> bool:
        return False


STREAM = Stream()


class Module:
    """What torch asks of `torch.elsewhere`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return STREAM

    def stream(self, stream: Stream) -> Any:
        return nullcontext()

    def get_device_name(self, index: int) -> str:
        return "Nowhere 1"

    def is_bf16_supported(self, including_emulation: bool) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """What is drawn there the CPU's generator draws, and that is seeded anyway."""

    manual_seed_all = manual_seed


class There(Tensor):
    """A tensor elsewhere; `here` has its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        words = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        there = Tensor._make_wrapper_subclass(cls, here.shape, **words, device=torch.device(KIND, 0))  # type: ignore
        there.here = here
        return there

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Elsewhere.current.computed(func, args, kwargs or {})


def _set_data(there: There, other: There) -> None:
    there.here = other.here
    Tensor.data.__set__(there, other)  # type: ignore[attr-defined]


There.data = property(Tensor.data.__get__, _set_data)  # type: ignore


class Elsewhere(TorchDispatchMode):
    """The device while it is there. `wide`: has it float64, and fused steps?

    What it copies to the host without being waited for arrives when somebody waits: who reads earlier reads -1.
    """

    current: Elsewhere

    def __init__(self, wide: bool) -> None:
        super().__init__()
        Elsewhere.current, self._wide = self, wide
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.arrived = 0

    def arrive(self, until: int) -> None:
        for goal, values in self.under_way[self.arrived : until]:
            goal.copy_(values)
        self.arrived = max(self.arrived, until)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.computed(func, args, kwargs or {})

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
            if value.dtype == torch.float64 and not self._wide:
                raise TypeError("this device does not support float64")
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


def _refuse_fused(parameter: Tensor, **_: Any) -> None:
    if parameter.device.type == KIND:
        raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")


def main(report: Path, wide: bool, runs: list[list[str]]) -> None:
    """Do these runs one after the other, and report how each ended and what was found."""
    module = Module()
    _setup_privateuseone_for_python_backend(KIND, backend_module=module)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) makes it here and then copies, as it seems
    if not wide:
        patch("torch.optim.adam._device_dtype_check_for_fused", _refuse_fused).start()
    told: list[dict[str, Any]] = []
    for words in runs:
        watch, end = Watch(), "0"
        with patch("torch.accelerator.current_stream", module.current_stream), watch.over(*PHASES):
            try:
                with Elsewhere(wide), watch:
                    end = str(inside.here("device=auto", *words))
            except Refusal as refusal:
                end = str(refusal)
        told.append({"end": end, "findings": watch.findings, "copies": watch.copies})
    report.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "wide", json.loads(sys.argv[3]))
