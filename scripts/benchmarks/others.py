"""The others over the same work: `python -m scripts.benchmarks.others NAME`. Lightning may not be installed."""

import os
import sys
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scripts.benchmarks.work import Clock, Work, evaluate, loaders, loss, network, optimizer

FOLDER = os.environ["BENCH_FOLDER"]
LOG_EVERY = 50  # steps; the loss goes to TensorBoard


def by_hand(work: Work, model: nn.Module, batches: Iterable[Any], steps: Any, backward: Any, log: Any) -> None:
    """The loop of PyTorch's tutorials, which both have; they differ in `backward` and `log`."""
    model.train()
    for step, (x, y) in enumerate(islice(batches, work.steps)):
        value = loss(model(x), y)
        steps.zero_grad()
        backward(value)
        steps.step()
        if step % LOG_EVERY == 0:
            log(value.item(), step)


def raw(work: Work, clock: Clock) -> None:
    """torch alone."""
    from torch.utils.tensorboard import SummaryWriter

    if work.ranks > 1:
        dist.init_process_group("gloo")
    train, test = loaders(work, distributed=work.ranks > 1)
    model = network(work) if work.ranks == 1 else DistributedDataParallel(network(work))
    board = SummaryWriter(FOLDER + "/raw") if os.environ.get("RANK", "0") == "0" else None
    log = partial(board.add_scalar, "loss") if board else lambda *_: None
    by_hand(work, model, train, optimizer(work, model.parameters()), Tensor.backward, log)
    clock.read()  # the evaluation begins
    sums = evaluate(model, test)
    if work.ranks > 1:
        dist.all_reduce(sums)  # all ranks; two numbers
    clock.report(len(test), float(sums[0] / sums[1]))
    if board:
        board.close()
    if work.ranks > 1:
        dist.destroy_process_group()


def fabric(work: Work, clock: Clock) -> None:
    """lightning.Fabric around the loop by hand."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger

    strategy = "ddp" if work.ranks > 1 else "auto"
    lone = Fabric(accelerator="cpu", strategy=strategy, devices=work.ranks, loggers=TensorBoardLogger(FOLDER, "fabric"))
    lone.launch()
    train, test = lone.setup_dataloaders(*loaders(work), use_distributed_sampler=work.name != "overhead")
    plain = network(work)
    model, steps = lone.setup(plain, optimizer(work, plain.parameters()))
    by_hand(work, model, train, steps, lone.backward, partial(lone.log, "loss"))
    clock.read()  # the evaluation begins
    sums: Any = lone.all_reduce(evaluate(model, test), reduce_op="sum")  # a tensor, as what went in
    right, seen = sums.tolist()
    clock.report(len(test), right / seen)


if __name__ == "__main__":
    asked = Work.asked()
    {"raw": raw, "fabric": fabric}[sys.argv[1]](asked, Clock(asked.steps))
    # all is measured and written; torch's threads may abort what exits in the ordinary way after a group was made
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
