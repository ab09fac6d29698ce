"""Pictures in classes: what all sets of them have in common, wherever they come from."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from recipes.inputs import Listed, listed
from recipes.vision.augment import Augment, Random, as_seen
from recipes.vision.decode import ENDINGS, Window, Windows
from recipes.vision.prepared import preparation
from recipes.vision.sampling import appearances, sampled
from recipes.vision.unlabelled import Unlabelled
from trainer.data.data import Data, Preparation
from trainer.messages import Refusal


class Pictures(Data):
    """A training and an evaluation set of pictures with labels: augmented in batches, mixed, drawn several times.

    What derives from it says `_read(training)`: a data set whose `labels` are a tensor (N,) of class numbers.
    """

    num_classes: int
    stored: tuple[Literal[1, 3], int]  # channels and side of the pictures, as they are before `augment`

    def __init__(self, augment: Augment, repeat: int = 1, balance: float = 0.0) -> None:
        if repeat < 1:
            raise Refusal(f"data.repeat is {repeat}; it is how often a picture comes in a row, 1 or more")
        if not 0 <= balance <= 1:
            raise Refusal(f"data.balance is {balance}; it is 0 (classes as they come) to 1 (all equally often)")
        self._augment, self._repeat, self._balance = augment, repeat, balance
        # no method, where nothing is mixed: samples have partners only where there is one
        self.mix = self._mixed if augment.mixes else None

    def train(self) -> Any:
        """The training pictures; with a number for each appearance, where one may come several times."""
        return appearances(self._training) if self._several else self._training

    def evaluation(self) -> Any:
        """The evaluation pictures."""
        return self._evaluation

    def plain_train(self) -> Any:
        """The training pictures, each once."""
        return self._training

    def inputs(self, where: str) -> Unlabelled:
        """New pictures: the square in the middle of each, in the size of those that were learned."""
        channels, side = self.stored
        return self._unlabelled(where, Windows(centre=1.0).evaluation, side, channels)

    def _unlabelled(
        self, where: str, window: Window, size: int, channels: Literal[1, 3], draft: bool = True
    ) -> Unlabelled:
        files = Listed(listed(where, ENDINGS, listing=True))
        return Unlabelled(files, window, size, channels, self._augment.full_scale, draft)

    def augment(self, inputs: Tensor, targets: Tensor, random: Random, training: bool) -> tuple[Any, Any]:
        """Small changes of the pictures while training; normalisation always."""
        return self._augment(inputs, random, training), targets

    def preparation(self) -> Preparation | None:
        """Whole pictures; what is white in them is what is white in the set."""
        picture, _ = self.plain_train()[0]  # (C, H, W)
        channels, high, wide = picture.shape
        known = high == wide and channels in (1, 3)
        return preparation(wide, channels, self._augment.mean, self._augment.std) if known else None

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """A permutation, with repeats and balance where they are asked for."""
        if not self._several:
            return torch.randperm(len(self._training), generator=generator)
        return sampled(self._training.labels, self._repeat, self._balance, generator)

    def _mixed(self, inputs: Any, targets: Any, others: Any, other_targets: Any, random: Random) -> tuple[Any, Any]:
        return self._augment.mix(inputs, targets, others, other_targets, random, self.num_classes)

    def as_pictures(self, inputs: Any) -> Tensor | None:
        """The pictures in their own colours; what a lab has made of them, as far as it can be seen."""
        mean, std = tuple(self._augment.mean), tuple(self._augment.std)
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or len(mean) not in (1, inputs.shape[1]):
            return super().as_pictures(inputs)
        return as_seen(inputs, mean, std)

    def as_words(self, targets: Any) -> list[str]:
        """The class; of mixed pictures the two largest shares, as `3 70 %, 8 30 %`."""
        if not isinstance(targets, Tensor) or targets.dim() != 2:
            return super().as_words(targets)
        shares, classes = targets.topk(min(2, self.num_classes))  # (B, 2)
        names = [super(Pictures, self).as_words(column) for column in classes.unbind(1)]
        return [
            ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(own, parts, strict=True) if share)
            for own, parts in zip(zip(*names, strict=True), shares.tolist(), strict=True)
        ]

    @property
    def _several(self) -> bool:
        return self._repeat > 1 or self._balance > 0

    @cached_property
    def _training(self) -> Any:
        return self._labelled(training=True)

    @cached_property
    def _evaluation(self) -> Any:
        return self._labelled(training=False)

    def _labelled(self, training: bool) -> Any:
        """One of the sets. Refusal where a label is no class: cross entropy would fail somewhere in the middle."""
        dataset, most = self._read(training), self.num_classes - 1
        low, high = (int(dataset.labels.min()), int(dataset.labels.max())) if len(dataset.labels) else (0, 0)
        if not 0 <= low <= high <= most:
            part = "training" if training else "evaluation"
            raise Refusal(
                f"labels of the {part} pictures go from {low} to {high}; with num_classes={self.num_classes} they are"
                f" 0 to {most}"
            )
        return dataset

    def _read(self, training: bool) -> Any:
        raise NotImplementedError
