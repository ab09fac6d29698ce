"""DiLoCo: each process trains a copy of the network by itself; every so many steps all of them meet.

Douillard et al., 2023 (arXiv:2311.08105); in fragments, with overlap: the same, 2025 (arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.learning.optimizer import Groups, Make
from trainer.learning.task import Task
from trainer.messages import Refusal, format_count
from trainer.parallel.buckets import MeanUnderWay
from trainer.parallel.module_units import divide_into_fragments
from trainer.parallel.optimizer_state import OPTIMIZER_PREFIX, STRATEGY_PREFIX
from trainer.strategies.multi_process import Joined
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.replica_check import NoReplicaCheck, make_replica_check

# names in a checkpoint: of what is the same on all ranks, and (below) of what one rank has for itself
PREFIX = f"{STRATEGY_PREFIX}diloco/"
ALL = f"{PREFIX}all/"
OWN_WEIGHTS, MOMENTUM, ARRIVING = "/own_weights", "/outer_momentum", "/arriving"


@dataclass
class DiLoCo(Joined):
    """Each rank takes `every` inner steps by itself; then an outer step moves the weights that all of them share.

    The gradient of an outer step is the mean over the ranks of how far each has gone from the shared weights.
    """

    own_curve: ClassVar[bool] = True
    narrowing: ClassVar[tuple[str, ...]] = ("compress",)
    every: int = 50  # inner steps from one outer step to the next
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # Nesterov's
    fragments: int = 1  # parts of the network, each with outer steps at other times
    overlap: int = 0  # inner steps that are done while a fragment travels
    mixing: float | None = None  # how much a rank keeps of its own weights; None: 0, with overlap 0.5
    compress: Literal["bf16"] | None = None  # the precision in which differences travel; None: their own

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse numbers that do not fit each other, a scale of losses for each rank, and averages between meetings."""
        super().check(task, network, world_size)
        self._refuse_numbers()
        divide_into_fragments(network, task.plan(network), self.fragments)
        if self.machine.resolved_precision == "fp16":
            raise Refusal("strategy=diloco: each rank would have a loss scale of its own; use precision=bf16 or fp32")
        if self.cadences.average and (self.fragments > 1 or self.overlap):
            raise Refusal(
                "ema.decay: with strategy.fragments or strategy.overlap there is no step at which a rank has all of the"
                " shared weights; use strategy.fragments=1 strategy.overlap=0, or ema.decay=null"
            )
        for interval in self.cadences.average:
            if (interval.steps or 1) % self.every:
                raise Refusal(
                    f"ema.every={interval.steps or 1} is no multiple of strategy.every={self.every}, and between outer"
                    f" steps ranks have weights of their own; use ema.every={self.every}"
                )

    def _refuse_numbers(self) -> None:
        """Refuse what the schedule of outer steps cannot be."""
        if self.every < 1 or self.fragments < 1 or self.overlap < 0:
            raise Refusal(
                f"strategy.every={self.every} strategy.fragments={self.fragments} strategy.overlap={self.overlap}: the"
                " first two are 1 or more, the third is 0 or more"
            )
        if self.fragments > self.every:
            raise Refusal(
                f"strategy.fragments={self.fragments}: each has its own step of strategy.every={self.every}; use"
                f" strategy.fragments={self.every}, or fewer"
            )
        if self.overlap >= self.every:
            raise Refusal(
                f"strategy.overlap={self.overlap}: a fragment must arrive before it leaves again, after"
                f" strategy.every={self.every} steps; use strategy.overlap={self.every - 1}, or less"
            )
        if self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise Refusal(
                f"strategy.outer_lr={self.outer_lr} strategy.outer_momentum={self.outer_momentum}: the first is above"
                " 0, the second is 0 or more and below 1"
            )
        if self.mixing is not None and not (0 <= self.mixing < 1 and (self.overlap or not self.mixing)):
            raise Refusal(
                f"strategy.mixing={self.mixing}: how much a rank keeps of what it has trained while a fragment"
                " travelled: 0 or more and below 1, and 0 (or null) without strategy.overlap"
            )

    @property
    def kept(self) -> float:
        """How much of its own weights a rank keeps when shared ones arrive."""
        return (0.5 if self.overlap else 0.0) if self.mixing is None else self.mixing

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def copies(self, network: nn.Module) -> NoReplicaCheck:
        return make_replica_check(self, network, between_saves=False)

    @override
    def notes(self, network: nn.Module) -> list[str]:
        """The sentences of the base class, and whose curve this is."""
        return [
            f"diloco has a curve of its own, by {self.world.size} processes that meet after every {self.every} steps;"
            " evaluated and saved are the shared weights, as the last outer step has left them",
            *super().notes(network),
        ]

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return DiLoCoModel(self, task, network, example)


