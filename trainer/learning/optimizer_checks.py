"""Refuses optimizers that cannot train these parameters or be resumed: two steps over a few numbers, at the start."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from trainer.learning.optimizer import Make, find_sparse_embeddings
from trainer.learning.optimizer_leaves import load_leaves, optimizer_leaves
from trainer.messages import Refusal, first_line, format_count

_ERRORS = (RuntimeError, ValueError, Refusal)


def refuse_unusable_optimizer(network: nn.Module, make: Make) -> None:
    """Refuse parameters that the optimizer cannot step, and memory that no checkpoint can keep.

    Tried over a few numbers for each number of dimensions: Muon takes only matrices, SparseAdam nothing dense.
    """
    refuse_sparse_step(network, make)
    names = _examples(network)
    if not names:
        return
    # all of them at once: an optimizer may contain one for matrices and another one for the rest
    try:
        parameters, optimizer = _make_and_step(make, list(names))
    except _ERRORS as error:
        _refuse_dimensions(make, names, error)
        raise Refusal(f"optimizer: it cannot train these parameters: {first_line(error)}") from error
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise Refusal(
            f"optimizer: {str(error).partition('.')[0]} computes the loss again and again within a step (it needs a"
            " closure); here a step computes it once, so choose another"
        ) from error
    _refuse_unstorable_state(optimizer, parameters)
    _refuse_ignored_rate(make, parameters, names)
    _refuse_hidden_state(make, optimizer, parameters)


def _examples(network: nn.Module) -> dict[int, str]:
    """Number of dimensions → the name of a parameter that has so many, and a dense gradient."""
    sparse = {embedding.weight for embedding in find_sparse_embeddings(network).values()}
    return {p.dim(): name for name, p in network.named_parameters() if p.requires_grad and p not in sparse}


def refuse_coupled_steps(network: nn.Module, make: Make, strategy: str) -> None:
    """Refuse an optimizer that steps a parameter by what it knows of the others, where a rank has some of them.

    Prodigy and D-Adaptation estimate one rate for all, LAMB clips by the norm of all. Others draw random numbers, which
    begin anew on each rank.
    """
    dims = [*_examples(network)] * 2  # two of each: a network may have matrices alone
    # in fp64: what others add to a step may be small, as a weight decay is
    together = [nn.Parameter(_trial_parameter(count).detach().double()) for count in dims]
    try:
        leaves = _leaves_after_steps(make, together)
    except _ERRORS:  # it knows no fp64
        return
    # the same steps of each by itself: whatever differs came from the others
    for among_others, count in zip(together, dims, strict=True):
        alone = nn.Parameter(_trial_parameter(count).detach().double())
        try:
            mine = {"value": alone, **_leaves_after_steps(make, [alone]).get(alone, {})}
        except _ERRORS:  # of several optimizers inside, one has nothing to step
            continue
        others = {"value": among_others, **leaves.get(among_others, {})}
        if mine.keys() != others.keys() or not all(_close(x, others[name]) for name, x in mine.items()):
            kind = type(make([{"params": [alone]}])).__name__
            raise Refusal(
                f"optimizer: {kind} steps a parameter by what it knows of all others, or by random numbers that it"
                f" draws for all in turn, and strategy={strategy} gives each rank some of them: the curve would be"
                " another one. strategy=ddp gives it all"
            )


def _leaves_after_steps(make: Make, parameters: Sequence[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
    optimizer = make([{"params": parameters}])
    for factor in (1.0, 0.5, 2.0):  # what a first step has found out may show in the next ones
        _step(optimizer, parameters, factor)
    return optimizer_leaves(optimizer)


def _close(x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and torch.allclose(x.double(), other.double(), rtol=1e-10, atol=0, equal_nan=True)


def _trial_parameter(dims: int) -> nn.Parameter:
    # (2, 2, …): different numbers, negative ones too, so that a sign or a norm shows
    return nn.Parameter(torch.linspace(-1, 1, 2**dims).reshape((2,) * dims))


def _step(optimizer: Optimizer, parameters: Sequence[Tensor], factor: float) -> None:
    """One step; its gradients and its random numbers are the same each time."""
    for parameter in parameters:
        parameter.grad = factor * (parameter.detach() + 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizer.step()


def _make_and_step(make: Make, dims: Sequence[int], rate: float | None = None) -> tuple[list[nn.Parameter], Optimizer]:
    """An optimizer that has done a step, and its parameters: one for each of these numbers of dimensions."""
    parameters = [_trial_parameter(count) for count in dims]
    optimizer = make([{"params": parameters}])
    # as a schedule sets it
    for group in optimizer.param_groups if rate is not None else ():
        group["lr"] = rate
    _step(optimizer, parameters, 1.0)
    return parameters, optimizer


def _refuse_dimensions(make: Make, names: dict[int, str], error: Exception) -> None:
    """Refuse with the name of a parameter that alone gives the same error."""
    for dims, name in names.items():
        try:
            _make_and_step(make, [dims])
        except _ERRORS as same:
            if str(same) == str(error):
                raise Refusal(
                    f"optimizer: it cannot train {name}, which has {format_count(dims, 'dimension')}: {error}"
                ) from error


def _refuse_unstorable_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    kind, others = type(optimizer).__name__, [key for key in optimizer.state if key not in {*parameters}]
    if others:
        raise Refusal(
            f"optimizer: {kind} keeps {others[0]!r} in its state, which is no parameter: a checkpoint holds what"
            " belongs to parameters and their groups"
        )
    try:
        optimizer_leaves(optimizer)
    except TypeError as error:
        raise Refusal(
            f"optimizer: {kind} keeps {error}, and a checkpoint holds tensors and numbers; let each have a key of its"
            " own in self.state[parameter], or choose another optimizer"
        ) from error


def _refuse_ignored_rate(make: Make, parameters: Sequence[nn.Parameter], names: dict[int, str]) -> None:
    """Refuse an optimizer that ignores the rate of its groups: no schedule would reach it."""
    with_zero_rate, optimizer = _make_and_step(make, list(names), rate=0.0)
    for moved, same, (dims, name) in zip(parameters, with_zero_rate, names.items(), strict=True):
        if torch.equal(moved, same) and not torch.equal(moved, _trial_parameter(dims)):
            raise Refusal(
                f"optimizer: {type(optimizer).__name__} steps {name} by a rate of its own, not by the lr of its"
                " param_groups, so schedule and optimizer.groups would not reach it. Read group['lr'] in step(); with"
                " optimizers inside, let self.param_groups be all their groups together"
            )


def _refuse_hidden_state(make: Make, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer with state that no checkpoint holds: a new one with its stored state steps differently."""
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = make([{"params": copies}])
    leaves = optimizer_leaves(optimizer)
    load_leaves(resumed, {mine: deepcopy(leaves.get(p, {})) for p, mine in zip(parameters, copies, strict=True)})
    # both do the second step; what differs afterwards was not in the state
    _step(optimizer, parameters, 0.5)
    _step(resumed, copies, 0.5)
    if not all(torch.allclose(p, resumed_p, equal_nan=True) for p, resumed_p in zip(parameters, copies, strict=True)):
        raise Refusal(
            f"optimizer: {type(optimizer).__name__} remembers something outside of its state, which no checkpoint would"
            " hold: a resumed run would go on otherwise. Keep it in self.state[parameter] or in its group; with"
            " optimizers inside, let self.state be all their states together"
        )


def refuse_sparse_step(network: nn.Module, make: Make) -> None:
    """Refuse sparse gradients that the optimizer cannot take, by one step over one number."""
    for name in find_sparse_embeddings(network):
        # which optimizers take them, and with which options, changes with torch: try it on a table of one number
        table = nn.Parameter(torch.zeros(1, 1))
        functional.embedding(torch.tensor([0]), table, sparse=True).sum().backward()
        optimizer = make([{"params": [table], "fused": False}])
        try:
            optimizer.step()
        except RuntimeError as error:
            raise Refusal(
                f"the embedding {name} makes sparse gradients, and {type(optimizer).__name__} says: {error}; build the"
                " embedding with sparse=False, or use optimizer=sgd optimizer.nesterov=false optimizer.weight_decay=0"
            ) from error
