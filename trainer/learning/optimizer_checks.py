"""Can an optimizer train these parameters, and a run go on with it? A few numbers and two steps tell, at the start."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from trainer.learning.optimizer import Make, find_sparse_embeddings
from trainer.messages import Refusal, first_line, format_count

_ERRORS = (RuntimeError, ValueError, Refusal)


def refuse_step(network: nn.Module, make: Make) -> None:
    """Refuse parameters that the optimizer cannot step, and memory that no checkpoint can keep.

    A step over a few numbers tells, some for each number of dimensions: Muon takes matrices alone, SparseAdam nothing
    dense.
    """
    refuse_sparse_step(network, make)
    sparse = {embedding.weight for embedding in find_sparse_embeddings(network).values()}
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad and p not in sparse}
    names = {parameter.dim(): name for name, parameter in trained.items()}
    if not names:
        return
    # all of them at once: a class may have an optimizer for matrices and another one for the rest
    try:
        numbers, optimizer = _make_and_step(make, list(names))
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
    _refuse_non_tensor_state(optimizer, numbers)
    _refuse_ignored_rate(make, numbers, names)
    _refuse_hidden_state(make, optimizer, numbers)


def _trial_parameter(dims: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 2**dims).reshape((2,) * dims))


def _step(optimizer: Optimizer, numbers: Sequence[Tensor], factor: float) -> None:
    """One step, with these gradients; whatever it draws at random is the same each time."""
    for number in numbers:
        number.grad = factor * (number.detach() + 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizer.step()


def _make_and_step(make: Make, dims: Sequence[int], rate: float | None = None) -> tuple[list[nn.Parameter], Optimizer]:
    """An optimizer that has done a step, and its numbers: a few for each of these counts of dimensions."""
    numbers = [_trial_parameter(count) for count in dims]
    optimizer = make([{"params": numbers}])
    for group in optimizer.param_groups if rate is not None else ():
        group["lr"] = rate
    _step(optimizer, numbers, 1.0)
    return numbers, optimizer


def _refuse_dimensions(make: Make, names: dict[int, str], error: Exception) -> None:
    """Refuse in the words of those parameters that it cannot train by themselves, if it can train any."""
    for dims, name in names.items():
        try:
            _make_and_step(make, [dims])
        except _ERRORS as own:
            if str(own) == str(error):
                raise Refusal(
                    f"optimizer: it cannot train {name}, which has {format_count(dims, 'dimension')}: {error}"
                ) from error


def _refuse_non_tensor_state(optimizer: Optimizer, numbers: Sequence[nn.Parameter]) -> None:
    for key, value in (pair for number in numbers for pair in optimizer.state[number].items()):
        if value is not None and not isinstance(value, Tensor):
            raise Refusal(
                f"optimizer: {type(optimizer).__name__} keeps {key} as {type(value).__name__}; only tensors can be"
                " saved, as torch.tensor(…)"
            )


def _refuse_ignored_rate(make: Make, numbers: Sequence[nn.Parameter], names: dict[int, str]) -> None:
    """Refuse an optimizer whose steps are the same whatever the rate in its groups is: no schedule would reach it."""
    still, optimizer = _make_and_step(make, list(names), rate=0.0)
    for one, other, (dims, name) in zip(numbers, still, names.items(), strict=True):
        if torch.equal(one, other) and not torch.equal(one, _trial_parameter(dims)):
            raise Refusal(
                f"optimizer: {type(optimizer).__name__} steps {name} by a rate of its own, not by the lr of its"
                " param_groups, so schedule and optimizer.groups would not reach it. Read group['lr'] in step(); with"
                " optimizers inside, let self.param_groups be all their groups together"
            )


def _refuse_hidden_state(make: Make, optimizer: Optimizer, numbers: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that another one, with all that a checkpoint holds of it, does not go on as."""
    copies = [nn.Parameter(number.detach().clone()) for number in numbers]
    other = make([{"params": copies}])
    order = {number: at for at, number in enumerate(numbers)}
    own = [number for group in optimizer.param_groups for number in group["params"]]
    memory = {at: copy.deepcopy(dict(optimizer.state[number])) for at, number in enumerate(own) if number in order}
    other.load_state_dict({"state": memory, "param_groups": other.state_dict()["param_groups"]})
    _step(optimizer, numbers, 0.5)
    _step(other, copies, 0.5)
    if not all(torch.allclose(one, two, equal_nan=True) for one, two in zip(numbers, copies, strict=True)):
        raise Refusal(
            f"optimizer: {type(optimizer).__name__} remembers something outside of its state, which no checkpoint would"
            " hold: a resumed run would go on otherwise. Keep it as tensors in self.state[parameter]; with optimizers"
            " inside, let self.state be all their states together"
        )


def refuse_sparse_step(network: nn.Module, make: Make) -> None:
    """Refuse sparse gradients that the optimizer cannot take: one step of it over one number tells."""
    for name in find_sparse_embeddings(network):
        # Which optimizers take them, and with which options, changes with torch: try it on a table of one number.
        number = nn.Parameter(torch.zeros(1, 1))
        functional.embedding(torch.tensor([0]), number, sparse=True).sum().backward()
        optimizer = make([{"params": [number], "fused": False}])
        try:
            optimizer.step()
        except RuntimeError as error:
            raise Refusal(
                f"the embedding {name} makes sparse gradients, and {type(optimizer).__name__} says: {error}; build the"
                " embedding with sparse=False, or use optimizer=sgd optimizer.nesterov=false optimizer.weight_decay=0"
            ) from error
