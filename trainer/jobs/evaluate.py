"""The job `evaluate`: the figures of a trained run, again, with any strategy and any number of processes."""

from __future__ import annotations

import json
from functools import partial

from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.trained_run import Split, Which, opened, run_folder, samples_of
from trainer.launch import failure
from trainer.launch.safe_files import open_file
from trainer.loop.evaluation import evaluate


class Evaluate(Job):
    """Print a checkpoint's figures over a whole set, and append them to `evaluate/metrics.jsonl`."""

    def __init__(self, split: Split = "evaluation", checkpoint: Which = "best") -> None:
        self.split, self.checkpoint = split, checkpoint

    def __call__(self, run: RunParts) -> int:
        """Evaluate; the exit code."""
        launch = run.machine.launch
        # as the loop evaluates: the same batches, cut in the same way, so that one process gives the same bits
        with opened(run, "evaluate", self.checkpoint, partial(samples_of, run, self.split, launch)) as job:
            figures = evaluate(run.strategy, job.placed, run.task, job.stream, lambda: job.stop.raised)
            if figures is not None and launch.is_main:
                step = job.found.step
                about = {"kind": "eval", "step": step, "epoch": job.epoch, "samples": job.stream.size}
                line = {**about, **figures, "checkpoint": step, "split": self.split}
                with open_file(job.folder / "metrics.jsonl", "ab") as file:
                    file.write(json.dumps(line).encode() + b"\n")  # in one call, as others may read meanwhile
                # for people the same in lines, one below the other
                said = {
                    "checkpoint": f"step {step} of {run_folder(run)}",
                    "samples": f"{job.stream.size} ({self.split})",
                }
                said |= {name: f"{value:.6g}" for name, value in figures.items()}
                said |= {"written": str(job.folder / "metrics.jsonl")}
                width = max(11, *map(len, said))
                print("\n".join(f"{name:<{width}} {value}" for name, value in said.items()))
        return failure.exit_code(figures is not None, launch)
