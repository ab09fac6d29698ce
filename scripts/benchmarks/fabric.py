"""lightning.Fabric around a loop by hand."""

import itertools
import os

from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, evaluate, loaders, loss, network, optimizer


def main() -> None:
    """Train, evaluate, report."""
    work, clock = Work.asked(), Clock()
    strategy = "ddp" if work.ranks > 1 else "auto"
    logger = TensorBoardLogger(os.environ["BENCH_FOLDER"], "fabric")
    fabric = Fabric(accelerator="cpu", devices=work.ranks, strategy=strategy, loggers=logger)
    fabric.launch()
    train, test = fabric.setup_dataloaders(*loaders(work), use_distributed_sampler=work.name != "overhead")
    plain = network(work)
    model, steps = fabric.setup(plain, optimizer(work, plain.parameters()))
    model.train()
    for step, (x, y) in enumerate(itertools.islice(train, work.steps)):
        value = loss(model(x), y)
        steps.zero_grad()
        fabric.backward(value)
        steps.step()
        if step % 50 == 0:
            fabric.log("loss", value.item(), step)
    clock.evaluate()
    right, seen = fabric.all_reduce(evaluate(model, test), reduce_op="sum").tolist()
    clock.report(work.steps, len(test), right / seen)


if __name__ == "__main__":
    main()
