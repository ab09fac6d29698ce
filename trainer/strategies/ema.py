"""The exponential moving average of the weights (EMA): updated after steps, evaluated in their place, saved."""

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

METRIC_PREFIX = "ema_"  # of the names of the average's metrics

Views = Iterator[tuple[str, AbstractContextManager[None]]]


class NoMovingAverage:
    """No average is kept: only the weights are evaluated and saved."""

    def update(self, step: int, skipped: Tensor | float) -> None:
        """Follow the weights after step number `step`; skipped: 1 if it was left out, else 0."""

    def views(self) -> Views:
        """What to evaluate: a prefix for the names of its metrics, and a context in which the network holds it."""
        yield "", nullcontext()

    def synchronize_statistics(self, synchronize: Callable[[], None]) -> None:
        """Collective if `synchronize` is, which makes the network's running statistics equal on all ranks."""
        synchronize()

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {}

    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Empty tensors to read a checkpoint into."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class MovingAverage(NoMovingAverage):
    """The average of each trainable parameter and of BatchNorm's running statistics, elementwise, on local shards.

    The first update takes the weights as they are, each later one `decay` of the average and the rest of the weights:
    torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. All other buffers stay the network's own. Of weights
    with fewer bits than fp32 the average has those of fp32: what it moves by would be rounded away.
    """

    def __init__(self, network: nn.Module, decay: float, every: int) -> None:
        self._decay, self._every, self._move = decay, every, get_ema_multi_avg_fn(decay)
        self._statistics = running_statistics(network)
        trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self._tensors: dict[str, Tensor] = {**trained, **self._statistics}  # of the network, by name
        self._averages: dict[str, Tensor] = {}  # empty before the first update

    @torch.no_grad()
    @override
    def update(self, step: int, skipped: Tensor | float) -> None:
        """Move the average towards the weights after every so many steps; not if the step was left out."""
        if step % self._every:
            return
        if not self._averages:
            self._averages = {name: tensor.detach().clone().to(_wide(tensor)) for name, tensor in self._tensors.items()}
            return
        # elementwise, on shards and on copies: nothing is sent, and copies stay the same bits
        pairs = [(to_local(self._averages[name]), to_local(tensor)) for name, tensor in self._tensors.items()]
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]  # these at once; of others one at a time,
        others = [[pair] for pair in pairs if pair[0].dtype != pair[1].dtype]  # since it is copied into fp32
        for some in (alike, *others) if alike else others:
            averages, weights = [average for average, _ in some], [tensor.to(average.dtype) for average, tensor in some]
            if not isinstance(skipped, Tensor):
                self._move(averages, weights, step)
                continue
            # only the device knows whether the step was left out, and the host does not wait for it
            part = (1 - self._decay) * (1 - skipped)
            for average, tensor in zip(averages, weights, strict=True):
                average.lerp_(tensor, part.to(average.device, average.dtype))

    @override
    def views(self) -> Views:
        """The weights, then the average in their place."""
        yield "", nullcontext()
        yield METRIC_PREFIX, self._in_place(self._tensors)

    @override
    def synchronize_statistics(self, synchronize: Callable[[], None]) -> None:
        """Collective if `synchronize` is: the running statistics, then their averages in their place."""
        synchronize()
        with self._in_place(self._statistics):
            synchronize()

    @override
    def state(self) -> dict[str, Tensor]:
        """The averages under their names; DTensors where the weights are."""
        return {EMA_PREFIX + name: average for name, average in self._averages.items()}

    @override
    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory for the averages that are stored; without them the average begins from the weights."""
        tensors = {EMA_PREFIX + name: tensor for name, tensor in self._tensors.items()}
        return {
            name: torch.empty_like(tensor, dtype=_wide(tensor)) for name, tensor in tensors.items() if name in stored
        }

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the averages over; without any in the checkpoint, the next update is the first one.

        If only some tensors have no average, they were frozen until now: they never moved and are their own average.
        """
        stored = {name: state[EMA_PREFIX + name] for name in self._tensors if EMA_PREFIX + name in state}
        tensors = self._tensors if stored else {}
        self._averages = {
            n: stored[n] if n in stored else tensor.detach().clone().to(_wide(tensor)) for n, tensor in tensors.items()
        }

    @contextmanager
    def _in_place(self, names: Collection[str]) -> Iterator[None]:
        """Inside, the network holds the averages of these tensors; afterwards the same bits as before."""
        kept: dict[str, Tensor] = {}  # weights with fewer bits than their average, which would be rounded there
        self._exchange(names, kept)
        try:
            yield
        finally:
            self._exchange(names, kept)

    @torch.no_grad()
    def _exchange(self, names: Collection[str], kept: dict[str, Tensor]) -> None:
        for name in names if self._averages else ():
            tensor, average = to_local(self._tensors[name]), to_local(self._averages[name])
            weights = tensor.clone()  # one tensor at a time: there is never a whole second copy
            if tensor.dtype == average.dtype:
                tensor.copy_(average)
                average.copy_(weights)
            elif name in kept:
                average += weights.to(average.dtype) - average.to(tensor.dtype)  # 0, if nobody has changed it meanwhile
                tensor.copy_(kept[name])
            else:
                tensor.copy_(average)
                kept[name] = weights


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
