"""A forward on shapes alone: what each stage would be handed, and which parameters it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer.data.nested_tensors import map_tensors, tensors
from trainer.parallel.meta_model import named_tensors
from trainer.parallel.pipeline.fx_trace import NETWORK
from trainer.parallel.units import ancestors

_AT = torch.ops.aten
_MAKERS = {_AT.new_ones, _AT.new_zeros, _AT.new_full, _AT.ones_like, _AT.zeros_like, _AT.full_like}
ArgumentKey = int | str  # of an argument in a call: its position, or its name


class CannotCut(Exception):
    """A network that cannot be cut at these places; the message says what stands in the way."""


def has_values(tensor: Tensor) -> bool:
    """Is there anything in a tensor, or is it a shape alone?"""
    return not isinstance(tensor, FakeTensor)


class FakeMode(FakeTensorMode):
    """Inside it tensors are made without values. Masks and their like, made in the shape of one, have theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) in _MAKERS:
            like = args[0]
            args = (torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:])
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def fake_tensors(network: nn.Module, device: torch.device, mode: FakeMode | None = None) -> dict[Tensor, Tensor]:
    """For each tensor of a network one of the same shape and type, without values and without memory.

    What is computed with them has none either. Who asks for a value gets an error, or what `mode` answers. After
    torch's FakeTensor.
    """
    own = dict.fromkeys(tensor for _, tensor in named_tensors(network))
    with mode or FakeMode(allow_non_fake_inputs=True):  # a batch may meet them
        return {tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in own}


def copy_step(step: nn.Module, instead: Mapping[Any, Any]) -> nn.Module:
    """A copy of a step and of its network's modules, with others in the place of some tensors and modules.

    What else the step holds, its task, is no copy.
    """
    memo: dict[int, Any] = {id(value): value for value in vars(step).values() if not isinstance(value, dict)}
    return deepcopy(step, memo | {id(one): other for one, other in instead.items()})


