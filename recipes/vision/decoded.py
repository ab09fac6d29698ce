"""Pictures that are decoded one by one, in worker processes; what happens where one is damaged."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.vision.augment import Augment
from recipes.vision.decode import Window, Windows, decode
from recipes.vision.pictures import Pictures
from recipes.vision.prepared import preparation
from recipes.vision.unlabelled import Unlabelled
from trainer.data.data import Preparation
from trainer.messages import BadData, Refusal, escape_line

_MOST = 100  # damaged pictures in a row; then nothing is there that could be read
_SHOWN = 5  # names in a message


class Sources(Protocol):
    """Where compressed pictures are, and what they show."""

    labels: Tensor  # (N,) class numbers

    def source(self, at: int) -> Any:
        """What PIL opens: a path, or a file in memory."""

    def name(self, at: int) -> str:
        """How a message calls it."""

    def fingerprint(self) -> str:
        """What tells these pictures from others."""


class LostPictures(Exception):
    """Several pictures cannot be read, for one reason: their shard is missing."""

    def __init__(self, reason: str, indices: Tensor) -> None:
        """indices: (n,) of the pictures."""
        super().__init__(reason)
        self.indices = indices


class DecodedPictures(Pictures):
    """Pictures (C, image_size, image_size) out of compressed ones: random windows in training, else central squares.

    An evaluation may have another size (Touvron et al. 2019: a window of the whole picture shows things smaller). What
    derives from it says `_sources(training)`.
    """

    def __init__(
        self,
        augment: Augment,
        window: Windows,
        image_size: int,
        eval_image_size: int | None,
        channels: Literal[1, 3],
        on_bad: Literal["raise", "skip"],
        bad_budget: float,
        repeat: int,
        balance: float,
        image_sizes: list[list[int]] | None = None,
    ) -> None:
        """image_sizes: [first epoch, size] of each part of the training; None: always image_size."""
        super().__init__(augment, repeat, balance)
        if not 0 <= bad_budget <= 1:
            raise Refusal(f"data.bad_budget is {bad_budget:g}; it is a fraction of the images, 0 to 1")
        if len(augment.mean) not in (1, channels):
            raise Refusal(
                f"data.channels={channels}, and data.augment.mean and data.augment.std have {len(augment.mean)} values;"
                " give one of each for all channels, such as data.augment.mean=[0.449] data.augment.std=[0.226]"
            )
        for name, size in (("image_size", image_size), ("eval_image_size", eval_image_size)):
            if size is not None and size < 1:
                raise Refusal(f"data.{name} is {size}; it is a number of pixels, 1 or more")
        self._windows, self.image_size, self._channels, self._on_bad = window, image_size, channels, on_bad
        self._budget = bad_budget
        self._sizes = image_sizes or [[0, image_size]]
        _refuse_sizes(self._sizes, image_size)
        self.largest_epoch = next(epoch for epoch, size in self._sizes if size == image_size)
        self._eval_size = image_size if eval_image_size is None else eval_image_size
        self._parts: list[Decoded] = []  # that have been made

    def replaced(self) -> list[str]:
        """The damaged pictures that others stand for."""
        return [name for part in self._parts for name in part.replaced()]

    def plain_train(self) -> Decoded:
        """The training pictures, each once, in the windows of an evaluation."""
        return self._decoded(self._sources(training=True), training=False)

    def preparation(self) -> Preparation | None:
        """The square in the middle; None where a window of a lab's own says otherwise."""
        augment, windows = self._augment, self._windows
        if type(windows).evaluation is not Windows.evaluation:
            return None
        return preparation(
            self._eval_size, self._channels, augment.mean, augment.std, windows.centre, white=augment.full_scale
        )

    def inputs(self, where: str) -> Unlabelled:
        """New pictures, in the windows and the size of an evaluation."""
        return self._unlabelled(where, self._windows.evaluation, self._eval_size, self._channels, self._windows.draft)

    def _read(self, training: bool) -> Decoded:
        return self._decoded(self._sources(training), training)

    def _decoded(self, sources: Sources, training: bool) -> Decoded:
        damaged = Lenient(sources, self._budget) if self._on_bad == "skip" else Strict()
        window = self._windows.training if training else self._windows.evaluation
        sizes = self._sizes if training else [[0, self._eval_size]]
        self._parts.append(Decoded(sources, window, sizes, self._channels, damaged, self._windows.draft))
        return self._parts[-1]

    def _sources(self, training: bool) -> Sources:
        raise NotImplementedError


