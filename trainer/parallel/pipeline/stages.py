"""The stages of a network that one rank holds, as one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn


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
