"""FSDP2: sharding parameters, gradients and optimizer state over ranks with torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.data.nested_tensors import tensors
from trainer.messages import FatalRunError, Refusal
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.batch_norm import all_batch_norms
from trainer.parallel.device_mesh import split_axes, to_local
from trainer.parallel.ranks import GROUP_TIMEOUT, Ranks

_ANSWER_TIMEOUT = timedelta(seconds=30)  # for ranks that have done the same as ever: they do not come


class DifferentCalls(FatalRunError):
    """Ranks call different units; all of them raise it in the same call."""


class SameCallsCheck:
    """Checks that all ranks call the same units in the same order, before FSDP gathers the next one.

    A call that has always been the same costs nothing: it is what all others wait for. Where it is another one, or
    where there were several, the ranks ask each other first. Else each would compute with parts of others.

    An evaluation may call units several times (windows over a large image), and each rank by its own samples. So there
    the ranks also ask each other where a forward ends.
    """

    def __init__(
        self, root: nn.Module, network: nn.Module, units: Sequence[str], ranks: Ranks, patience: timedelta
    ) -> None:
        """Collective. patience: how late a rank may be with its answer."""
        self._network, self._ranks = network, ranks
        self._names = ["nothing more", *units]
        self._agreed: dict[bool, list[set[int]]] = {True: [], False: []}  # in training; in evaluation
        self._called: list[int] = []  # in this forward
        self.repeats = False  # has an evaluation called a unit several times in a forward?
        self.ignores_evaluations = False  # where all is gathered beforehand, a call gathers nothing
        if ranks.size > 1 and units:
            self._ranks = ranks.duplicate(patience)  # a gather may be under way
            root.register_forward_pre_hook(self._begin)
            for number, name in enumerate(units, 1):
                # before fully_shard's own
                network.get_submodule(name).register_forward_pre_hook(partial(self._call, number), prepend=True)
            root.register_forward_hook(partial(self._call, 0))

    @torch.compiler.disable
    def _begin(self, *_: Any) -> None:
        self._called = []

    @torch.compiler.disable
    def _call(self, number: int, *_: Any) -> None:
        training = self._network.training
        # what is computed again has been called before
        if in_backward() or (self.ignores_evaluations and not training):
            return
        agreed, at = self._agreed[training], len(self._called)
        if at == len(agreed):
            agreed.append(set())
        may_end = not training and agreed[at] <= {0}
        if agreed[at] != {number} or may_end:
            self._agree(number, set() if may_end else agreed[at], not training and number in self._called)
            agreed[at].add(number)
        self._called.append(number)

    def _agree(self, number: int, before: set[int], again: bool) -> None:
        """Collective of the ranks that have come: DifferentCalls where they do not call the same."""
        only = len(before) == 1  # whoever calls that does not ask
        wait = _ANSWER_TIMEOUT if only else GROUP_TIMEOUT
        vote = self._ranks.vote([number, -number, int(again)], wait)  # these ranks; 24 bytes
        try:
            most, least, any_again = vote.read()
        except RuntimeError as error:
            if not only:
                raise
            others = f"{self._names[before.pop()]} on others, as before"
            here = f"{self._names[number]} on rank {self._ranks.rank}"
            raise FatalRunError(_different_calls([here, others])) from error
        self.repeats |= bool(any_again)
        if most != -least:
            names = [self._names[each] for each in self._ranks.all_gather_values(number)]  # these ranks
            callers: dict[str, list[str]] = {}
            for rank, name in enumerate(names):
                callers.setdefault(name, []).append(str(rank))
            calls = [f"{name} on rank {', '.join(ranks)}" for name, ranks in callers.items()]
            raise DifferentCalls(_different_calls(calls))


def _different_calls(calls: Sequence[str]) -> str:
    return (
        f"data ranks call different modules: {'; '.join(calls)}. Each of them is a unit, which ranks gather together:"
        " they would compute with parts of different ones. Use strategy=zero1, which gathers nothing. Or, where a"
        " network chooses its layers by a rank's own samples or random numbers, name the module around the choice in"
        " its plan, Plan(shard=(…)), so that it is one unit"
    )


PADDING = 1 / 8  # of a parameter: with no more, it its first dimension is sharded: the fastest to gather
WHOLE_COST = 4  # sizes of it are what a whole parameter costs a rank: itself, its gradient and two moments


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded and gathered."""

    reshard_after_forward: bool = True  # True: gathered anew for the backward (ZeRO-3); False: kept until then (ZeRO-2)
    param_dtype: Literal["bf16"] | None = None  # what parameters are gathered and computed in; None: their own
    offload: bool = False  # shards, gradients and the optimizer's memory lie in the host's memory
    ahead: int = 1  # units that are gathered before they are needed


