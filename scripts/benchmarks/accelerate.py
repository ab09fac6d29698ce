"""Accelerate around a loop by hand."""

import itertools
import os

import torch
from accelerate import Accelerator

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, loaders, loss, network, optimizer


def main() -> None:
    """Train, evaluate, report."""
    work, clock = Work.asked(), Clock()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=os.environ["BENCH_FOLDER"])
    accelerator.init_trackers("accelerate")
    train, test = loaders(work)
    plain = network(work)
    model, steps = accelerator.prepare(plain, optimizer(work, plain.parameters()))
    if not work.dealt:
        train, test = accelerator.prepare(train, test)
    model.train()
    for step, (x, y) in enumerate(itertools.islice(train, work.steps)):
        value = loss(model(x), y)
        steps.zero_grad()
        accelerator.backward(value)
        steps.step()
        if step % 50 == 0:
            accelerator.log({"loss": value.item()}, step)
    clock.evaluate()
    right, seen = 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in test:
            chosen, wanted = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += int((chosen == wanted).sum())
            seen += wanted.numel()
    clock.report(work.steps, len(test), right / seen)
    accelerator.end_training()


if __name__ == "__main__":
    main()
