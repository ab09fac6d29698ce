"""A forward with fake tensors (torch's FakeTensor), which have a shape and no values: what each stage needs.

It runs a network's own code without memory for its weights. So it is known before any stage exists which arguments are
handed on at a cut, and which parameters belong to which stage. Other files use its parts to run a forward on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer.data.nested_tensors import map_tensors, tensors
from trainer.messages import Refusal, first_line
from trainer.parallel.meta_model import named_state
from trainer.parallel.module_units import ancestors
from trainer.parallel.rng.kernels import count_draw

NETWORK = "network"  # the attribute under which a step holds its network
_AT = torch.ops.aten
# operators that make a tensor in the shape of another one
_LIKE_OPERATORS = {_AT.new_ones, _AT.new_zeros, _AT.new_full, _AT.ones_like, _AT.zeros_like, _AT.full_like}
ArgumentKey = int | str  # which argument of a call: its position, or its name


class CannotCut(Exception):
    """A network that cannot be cut at these places; the message says what stands in the way."""


def has_values(tensor: Tensor) -> bool:
    """Is there anything in a tensor, or is it a shape alone?"""
    # a plan plays a whole run with fake tensors of a mode of its own: there these count as values
    return not (isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, FakeMode))


def count_writes(tensor: Tensor) -> int:
    """How often a tensor, or another one in the same memory, was written to since it was made."""
    return tensor._version


class FakeMode(FakeTensorMode):
    """Inside it tensors are made without values. Only what `ones_like` and its kind make, as masks, has some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) in _LIKE_OPERATORS:
            like = args[0]
            args = (torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:])
            return func(*args, **(kwargs or {}))
        count_draw(func, args)  # a stage that has the values draws here, too
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def fake_tensors(network: nn.Module, device: torch.device, mode: FakeMode | None = None) -> dict[Tensor, Tensor]:
    """For each tensor of a network one of the same shape and type, without values and without memory.

    What is computed with them has none either. Who asks for a value gets an error, or what `mode` answers. After
    torch's FakeTensor.
    """
    unique = dict.fromkeys(tensor for _, tensor in named_state(network))
    with mode or FakeMode(allow_non_fake_inputs=True):  # a batch with values may be used together with them
        return {tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in unique}


def copy_step(step: nn.Module, instead: Mapping[Any, Any]) -> nn.Module:
    """A copy of a step and of its network's modules. instead: tensor or module → what takes its place in the copy.

    What else the step holds, its task, is not copied.
    """
    # deepcopy takes for copied already what stands in its memo
    memo: dict[int, Any] = {id(value): value for value in vars(step).values() if not isinstance(value, dict)}
    return deepcopy(step, memo | {id(original): other for original, other in instead.items()})