def apply_fully_shard(
    root: nn.Module, network: nn.Module, names: list[str], mesh: DeviceMesh, how: Sharding
) -> tuple[FSDPModule, list[Unit]]:
    """Collective over the mesh: every parameter becomes a DTensor of which each rank holds a shard, in place.

    The units of `network` that are named are gathered and released one by one, the rest of it with `root`, the module
    that is called. mesh: the axis "shard", and "replicate" where there is one. Names stay. What would be gathered as
    mostly padding, and beside another precision BatchNorms, stay whole on every rank (`unsharded_parameters`); their
    gradients are not averaged here.
    """
    for parameter in network.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # fully_shard takes nothing else
    # masters stay as they are: what is gathered is cast, gradients are added up in fp32
    policy = MixedPrecisionPolicy()
    if how.param_dtype:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.offload else OffloadPolicy()
    # all calls must pass over the same parameters
    ranks = mesh["shard"].size()
    replicated = _replicated_parameters(network, ranks, how) | _of_another_type(network, names)
    shard = partial(
        fully_shard,
        mesh=mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["shard"],
        mp_policy=policy,
        offload_policy=offload,
        shard_placement_fn=lambda parameter: Shard(_shard_dim(parameter, ranks) or 0),
        ignored_params=replicated,
    )
    again = how.reshard_after_forward  # gather again for the backward
    # units first, for fully_shard of the root takes what no unit has
    modules = [shard(network.get_submodule(name), reshard_after_forward=again) for name in names]
    units = [Unit(name, network.get_submodule(name)) for name in names]
    # what is left is small and wanted first in the backward: it stays gathered, unless it is everything
    whole = shard(root, reshard_after_forward=again and not units)
    for unit in units if not again else ():
        root.register_forward_hook(unit.look, prepend=True)  # the last one before they are released
    for watched in (root, *map(network.get_submodule, names)):
        watched.register_forward_hook(_refuse_second_derivatives, prepend=True)
    # one unit ahead is what torch does by itself
    if how.ahead > 1:
        for index, module in enumerate(modules):
            module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + how.ahead])
            module.set_modules_to_backward_prefetch(modules[max(index - how.ahead, 0) : index][::-1])
    return whole, units


def _replicated_parameters(network: nn.Module, ranks: int, how: Sharding) -> set[nn.Parameter]:
    """The parameters that fully_shard leaves alone: single numbers, which it refuses, what is too short, and experts.

    All but these experts, of which other data ranks have others, stay whole on every rank.
    Where parameters are cast, what stays whole would stay as it is, and mix with what is cast. So there only BatchNorms
    do, whose weights must have the type of their running statistics.
    """
    experts = {parameter for parameter in network.parameters() if "expert" in split_axes(parameter)}
    if how.param_dtype:
        of_norms = {parameter for norm in all_batch_norms(network) for parameter in norm.parameters()}
        return experts | of_norms | {parameter for parameter in network.parameters() if parameter.dim() == 0}
    return experts | {parameter for parameter in network.parameters() if _shard_dim(parameter, ranks) is None}


