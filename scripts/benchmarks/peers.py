"""The others over the same work, one function each: `python -m scripts.benchmarks.peers NAME`.

Each imports its framework inside, for others may not be installed.
"""

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, evaluate, loaders, loss, network, optimizer

FOLDER = os.environ["BENCH_FOLDER"]
LOG_EVERY = 50  # steps; the loss goes to TensorBoard


def by_hand(work: Work, model: nn.Module, batches: Iterable[Any], steps: Any, backward: Any, log: Any) -> None:
    """The loop of PyTorch's tutorials, which three of them have; they differ in `backward` and `log`."""
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
    clock.evaluate()
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
    clock.evaluate()
    sums: Any = lone.all_reduce(evaluate(model, test), reduce_op="sum")  # a tensor, as what went in
    right, seen = sums.tolist()
    clock.report(len(test), right / seen)


def accelerate(work: Work, clock: Clock) -> None:
    """Accelerate around the loop by hand; its evaluation gathers what all ranks have found, as its pages say."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=FOLDER)
    accelerator.init_trackers("accelerate")
    train, test = loaders(work)
    plain = network(work)
    model, steps = accelerator.prepare(plain, optimizer(work, plain.parameters()))
    if not work.dealt:
        train, test = accelerator.prepare(train, test)
    by_hand(work, model, train, steps, accelerator.backward, lambda v, step: accelerator.log({"loss": v}, step))
    clock.evaluate()
    right, seen = 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in test:
            chosen, wanted = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += int((chosen == wanted).sum())
            seen += wanted.numel()
    clock.report(len(test), right / seen)
    accelerator.end_training()


def lightning(work: Work, clock: Clock) -> None:
    """lightning.Trainer, with what it does unasked: a progress bar, a summary, checkpoints."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(work)

        def training_step(self, batch: Any, index: int) -> Tensor:
            value = loss(self.model(batch[0]), batch[1])
            self.log("loss", value)
            return value

        def validation_step(self, batch: Any, index: int) -> None:
            right = (self.model(batch[0]).argmax(-1) == batch[1]).float().mean()
            self.log("accuracy", right, sync_dist=work.ranks > 1, batch_size=len(batch[0]))

        def configure_optimizers(self) -> Any:
            return optimizer(work, self.parameters())

    trainer = Trainer(
        accelerator="cpu",
        devices=work.ranks,
        strategy="ddp" if work.ranks > 1 else "auto",
        max_steps=work.steps,
        logger=TensorBoardLogger(FOLDER, "lightning"),
        log_every_n_steps=LOG_EVERY,
        default_root_dir=FOLDER,
        use_distributed_sampler=work.name != "overhead",
    )
    train, test = loaders(work)
    module = Module()
    trainer.fit(module, train)
    clock.evaluate()
    (figures,) = trainer.validate(module, test, verbose=False)
    clock.report(int(trainer.num_val_batches[0]), figures["accuracy"])


def hf(work: Work, clock: Clock) -> None:
    """transformers.Trainer; clipping off and a constant rate, so that it computes what the others compute."""
    from transformers import Trainer, TrainingArguments, get_constant_schedule

    class Called(nn.Module):
        """The network as the Trainer calls it: with labels, for a loss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = network(work)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.model(x)
            return {"loss": loss(output, labels), "logits": output}

    class Given(Trainer):
        """A Trainer that takes the loaders that all programs have."""

        def get_train_dataloader(self) -> DataLoader:
            return train if work.dealt else self.accelerator.prepare(train)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
            return test if work.dealt else self.accelerator.prepare(test)

    def collate(batch: Any) -> dict[str, Tensor]:
        x, y = batch if work.name == "overhead" else default_collate(batch)
        return {"x": x, "labels": y}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{FOLDER}/hf"
    model = Called()
    steps = optimizer(work, model.parameters())
    train, test = loaders(work, collate_fn=collate)
    arguments = TrainingArguments(
        f"{FOLDER}/hf",
        max_steps=work.steps,
        per_device_train_batch_size=work.batch,
        per_device_eval_batch_size=work.eval_batch,
        logging_steps=LOG_EVERY,
        report_to="tensorboard",
        use_cpu=True,
        max_grad_norm=0.0,
        label_names=["labels"],
        save_total_limit=1,
    )
    empty: Any = TensorDataset(torch.zeros(10))  # asked for, never read
    optimizers = (steps, get_constant_schedule(steps))
    trainer = Given(model, arguments, collate, empty, empty, compute_metrics=accuracy, optimizers=optimizers)
    trainer.train()
    clock.evaluate()
    figures = trainer.evaluate()
    clock.report(len(trainer.get_eval_dataloader()), figures["eval_accuracy"])


PEERS: dict[str, Callable[[Work, Clock], None]] = {f.__name__: f for f in (raw, fabric, lightning, accelerate, hf)}
if __name__ == "__main__":
    asked = Work.asked()
    PEERS[sys.argv[1]](asked, Clock(asked.steps))
    # all is measured and written; torch's threads may abort what exits in the ordinary way after a group was made
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
