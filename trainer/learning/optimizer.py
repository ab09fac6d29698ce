"""Building an optimizer: parameter groups, weight decay, fused steps, and optimizers that contain others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from inspect import signature, unwrap
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.learning.muon import Muon
from trainer.learning.optimizer_leaves import optimizer_leaves
from trainer.learning.parallel_plan import Plan
from trainer.learning.parameter_patterns import Rule
from trainer.messages import Refusal

EMPTY_ERROR = "empty parameter list"  # what torch says of an optimizer that gets nothing


def make_trial_optimizer(make: Callable[[Any], Optimizer]) -> Optimizer:
    """An optimizer over a small matrix, which all of them take; with a vector, if an inner optimizer needs one."""
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    try:
        return make(parameters[:1])
    except (ValueError, Refusal) as error:
        if EMPTY_ERROR not in str(error):
            raise
    # an inner optimizer for everything but matrices got no parameter: give it a vector
    return make(parameters)


@cache
def without_compiler(target: Callable[..., Any]) -> Callable[..., Any]:
    """A class of torch.optim or of the program that leaves torch's compiler alone; anything else as it is.

    torch wraps these methods so that no graph holds them, and imports its compiler for that: a third of a start.
    """
    if not (isinstance(target, type) and target.__module__.startswith(("torch.optim.", "trainer."))):
        return target
    kind: Any = target
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: unwrap(getattr(kind, name)) for name in wrapped}
    # the hooks of a step are not lost: torch puts them around it for each class, as the first of it is made
    methods["step"] = torch.no_grad()(unwrap(kind.step))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**methods, **names})


def expose_inner_optimizers(optimizer: Optimizer) -> Optimizer:
    """The same optimizer. If optimizers inside it step all its parameters, it shares their groups and states.

    So the schedule reaches them, and a checkpoint holds their states.
    """
    inner = list(_find_optimizers(vars(optimizer).values()))
    stepped = [parameter for each in inner for group in each.param_groups for parameter in group["params"]]
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not inner or len(stepped) != len(parameters) or {*stepped} != parameters:
        return optimizer  # what is wrong with it shows when it is tried (optimizer_checks)
    # the same group objects, not copies: a rate that is set here is the one that the inner optimizer uses
    optimizer.param_groups = [group for each in inner for group in each.param_groups]
    for each in inner:
        optimizer.state.update(each.state)
    share = partial(_share_state, inner)
    optimizer.register_load_state_dict_post_hook(share)  # load_state_dict makes new groups and a new state
    share(optimizer)
    return optimizer


def _share_state(inner: Sequence[Optimizer], optimizer: Optimizer) -> None:
    # in the order in which expose_inner_optimizers has collected the groups
    groups = iter(optimizer.param_groups)
    for each in inner:
        each.state = optimizer.state
        each.param_groups = list(islice(groups, len(each.param_groups)))


def _find_optimizers(values: Any) -> Iterator[Optimizer]:
    for value in values:
        if isinstance(value, Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _find_optimizers(value)
        elif type(value) is dict:
            yield from _find_optimizers(value.values())


Groups = list[dict[str, Any]]  # of parameters, as torch.optim takes them
Make = Callable[[Groups], torch.optim.Optimizer]


def should_spare_vectors(kind: Any, weight_decay: float | None, decay: str) -> bool:
    """Do biases and norms (vectors) need a group without decay? Not if `decay` is "all", nor if nothing decays.

    weight_decay: of the configuration; None: the optimizer's own default.
    """
    # an optimizer without this argument cannot spare them; one that decays nothing need not
    argument = signature(kind).parameters.get("weight_decay")
    amount = argument.default if argument is not None and weight_decay is None else weight_decay
    return decay == "weights" and argument is not None and amount != 0


def trains_other_weights(optimizer: Optimizer) -> bool:
    """Does it train other weights than those to evaluate? Then it has `train()` and `eval()`, which swap them."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


Roles = Mapping[str, str]  # name of a parameter → "elementwise" or "stacked": what its group says; others say neither


def find_roles(make: Make, network: nn.Module, plan: Plan) -> Roles:
    """What Muon steps unlike other parameters: element by element, or as a stack of matrices."""
    optimizer = make_trial_optimizer(make)
    return optimizer.find_roles(network, plan) if isinstance(optimizer, Muon) else {}