def _of_another_type(network: nn.Module, names: list[str]) -> set[nn.Parameter]:
    """The trained parameters whose type is not that of most in their unit, or in what no unit has: torch refuses them.

    Complex numbers beside real ones, for example.
    """
    of_units: dict[str, dict[torch.dtype, list[nn.Parameter]]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            unit = next((unit for unit in names if name.startswith(f"{unit}.")), "")
            of_units.setdefault(unit, {}).setdefault(parameter.dtype, []).append(parameter)
    fewer = [sorted(kinds.values(), key=lambda kind: sum(p.numel() for p in kind))[:-1] for kinds in of_units.values()]
    return {parameter for kinds in fewer for kind in kinds for parameter in kind}


def _shard_dim(parameter: nn.Parameter, ranks: int) -> int | None:
    """Along which dimension a parameter is best sharded over so many ranks; None: it is better kept whole.

    fully_shard pads the first dimension to a multiple of the ranks, so (1, 256, 768) would be gathered as 1,024 times
    its size on 1,024 ranks; the other dimensions it takes where they divide.
    """
    shape = to_local(parameter).shape  # tensor ranks split first
    if not shape or 0 in shape:  # of no numbers there is nothing to gather, and torch's reduction refuses them
        return None
    gathered = -(-shape[0] // ranks) * ranks / max(shape[0], 1)  # what a rank sees of it, padding too, in its own size
    if gathered <= 1 + PADDING:
        return 0
    # no padding at all along another one, if it divides
    for dim, size in enumerate(shape):
        if size % ranks == 0:
            return dim
    # sharded with padding: what is gathered for a while, and what is kept of it between steps
    return 0 if gathered + WHOLE_COST * gathered / ranks < WHOLE_COST else None


class Unit:
    """A module that fully_shard gathers by itself, and that looks at its parameters before each call.

    Refusal where somebody has put in others. fully_shard puts the gathered ones in place before the forward. What
    `torch.func.functional_call` had put there would be lost without a word, and the network would learn something else.

    What is frozen or thawed while it is gathered holds for its shard, too: else it would be undone, or stay so, with
    the next gather.
    """

    module: Any  # an nn.Module that is an FSDPModule, too

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._places = [
            (inner, key)
            for inner in module.modules()
            for key, value in inner.named_parameters(recurse=False)
            if "shard" in split_axes(value)
        ]
        self._shards: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._gathered: set[nn.Parameter] = set()  # what fully_shard has put in place: these are the unit's, too
        module.register_forward_pre_hook(self.look, prepend=True)  # before fully_shard's own
        module.register_forward_pre_hook(self._remember)  # behind it

    @torch.compiler.disable
    def look(self, *_: Any) -> None:
        for place in self._places:
            value = getattr(*place)
            if value in self._gathered:
                if value.requires_grad != self._shards[place].requires_grad:
                    self._shards[place].requires_grad_(value.requires_grad)
            elif isinstance(value, DTensor) and isinstance(value, nn.Parameter):
                self._shards[place] = value
            else:
                raise Refusal(
                    f"{self.name} is called with other parameters than its own (torch.func.functional_call), but FSDP"
                    f" would compute with its own, because {self.name} is a unit that is gathered when it is called;"
                    " ddp and zero1 can do it, or a plan's shard that names a unit which makes this call inside its own"
                    " forward"
                )

    @torch.compiler.disable
    def _remember(self, *_: Any) -> None:
        self._gathered = {getattr(*place) for place in self._places}

    @contextmanager
    def gathered(self, again: bool) -> Iterator[None]:
        """Collective at its begin: inside, the unit stays gathered, so that its calls gather nothing.

        again: is it released after its forward, otherwise?
        """
        self.look()
        self.module.set_reshard_after_forward(False, recurse=False)
        self.module.unshard()  # all ranks; the shards of the unit
        self._remember()
        yield
        self.module.set_reshard_after_forward(again, recurse=False)


@torch.compiler.disable
def _refuse_second_derivatives(module: nn.Module, _: Any, output: Any) -> None:
    """Refusal, when it is taken, of a gradient with a graph of its own through what a gathered module has returned.

    fully_shard releases the module after that gradient, and only a backward through this output gathers it again: the
    graph of the gradient would compute with freed memory, or nothing would learn.
    """
    for tensor in tensors(output) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            tensor.register_hook(_refuse_graph)


def _refuse_graph(_: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward only with create_graph=True
        raise Refusal(
            "a gradient is taken with create_graph=True through a part of the network that FSDP has released by then;"
            " strategy=zero1 and strategy=ddp keep the weights whole. Under FSDP it works where every training forward"
            " takes it; not in Task.loss, and not in evaluations or some steps alone"
        )


def unsharded_parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters on no axis "shard" or "expert": each data rank holds the same of them, and its own gradient."""
    return [parameter for parameter in network.parameters() if not {"shard", "expert"} & {*split_axes(parameter)}]


def reshard(root: nn.Module) -> None:
    """Release what was gathered: parameters are again the shards that this rank holds."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
