"""The state that `Task.carry` passes from batch to batch: row i gets the state of row i of the batch before."""

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

State = dict[str, Tensor]  # of some rows: name → (rows, …), detached


class RecurrentTaskNetwork(TaskNetwork):
    """Task and network as one module; the task's forward also gets the state of its rows."""

    @override
    def forward(self, inputs: Any, targets: Any, carried: State | None = None) -> Any:
        return self._task.forward(self.network, inputs, targets, carried)  # type: ignore[call-arg]  # its own has one


class NoRecurrentState:
    """The task has no `carry`: batches are independent, and nothing is kept or saved."""

    def make_step_module(self, task: Task, network: nn.Module) -> TaskNetwork:
        """Task and network as one module."""
        return TaskNetwork(task, network)

    def wrap_forward(self, forward: Forward, batch: Batch, training: bool) -> Forward:
        """The forward of this micro-batch, which gets the state of its rows, and leaves one for the next batch."""
        return forward

    def undo_step(self, broken: Tensor) -> None:
        """If `broken` is true (0-d, on the device), the rows keep the state from before this step."""

    def state(self) -> dict[str, Tensor]:
        """Collective: the tensors for a checkpoint."""
        return {}

    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Empty tensors to read a checkpoint into."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""


class RecurrentState(NoRecurrentState):
    """What `Task.carry` returns, kept for each micro-batch of this rank until its rows come again.

    A checkpoint has the rows in the order of the global batch, so that any number of ranks and micro-batches can resume
    from it. Evaluations have separate states.
    """

    def __init__(self, task: Task, context: RankContext) -> None:
        self._task, self._context = task, context
        self._training: dict[int, State] = {}  # by the position in the global batch where a micro-batch begins
        self._evaluation: dict[int, State] = {}
        self._before: dict[int, State] = {}  # the states before the present step
        self._loaded: State = {}  # this rank's rows of a checkpoint, for the first step after it
        self._total = 0  # rows of the last global batch of training

    @override
    def make_step_module(self, task: Task, network: nn.Module) -> TaskNetwork:
        """The same, with one more argument."""
        return RecurrentTaskNetwork(task, network)

    @override
    def wrap_forward(self, forward: Forward, batch: Batch, training: bool) -> Forward:
        """The forward of this micro-batch, which passes the state of its rows as one more argument."""
        if training and batch.total != self._total:
            # another global batch: the rows of the checkpoint do not belong to it
            self._loaded, self._total = {}, batch.total
        states = self._training if training else self._evaluation
        before = self._previous_state(states, batch) if batch.continues else None
        if training:
            self._before[batch.span.start] = before or {}

        def recurrent_forward(inputs: Any, targets: Any) -> Any:
            output = forward(inputs, targets, before)
            states[batch.span.start] = self._detach_state(output, len(batch.indices))
            return output

        return recurrent_forward

    @override
    def undo_step(self, broken: Tensor) -> None:
        """If `broken` is true, the rows keep the state from before this step, or zeros if they had none."""
        for first, state in self._training.items():
            before = self._before[first]
            # chosen on the device: nothing waits
            self._training[first] = {
                name: torch.where(broken, before.get(name, torch.zeros_like(x)), x) for name, x in state.items()
            }

    def _previous_state(self, states: dict[int, State], batch: Batch) -> State | None:
        """The state that these rows have from the batch before; None if they have none."""
        state, first = states.get(batch.span.start), 0
        if state is None:
            # from a checkpoint, which has all rows of this rank in one tensor
            state, first = self._loaded, self._context.slice.rows(batch.span).start
        # the last batch of an evaluation may have fewer rows than the one before: then the first ones
        return {name: x[first : first + len(batch.indices)] for name, x in state.items()} or None

    def _detach_state(self, output: Any, rows: int) -> State:
        """The state in an output, detached, and whole on this rank."""
        state = self._task.carry(output)
        for name, x in state.items():
            if not isinstance(x, Tensor) or x.shape[:1] != (rows,):
                raise ValueError(
                    f"{type(self._task).__name__}.carry: {name} is {_describe(x)} and must be a tensor with the {rows} "
                    'samples first; of an LSTM\'s memory that is {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}'
                )
        # contiguous, as a checkpoint gives it back: another memory layout could round differently
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}
        return {name: x.detach().contiguous() for name, x in whole.items()}

    @override
    def state(self) -> dict[str, Tensor]:
        """Collective: the rows of the whole global batch, in its order."""
        parts = [self._training[first] for first in sorted(self._training)] or [self._loaded]
        with set_gather_ranks(self._context.data_group), set_gather_span(range(self._total)):
            # the data ranks; the rows of every rank are sent to all, (total, …)
            return {CARRIED_PREFIX + name: gather(torch.cat([part[name] for part in parts])) for name in parts[0]}

    @override
    def empty(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for the rows of the whole global batch, in the host's memory."""
        carried = {name: x for name, x in stored.items() if name.startswith(CARRIED_PREFIX)}
        return {name: torch.empty(tuple(x.shape), dtype=x.dtype) for name, x in carried.items()}

    @override
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's rows, where the checkpoint had any."""
        ranks, device = self._context.data_group, self._context.device
        whole = {name: x for name, x in state.items() if name.startswith(CARRIED_PREFIX)}
        self._training.clear()
        self._total = max((len(x) for x in whole.values()), default=0)
        # (total, …) → every ranks-th row from this rank's on, as samples are dealt
        rows = {name.removeprefix(CARRIED_PREFIX): x[ranks.rank :: ranks.size] for name, x in whole.items()}
        self._loaded = {name: x.to(device).contiguous() for name, x in rows.items()}


def _describe(x: Any) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def make_recurrent_state(task: Task, context: RankContext) -> NoRecurrentState:
    """What keeps the state of a task from batch to batch, if it has a `carry`."""
    return RecurrentState(task, context) if is_recurrent(task) else NoRecurrentState()
