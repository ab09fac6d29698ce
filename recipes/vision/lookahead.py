"""Lookahead (Zhang et al. 2019, arXiv:1907.08610) around SGD, as airbench has it (Jordan 2024, arXiv:2404.00498)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD

from trainer.messages import Refusal


class LookaheadSGD(SGD):
    """SGD, and slow weights that are drawn to its weights every few steps, and then take their place.

    After step n they keep keep^every · (n / steps)^power of themselves: little at first, most of it in the end.
    Elementwise, so each rank does it with the shards that it holds.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        fused: bool | None = None,
        every: int = 5,
        keep: float = 0.95,
        power: float = 3.0,
        begin: int = 0,
        restart: int | None = None,
        steps: int | None = None,
    ) -> None:
        """every, begin: steps between two pulls, and before the first. restart: so often weights become the slow ones.

        steps: of the whole run; after the last one the weights become the slow ones, too. None: power does nothing.
        """
        if every < 1 or begin < 0 or not 0 <= keep <= 1 or (restart is not None and restart < 1):
            raise Refusal(
                f"optimizer.every={every}, begin={begin}, restart={restart}, keep={keep:g}: every and restart count"
                " steps, 1 or more, begin 0 or more, and keep is a fraction between 0 and 1"
            )
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused)
        self._every, self._keep, self._power = every, keep, power
        self._restart, self._steps = restart, steps
        # the steps so far, which the state has too; None: to be read from there, once, as a device must be waited for
        self._done: int | None = 0
        self.register_load_state_dict_post_hook(lambda _: setattr(self, "_done", None))
        self._first = (begin // every + 1) * every  # the step of the first pull, where the slow weights begin

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step of SGD, and what follows from its number."""
        loss = super().step(closure)
        weights = [x for group in self.param_groups for x in group["params"] if x.grad is not None]
        if self._done is None:
            self._done = max((int(self.state[x].get("step", 0)) for x in weights), default=0)
        self._done += 1
        for x in weights:
            state = self.state[x]
            if "slow" not in state:  # from the first step on, so that a plan of memory sees them
                state["slow"] = torch.zeros_like(x)
            state["step"] = torch.tensor(float(self._done))
        if self._done >= self._first and (kept := self._kept(self._done)) is not None:
            for x in weights:
                x.copy_(self.state[x]["slow"].lerp_(x, 1 - kept))
        return loss

    def _kept(self, done: int) -> float | None:
        """How much of themselves the slow weights keep after this step; None: nothing happens."""
        if done % self._every == 0:
            part = min(done / self._steps, 1.0) if self._steps else 1.0
            return 0.0 if done == self._first else self._keep**self._every * part**self._power
        ends = done == self._steps or (self._restart is not None and done % self._restart == 0)
        return 1.0 if ends else None
