"""Do ranks call the same units? What they gather together they must call together.

Else each computes with parts of others, which nothing else shows, or they wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.ranks import Ranks
from trainer.refusal import FatalRunError


def call_together(network: nn.Module, ranks: Ranks, step: Callable[[], int | None]) -> None:
    """From now on these ranks compare which unit they call next. step: the one under way; None: nothing is compared.

    Told on all of them where they differ.
    """
    units = [name for name, module in network.named_modules() if name and isinstance(module, FSDPModule)]

    def meet(name: str, *_: Any) -> None:
        at = None if in_backward() else step()  # what is computed again has been called before
        if at is None:
            return
        names = ranks.all_gather_values(name)  # these ranks, before any of them gathers
        if len({*names}) > 1:
            raise FatalRunError(_parted(names, at))

    if ranks.size > 1:
        for name in units:
            network.get_submodule(name).register_forward_pre_hook(
                partial(meet, name), prepend=True
            )  # before fully_shard's own
        if units:
            network.register_forward_hook(partial(meet, ""))


def _parted(names: list[str], step: int) -> str:
    who = {name: [str(rank) for rank, own in enumerate(names) if own == name] for name in dict.fromkeys(names)}
    first = next(name for name in names if name)
    said = [f"{name or 'nothing more'} on rank {', '.join(ranks)}" for name, ranks in who.items()]
    return (
        f"DIFFERS at step {step}, forward, {first}: what is called is {'; '.join(said)}; cause: a choice of layers by"
        " a rank's own samples. Each of them is a unit, which ranks gather together: they would compute with parts of"
        " different ones, or wait for each other for ever. ddp with strategy.find_unused_parameters=true can do it; or"
        " a plan's shard that names the module around the choice, so that it is one unit"
    )
