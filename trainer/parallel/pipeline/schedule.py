"""How micro-batches pass through the stages: torch's schedules in training, and a chain of forwards in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.data.nested_tensors import cast_floats, to_device
from trainer.launch.devices import accumulation_dtype
from trainer.parallel.buckets import Sums, to_accumulator
from trainer.parallel.ranks import Group

ScheduleName = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True)
class ScheduleTraits:
    """What is special about one of torch's schedules."""

    multi_stage: bool = True  # a rank may hold several stages
    v_shaped: bool = False  # two stages a rank, down the ranks and back up: rank 0 holds the first and the last
    splits_backward: bool = False  # gradients of inputs and of weights are computed apart
    in_rounds: bool = False  # micro-batches come in equal rounds of about as many as there are ranks
    fills_pipeline: bool = False  # as many micro-batches as stages, or more


SCHEDULES: dict[str, ScheduleTraits] = {
    "1F1B": ScheduleTraits(multi_stage=False),
    "GPipe": ScheduleTraits(multi_stage=False),
    "Interleaved1F1B": ScheduleTraits(in_rounds=True),
    "LoopedBFS": ScheduleTraits(),
    "InterleavedZeroBubble": ScheduleTraits(splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": ScheduleTraits(v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleTraits(v_shaped=True, splits_backward=True, fills_pipeline=True),
}


@dataclass(frozen=True)
class StageLayout:
    """Which rank of a pipeline holds which stages."""

    ranks: int
    per_rank: int  # stages
    v_shaped: bool = False

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.ranks * self.per_rank

    def owner(self, stage: int) -> int:
        """The rank that holds a stage: in turn, or back up again."""
        loop, at = divmod(stage, self.ranks)
        return self.ranks - 1 - at if self.v_shaped and loop % 2 else at

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.count) if self.owner(stage) == rank]


