"""The job `evaluate`: the metrics of a trained run, again, with any strategy and any number of processes."""

from __future__ import annotations

import json
from typing import Any

from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.trained_run import LoadedRun, Split, Which, load_run, run_folder
from trainer.launch import failure
from trainer.launch.safe_files import open_file
from trainer.loop.evaluation import evaluate


class Evaluate(Job):
    """Print a checkpoint's metrics over a whole set, and append them to `evaluate/metrics.jsonl`."""

    def __init__(self, split: Split = "evaluation", checkpoint: Which = "best") -> None:
        self.split, self.checkpoint = split, checkpoint

    def __call__(self, run: RunParts) -> int:
        """Evaluate; the exit code."""
        launch = run.machine.launch
        # as the loop evaluates: the same batches, divided in the same way, so that one process gives the same bits
        with load_run(run, "evaluate", self.checkpoint, self.split) as loaded:
            metrics = evaluate(run.strategy, loaded.model, run.task, loaded.loader, lambda: loaded.stop.raised)
            if metrics is not None and launch.is_main:
                self._write(run, loaded, metrics)
        return failure.exit_code(metrics is not None, launch)

    def _write(self, run: RunParts, loaded: LoadedRun, metrics: dict[str, float]) -> None:
        """One line of JSON for programs, and the same on the screen, a metric in each line."""
        step, samples, path = loaded.checkpoint.step, loaded.loader.size, loaded.folder / "metrics.jsonl"
        # as a line of the run's own metrics.jsonl, with the checkpoint and the split
        line: dict[str, Any] = {"kind": "eval", "step": step, "epoch": loaded.epoch, "samples": samples}
        line |= {**metrics, "checkpoint": step, "split": self.split}
        with open_file(path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")  # in one call, as others may read meanwhile
        # for people
        rows = {
            "checkpoint": f"step {step} of {run_folder(run)}",
            "samples": f"{samples} ({self.split})",
            **{name: f"{value:.6g}" for name, value in metrics.items()},
            "written": str(path),
        }
        width = max(11, *map(len, rows))
        print("\n".join(f"{name:<{width}} {value}" for name, value in rows.items()))
