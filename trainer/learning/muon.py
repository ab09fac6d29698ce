"""Muon: matrices are stepped along the nearest orthogonal matrix to their momentum, all other parameters by AdamW.

K. Jordan et al., Muon, 2024; J. Liu et al. (Moonshot), Muon is Scalable for LLM Training, 2025, arXiv:2502.16982.
`torch.optim.Muon` is not used: it computes in bf16 whatever the weights are, so that no two layouts would have one
curve, and it takes nothing but matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from trainer.learning.parallel_plan import Plan
from trainer.learning.parameter_patterns import matches_or_contains, resolve_pattern
from trainer.messages import Refusal

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: singular values come near 1 in few iterations, not to 1
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
EMBEDDINGS, HEAD = "embeddings", "head"  # words of `adamw` that are found by the type of a module, and by its place


class Muon(Optimizer):
    """Muon for matrices, and AdamW for groups that say `elementwise` and for what is no matrix.

    A weight of a convolution, (out, in, …), counts as the matrix (out, in · …). A fused qkv weight is one matrix. In
    groups that say `stacked` a parameter (n, rows, columns) is n matrices: experts.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scaling: Literal["moonshot", "jordan"] = "moonshot",
        newton_schulz: Literal["fp32", "bf16"] = "fp32",
        iterations: int = 5,
        adamw: Sequence[str] = (EMBEDDINGS, HEAD),
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        fractions = (momentum, *betas)
        if min(lr, adamw_lr or 0, weight_decay, eps) < 0 or not all(0 <= x < 1 for x in fractions) or iterations < 1:
            raise ValueError(
                "lr, adamw_lr, weight_decay and eps are 0 or more, momentum and betas from 0 to below 1, iterations 1"
                " or more"
            )
        self._adamw_patterns = tuple(adamw)
        rate = {} if adamw_lr is None else {"lr": adamw_lr}
        groups = [{**rate, **each} if isinstance(each, dict) and each.get("elementwise") else each for each in params]
        numbers = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        how = {"scaling": scaling, "newton_schulz": newton_schulz, "iterations": iterations}
        super().__init__(groups, {**numbers, **how, "betas": betas, "eps": eps, "elementwise": False, "stacked": False})

    def find_roles(self, network: nn.Module, plan: Plan) -> dict[str, str]:
        """Which parameters AdamW steps (elementwise), and which are the matrices of the plan's experts (stacked).

        Refusal where nothing that learns is left for Muon.
        """
        names = {name for pattern in self._adamw_patterns for name in _find_parameters(network, pattern)}
        # what is no matrix: a convolution's weight is one, of experts a stack of them
        modules = [module for module in network.modules() if isinstance(module, CONVOLUTIONS)]
        convolutions = {parameter for module in modules for parameter in module.parameters()}
        named = dict(network.named_parameters(remove_duplicate=False))
        inside = {name for name in named if any(matches_or_contains(key, name) for key in plan.experts)}
        stacked = {name for name in inside if _is_matrix(named[name], False, dims=3)} - names
        matrices = {name for name, parameter in named.items() if _is_matrix(parameter, parameter in convolutions)}
        # of experts a parameter with two dimensions is a vector for each
        names |= named.keys() - (matrices - inside) - stacked
        elementwise = {named[name] for name in names}  # a tied weight by any of its names
        if not any(parameter.requires_grad and parameter not in elementwise for parameter in named.values()):
            raise Refusal(
                f"optimizer: {type(network).__name__} has nothing for Muon: all that learns is no matrix, or named by"
                f" optimizer.adamw={[*self._adamw_patterns]}; use optimizer=adamw, or a shorter optimizer.adamw"
            )
        return dict.fromkeys(stacked, "stacked") | {n: "elementwise" for n, p in named.items() if p in elementwise}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            elementwise = [parameter for parameter in used if group["elementwise"] or parameter.dim() < 2]
            if elementwise:
                self._step_by_adamw(elementwise, group)
            for parameter in used if len(elementwise) < len(used) else ():
                if parameter.dim() >= 2:
                    self._step_by_muon(parameter, group)

    def _step_by_muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("Muon does not support sparse gradients")
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        # of a stack that ranks have divided, this rank's matrices are stepped, as plain tensors
        weight, gradient, momentum = map(_local, (parameter, gradient, state["momentum_buffer"]))
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrix = direction if group["stacked"] else direction.flatten(1)  # (rows, columns), or (n, rows, columns)
        update = orthogonalize(matrix, group["iterations"], group["newton_schulz"]).view(weight.shape)
        rows, columns = matrix.shape[-2:]
        # moonshot: entries as large as those of AdamW's steps are on the average; jordan: as the norm of a layer wants
        scale = 0.2 * sqrt(max(rows, columns)) if group["scaling"] == "moonshot" else sqrt(max(1.0, rows / columns))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale)

    def _step_by_adamw(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise RuntimeError("Muon's AdamW does not support sparse gradients")
        is_complex = any(parameter.is_complex() for parameter in parameters)
        fused = not is_complex and _has_fused_adam(parameters[0].device)
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            # where the step's number must be; a checkpoint's is on the CPU
            state["step"] = state["step"].to(parameter.device if fused else "cpu")
        first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        _adamw([*parameters], gradients, first, second, steps, group, fused=fused, has_complex=is_complex)


def _adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    **switches: bool,
) -> None:
    """torch's AdamW, in place; first and second: its moments."""
    numbers = {key: group[key] for key in ("lr", "weight_decay", "eps")}
    numbers |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    how: dict[str, Any] = {**switches, "amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    adam(parameters, gradients, first, second, [], steps, **numbers, **how)


@cache
def _has_fused_adam(device: torch.device) -> bool:
    """Has torch a kernel for it there? Which devices have one changes with torch: it is tried on one number."""
    parameter, gradient, first, second = ([torch.zeros(1, device=device)] for _ in range(4))
    numbers = {"lr": 0.0, "weight_decay": 0.0, "eps": 1.0, "betas": (0.0, 0.0)}
    try:
        _adamw(parameter, gradient, first, second, [torch.zeros((), device=device)], numbers, fused=True)
    except RuntimeError:
        return False
    return True


def orthogonalize(matrix: Tensor, iterations: int, precision: str) -> Tensor:
    """A matrix of the same singular vectors, whose singular values are near 1: (…, rows, columns), in its type.

    Newton–Schulz: an odd polynomial, again and again. In fp64 where the matrix is fp64, whatever the precision says:
    there all strategies have one curve to the last digits.
    """
    single = torch.bfloat16 if precision == "bf16" else torch.float32
    x = matrix.to(torch.float64 if matrix.dtype == torch.float64 else single)
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x  # the products below are of the smaller side's size then
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT  # (smaller side, smaller side)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype).contiguous()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_matrix(parameter: Tensor, convolution: bool, dims: int = 2) -> bool:
    """Has it rows and columns, or so many dimensions of which they are the last? Positions, (1, n, d), have not."""
    sides = parameter.flatten(1).shape if convolution and parameter.dim() > 2 else parameter.shape
    return len(sides) == dims and min(sides[-2:]) > 1 and parameter.is_floating_point()


def _find_parameters(network: nn.Module, pattern: str) -> Iterable[str]:
    """The names of the parameters that one entry of `adamw` means; none where the network has no such thing."""
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if pattern in (EMBEDDINGS, HEAD) and not any(matches_or_contains(pattern, name) for name in names):
        kinds: Any = (nn.Embedding, nn.EmbeddingBag) if pattern == EMBEDDINGS else nn.Linear
        modules = [name for name, module in network.named_modules() if isinstance(module, kinds)]
        inside = tuple(f"{name}." if name else "" for name in (modules if pattern == EMBEDDINGS else modules[-1:]))
        return [name for name in names if name.startswith(inside)] if inside else []
    resolved = resolve_pattern(network, pattern, "optimizer.adamw")
    return [name for name in names if any(matches_or_contains(each, name) for each in resolved)]
