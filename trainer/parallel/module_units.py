"""Which subtrees of a network are units: gathered, recomputed and compiled as one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from trainer.learning.parallel_plan import Plan
from trainer.learning.parameter_patterns import matches_exactly
from trainer.messages import Refusal, did_you_mean

# fractions of the network's parameters
SMALL = 1 / 8  # a module of no more than that is one unit
LARGE = 1 / 4  # a repeated block of more than that is taken apart, where blocks repeat inside it, too
CRUMB = 1 / 32  # a layer of less is no unit, but stays with what surrounds it
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# They use the weights of the layers inside them without calling these, sometimes or always.
SEALED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def require_modules(network: nn.Module, key: str, what: str, instead: str = "") -> dict[str, nn.Module]:
    """The modules that a plan's key means, by name. Refusal where there is none. what: the key in the message."""
    modules = dict(matching_modules(network, key))
    if not modules:
        names = [name for name, _ in network.named_modules() if name]
        raise Refusal(f"{what} {key!r} matches no module{did_you_mean(key, names)}{instead}")
    return modules


def matching_modules(network: nn.Module, key: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose name fits a plan's key; `*` and the like stand within one level, as in parallelize_module."""
    yield from ((name, module) for name, module in network.named_modules() if matches_exactly(key, name))


def find_units(network: nn.Module, plan: Plan) -> list[str]:
    """Names of the units in the order of `network.named_modules()`; no unit lies in another.

    Those that the plan's `shard` names. Where it is silent: the blocks that a network repeats in its lists, else the
    largest subtrees that have at most an eighth of the parameters. What is left belongs to the network as a whole. No
    value is read, so the network may be on the meta device.

    Refusal where the plan names what is not there or cannot be a unit.
    """
    if plan.shard:
        return _planned_units(network, plan)
    search = _UnitSearch(_size(network), _sharing_modules(network))
    return list(search.below("", network, blocks_only=isinstance(network, SEALED)))


def _planned_units(network: nn.Module, plan: Plan) -> list[str]:
    """The units that the plan names. Of what a wildcard fits, modules without parameters are left out."""
    sharing, named = _sharing_modules(network), set()
    for key in plan.shard:
        modules = require_modules(network, key, "the plan's shard")
        for name, module in modules.items():
            _refuse_unit(name, module, network, sharing)
        full = {name for name, module in modules.items() if any(True for _ in module.parameters())}
        if not full:
            raise Refusal(f"the plan's shard {key!r} names only modules without parameters")
        named |= full
    # fully_shard gathers a unit as one, and so would gather the inner one twice
    for name in named:
        for above in ancestors(name):
            if above in named:
                raise Refusal(f"the plan's shard names {above} and {name} inside it; units do not lie in one another")
    return [name for name, _ in network.named_modules() if name in named]


def _refuse_unit(name: str, module: nn.Module, network: nn.Module, sharing: set[str]) -> None:
    """Refuse what a plan names and FSDP could not gather when it is called. sharing: see `_sharing_modules`."""
    if not _has_forward(module):
        raise Refusal(
            f"the plan's shard names {name}, a {type(module).__name__}, which is never called; use {name + '.*'!r},"
            " the modules inside it"
        )
    if name in sharing:
        raise Refusal(f"the plan's shard names {name}, of whose parameters one is also used outside of it")
    for above in ancestors(name):  # of other networks that own weights beside blocks the plan's author knows more
        if above and isinstance(network.get_submodule(above), SEALED):
            kind = type(network.get_submodule(above)).__name__
            raise Refusal(f"the plan's shard names {name}, but a {kind} uses weights in it without calling it: {above}")


def present_units(network: nn.Module, names: list[str]) -> list[str]:
    """Those of these units that a network, or a stage of it, has; a stage has bare holders in place of some."""
    modules = dict(network.named_modules(remove_duplicate=False))
    return [name for name in names if name in modules and type(modules[name]) is not nn.Module]


def repeated_blocks(parent: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a list, by name: modules that have children and whose class occurs more than once in the list.

    Modules in lists inside the list count, too.
    """
    if not isinstance(parent, LISTS):
        return {}
    inside = dict(_listed_modules(parent))
    kinds = Counter(type(child) for child in inside.values())
    return {name: module for name, module in inside.items() if kinds[type(module)] > 1 and has_children(module)}


def _listed_modules(parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a list, and in lists inside it, that are called."""
    for word, child in parent.named_children():
        if isinstance(child, LISTS) and not _has_forward(child):
            yield from ((f"{word}.{name}", module) for name, module in _listed_modules(child))
        else:
            yield word, child


@dataclass(frozen=True)
class _UnitSearch:
    """Finding units by size."""

    total: int  # parameters of the whole network
    sharing: set[str]  # modules of whose parameters one is also used outside of them

    def below(self, prefix: str, parent: nn.Module, blocks_only: bool) -> Iterator[str]:
        """The units inside a module. `blocks_only`: nothing but repeated blocks may be taken out of it."""
        repeating = repeated_blocks(parent).values()
        for word, child in parent.named_children():
            name, size, repeated = f"{prefix}{word}", _size(child), child in repeating
            if not size:
                continue
            # what cannot be a unit by itself may hold some
            can_be = _has_forward(child) and not _begins_in_place(child)
            free = name not in self.sharing and can_be and (repeated or not blocks_only)
            if not free or not self._belongs_together(child, size, repeated):
                yield from self.below(f"{name}.", child, blocks_only or _is_sealed(child))
            elif repeated or has_children(child) or size >= CRUMB * self.total:
                yield name

    def _belongs_together(self, module: nn.Module, size: int, repeated: bool) -> bool:
        """Is it better as one unit than taken apart?"""
        # where blocks repeat inside, these are the natural units, unless all of it is small
        if any(repeated_blocks(inner) for inner in module.modules()):
            return type(module) not in LISTS and size <= (LARGE if repeated else SMALL) * self.total
        return repeated or size <= SMALL * self.total or _is_sealed(module) or _is_one_layer(module)


def _sharing_modules(network: nn.Module) -> set[str]:
    """Names of modules that share a parameter with something outside of them: tied weights, modules used twice."""
    users: dict[int, list[set[str]]] = defaultdict(list)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        users[id(parameter)].append(ancestors(name))
    # nothing outside: then every user lies in the module
    return {name for above in users.values() for name in chain(*above) if not all(name in other for other in above)}


def ancestors(name: str) -> set[str]:
    """The modules that a module or a parameter lies in, the network itself ("") too."""
    levels = name.split(".")
    return {".".join(levels[:depth]) for depth in range(len(levels))}


def can_be_unit(network: nn.Module, name: str) -> bool:
    """Can this module be a unit that lies in no other and shares nothing with what is outside of it?"""
    module = network.get_submodule(name)
    return _has_forward(module) and not _begins_in_place(module) and name not in _sharing_modules(network)


def has_children(module: nn.Module) -> bool:
    """Does it hold other modules?"""
    return any(True for _ in module.children())


def _has_forward(module: nn.Module) -> bool:
    """Can it be called? A ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def _begins_in_place(module: nn.Module) -> bool:
    """Does it change what it is given? To a unit of FSDP autograd forbids that, with an error in the first step."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return getattr(module, "inplace", False) is True


def _is_sealed(module: nn.Module) -> bool:
    """Must what is inside stay with it, because it may use the weights there without a call?"""
    lists = any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in module.children())
    owns = lists or any(True for _ in module.parameters(recurse=False))
    return has_children(module) and (owns or isinstance(module, SEALED) or is_parametrized(module))


def _is_one_layer(module: nn.Module) -> bool:
    """Has one layer more than three quarters of its parameters, so that nothing is gained by taking it apart?"""
    layers = [_size(child) for child in module.children() if not has_children(child)]
    return max(layers, default=_size(module)) > 0.75 * _size(module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
