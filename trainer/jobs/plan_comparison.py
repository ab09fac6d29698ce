"""What the steps of a run take, beside what was planned: `planned` and `measured` in environment.json."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from torch import nn

from trainer.jobs.run_parts import PreparedRun
from trainer.launch.devices import memory_usage
from trainer.parallel.device_mesh import to_local
from trainer.parallel.meta_model import named_state
from trainer.strategies.step_timing import STEP_PHASES, StepTimer

COMPARED_STEPS = 10  # after which the first comparison is written


class PlanComparison:
    """Measures the memory and the time of this process's steps; the main rank writes them down, once a start."""

    def __init__(self, run: PreparedRun) -> None:
        self.planned = planned_row(run)
        self._folder, self._on_gpu = run.folder, run.machine.on_gpu
        self._measured: dict[str, float] | None = None
        self._before = 0  # bytes that this process has for all but tensors

    def begin(self, network: nn.Module) -> None:
        """The network has been built, and no step has run: what the process grows by from now on is a step's.

        Only on CPUs; an accelerator's allocator counts by itself.
        """
        held = {to_local(tensor) for _, tensor in named_state(network)}
        self._before = memory_usage().get("host", 0) - sum(tensor.nbytes for tensor in held)
        with suppress(OSError):  # the most that this process has had counts from now on; Linux alone does that
            Path("/proc/self/clear_refs").write_text("5")

    def note(self, watch: StepTimer, ended: bool) -> None:
        """Write down what the steps took, once there are enough of them, or no more will come."""
        if self._measured is None and watch.measured >= (1 if ended else COMPARED_STEPS):
            # reading of data is in no plan
            spent = sum(watch.laps[phase] for phase in STEP_PHASES if phase != "data")
            self._measured = {"peak": self._peak(), "step_s": spent / watch.measured}
            with suppress(OSError):  # a full disk, which the log names by itself, must not end a run for two numbers
                self._folder.add_to_environment({"measured": self._measured})

    def lines(self) -> list[str]:
        """How far the plan was off, for people; nothing where there was no plan."""
        if not self.planned or not self._measured:
            return []
        error = self._measured["peak"] / self.planned["peak"] - 1
        return [f"planned     {self.planned['peak'] / 2**20:,.0f} MiB, measured {100 * error:+.0f} %"]

    def _peak(self) -> float:
        usage = memory_usage()
        if self._on_gpu and "device" in usage:
            return float(usage["device"])
        with suppress(OSError, StopIteration):
            status = Path("/proc/self/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM:"))
            return 1024.0 * int(peak.split()[1]) - self._before
        return 0.0


def planned_row(run: PreparedRun) -> dict[str, float] | None:
    """What was planned for a run, for its auto or by its own `job=plan`: `peak` in bytes; None: nothing."""
    if run.auto is not None and run.auto.planned is not None:
        return run.auto.planned
    mine = run.strategy.name, run.machine.launch.world_size, str(run.batches)
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or one of another version
        for row in json.loads((run.folder.path / "plan" / "plan.json").read_text())["rows"]:
            if (row["strategy"], row["processes"], row["batches"]) == mine:
                return {"peak": float(row["peak"])}
    return None
