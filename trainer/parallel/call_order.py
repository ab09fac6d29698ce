"""Ranks that gather units together must call the same ones, in one order: who differs says so before it gathers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.ranks import ALWAYS, Ranks
from trainer.refusal import Told

_PATIENCE = timedelta(seconds=30)  # for ranks that have done the same as ever: they do not come


class SameCalls:
    """What ranks have agreed to call, by the number of the call in a forward.

    A call that has always been the same costs nothing: it is what all others wait for. Where it is another one, or
    where there were several, the ranks ask each other first. Else each would compute with parts of others.
    """

    def __init__(
        self, root: nn.Module, network: nn.Module, units: Sequence[str], ranks: Ranks, patience: timedelta
    ) -> None:
        """Collective. patience: how late a rank may be with an answer."""
        self._network, self._ranks = network, ranks
        self._names = ["nothing more", *units]
        self._agreed: dict[bool, list[set[int]]] = {True: [], False: []}  # in training; in evaluation
        self._at = 0  # the number of the next call
        if ranks.size > 1 and units:
            self._ranks = ranks.apart(patience)  # a gather may be under way
            root.register_forward_pre_hook(self._begin)
            for number, name in enumerate(units, 1):
                # before fully_shard's own
                network.get_submodule(name).register_forward_pre_hook(partial(self._call, number), prepend=True)
            root.register_forward_hook(partial(self._call, 0))

    @torch.compiler.disable
    def _begin(self, *_: Any) -> None:
        self._at = 0

    @torch.compiler.disable
    def _call(self, number: int, *_: Any) -> None:
        if in_backward():  # what is computed again has been called before
            return
        agreed = self._agreed[self._network.training]
        if self._at == len(agreed):
            agreed.append(set())
        if agreed[self._at] != {number}:
            self._agree(number, agreed[self._at])
            agreed[self._at].add(number)
        self._at += 1

    def _agree(self, number: int, before: set[int]) -> None:
        """Collective of the ranks that have come: Told where they do not call the same."""
        only = len(before) == 1  # whoever calls that does not ask
        vote = self._ranks.vote([number, -number], _PATIENCE if only else ALWAYS)  # these ranks; 16 bytes
        try:
            most, least = vote.read()
        except RuntimeError as error:
            if not only:
                raise
            others = f"{self._names[before.pop()]} on others, as before"
            raise Told(_parted([f"{self._names[number]} on rank {self._ranks.rank}", others])) from error
        if most != -least:
            names = [self._names[each] for each in self._ranks.all_gather_values(number)]  # these ranks
            who = {name: [str(rank) for rank, own in enumerate(names) if own == name] for name in dict.fromkeys(names)}
            raise Told(_parted([f"{name} on rank {', '.join(ranks)}" for name, ranks in who.items()]))


def _parted(calls: Sequence[str]) -> str:
    return (
        f"data ranks call different modules: {'; '.join(calls)}. Each of them is a unit, which ranks gather together:"
        " they would compute with parts of different ones. Where a network chooses its layers by a rank's own samples"
        " or random numbers, its plan must name the module around the choice, Plan(shard=(…)), so that it is one unit;"
        " or use strategy=zero1, which gathers nothing"
    )