class DiLoCoModel(ParallelModel):
    strategy: DiLoCo

    @override
    def materialize(self, network: nn.Module) -> nn.Module:
        """Collective: the whole network on each rank, which knows its fragments before anything is wrapped."""
        self._fragments = divide_into_fragments(network, self.plan, self.strategy.fragments)
        return super().materialize(network)

    @override
    def optimizer(self, make: Make, groups: Groups) -> torch.optim.Optimizer:
        """Build the inner optimizer; and the shared weights, which begin as this rank's own, as those of all ranks."""
        ranks = self.strategy.data_group
        self._own = f"{PREFIX}{ranks.rank}of{ranks.size}/"
        self._trained = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        # the shared weights; during an evaluation or a save this rank's own, and the shared ones are in the network
        self._aside = {name: p.detach().clone() for name, p in self._trained.items()}
        self._momentum = {name: torch.zeros_like(x) for name, x in self._aside.items()}
        self._under_way: dict[int, MeanUnderWay] = {}  # by fragment
        self._arrived: dict[str, Tensor] = {}  # means that have come, and wait for their step
        self._news: list[str] = []
        return super().optimizer(make, groups)

    @override
    def skip_broken_steps(self) -> None:
        raise Refusal(
            "loop.on_nonfinite=skip: with strategy=diloco a rank would leave out steps that others do; use stop"
        )

    @override
    def after_step(self, step: int) -> None:
        """Collective where a fragment leaves: merge what is due, then send what is due. Both follow from the step.

        A fragment is merged at a step that is known beforehand, whenever it arrives: so a run can be repeated.
        """
        strategy, count = self.strategy, len(self._fragments)
        for index in range(count):
            since = (step - strategy.every * index // count) % strategy.every  # steps since it was to leave
            if since == 0:
                self._merge(index)  # what a run with other intervals has left under way
                self._send(index)
            if since == strategy.overlap:
                self._merge(index)
        super().after_step(step)

    @torch.no_grad()
    def _send(self, index: int) -> None:
        """Collective: how far this rank has gone from the shared weights of a fragment begins to travel."""
        differences = [self._aside[name] - self._trained[name] for name in self._fragments[index]]
        dtype = torch.bfloat16 if self.strategy.compress else None
        # the data ranks; each tensor of the fragment, once
        self._under_way[index] = MeanUnderWay(differences, self.strategy.data_group, dtype=dtype)

    @torch.no_grad()
    def _merge(self, index: int) -> None:
        """The outer step of a fragment that has left: SGD with Nesterov's momentum, the same on each rank."""
        self._receive([index])
        lr, decay, kept = self.strategy.outer_lr, self.strategy.outer_momentum, self.strategy.kept
        for name in self._fragments[index]:
            gradient = self._arrived.pop(name, None)
            if gradient is not None:
                moved = self._momentum[name].mul_(decay).add_(gradient)
                self._aside[name].sub_(gradient + decay * moved, alpha=lr)
                self._trained[name].mul_(kept).add_(self._aside[name], alpha=1 - kept)

    def _receive(self, fragments: list[int]) -> None:
        """Wait for what is still under way of these fragments."""
        for index in fragments:
            if index in self._under_way:
                self._arrived |= zip(self._fragments[index], self._under_way.pop(index).read(), strict=True)

    @override
    def heard(self) -> list[str]:
        news, self._news = self._news, []
        return [*news, *super().heard()]

    # an evaluation and a save see the shared weights

    @override
    def settle(self) -> None:
        self.switch.use(training=False)  # of this rank's own weights, not of the shared ones
        self._exchange()
        super().settle()

    @override
    def unsettle(self) -> None:
        super().unsettle()
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The shared weights go into the network and this rank's own aside, or back."""
        for name, parameter in self._trained.items():  # one at a time: there is never a whole third copy
            other, self._aside[name] = self._aside[name], parameter.clone()
            parameter.copy_(other)

    # state

    @override
    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What others read: the shared weights. For a resume, also each rank's own, and what is under way."""
        self._receive([*self._under_way])  # merged at their step all the same
        mine = {f"{OPTIMIZER_PREFIX}{name}{OWN_WEIGHTS}": x for name, x in self._aside.items()}
        mine |= super().state(optimizer)
        common = {f"{ALL}{OPTIMIZER_PREFIX}{name}{MOMENTUM}": x for name, x in self._momentum.items()}
        common |= {f"{ALL}{OPTIMIZER_PREFIX}{name}{ARRIVING}": x for name, x in self._arrived.items()}
        named = {self._own + name if name.startswith(OPTIMIZER_PREFIX) else name: x for name, x in mine.items()}
        return named | common

    @override
    def empty_state(self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        ranks = self.strategy.data_group
        owners = {name.removeprefix(PREFIX).partition("/")[0] for name in stored if name.endswith(OWN_WEIGHTS)}
        count = int(next(iter(owners), f"of{ranks.size}").partition("of")[2])  # processes that have written it
        self._source = f"{PREFIX}{ranks.rank % count}of{count}/"
        short = {name.removeprefix(self._source).removeprefix(ALL): name for name in stored}
        if count != ranks.size:
            short = {key: name for key, name in short.items() if not name.endswith(OWN_WEIGHTS)}
            self._news.append(
                f"the checkpoint is of {format_count(count, 'process')} and here are {ranks.size}: each begins at the"
                " shared weights, with the inner optimizer of one of those; the outer momentum goes on"
            )
        space = super().empty_state(optimizer, {key: stored[name] for key, name in short.items()})
        return {short[key]: x for key, x in space.items()}

    @override
    @torch.no_grad()
    def load_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
        inner = {name.removeprefix(self._source): x for name, x in state.items() if not name.endswith(OWN_WEIGHTS)}
        super().load_state(optimizer, inner)
        self._under_way, self._arrived = {}, {}
        for name, parameter in self._trained.items():
            key = f"{OPTIMIZER_PREFIX}{name}"
            self._aside[name].copy_(parameter)
            parameter.copy_(state.get(f"{self._source}{key}{OWN_WEIGHTS}", parameter))
            self._momentum[name].copy_(state.get(f"{ALL}{key}{MOMENTUM}", torch.zeros_like(parameter)))
            if f"{ALL}{key}{ARRIVING}" in state:
                self._arrived[name] = state[f"{ALL}{key}{ARRIVING}"].to(parameter.device)
