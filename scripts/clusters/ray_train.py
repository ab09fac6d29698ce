#!/usr/bin/env python
"""Train under Ray Train: each of its workers is one rank of a run, and after a failure Ray starts all of them again.

    python scripts/clusters/ray_train.py --workers 2 model=resnet50 strategy=fsdp run.dir=/shared/runs/a
    python scripts/clusters/ray_train.py --workers 16 --gpu --storage /shared/ray model=resnet50 run.dir=/shared/runs/a

All words after the options are those of `python -m trainer`. run.dir must lie in a folder that all machines share: a
run that is started again goes on from its newest checkpoint there. Ray gets the metrics of each evaluation, and at the
end the last checkpoint. Needs `pip install -e '.[ray]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from torch import distributed

import trainer

try:
    import ray.train
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ImportError as error:
    sys.exit(f"scripts/clusters/ray_train.py needs Ray Train ({error}): pip install -e '.[ray]'")


def work(words: dict[str, list[str]]) -> None:
    """What each worker does: its rank of the run, and reports beside it."""
    arguments = words["words"]
    folder = Path(next(word.partition("=")[2] for word in arguments if word.startswith("run.dir=")))
    distributed.destroy_process_group()  # Ray's own: a strategy makes the groups that it needs
    reported = len(evaluations(folder))  # by an earlier start; nobody adds any before all ranks are there
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.run, arguments)
        while not run.done():
            wait([run], timeout=1.0)  # seconds
            # all workers report all but the last one, each at its time: Ray waits until all have
            for metrics in evaluations(folder)[reported:-1]:
                ray.train.report(metrics)
                reported += 1
    result = run.result()  # an error of the run is one of the worker
    for metrics in evaluations(folder)[reported:-1]:
        ray.train.report(metrics)
    last = max((result.folder / "checkpoints").glob("step-*"))
    is_main = ray.train.get_context().get_world_rank() == 0
    ray.train.report(evaluations(folder)[-1], Checkpoint.from_directory(last) if is_main else None)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """What the evaluations of the run have measured so far, in order."""
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""  # without a line that is being written
    return [entry for entry in map(json.loads, whole.splitlines()) if entry["kind"] == "eval"]


def main() -> None:
    """Start the workers, and say what Ray has in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks of the run")
    parser.add_argument("--gpu", action="store_true", help="each worker has a GPU")
    parser.add_argument("--storage", help="where Ray keeps its copies; a folder or a bucket (~/ray_results)")
    parser.add_argument("--failures", type=int, default=3, help="how often all workers are started again")
    options, words = parser.parse_known_args()
    if not any(word.startswith("run.dir=") for word in words):
        parser.error("run.dir=FOLDER is needed, in a folder that all machines share: the workers meet there")
    result = TorchTrainer(
        work,
        train_loop_config={"words": words},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=options.failures)),
    ).fit()
    print(f"ray         {result.metrics}")
    print(f"ray         {result.checkpoint}")


if __name__ == "__main__":
    main()