def get_argument(place: ArgumentKey, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument of a call at a place; None where there is none."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


class TensorSubstitutions(dict[Tensor, Tensor]):
    """What was handed on, by what a stage's forward has in its place: there it goes on to hold it in its variables."""

    def put(self, value: Tensor, instead: Tensor) -> None:
        """From now on `instead` takes the place of a value, and of what that was put for."""
        for before, now in self.items():
            if now is value:
                self[before] = instead
        self[value] = instead

    def into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with what was handed on where it belongs."""
        known = tuple(self._known(value) for value in args)
        return known, {name: self._known(value) for name, value in kwargs.items()}

    def _known(self, value: Any) -> Any:
        return self.get(value, value) if isinstance(value, Tensor) else value


def siblings(network: nn.Module, cut: str) -> list[str]:
    """A cut module and what stands in the same list or module."""
    above = cut.rpartition(".")[0]
    return [f"{above}.{word}".strip(".") for word, _ in network.get_submodule(above).named_children()]


class FakeForward:
    """One forward of the whole network, in which every stage after the first begins with a value of its own.

    So of each stage autograd keeps a graph by itself. What it reaches is what the stage needs, and nothing can pass by
    a cut unseen. `places`: of each cut, which arguments are handed on. `owner`: parameter → its stage. may_draw: what
    its code draws follows from numbers, so that it is the same in every stage that runs it.
    """

    def __init__(self, step: nn.Module, cuts: list[str], example: Any, may_draw: bool) -> None:
        self._network, self._cuts, self._may_draw = step.get_submodule(NETWORK), cuts, may_draw
        self.places: list[list[ArgumentKey]] = []
        self._begins: list[list[Tensor]] = []  # the values that each stage after the first begins with
        self._stead = TensorSubstitutions()
        self._reached: list[set[Tensor]] = []  # by each stage's graph, where it begins
        own = fake_tensors(self._network, torch.device("cpu"))
        # frozen ones, too: it is asked who needs them
        self._parameters = {own[one]: one for one in self._network.parameters() if one.is_floating_point()}
        for shape in self._parameters:
            shape.requires_grad_()
        copy = copy_step(step, own)
        for name in dict.fromkeys(name for cut in cuts for name in siblings(self._network, cut)):
            module = copy.get_submodule(f"{NETWORK}.{name}")
            vars(module)["forward"] = partial(self._call, name, module.forward)
        self._run(copy, map_tensors(example, lambda tensor: tensor.detach().cpu().clone()))
        self.owner = self._owners()

    def _run(self, step: nn.Module, example: Any) -> None:
        batch, chance = list(tensors(example)), torch.get_rng_state()
        try:
            self._end(tensors(step(*example)))
        except CannotCut:
            raise
        except Exception as error:  # whatever a forward does with what has no values
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].strip(' .')}"
            raise CannotCut(f"its forward cannot be run without the values of its weights ({said})") from error
        if left := self._cuts[len(self.places) :]:
            raise CannotCut(f"{left[0]} is never called by the forward")
        # every stage runs the forward: what it does beside computing would be done several times, or in several ways
        if any(tensor._version for tensor in batch):
            raise CannotCut("its forward changes the batch in place, which every stage would do again")
        if not self._may_draw and not torch.equal(chance, torch.get_rng_state()):
            raise CannotCut(
                "its forward draws random numbers by itself (dropped layers, masks), and stages would draw others;"
                " with loop.dropout=sample, without compile, they draw the same"
            )

    def _call(self, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A block is called. A cut one's arguments end one stage, and values without a past begin the next."""
        args, kwargs = self._stead.into(args, kwargs)
        if name not in self._cuts:
            return forward(*args, **kwargs)
        number = len(self.places)
        if self._cuts[number : number + 1] != [name]:
            raise CannotCut(f"{name} is called a second time, or before another cut that stands before it")
        given: Iterator[tuple[ArgumentKey, Any]] = chain(enumerate(args), kwargs.items())
        learned = {value: place for place, value in given if isinstance(value, Tensor) and value.requires_grad}
        every = {tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad}
        if not every:
            raise CannotCut(f"{name} is given nothing that gradients go back through")
        if every > learned.keys():
            raise CannotCut(
                f"{name} is given values inside of others; to be handed on they must be arguments themselves"
            )
        self._end(learned)
        self.places.append(list(learned.values()))
        self._begins.append([value.detach().requires_grad_() for value in learned])
        for value, begin in zip(learned, self._begins[-1], strict=True):
            self._stead.put(value, begin)
        args, kwargs = self._stead.into(args, kwargs)
        return forward(*args, **kwargs)

    def _end(self, values: Iterable[Tensor]) -> None:
        if not all(shape.requires_grad for shape in self._parameters):
            raise CannotCut(
                "its forward freezes parameters for a while, and a stage may end before it has put them back"
            )
        self._reached.append(set(graph_leaves(values)))

    def _owners(self) -> dict[nn.Parameter, int]:
        """The stage of every parameter. Uncut where two need it, or where one needs what passes by a cut."""
        owner: dict[nn.Parameter, int] = {}
        for number, reached in enumerate(self._reached):
            # a leaf that is neither belongs to the batch: some networks ask for its gradient
            for at, begins in enumerate(self._begins, 1):
                if at != number and not reached.isdisjoint(begins):
                    raise CannotCut(f"stage {number} needs what {self._cuts[at - 1]} is given, which passes it by")
                if at == number and not reached.issuperset(begins):
                    raise CannotCut(f"not all of what {self._cuts[at - 1]} is given flows on")
            for parameter in (one for shape, one in self._parameters.items() if shape in reached):
                if owner.setdefault(parameter, number) != number:
                    raise CannotCut(self._shared(parameter, owner[parameter], number))
            if number not in owner.values():
                raise CannotCut(f"stage {number} of {len(self._reached)} would have no parameter: cut elsewhere")
        every = self._network.named_parameters()
        return owner | {one: self._around(name, owner) for name, one in every if one not in owner}

    def _shared(self, parameter: nn.Parameter, one: int, other: int) -> str:
        every = self._network.named_parameters(remove_duplicate=False)
        names = [name for name, own in every if own is parameter]
        if len(names) > 1:
            return (
                f"{' and '.join(names)} are one parameter, which stages {one} and {other} need: each wants its own"
                " (of transformers most configurations take tie_word_embeddings: false)"
            )
        cut = self._cuts[other - 1]
        return f"{names[0]} is needed by stages {one} and {other}: what is made with it passes {cut} by"

    def _around(self, name: str, owner: Mapping[nn.Parameter, int]) -> int:
        """The stage of a parameter that no output needs: that of what surrounds it, or the first."""
        for above in sorted(ancestors(name), key=len, reverse=True):
            near = {owner[one] for one in self._network.get_submodule(above).parameters() if one in owner}
            if near:
                return near.pop() if len(near) == 1 else 0
        return 0


def graph_leaves(values: Iterable[Tensor], begins: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Where the graph begins that autograd has made of these values; not looking behind these nodes of it."""
    every = [value for value in values if value.requires_grad]
    yield from (value for value in every if value.grad_fn is None)
    ahead, seen = [value.grad_fn for value in every], set(begins)
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # what gradients add up in
            yield node.variable
        ahead += [before for before, _ in node.next_functions]
