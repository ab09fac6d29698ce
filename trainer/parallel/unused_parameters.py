"""What FSDP must know of a forward: what only some data use, and modules that the forward takes gradients through.

Ranks have other data. Without this they would gather different units under FSDP, and reduce different gradients: what a
rank's data leave out gets zeros.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.data.nested_tensors import map_tensors, tensors
from trainer.parallel.device_mesh import split_axes
from trainer.parallel.module_units import ancestors, can_be_unit
from trainer.parallel.pipeline.fake_forward import NETWORK, FakeMode, copy_step, fake_tensors, graph_leaves, has_values
from trainer.parallel.ranks import Ranks

_AT = torch.ops.aten


@dataclass(frozen=True)
class Usage:
    """What every forward of a network uses, by name, whatever the data are."""

    modules: frozenset[str]  # called as often in every forward, and can be gathered by themselves
    parameters: frozenset[str]  # get a gradient in every backward
    differentiated: frozenset[str] = frozenset()  # modules that the forward itself takes a gradient through, here


def find_always_used(step: nn.Module, example: Any, ranks: Ranks) -> Usage:
    """Collective: what the forward uses whatever the data are. It runs twice with fake tensors.

    Where it asks for a value, the answer is no (or: no rows) the first time, and yes (all rows) the second. If a
    forward cannot be run so, all modules count as called, and no parameter is known to get a gradient.
    """
    network = step.get_submodule(NETWORK)
    return _agree(_use_in_two_forwards(step, network, example), network, ranks)


_searching = [False]


def is_searching() -> bool:
    """Does a forward run with fake tensors, which takes no memory of a device? A plan does not count it."""
    return _searching[0]


@torch.enable_grad()
def _use_in_two_forwards(step: nn.Module, network: nn.Module, example: Any) -> Usage:
    """What is used the same with both answers, on this rank."""
    python_rng, _searching[0] = random.getstate(), True
    try:
        with torch.random.fork_rng(devices=[]):
            # (calls, parameters, differentiated modules)
            no, yes = (_use_in_forward(step, example, answer) for answer in (False, True))
    except Exception:  # whatever a forward does with what has no values
        return Usage(frozenset(name for name, _ in network.named_modules()), frozenset())
    finally:
        random.setstate(python_rng)
        _searching[0] = False
    # FSDP would release a differentiated module after that gradient, and the forward or the backward needs it again
    differentiated = no[2] | yes[2]
    called = {name for name, often in no[0].items() if often == yes[0][name]}
    return Usage(frozenset(called - differentiated), no[1] & yes[1], frozenset(differentiated))


def _agree(use: Usage, network: nn.Module, ranks: Ranks) -> Usage:
    """Collective: what is always used on all of these ranks; their batches may have other shapes."""
    modules, parameters = ([name for name, _ in each] for each in (network.named_modules(), network.named_parameters()))
    unsure = [name not in use.modules for name in modules] + [name not in use.parameters for name in parameters]
    sure = [not flag for flag in ranks.max_values(unsure)]  # these ranks; a byte for each name
    used = frozenset(compress(parameters, sure[len(modules) :]))
    return Usage(frozenset(compress(modules, sure)), used, use.differentiated)


def always_called_units(network: nn.Module, units: Iterable[str], use: Usage) -> list[str]:
    """These units; instead of one that only some data call, or that is differentiated, the nearest fitting around it.

    Where there is none but the network, what is in the unit belongs to the network as a whole.
    """
    called = set()
    for name in units:
        around = sorted(ancestors(name), key=len, reverse=True)
        fitting = [above for above in around if above and above in use.modules and can_be_unit(network, above)]
        called |= {name} if name in use.modules else {*fitting[:1]}
    return [name for name, _ in network.named_modules() if name in called and not ancestors(name) & called]


class _FixedAnswers(FakeMode):
    """Inside it every value of a fake tensor is `answer`, and a mask selects no rows, or all."""

    def __init__(self, answer: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._answer = answer
        # operators whose output depends on values → what answers for them
        self._answers: dict[Any, Callable[..., Any]] = {
            _AT._local_scalar_dense: self._value,
            _AT.nonzero: self._rows,
            _AT.masked_select: lambda x, mask: x.new_empty(self._count(mask)),
            _AT._unique2: lambda x, *_, **__: (x.new_empty(1), self._numbers(*x.shape), self._numbers(1)),
            _AT.bincount: lambda x, weights=None, minlength=0: self._numbers(max(minlength, 1)),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet in self._answers and not has_values(args[0]):
            with self:
                return self._answers[packet](*args, **(kwargs or {}))
        if packet in (_AT.index, _AT.index_put, _AT.index_put_):
            with self:
                args = (args[0], [numbers for index in args[1] for numbers in self._places(index)], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _value(self, x: Tensor) -> bool | int | float:
        kind = bool if x.dtype == torch.bool else float if x.is_floating_point() else int
        return kind(self._answer)

    def _count(self, mask: Tensor) -> int:
        return mask.numel() if self._answer else 0

    def _rows(self, mask: Tensor) -> Tensor:
        return self._numbers(self._count(mask), mask.dim())

    def _numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64)

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """An index as numbers: a mask becomes as many tensors of numbers as it has dimensions."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return [self._numbers(self._count(index)) for _ in range(index.dim())]