def parameter_groups(
    network: nn.Module, spare_vectors: bool, rules: Sequence[Rule] = (), roles: Roles | None = None
) -> Groups:
    """The trainable parameters, in as few groups as possible: each group is a kernel call of its own in every step.

    The first group has the optimizer's own rate, which is the one that is logged; it may be empty. If several rules
    apply to a parameter, the first one counts. roles: of `find_roles`.
    """
    # a group for each answer to: which rule applies, which role has it, does it decay, can a fused step take it? No
    # fused step takes sparse gradients or complex numbers
    sparse = {embedding.weight for embedding in find_sparse_embeddings(network).values()}
    groups: dict[tuple[int, str, bool, bool], list[nn.Parameter]] = {(0, "", False, False): []}
    names: dict[nn.Parameter, list[str]] = {}  # a tied weight has several
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, aliases in names.items():
        if parameter.requires_grad:
            rule = next((at for at, rule in enumerate(rules, 1) if any(map(rule.applies_to, aliases))), 0)
            spared = spare_vectors and parameter.dim() <= 1
            unfused = parameter in sparse or parameter.is_complex()
            role = next((roles[alias] for alias in aliases if roles and alias in roles), "")
            groups.setdefault((rule, role, spared, unfused), []).append(parameter)
    settings: list[dict[str, Any]] = [{}, *(rule.hyperparameters() for rule in rules)]
    return [
        {"params": group}
        | settings[rule]
        | ({role: True} if role else {})
        | ({"weight_decay": 0.0} if spared else {})
        | ({"fused": False} if unfused else {})
        for (rule, role, spared, unfused), group in sorted(groups.items(), key=lambda item: item[0])
    ]


def refuse_rate(rate: Any) -> None:
    """Refuse a learning rate that is no number: an optimizer without annotations would fail with another error."""
    if not isinstance(rate, int | float):
        raise Refusal(f"optimizer.lr={'null' if rate is None else rate}: expected a number")


def refuse_rules(kind: Any, rules: Sequence[Rule]) -> None:
    """Refuse a rule for a hyper-parameter that the optimizer does not have: it would change nothing."""
    for rule in rules:
        for key in rule.hyperparameters():
            if key not in signature(kind).parameters:
                raise Refusal(f"optimizer.groups: {rule}, but {kind.__name__} has no {key}")


def find_sparse_embeddings(network: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The trainable embeddings whose gradients are sparse, by name."""
    return {
        name or "itself": module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    }


def why_not_fused(
    optimizer: torch.optim.Optimizer,
    make: Make,
    device: torch.device,
    wanted: bool | None,
) -> str:
    """Why this optimizer's fused step cannot run on the device; empty if it can, or if it is not fused.

    Refusal if the configuration asks for a fused step.
    """
    if not any(group.get("fused") for group in optimizer.param_groups):
        return ""
    # which device has which kernels changes with torch: try it on one number
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        make([{"params": [parameter]}]).step()
    except RuntimeError as error:
        if wanted:
            raise Refusal(f"optimizer.fused=true: torch says: {error}; leave optimizer.fused out") from error
        return str(error)
    return ""


def init_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD a momentum of zeros, if it has none yet. The numbers of every step stay the same.

    torch makes it in a parameter's first step. A fused step then leaves unwritten memory if there is an overflow, and
    fails if only some parameters of a group had a step before. A sparse gradient makes a sparse momentum, which no
    checkpoint keeps.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["momentum"] and not group["dampening"]:  # a first step is not dampened: zeros would be wrong
            for parameter in group["params"]:
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def state_per_parameter(make_optimizer: Make) -> float:
    """How many numbers an optimizer remembers for each that it learns; two where a step over a few does not tell."""
    parameter = nn.Parameter(torch.zeros(32, 32))
    parameter.grad = torch.ones_like(parameter)
    with suppress(Exception):  # some optimizers take sparse gradients alone
        optimizer = make_optimizer([{"params": [parameter]}])
        optimizer.step()
        leaves = optimizer_leaves(optimizer).get(parameter, {})
        return round(sum(x.numel() for x in leaves.values()) / parameter.numel(), 1)
    return 2.0


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> float:
    """Set the learning rate of every group to its rate times this factor; returns that of the first group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor  # in place: the optimizer reads it from its groups in every step
    return rates[0] * factor


def fused_argument(kind: Any, fused: bool | None, dampening: Any = 0) -> dict[str, bool]:
    """The `fused` argument for an optimizer; None: yes where it has one (1.3 to 3.4 times faster, the same result)."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return {}  # building it will show what it is instead
    # asked for, but missing or known to be wrong: a refusal; not asked for: what is right
    if "fused" not in signature(kind).parameters:
        if fused:
            raise Refusal(f"optimizer.fused=true: {kind.__name__} has no fused step")
        return {}
    if fused and dampening:
        raise Refusal(
            f"optimizer.fused=true, optimizer.dampening={dampening}: the fused step can begin momentum wrongly where it"
            " is dampened; leave optimizer.fused out"
        )
    # a dampened momentum is begun wrongly by a fused step, see above
    return {"fused": fused is not False and not dampening}
