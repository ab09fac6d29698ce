"""What passes from batch to batch: each row of the global batch gets what the same row of the batch before has left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from trainer.data.loader import Batch
from trainer.learning.task import Task, is_recurrent
from trainer.parallel.batch_gather import gather, set_gather_ranks, set_gather_span
from trainer.parallel.optimizer_state import CARRIED_PREFIX
from trainer.strategies.loss import Forward, TaskNetwork
from trainer.strategies.rank_context import RankContext

State = dict[str, Tensor]  # of some rows: by names, (rows, …) each, without a graph


class RecurrentTaskNetwork(TaskNetwork):
    """A network whose task gets what the rows of its inputs have left in the batch before."""

    @override
    def forward(self, inputs: Any, targets: Any, carried: State | None = None) -> Any:
        return self._task.forward(self.network, inputs, targets, carried)  # type: ignore[call-arg]  # its own has one


class NoRecurrentState:
    """Batches have nothing to do with each other: nothing is kept, handed on or saved."""

    def make_step_module(self, task: Task, network: nn.Module) -> TaskNetwork:
        """Task and network as one module, with what a forward is given."""
        return TaskNetwork(task, network)

    def wrap_forward(self, forward: Forward, batch: Batch, training: bool) -> Forward:
        """The forward of this micro-batch, which gets what its rows have left, and leaves what the next ones get."""
        return forward

    def undo_step(self, broken: Tensor) -> None:
        """Where this is true the step counts for nothing: its rows pass on what they were given."""

    def state(self) -> dict[str, Tensor]:
        """Collective: what a checkpoint stores."""
        return {}

    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors to read it into."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class RecurrentState(NoRecurrentState):
    """What a task's `carry` gives, of each micro-batch of this rank until its rows come again.

    A checkpoint has the rows of the global batch in their own order, so that any number of ranks and micro-batches goes
    on from it. An evaluation has states of its own.
    """

    def __init__(self, task: Task, place: RankContext) -> None:
        self._task, self._place = task, place
        self._training: dict[int, State] = {}  # by where in the global batch a micro-batch begins
        self._evaluation: dict[int, State] = {}
        self._given: dict[int, State] = {}  # what the rows of the step under way were given
        self._read: State = {}  # this rank's rows, of a checkpoint: for the first step after it
        self._total = 0  # rows of the global batch that training has seen last

    @override
    def make_step_module(self, task: Task, network: nn.Module) -> TaskNetwork:
        """The same, with one argument more."""
        return RecurrentTaskNetwork(task, network)

    @override
    def wrap_forward(self, forward: Forward, batch: Batch, training: bool) -> Forward:
        """The forward of this micro-batch, with one argument more than it is called with."""
        if training and batch.total != self._total:
            # a checkpoint's rows, if there are any, are those of other batches
            self._read, self._total = {}, batch.total
        kept = self._training if training else self._evaluation
        before = self._previous_state(kept, batch) if batch.continues else None
        if training:
            self._given[batch.span.start] = before or {}

        def carrying(inputs: Any, targets: Any) -> Any:
            output = forward(inputs, targets, before)
            kept[batch.span.start] = self._detach_state(output, len(batch.indices))
            return output

        return carrying

    @override
    def undo_step(self, broken: Tensor) -> None:
        """Where this is true the step counts for nothing: its rows pass on what they were given, or zeros."""
        for first, left in self._training.items():
            given = self._given[first]
            self._training[first] = {
                name: torch.where(broken, given.get(name, torch.zeros_like(x)), x) for name, x in left.items()
            }

    def _previous_state(self, kept: dict[int, State], batch: Batch) -> State | None:
        """What these rows have left; None where they have left nothing."""
        state, first = kept.get(batch.span.start), 0
        if state is None:
            # a checkpoint knows of no micro-batches: of the rank's rows these
            state, first = self._read, self._place.slice.rows(batch.span).start
        # the last batch of an evaluation may have fewer rows than the one before, its first ones
        return {name: x[first : first + len(batch.indices)] for name, x in state.items()} or None

    def _detach_state(self, output: Any, rows: int) -> State:
        """What the task keeps of an output: gradients end here, and nothing of it is left on other ranks."""
        state = self._task.carry(output)
        for name, x in state.items():
            if not isinstance(x, Tensor) or x.shape[:1] != (rows,):
                raise ValueError(
                    f"{type(self._task).__name__}.carry: {name} is {_describe(x)} and must be a tensor with the {rows} "
                    'samples first; of an LSTM\'s memory that is {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}'
                )
        # rows in order, as they come out of a checkpoint: another order in memory could round otherwise
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}
        return {name: x.detach().contiguous() for name, x in whole.items()}

    @override
    def state(self) -> dict[str, Tensor]:
        """Collective: the rows of the whole global batch, in their own order."""
        parts = [self._training[first] for first in sorted(self._training)] or [self._read]
        with set_gather_ranks(self._place.data_group), set_gather_span(range(self._total)):
            # the data ranks; every rank's rows come to all
            return {CARRIED_PREFIX + name: gather(torch.cat([part[name] for part in parts])) for name in parts[0]}

    @override
    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for the rows of the whole global batch, in the host's memory."""
        own = {name: one for name, one in stored.items() if name.startswith(CARRIED_PREFIX)}
        return {name: torch.empty(tuple(one.shape), dtype=one.dtype) for name, one in own.items()}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's rows, where the checkpoint had any."""
        ranks, whole = self._place.data_group, {name: x for name, x in state.items() if name.startswith(CARRIED_PREFIX)}
        self._training.clear()
        self._total = max((len(x) for x in whole.values()), default=0)
        # (total, …) → every ranks-th row from this rank's on, as samples are dealt
        own = {name.removeprefix(CARRIED_PREFIX): x[ranks.rank :: ranks.size] for name, x in whole.items()}
        self._read = {name: x.to(self._place.device).contiguous() for name, x in own.items()}


def _describe(x: Any) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def make_recurrent_state(task: Task, place: RankContext) -> NoRecurrentState:
    """What keeps a task's states from batch to batch, if it has any."""
    return RecurrentState(task, place) if is_recurrent(task) else NoRecurrentState()
