"""Strategies with a mistake each: one of conf/strategy, whose model has a method of docs/own-strategy.md that is wrong.

`strategy=zero1 strategy._target_=tests.planted.strategies.summed` is zero1 with the mistake `summed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from tests.planted.networks import rank
from trainer import ParallelModel

CONF = Path(__file__).resolve().parents[2] / "conf/strategy"
_Base: Any = ParallelModel  # of the class that is made wrong, whatever it is


def mistake(option: str) -> Callable[[Any], Any]:
    """Makes a strategy of a class of methods: one of conf/strategy, whose model has these."""
    kind: Any = resolve_name(OmegaConf.select(OmegaConf.load(CONF / f"{option}.yaml"), "_target_"))

    def wrong(methods: Any) -> Any:
        @dataclass
        class Wrong(kind):
            def build(self, task: Any, network: Any, example: Any) -> Any:
                model = super().build(task, network, example)
                model.__class__ = type("WrongModel", (methods, type(model)), {})
                methods.built(model)
                return model

        Wrong.__name__ = methods.__name__
        return Wrong

    return wrong


class Methods(_Base):
    """What is changed before the first step: nothing."""

    def built(self) -> None:
        pass


def gradients(model: Any) -> list[Tensor]:
    """What this rank holds of all gradients."""
    found = [parameter.grad for parameter in model.network.parameters() if parameter.grad is not None]
    return [local(gradient) for gradient in found]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@mistake("ddp")
class own_values(Methods):
    """Rank 1 begins with weights of its own."""

    @torch.no_grad()
    def built(self) -> None:
        for parameter in self.network.parameters():
            parameter.mul_(1 + 1e-3 * rank())


@mistake("ddp")
class stale_keys(Methods):
    """The random numbers of a step are those of the first one."""

    def run_micro_batches(self, batches: Any, step: int, share_of: Any) -> Any:
        return super().run_micro_batches(batches, 0, share_of)


@mistake("fsdp")
class swapped_targets(Methods):
    """Each micro-batch has the targets of its neighbour."""

    def run_micro_batches(self, batches: Any, *rest: Any) -> Any:
        swapped = [one._replace(targets=batches[at - 1].targets) for at, one in enumerate(batches)]
        return super().run_micro_batches(swapped, *rest)


@mistake("ddp")
class never_synced(Methods):
    """Gradients stay on their rank."""

    def grad_sync_context(self, last: bool) -> Any:
        return super().grad_sync_context(False)


@mistake("zero1")
class summed(Methods):
    """An owner gets the sum of gradients, not their mean."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for gradient in gradients(self):
            gradient.mul_(2)


@mistake("zero1")
class zeros_for_unused(Methods):
    """A parameter that no sample uses gets a gradient of zeros, and is decayed."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for parameter in self.network.middle.spare.parameters():
            parameter.grad = torch.zeros_like(parameter)


@mistake("ddp")
class narrow(Methods):
    """Gradients travel in bf16, in a run in fp32 alone."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for gradient in gradients(self):
            if gradient.dtype == torch.float32:
                gradient.copy_(gradient.bfloat16())


@mistake("pp")
class stages_norm(Methods):
    """Each stage clips by its own norm (torchtitan#766)."""

    def grad_norm(self, gradients: Any) -> Tensor:
        return torch.stack([gradient.norm() for gradient in gradients]).norm()


@mistake("fsdp")
class unclipped(Methods):
    """The norm is right, and nothing is clipped (transformers#46113)."""

    def optimizer_step(self, optimizer: Any, max_norm: float | None) -> Any:
        return super().optimizer_step(optimizer, float("inf"))


@mistake("ddp")
class drifting(Methods):
    """The weights of one rank go away from the others' after each step."""

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        super().after_step(step)
        self.network.head.weight.mul_(1 + 1e-4 * rank())


@mistake("ddp")
class counted_padding(Methods):
    """A rank without a sample of the last batch counts the one that it computes."""

    def evaluate(self, batch: Any, valid: int) -> Any:
        return super().evaluate(batch, max(valid, 1))


@mistake("fsdp")
class lost_moment(Methods):
    """One of the optimizer's moments is not read."""

    def load_state(self, optimizer: Any, state: Any) -> None:
        lost = {name: torch.zeros_like(one) for name, one in state.items() if name.endswith("/exp_avg_sq")}
        super().load_state(optimizer, {**state, **lost})
