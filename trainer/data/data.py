"""Where samples come from: what a lab writes about its data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trainer.data.fingerprint import of_items
from trainer.data.preparation import Preparation
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from trainer.data.sample_random import Random


class Data:
    """A training set and an evaluation set, and how their batches are made. Only `train` is required.

    Data sets are map-style: `len(dataset)`, and `dataset[i]` returns (input, target). If one also has
    `batch(indices) -> (inputs, targets)`, whole batches are read at once instead of item by item; so are the rows of a
    `TensorDataset` with the default `collate`.
    """

    # mix(inputs, targets, other_inputs, other_targets, random) → (inputs, targets): combines each augmented training
    # sample with its partner, the sample half a global batch later (mixup). A method, or None: no partners.
    mix: Callable[[Any, Any, Any, Any, Random], tuple[Any, Any]] | None = None
    class_names: Sequence[str] = ()  # names of the classes, in the order of their numbers; empty: unknown

    def train(self) -> Dataset:
        """The training set."""
        raise NotImplementedError(f"{type(self).__name__} must give its training set: def train(self)")

    def evaluation(self) -> Dataset | None:
        """The evaluation set; None: nothing is evaluated."""
        return None

    def plain_train(self) -> Dataset:
        """The training set for `job.split=train`: each sample once, without random changes; default: `train`."""
        return self.train()

    def inputs(self, where: str) -> Dataset:
        """New samples for `job=predict job.inputs=WHERE`, prepared as the evaluation set is; Refusal: there are none.

        Items are (input, 0), or (anything of its shape, 1) where it cannot be read. The set also has `name(i)`, and
        `error(i)`: a sentence that says what is wrong with that one. Default: Refusal.
        """
        raise Refusal(
            f"job.inputs={where}: {type(self).__name__} does not say how new inputs are read: def inputs(self, where)."
            " job.split=evaluation and train are the sets of the data itself"
        )

    def collate(self, items: list[Any]) -> Any:
        """Make one batch of the items of a data set."""
        return default_collate(items)

    def augment(self, inputs: Any, targets: Any, random: Random, training: bool) -> tuple[Any, Any]:
        """Change a whole batch on its device; numbers of `random` depend only on (seed, epoch, sample index)."""
        return inputs, targets

    def preparation(self) -> Preparation | None:
        """What an evaluation does with a sample, as a module that an exported program can contain (`job.prepared`).

        Default: None, this data cannot say it. Who overrides `augment` or `collate` overrides this as well.
        """
        return None

    def as_pictures(self, inputs: Any) -> Tensor | None:
        """The inputs of a batch as pictures to look at: (B, C, H, W), 0 black to 1 white; None: they are no images.

        The default takes a tensor of that shape, and scales it from its smallest to its largest value.
        """
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.numel():
            return None
        low, high = inputs.min(), inputs.max()
        return (inputs - low) / (high - low).clamp_min(1e-12)

    def as_words(self, targets: Any) -> list[str]:
        """A short text for each target or prediction, to show below its picture; an empty list: none.

        The default is for one number for each sample, (B,): the number, or the class name if there are `class_names`.
        """
        if not isinstance(targets, Tensor) or targets.dim() != 1:
            return []
        if targets.is_floating_point():
            return [f"{number:.4g}" for number in targets.tolist()]
        names = dict(enumerate(self.class_names))
        return [names.get(number, str(number)) for number in targets.tolist()]

    def fingerprint(self, dataset: Any) -> str:
        """A text that tells one of the two sets from another: a run that resumes with other samples is refused.

        It must be the same in every process, and cheap. Empty: only the number of samples is compared. The default asks
        the set's own `fingerprint()` if it has one, else it takes the length and some items, without what is random.
        """
        own = getattr(dataset, "fingerprint", None)
        return str(own()) if callable(own) else of_items(dataset)

    def notes(self) -> list[str]:
        """Sentences about this data, printed at the start of a run, after both sets have been read."""
        return []

    def replaced(self) -> list[str]:
        """Names of the samples that could not be read and were replaced; printed at the end of a run."""
        return []

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """The epoch's global indices (weighted sampling, a curriculum); default: a permutation of the training set.

        The generator is seeded from (seed, epoch), equal on every rank. The order may repeat samples and have any
        length, the same in every epoch.
        """
        # (N,); an equal generator on every rank gives an equal order, and nothing need be sent
        return torch.randperm(len(self.train()), generator=generator)  # type: ignore[arg-type]
