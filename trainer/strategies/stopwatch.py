"""Where a run's time goes, step by step: laps of the host's clock, each for one phase."""

from __future__ import annotations

from time import perf_counter

PHASES = ("data", "forward and backward", "communication", "optimizer", "log", "evaluation", "save")  # in order of time


class Stopwatch:
    """Laps of the host's clock. It costs a microsecond a step and never waits for a device."""

    def __init__(self) -> None:
        self._steps = 0
        self._spent = dict.fromkeys(PHASES, 0.0)  # seconds
        self._since = perf_counter()

    def step(self) -> None:
        """A step begins: what passed since the last one ended went into its data.

        The first does not count: it compiles, allocates and opens files as no other one does.
        """
        self.lap("data")
        self._steps += 1
        if self._steps == 2:
            self._spent = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> None:
        """What passed since the last lap went into this phase."""
        now = perf_counter()
        self._spent[phase] += now - self._since
        self._since = now

    def line(self, ahead: bool) -> str:
        """The mean step, and what share of it each phase had. `ahead`: of a GPU that computes."""
        whole, steps = sum(self._spent.values()), self._steps - 1
        if steps < 1:
            return "step time   not measured: the first step of a start does not count"
        shares = ", ".join(
            f"{name} {100 * part / whole:.0f} %" for name, part in self._spent.items() if part >= whole / 200
        )
        note = "; the host's time, which runs ahead of the GPU (profile=true shows both)" if ahead else ""
        mean = whole / steps
        said = f"{mean:.1f} s" if mean >= 1 else f"{1e3 * mean:.3g} ms"
        return f"step time   {said}: {shares}{note}"