def get_argument(place: ArgumentKey, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument of a call at a place; None where there is none."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


class TensorSubstitutions(dict[Tensor, Tensor]):
    """Tensor that a forward still holds in its variables → the tensor that takes its place in later calls.

    A network's code between two blocks may keep a value and give it to several blocks, for example a mask.
    """

    def put(self, value: Tensor, instead: Tensor) -> None:
        """From now on `instead` takes the place of a value, and of all whose place that value has taken."""
        for before, now in self.items():
            if now is value:
                self[before] = instead
        self[value] = instead

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, after the substitutions."""

        def current(value: Any) -> Any:
            return self.get(value, value) if isinstance(value, Tensor) else value

        return tuple(map(current, args)), {name: current(value) for name, value in kwargs.items()}


def siblings(network: nn.Module, cut: str) -> list[str]:
    """Names of a cut module and of all others in the same list or module."""
    above = cut.rpartition(".")[0]
    return [f"{above}.{word}".strip(".") for word, _ in network.get_submodule(above).named_children()]


class FakeForward:
    """One forward of the whole network, in which the inputs of every stage after the first are new leaves of autograd.

    So autograd keeps a graph for each stage. The leaves of this graph are what the stage needs, and nothing can pass by
    a cut unseen. `handed_on`: of each cut, which arguments are handed on. `owner`: parameter → its stage. `called`:
    those of the watched modules that are called once, in order. may_draw: random numbers of the forward follow from
    numbers, so they are the same in every stage that runs it.
    """

    @torch.enable_grad()
    def __init__(
        self, step: nn.Module, cuts: list[str], example: Any, may_draw: bool, watched: Iterable[str] = ()
    ) -> None:
        self._network, self._cuts, self._may_draw = step.get_submodule(NETWORK), cuts, may_draw
        self.handed_on: list[list[ArgumentKey]] = []
        self._inputs: list[list[Tensor]] = []  # the new leaves that each stage after the first begins with
        self._given: list[list[Tensor]] = []  # copies of them, which it may write into
        self._substitutions = TensorSubstitutions()
        self._leaves: list[set[Tensor]] = []  # of each stage's graph: parameters and inputs that it needs
        fakes = fake_tensors(self._network, torch.device("cpu"))
        self._fakes = {*fakes.values()}
        # fake → parameter; frozen ones, too, because a stage needs them as well
        self._parameters = {fakes[p]: p for p in self._network.parameters() if p.is_floating_point()}
        for fake in self._parameters:
            fake.requires_grad_()
        copy = copy_step(step, fakes)
        calls: Counter[str] = Counter()
        for name in watched:
            module = copy.get_submodule(f"{NETWORK}.{name}")
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        # watch the calls of the modules to cut at, and of those beside them
        for name in dict.fromkeys(name for cut in cuts for name in siblings(self._network, cut)):
            module = copy.get_submodule(f"{NETWORK}.{name}")
            vars(module)["forward"] = partial(self._call, name, module, module.forward)
        self._evaluated: Counter[str] | None = None  # how often each module was called in an evaluation
        self._run(copy, map_tensors(example, lambda tensor: tensor.detach().cpu().clone()))
        self.called = [name for name, count in calls.items() if count == 1]
        # of each stage after the first: does it write into what it is given?
        self.writes = [any(map(count_writes, given)) for given in self._given]
        self.owner = self._owners()
        self._refuse_several_calls(copy.eval(), example)

    def _run(self, step: nn.Module, example: Any) -> None:
        """Run the forward. CannotCut where stages, which each run it, would not do the same as one process."""
        batch, rng_state = list(tensors(example)), torch.get_rng_state()
        try:
            self._end_stage(tensors(step(*example)))
        except CannotCut:
            raise
        except Exception as error:  # whatever a forward does with what has no values
            reason = f"{type(error).__name__}: {first_line(error).strip(' .')}"
            raise CannotCut(f"its forward cannot be run without the values of its weights ({reason})") from error
        for name, parameter in step.get_submodule(NETWORK).named_parameters():
            if parameter not in self._fakes:  # a cut elsewhere would not help, and no other strategy takes it
                raise Refusal(
                    f"the forward puts a new parameter in the place of {name}: no optimizer knows of it. What a forward"
                    " computes belongs into a buffer (register_buffer), from trainer.gather(x), the samples of all"
                    " ranks (docs/one-curve.md)"
                )
        if left := self._cuts[len(self.handed_on) :]:
            raise CannotCut(f"{left[0]} is never called by the forward")
        # every stage runs the forward: what it does beside computing would be done several times, or in several ways
        if any(map(count_writes, batch)):
            raise CannotCut("its forward changes the batch in place, which every stage would do again")
        if not self._may_draw and not torch.equal(rng_state, torch.get_rng_state()):
            raise CannotCut(
                "its forward draws random numbers by itself (dropped layers, masks), and stages would draw others;"
                " with loop.dropout=sample they draw the same"
            )

    @torch.no_grad()
    def _refuse_several_calls(self, step: nn.Module, example: Any) -> None:
        """CannotCut where an evaluation calls the network several times: a stage would give the first output again."""
        self._evaluated = Counter()
        with suppress(Exception), torch.random.fork_rng(devices=[]):  # what fails there has its own message later
            step(*map_tensors(example, lambda tensor: tensor.detach().cpu().clone()))
        for cut in self._cuts:
            if self._evaluated[cut] > 1:
                raise CannotCut(f"{cut} is called {self._evaluated[cut]} times in an evaluation, and a stage runs once")

    def _call(self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A block is called. If it is cut, its arguments end one stage, and new leaves begin the next."""
        if self._evaluated is not None:
            self._evaluated[name] += 1
            return forward(*args, **kwargs)
        args, kwargs = self._substitutions.apply(args, kwargs)
        # where a stage begins, and beside it, the network's own module is called, whose weights nobody replaces
        if (name in self._cuts or self.handed_on) and not self._fakes.issuperset(module.parameters()):
            raise CannotCut(f"{name} is called with other parameters than its own")
        if name not in self._cuts:
            return forward(*args, **kwargs)
        number = len(self.handed_on)
        if self._cuts[number : number + 1] != [name]:
            raise CannotCut(f"{name} is called a second time, or before another cut that stands before it")
        arguments: Iterator[tuple[ArgumentKey, Any]] = chain(enumerate(args), kwargs.items())
        handed = {value: key for key, value in arguments if isinstance(value, Tensor) and value.requires_grad}
        needing_gradients = {tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad}  # nested ones, too
        if not needing_gradients:
            raise CannotCut(f"{name} is given nothing that gradients go back through")
        if needing_gradients > handed.keys():
            raise CannotCut(
                f"{name} is given values inside of others; to be handed on they must be arguments themselves"
            )
        self._end_stage(handed)
        self.handed_on.append(list(handed.values()))
        self._inputs.append([value.detach().requires_grad_() for value in handed])
        self._given.append([leaf.clone() for leaf in self._inputs[-1]])
        for value, given in zip(handed, self._given[-1], strict=True):
            self._substitutions.put(value, given)
        args, kwargs = self._substitutions.apply(args, kwargs)
        return forward(*args, **kwargs)

    def _end_stage(self, outputs: Iterable[Tensor]) -> None:
        """A stage ends with these values: remember what its graph begins with."""
        if not all(fake.requires_grad for fake in self._parameters):
            raise CannotCut(
                "its forward freezes parameters for a while, and a stage may end before it has put them back"
            )
        self._leaves.append(set(graph_leaves(outputs)))

    def _owners(self) -> dict[nn.Parameter, int]:
        """The stage of every parameter. CannotCut where two need it, or where one needs what passes by a cut."""
        owner: dict[nn.Parameter, int] = {}
        for number, leaves in enumerate(self._leaves):
            # it must need all inputs of its own stage, and none of others
            for other, inputs in enumerate(self._inputs, 1):
                if other != number and not leaves.isdisjoint(inputs):
                    raise CannotCut(f"stage {number} needs what {self._cuts[other - 1]} is given, which passes it by")
                if other == number and not leaves.issuperset(inputs):
                    raise CannotCut(f"not all of what {self._cuts[other - 1]} is given flows on")
            # a leaf that is neither input nor parameter belongs to the batch: some networks ask for its gradient
            for parameter in (p for fake, p in self._parameters.items() if fake in leaves):
                if owner.setdefault(parameter, number) != number:
                    raise CannotCut(self._shared(parameter, owner[parameter], number))
            if number not in owner.values():
                raise CannotCut(f"stage {number} of {len(self._leaves)} would have no parameter: cut elsewhere")
        unused = {p: name for name, p in self._network.named_parameters() if p not in owner}
        return owner | {parameter: self._nearest_stage(name, owner) for parameter, name in unused.items()}

    def _shared(self, parameter: nn.Parameter, first: int, second: int) -> str:
        """Why no cut is possible here: two stages need this parameter."""
        names = [name for name, p in self._network.named_parameters(remove_duplicate=False) if p is parameter]
        if len(names) > 1:
            return (
                f"{' and '.join(names)} are one parameter, which stages {first} and {second} need: each wants its own"
                " (of transformers most configurations take tie_word_embeddings: false)"
            )
        cut = self._cuts[second - 1]
        return f"{names[0]} is needed by stages {first} and {second}: what is made with it passes {cut} by"

    def _nearest_stage(self, name: str, owner: Mapping[nn.Parameter, int]) -> int:
        """The stage of a parameter that no output needs: that of what surrounds it, or the first."""
        for above in sorted(ancestors(name), key=len, reverse=True):
            stages = {owner[p] for p in self._network.get_submodule(above).parameters() if p in owner}
            if stages:
                return stages.pop() if len(stages) == 1 else 0
        return 0


def graph_leaves(values: Iterable[Tensor], stop_at: Iterable[Any] = ()) -> Iterator[Tensor]:
    """The leaves of autograd's graph behind these values. stop_at: nodes of the graph that are not looked behind."""
    every = [value for value in values if value.requires_grad]
    yield from (value for value in every if value.grad_fn is None)
    ahead, seen = [value.grad_fn for value in every], set(stop_at)
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # what gradients add up in
            yield node.variable
        ahead += [before for before, _ in node.next_functions]
