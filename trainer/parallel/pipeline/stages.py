"""The stages of a network that one rank holds, and the orders in which torch runs their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Name = Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@dataclass(frozen=True)
class Kind:
    """What is particular about a schedule."""

    several: bool = True  # a rank may hold several stages
    turns_back: bool = False  # two stages a rank, down the ranks and back up: rank 0 holds the first and the last
    splits: bool = False  # gradients of inputs and of weights are computed apart
    rounds: bool = False  # micro-batches come in equal rounds of about as many as there are ranks
    full: bool = False  # as many micro-batches as stages, or more


KINDS: dict[str, Kind] = {
    "1F1B": Kind(several=False),
    "GPipe": Kind(several=False),
    "Interleaved1F1B": Kind(rounds=True),
    "LoopedBFS": Kind(),
    "InterleavedZeroBubble": Kind(splits=True, rounds=True),
    "ZBVZeroBubble": Kind(turns_back=True, splits=True),
    "DualPipeV": Kind(turns_back=True, splits=True, full=True),
}


@dataclass(frozen=True)
class Layout:
    """Which rank of a pipeline holds which stages."""

    ranks: int
    each: int  # stages a rank
    turns_back: bool = False

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.ranks * self.each

    def owner(self, stage: int) -> int:
        """The rank that holds a stage: in turn, or back up again."""
        loop, at = divmod(stage, self.ranks)
        return self.ranks - 1 - at if self.turns_back and loop % 2 else at

    def held_by(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.count) if self.owner(stage) == rank]


def takes(name: str, layout: Layout, micro_batches: int) -> bool:
    """Can this schedule run so many micro-batches? What it cannot is an error or a hang in torch."""
    kind = KINDS[name]
    if kind.full and micro_batches < layout.count:
        return False
    return not kind.rounds or micro_batches % max(1, micro_batches // layout.ranks) == 0


def runs_over_gloo(name: str) -> bool:
    """Can gloo run it? Before torch 2.13 two neighbouring stages on one rank begin with a message to themselves."""
    return not KINDS[name].turns_back or torch.__version__ >= "2.13"


def make_schedule(name: str, stages: list[Any], micro_batches: int) -> Any:
    """A schedule over this rank's stages (torch's PipelineStage), of which the last of all returns the loss itself.

    1F1B wants as many micro-batches as stages; with fewer it is the same work in GPipe's order.
    """
    from torch.distributed import pipelining  # here, because the import takes seconds

    if name == "1F1B" and micro_batches < stages[0].num_stages:
        name = "GPipe"
    make: Callable[..., Any] = getattr(pipelining, f"Schedule{name}")
    own = stages if KINDS[name].several else stages[0]
    # the last stage knows the targets and returns its loss; torch wants a function all the same
    return make(own, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)


class Stages(nn.Module):
    """The stages that one rank holds, as one module: everything stands under the network's own names.

    order: the names of the network's modules. They come in this order, so that of tied weights the same name is first.
    """

    def __init__(self, stages: Sequence[nn.Module], order: Sequence[str]) -> None:
        super().__init__()
        self._order = {name: at for at, name in enumerate(order)}
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module under its name in the network; parameters and buffers follow from this."""
        memo = set() if memo is None else memo
        yield prefix, self
        # one tree of names out of several stages, which have bare holders of the same names
        held = [pair for stage in self.children() for pair in stage.named_modules(memo, "", remove_duplicate)]
        for name, module in sorted(held, key=lambda pair: self._order.get(pair[0], len(self._order))):
            yield f"{prefix}.{name}".strip("."), module

    def __getattr__(self, name: str) -> Any:
        """A module of the network. AttributeError, in words, where another rank has it."""
        # torch's own lookup first: parameters, buffers and the stages themselves
        with suppress(AttributeError):
            return super().__getattr__(name)
        with suppress(AttributeError):
            return self.get_submodule(name)
        held = ", ".join(sorted({held.split(".")[0] for held, _ in self.named_modules() if held}))
        raise AttributeError(
            f"{name}: this rank of a pipeline holds these of the network only: {held}; a task's after_step finds what"
            " is there by network.named_parameters()"
        )

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name. AttributeError where no stage here has it."""
        for name, module in self.named_modules():
            if name == target:
                return module
        raise AttributeError(f"no stage of this rank has a module {target}")

    def state_dict(  # type: ignore[override]  # the base also takes positions, which torch has deprecated
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What all stages here hold, under the network's own names."""
        held: dict[str, Any] = {} if destination is None else destination
        for stage in self.children():
            held.update(stage.state_dict(prefix=prefix, keep_vars=keep_vars))
        return held

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over the values of all stages here; what other ranks hold is passed over."""
        for stage in self.children():
            own = stage.state_dict()  # it also holds the versions of modules, which some ask for
            for name in own.keys() - state_dict.keys():
                del own[name]
            own.update({name: state_dict[name] for name in own})
            stage.load_state_dict(own, strict, assign)


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """Whatever a forward in here does to buffers is undone."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
