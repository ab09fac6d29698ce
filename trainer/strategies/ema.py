"""The moving average of the weights (EMA): kept beside them, evaluated in their place, saved under their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from trainer.parallel.batch_norm import running_statistics
from trainer.parallel.device_mesh import to_local
from trainer.parallel.optimizer_state import EMA_PREFIX

METRIC_PREFIX = "ema_"  # of a figure's name

Views = Iterator[tuple[str, AbstractContextManager[None]]]


class NoMovingAverage:
    """There is none: nothing is kept, and the weights are all that is evaluated and saved."""

    def update(self, step: int, skipped: Tensor | float) -> None:
        """After an optimizer step, the `step`th; skipped: 1 where it was left out because of an overflow, else 0."""

    def views(self) -> Views:
        """What is to be evaluated: a prefix for its figures, and the context in which the network holds it."""
        yield "", nullcontext()

    def synchronize_statistics(self, agree: Callable[[], None]) -> None:
        """Collective if `agree` is, which brings the network's running statistics together."""
        agree()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores."""
        return {}

    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors to read it into."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class MovingAverage(NoMovingAverage):
    """Of each trainable parameter and of BatchNorm's running statistics, elementwise, of what this rank holds.

    The first update takes the weights as they are, each later one `decay` of the average and the rest of the weights:
    torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. All other buffers stay the network's own.
    """

    def __init__(self, network: nn.Module, decay: float, every: int) -> None:
        self._decay, self._every, self._move = decay, every, get_ema_multi_avg_fn(decay)
        self._statistics = running_statistics(network)
        trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self._tensors: dict[str, Tensor] = {**trained, **self._statistics}  # the network's, by their names
        self._averages: dict[str, Tensor] = {}  # their averages; none before the first update

    @torch.no_grad()
    @override
    def update(self, step: int, skipped: Tensor | float) -> None:
        """Move the average towards the weights, at every so many steps; not where the step was left out."""
        if step % self._every:
            return
        if not self._averages:
            self._averages = {name: own.detach().clone() for name, own in self._tensors.items()}
            return
        # shards and copies alike: nothing travels, and what ranks have in common stays the same bits
        kept, own = ([to_local(tensor) for tensor in tensors.values()] for tensors in (self._averages, self._tensors))
        if not isinstance(skipped, Tensor):
            self._move(kept, own, step)
            return
        # fp16: the device alone knows whether the step was left out, and nobody waits for its answer
        part = (1 - self._decay) * (1 - skipped)
        for average, weights in zip(kept, own, strict=True):
            average.lerp_(weights, part.to(average.device, average.dtype))

    @override
    def views(self) -> Views:
        """The weights, then the average in their place."""
        yield "", nullcontext()
        yield METRIC_PREFIX, self._in_place(self._tensors)

    @override
    def synchronize_statistics(self, agree: Callable[[], None]) -> None:
        """Collective if `agree` is, which brings the network's running statistics together: them and their average."""
        agree()
        with self._in_place(self._statistics):
            agree()

    @override
    def state(self) -> dict[str, Tensor]:
        """The averages under their names; DTensors where the weights are."""
        return {EMA_PREFIX + name: average for name, average in self._averages.items()}

    @override
    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for the averages that are stored; where there are none, the average begins from the weights."""
        wanted = {EMA_PREFIX + name: own for name, own in self._tensors.items()}
        return {name: torch.empty_like(own) for name, own in wanted.items() if name in stored}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the averages over; where a checkpoint has none, the next update is the first one.

        What has none among others was frozen until now: it never moved, so it is its own average.
        """
        there = {name: state[EMA_PREFIX + name] for name in self._tensors if EMA_PREFIX + name in state}
        own = self._tensors if there else {}
        self._averages = {n: there[n] if n in there else tensor.detach().clone() for n, tensor in own.items()}

    @contextmanager
    def _in_place(self, names: Collection[str]) -> Iterator[None]:
        """Inside, the network holds the averages of these; outside again what it held before, to the bit."""
        self._exchange(names)
        try:
            yield
        finally:
            self._exchange(names)

    @torch.no_grad()
    def _exchange(self, names: Collection[str]) -> None:
        for name in names if self._averages else ():
            own, average = to_local(self._tensors[name]), to_local(self._averages[name])
            aside = own.clone()  # one at a time: never is there a whole second copy
            own.copy_(average)
            average.copy_(aside)
