"""transformers.Trainer; clipping off and a constant rate, so that it computes what the others compute."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainingArguments, get_constant_schedule

from scripts.benchmarks.clock import Clock
from scripts.benchmarks.work import Work, loaders, loss, network, optimizer


class Called(nn.Module):
    """The network as the Trainer calls it: with labels, for a loss."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = network(work)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.model(x)
        return {"loss": loss(output, labels), "logits": output}


class Given(Trainer):
    """A Trainer that takes the loaders that all programs have."""

    work: Work
    made: list[DataLoader]

    def get_train_dataloader(self) -> DataLoader:
        return self.made[0] if self.work.dealt else self.accelerator.prepare(self.made[0])

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self.made[1] if self.work.dealt else self.accelerator.prepare(self.made[1])


def main() -> None:
    """Train, evaluate, report."""
    work, clock = Work.asked(), Clock()
    folder = os.environ["BENCH_FOLDER"]
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/hf"
    model = Called(work)
    steps = optimizer(work, model.parameters())
    arguments = TrainingArguments(
        f"{folder}/hf",
        max_steps=work.steps,
        per_device_train_batch_size=work.batch,
        per_device_eval_batch_size=work.eval_batch,
        logging_steps=50,
        report_to="tensorboard",
        use_cpu=True,
        max_grad_norm=0.0,
        label_names=["labels"],
        save_total_limit=1,
    )

    def collate(batch: Any) -> dict[str, Tensor]:
        x, y = batch if work.name == "overhead" else default_collate(batch)
        return {"x": x, "labels": y}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    empty: Any = torch.utils.data.TensorDataset(torch.zeros(10))  # asked for, never read
    optimizers = (steps, get_constant_schedule(steps))
    trainer = Given(model, arguments, collate, empty, empty, compute_metrics=accuracy, optimizers=optimizers)
    trainer.work, trainer.made = work, loaders(work, collate_fn=collate)
    trainer.train()
    clock.evaluate()
    figures = trainer.evaluate()
    clock.report(work.steps, len(trainer.get_eval_dataloader()), figures["eval_accuracy"])


if __name__ == "__main__":
    main()