def can_run(name: str, layout: StageLayout, micro_batches: int) -> bool:
    """Can this schedule run so many micro-batches? With others torch raises an error or hangs."""
    traits = SCHEDULES[name]
    if traits.fills_pipeline and micro_batches < layout.count:
        return False
    return not traits.in_rounds or micro_batches % max(1, micro_batches // layout.ranks) == 0


def runs_over_gloo(name: str) -> bool:
    """Can gloo run it? Before torch 2.13 two neighbouring stages on one rank begin with a message to themselves."""
    return not SCHEDULES[name].v_shaped or torch.__version__ >= "2.13"


def make_pipeline_schedule(name: str, stages: list[Any], micro_batches: int) -> Any:
    """torch's schedule over this rank's stages (its PipelineStage). The last stage of all returns the loss itself.

    1F1B needs as many micro-batches as stages; with fewer it is the same work in GPipe's order.
    """
    from torch.distributed import pipelining  # here, because the import takes seconds

    if name == "1F1B" and micro_batches < stages[0].num_stages:
        name = "GPipe"
    make: Callable[..., Any] = getattr(pipelining, f"Schedule{name}")
    stage_or_stages = stages if SCHEDULES[name].multi_stage else stages[0]
    # the last stage knows the targets and returns its loss; torch wants a function all the same
    return make(stage_or_stages, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)


ERROR_TIMEOUT = timedelta(seconds=10)  # of the message with which a rank that has failed tells the next one


class StageChain:
    """Runs the stages of a pipeline one after the other, forwards only, for batches of any size.

    Shapes are sent before the values, as CPU tensors. A stage that fails sends its error instead, so that no rank waits
    for values that will not come.
    """

    def __init__(self, ranks: Group, layout: StageLayout, device: torch.device) -> None:
        self._ranks, self._layout, self._device = ranks, layout, device

    def run(self, stages: Mapping[int, Callable[..., Any]]) -> tuple[Any, dict[int, tuple[Tensor, ...]]]:
        """Collective over the pipeline: call this rank's stages, by number, with what the stage before hands on.

        Returns the output of the last stage of all, if this rank has it; and by stage what this rank received or sent,
        on the meta device. RuntimeError where something else than tensors is handed on.
        """
        # a chain: at any time one rank computes, and the next one waits for it
        values: Any = ()
        handed: dict[int, tuple[Tensor, ...]] = {}
        under_way: list[tuple[Any, Tensor]] = []  # a tensor must live until it is sent
        for stage in sorted(stages):
            try:
                # neighbours on one rank hand on in memory
                if stage and not self._is_here(stage - 1):
                    values = self._receive(stage)
                handed[stage] = _meta_copies(values)
                values = stages[stage](*values)
                if stage == self._layout.count - 1:
                    break
                _refuse_non_tensors(stage, values)
                handed[stage + 1] = _meta_copies(values)
            except Exception as error:  # whatever a stage does: the next rank waits to be told
                self._send_error(stage, str(error))
                raise
            if not self._is_here(stage + 1):
                header = [[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values]
                peer = self._layout.owner(stage + 1)
                # to the rank of the next stage: shapes and types, then every value
                under_way += self._ranks.send_value(header, peer)
                under_way += [self._ranks.send(value, peer) for value in values]
        # only now, so that a rank of several stages could go on while values travelled
        for work, _ in under_way:
            work.wait()
        return values if self._layout.count - 1 in stages else None, handed

    def _is_here(self, stage: int) -> bool:
        return self._layout.owner(stage) == self._ranks.rank

    def _receive(self, stage: int) -> tuple[Tensor, ...]:
        """Wait for what the stage before this one hands on. RuntimeError where that has failed."""
        peer = self._layout.owner(stage - 1)
        header = self._ranks.receive_value(peer)  # from the rank of the stage before: shapes and types, or an error
        if isinstance(header, str):
            raise RuntimeError(f"an earlier stage failed: {header}")
        spaces = (torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in header)
        return tuple(self._ranks.receive_(space, peer) for space in spaces)

    def _send_error(self, stage: int, error: str) -> None:
        """Tell the rank that waits for what follows this stage."""
        for later in range(stage + 1, self._layout.count):
            if not self._is_here(later):
                for work, _ in self._ranks.send_value(error, self._layout.owner(later)):
                    with suppress(RuntimeError):  # it may have failed itself by now
                        work.wait(ERROR_TIMEOUT)
                return


def _meta_copies(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value, device="meta") for value in values)


def _refuse_non_tensors(stage: int, values: Any) -> None:
    for value in values:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            raise RuntimeError(
                f"between stages {stage} and {stage + 1} a {type(value).__name__} would be handed on; only whole"
                " tensors can be: cut elsewhere, in the plan's cuts"
            )


def broadcast_sums(
    sums: Sums, like: dict[str, Tensor], source: int, ranks: Group, device: torch.device
) -> dict[str, Tensor]:
    """Collective: the source's sums on every rank, whole numbers as int64, all others in the device's widest type.

    like: names, shapes and types of the sums. It is empty the first time, and filled then; give the same dict again
    each time after. RuntimeError where the source has other sums then.
    """
    numbers = {name: to_accumulator(value).detach().contiguous() for name, value in sums.items()}
    local = to_device(cast_floats(numbers, accumulation_dtype(device)), device)
    layout = [(name, value.shape, value.dtype) for name, value in local.items()]
    # who receives must have room of the right shapes, which are the same in every step: they travel once
    if not like:
        first = ranks.broadcast_value(layout, source)  # the group; names and shapes, once
        like.update({name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in first})
    known = [(name, value.shape, value.dtype) for name, value in like.items()]
    is_source = ranks.rank == source
    if is_source and layout != known:
        raise RuntimeError(f"the sums have other names or shapes than before: {layout}, not {known}")
    # other ranks have no sums: room for them
    result = local if is_source else {name: torch.empty_like(value, device=device) for name, value in like.items()}
    for value in result.values():
        dist.broadcast(value, group_src=source, group=ranks.group)  # the group; 8 bytes a number
    return result


def contiguous_copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a stage hands on, ready to be sent: contiguous copies that nothing else reads or writes."""
    return tuple(
        value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value for value in values
    )


class ContiguousGradient(torch.autograd.Function):
    """Returns a received value unchanged, and makes its gradient contiguous: no other can be sent back.

    Schedules that compute gradients of inputs by themselves send them as autograd made them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same value."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The same gradient, contiguous."""
        return grads[0].contiguous()
