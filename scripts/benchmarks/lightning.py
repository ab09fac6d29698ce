"""lightning.Trainer, with what it does unasked: a progress bar, a summary, checkpoints."""

import os
from typing import Any

import lightning
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, loaders, loss, network, optimizer


class Module(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.model = work, network(work)

    def training_step(self, batch: Any, index: int) -> Tensor:
        value = loss(self.model(batch[0]), batch[1])
        self.log("loss", value)
        return value

    def validation_step(self, batch: Any, index: int) -> None:
        right = (self.model(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=self.work.ranks > 1, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return optimizer(self.work, self.parameters())


def main() -> None:
    """Train, evaluate, report."""
    work, clock = Work.asked(), Clock()
    folder = os.environ["BENCH_FOLDER"]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=work.ranks,
        strategy="ddp" if work.ranks > 1 else "auto",
        max_steps=work.steps,
        logger=TensorBoardLogger(folder, "lightning"),
        log_every_n_steps=50,
        default_root_dir=folder,
        use_distributed_sampler=work.name != "overhead",
    )
    train, test = loaders(work)
    module = Module(work)
    trainer.fit(module, train)
    clock.evaluate()
    (figures,) = trainer.validate(module, test, verbose=False)
    clock.report(work.steps, int(trainer.num_val_batches[0]), figures["accuracy"])


if __name__ == "__main__":
    main()