def _use_in_forward(step: nn.Module, example: Any, answer: bool) -> tuple[Counter[str], frozenset[str], set[str]]:
    """How often one forward calls each module; the parameters a backward would reach; modules one has gone through."""
    mode = _FixedAnswers(answer)
    network = step.get_submodule(NETWORK)
    fakes = fake_tensors(network, torch.device("cpu"), mode)
    for tensor, fake in fakes.items():
        fake.requires_grad_(tensor.requires_grad)
    copy = copy_step(step, fakes)
    calls: Counter[str] = Counter()
    differentiated: set[str] = set()
    for name, module in copy.get_submodule(NETWORK).named_modules():
        module.register_forward_pre_hook(partial(_count, calls, name))
        module.register_forward_hook(partial(_watch_gradient, differentiated, name))
    with mode:
        batch = map_tensors(example, lambda x: torch.empty(x.shape, dtype=x.dtype))
    reached = set(graph_leaves(tensors(copy(*batch))))
    return calls, frozenset(name for name, x in network.named_parameters() if fakes[x] in reached), {*differentiated}


def _count(calls: Counter[str], name: str, *_: Any) -> None:
    calls[name] += 1


def _watch_gradient(differentiated: set[str], name: str, _: nn.Module, __: Any, output: Any) -> None:
    """Whoever takes a gradient through this output before the forward ends: the forward does it itself."""
    for tensor in tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: differentiated.add(name))


Places = dict[tuple[nn.Module, str], nn.Parameter]  # where a parameter is found once it is gathered → its shard


class UnusedParameters:
    """Sharded parameters that only some data use get zeros as gradients where a rank's data leave them out.

    fully_shard reduces the gradients that a rank has, and no others, so ranks would reduce different ones. If no rank
    has used a parameter in a step, it has no gradient afterwards, as in one process.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks  # those that gradients are averaged over
        self._used: dict[nn.Parameter, bool] = {}  # by any micro-batch of this step, here

    def watch(self, root: nn.Module, network: nn.Module, units: Collection[str], use: Usage) -> None:
        """Watch the calls of those units, and of `root`, that hold such parameters. They must be sharded by now."""
        holders: dict[str, Places] = {}
        for name, parameter in network.named_parameters():
            spread = isinstance(parameter, DTensor) and "shard" in split_axes(parameter)
            if spread and parameter.requires_grad and name not in use.parameters:
                above, _, key = name.rpartition(".")
                unit = next(iter(ancestors(name).intersection(units)), "")
                holders.setdefault(unit, {})[network.get_submodule(above), key] = parameter
                self._used[parameter] = False
        for unit, places in holders.items():
            module = network.get_submodule(unit) if unit else root
            begins: list[set[Any]] = [set()]
            module.register_forward_pre_hook(
                partial(_remember_inputs, begins), with_kwargs=True
            )  # behind fully_shard's own
            module.register_forward_hook(partial(self._end, begins, places), prepend=True)  # before it releases them

    @torch.compiler.disable
    def _end(self, begins: list[set[Any]], places: Places, module: nn.Module, _: Any, output: Any) -> Any:
        """A call has ended: parameters that its output does not depend on will get zeros in its backward."""
        differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not torch.is_grad_enabled() or not differentiable:
            return output
        reached = set(graph_leaves(differentiable, begins[0]))
        left_out = []
        for (holder, key), parameter in places.items():
            gathered = getattr(holder, key)
            if gathered in reached:
                self._used[parameter] = True
            else:
                left_out.append(gathered)
        if not left_out:
            return output
        touched = _AddZeroGradients.apply(differentiable[0], *left_out)
        return map_tensors(output, lambda tensor: touched if tensor is differentiable[0] else tensor)

    def drop_gradients(self) -> None:
        """Collective, after the last backward of a step: what no rank has used has no gradient."""
        if not self._used:
            return
        flags = self._ranks.max_values([*self._used.values()])  # these ranks; a byte for each parameter
        for parameter, used in zip(self._used, flags, strict=True):
            if not used:
                parameter.grad = None
        self._used = dict.fromkeys(self._used, False)


class _AddZeroGradients(torch.autograd.Function):
    """Returns the first tensor unchanged. In the backward the others, which it does not depend on, get zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()  # of a view fully_shard warns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _remember_inputs(begins: list[set[Any]], module: nn.Module, args: Any, kwargs: Any) -> None:
    begins[0] = {tensor.grad_fn for tensor in tensors((args, kwargs))}