def _refuse_sizes(sizes: list[list[int]], largest: int) -> None:
    """Refuse what is no list of epochs with sizes, or whose largest size is not the one that networks are told."""
    pairs = all(len(pair) == 2 and min(pair[0], pair[1] - 1) >= 0 for pair in sizes)
    epochs = [pair[0] for pair in sizes] if pairs else []
    if not pairs or epochs[0] != 0 or epochs != sorted({*epochs}):
        raise Refusal(
            f"data.image_sizes={sizes}: it is a list of [first epoch, pixels], the epochs growing from 0:"
            " [[0,160],[12,192]]"
        )
    if max(size for _, size in sizes) != largest:
        raise Refusal(
            f"data.image_sizes={sizes}, data.image_size={largest}: the largest must be data.image_size, which the"
            " network and plans are told"
        )


class Decoded(Dataset):
    """Compressed pictures as square tensors, all of an epoch of one size, and their labels."""

    def __init__(
        self,
        sources: Sources,
        window: Window,
        sizes: list[list[int]],
        channels: Literal[1, 3],
        damaged: Strict | Lenient,
        draft: bool = True,
    ) -> None:
        """sizes: [first epoch, size], the epochs growing from 0."""
        self.sources, self.labels = sources, sources.labels
        self._window, self._sizes, self._channels, self._damaged = window, sizes, channels, damaged
        self._draft = draft

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> tuple[Tensor, int]:
        """(C, size, size) of uint8, and the label. Instead of a damaged one the next that can be read.

        So what stands for it follows from the files alone, and is the same on every rank. BadData where it is to end
        the run, or where there is none.
        """
        attempts, size = 0, [size for first, size in self._sizes if first <= epoch][-1]
        for at in range(index, index + len(self.labels)):
            at %= len(self.labels)
            if self._damaged.is_known(at):
                continue
            if (attempts := attempts + 1) > _MOST:
                break
            try:
                picture = decode(self.sources.source(at), size, self._channels, self._window, self._draft)
            except BadData:  # a server that does not answer: no picture is damaged
                raise
            except LostPictures as error:
                self._damaged.met(error.indices, str(error))
                continue
            except Exception as error:  # PIL has many, as formats have
                reason = " ".join(str(error).split()) or type(error).__name__
                self._damaged.met(at, f"{escape_line(self.sources.name(at))} cannot be read as a picture: {reason}")
                continue
            return picture, int(self.labels[at])
        raise BadData(f"{escape_line(self.sources.name(index))} and the {_MOST - 1} pictures after it cannot be read")

    def fingerprint(self) -> str:
        """That of the sources: no picture is decoded for it."""
        return self.sources.fingerprint()

    def name(self, index: int) -> str:
        """What a table of predictions calls it: the path of a file."""
        return self.sources.name(index)

    def replaced(self) -> list[str]:
        """The names of those that were damaged and replaced so far."""
        return [escape_line(self.sources.name(at)) for at in self._damaged.seen()]


class Strict:
    """A damaged picture ends the run."""

    def met(self, at: int | Tensor, said: str) -> None:
        """BadData with what is wrong."""
        raise BadData(f"{said}; data.on_bad=skip takes another in its place")

    def is_known(self, at: int) -> bool:
        """No picture is: the first damaged one ends the run."""
        return False

    def seen(self) -> list[int]:
        """None was replaced."""
        return []


class Lenient:
    """Damaged pictures are replaced, and remembered over all worker processes; too many of them end the run."""

    def __init__(self, sources: Sources, budget: float) -> None:
        """`budget`: the fraction of the pictures that may be damaged."""
        self._sources, self._budget = sources, budget
        self._flags = torch.zeros(
            len(sources.labels), dtype=torch.bool
        ).share_memory_()  # (N,), the same in every worker

    def is_known(self, at: int) -> bool:
        """Was this one met before, by any worker process? It is not tried again."""
        return bool(self._flags[at])

    def met(self, at: int | Tensor, said: str) -> None:
        """Remember it, or all of these (n,).

        BadData with the names of some where this is one too many, of those that this rank has met.
        """
        self._flags[at] = True
        bad, size = int(self._flags.sum()), len(self._flags)
        if bad > math.ceil(self._budget * size):
            names = [escape_line(self._sources.name(one)) for one in self.seen()[:_SHOWN]] + ["…"] * (bad > _SHOWN)
            raise BadData(
                f"{said}; it is one of {bad} damaged pictures of {size}, and data.bad_budget={self._budget:g} allows no"
                f" more than {math.ceil(self._budget * size)}: {', '.join(names)}"
            )

    def seen(self) -> list[int]:
        """Those that were met, each once."""
        return self._flags.nonzero().flatten().tolist()
