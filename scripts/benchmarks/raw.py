"""The loop of PyTorch's tutorials, by hand."""

import itertools
import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, evaluate, loaders, loss, network, optimizer


def main() -> None:
    """Train, evaluate, report."""
    work, clock = Work.asked(), Clock()
    several, rank = work.ranks > 1, int(os.environ.get("RANK", "0"))
    if several:
        dist.init_process_group("gloo")
    train, test = loaders(work, distributed=several)
    model = network(work)
    if several:
        model = DistributedDataParallel(model)
    steps = optimizer(work, model.parameters())
    board = SummaryWriter(os.environ["BENCH_FOLDER"] + "/raw") if rank == 0 else None
    model.train()
    for step, (x, y) in enumerate(itertools.islice(train, work.steps)):
        value = loss(model(x), y)
        steps.zero_grad()
        value.backward()
        steps.step()
        if board and step % 50 == 0:
            board.add_scalar("loss", value.item(), step)
    clock.evaluate()
    sums = evaluate(model, test)
    if several:
        dist.all_reduce(sums)  # all ranks; two numbers
    clock.report(work.steps, len(test), float(sums[0] / sums[1]))
    if board:
        board.close()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
