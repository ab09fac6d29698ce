"""Where samples come from: what a lab writes about its data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

if TYPE_CHECKING:
    from trainer.data.draws import Random


class Data:
    """A training set and an evaluation set, and how their batches are made. Only `train` must be written.

    Data sets are map-style: `len(dataset)`, and `dataset[i]` gives (input, target). One that also offers
    `batch(indices) -> (inputs, targets)` is asked for whole batches, already stacked, instead of item by item; of a
    `TensorDataset` that nobody collates differently the rows are taken at once.
    """

    # mix(inputs, targets, other_inputs, other_targets, random) → (inputs, targets): changes each augmented training
    # sample by the one half a global batch further on (mixup). A method, or None: then nobody has a partner.
    mix: Callable[[Any, Any, Any, Any, Random], tuple[Any, Any]] | None = None

    def train(self) -> Dataset:
        """The training set."""
        raise NotImplementedError(f"{type(self).__name__} must give its training set: def train(self)")

    def evaluation(self) -> Dataset | None:
        """The evaluation set; None: nothing is evaluated."""
        return None

    def plain_train(self) -> Dataset:
        """The training set as an evaluation reads sets: each sample once, nothing of it drawn; default: `train`."""
        return self.train()

    def collate(self, items: list[Any]) -> Any:
        """Make one batch of the items of a data set."""
        return default_collate(items)

    def augment(self, inputs: Any, targets: Any, random: Random, training: bool) -> tuple[Any, Any]:
        """Change a whole batch on its device; `random` draws what depends on (seed, epoch, sample index) alone."""
        return inputs, targets

    def notes(self) -> list[str]:
        """Sentences about this data that a run says at its start, once both sets have been read."""
        return []

    def replaced(self) -> list[str]:
        """The samples that could not be read, by name, for which others were taken; a run says them at its end."""
        return []

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """The epoch's global indices (weighted sampling, a curriculum); default: a permutation of the training set.

        The generator is seeded from (seed, epoch), equal on every rank. The order may repeat samples and have any
        length, the same in every epoch.
        """
        # (N,); an equal generator on every rank gives an equal order, and nothing need be sent
        return torch.randperm(len(self.train()), generator=generator)  # type: ignore[arg-type]
