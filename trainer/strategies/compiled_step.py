"""`CompiledStepModel`: forward, loss, backward and the optimizer's update as one graph (`compile.mode=step`).

A short step spends most of its time in Python and in calls of kernels. One graph has none of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from typing_extensions import override

from trainer.data.nested_tensors import tensors
from trainer.launch.devices import accumulation_dtype
from trainer.learning.optimizer import Groups, Make, without_compiler
from trainer.learning.task import learning_task_weights, refuse_task_gradients
from trainer.messages import FatalRunError, Refusal, format_names
from trainer.parallel.compile import Compiler
from trainer.parallel.gradient_clipping import global_norm
from trainer.parallel.unused_parameters import find_always_used
from trainer.strategies.loss import TaskNetwork, loss_shares, name_losses
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.recurrent_state import NoRecurrentState


class CompiledStepModel(ParallelModel):
    """A whole network on each rank, whose step is one compiled function of one micro-batch.

    `forward_backward` only begins it: the function runs in `optimizer_step`, and then the losses are there.
    """

    step_draws = True  # the loss is in the graph, and may draw

    @override
    def optimizer(self, make: Make, groups: Groups) -> Optimizer:
        """Build the optimizer; Refusal where its update, the network or the task cannot be part of the graph."""
        optimizer = make(groups)
        if type(optimizer) not in _UPDATES or any(group.get("dampening") for group in groups):
            raise Refusal(
                "compile.mode=step: SGD without dampening, Adam and AdamW can be part of the graph, not"
                f" {type(optimizer).__name__}; use compile.mode=default"
            )
        if not isinstance(self.carried, NoRecurrentState):
            raise Refusal(
                "compile.mode=step: a state that passes from batch to batch is no part of the graph; use"
                " compile.mode=default"
            )
        if self.plan.counters:
            raise Refusal(
                f"compile.mode=step: {type(self.network).__name__} counts in its forward (Plan(counters=…)), as"
                " mixtures of experts do, and one graph cannot; use compile.mode=default"
            )
        trained = {name for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        used = find_always_used(TaskNetwork(self.task, self.network), self.example, self.strategy.world).parameters
        if unsure := sorted(trained - used):
            raise Refusal(
                f"compile.mode=step: it is not sure that these parameters get a gradient in each step:"
                f" {format_names(unsure, 5)}; leave them out (model.freeze), or use compile.mode=default"
            )
        # a graph gives its gradients to the network's weights alone: nothing would show that these get some as well
        refuse_task_gradients(self.task, [*learning_task_weights(self.task, self.network)])
        assert isinstance(self.compiler, Compiler)
        # between steps nothing changes but tensors: to ask in each whether Python is as it was takes longer than a step
        options = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        how: Any = {"backend": self.compiler.backend, "fullgraph": True, "dynamic": False, "options": options}
        self._compiled = torch.compile(self._step, **how)
        # numbers that change between steps are tensors: a number would be part of the graph
        device = self.strategy.device
        wide = accumulation_dtype(device)
        self._rates = [torch.zeros((), dtype=wide, device=device) for _ in optimizer.param_groups]
        self._limit = torch.zeros((), dtype=wide, device=device)
        self._fraction = torch.zeros((), dtype=self.machine.parameter_dtype, device=device)
        self._quiet_shapes: list[torch.Size] = []  # of the last batch, whose graph has drawn nothing
        self._updates = [_UPDATES[type(optimizer)](group) for group in optimizer.param_groups]
        return optimizer

    @override
    def skip_broken_steps(self) -> None:
        raise Refusal(
            "loop.on_nonfinite=skip: with compile.mode=step a step is one graph, and none is left out; use stop or"
            " rollback"
        )

    @override
    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """Take the batch. The losses that this returns get their values in `optimizer_step`."""
        self.set_mode(training=True)
        (self._batch,), self._number = batches, step
        self._losses: dict[str, Tensor] = {}
        self._share = loss_shares(self.task, batches, self.strategy.loss_group, self.strategy.device)
        self.watch.end_forward_backward()
        return self._losses

    @override
    def optimizer_step(self, optimizer: Optimizer, max_norm: float | None) -> Tensor | None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            rate.fill_(group["lr"])
        self._limit.fill_(inf if max_norm is None else max_norm)
        groups = [group["params"] for group in optimizer.param_groups]
        states = [update.state(optimizer, group) for update, group in zip(self._updates, groups, strict=True)]
        # of a batch of other shapes there will be another graph, which may draw
        shapes = [x.shape for x in tensors((self._batch.inputs, self._batch.targets))]
        draws = shapes != self._quiet_shapes
        if draws:
            self.rng.begin_forward(self._batch.indices, self._number, 0, self.strategy.loss_group.rank)
        share = self._share(0)  # of the only micro-batch: a number, or a tensor that may be 0
        share = share if isinstance(share, Tensor) else self._fraction.fill_(share)
        batch = self._batch.inputs, self._batch.targets, share
        before = self._python_numbers() if self.before_first_step else {}
        with self.rng if draws else nullcontext(), self.compute_context():
            norm, losses = self._compiled(groups, states, self._rates, self._limit, *batch)
        after = self._python_numbers() if before else {}
        if changed := [name for name, value in after.items() if before.get(name) != value]:
            raise FatalRunError(
                f"compile.mode=step: a step changes {format_names(changed, 5)}, which the graph holds as it was in the"
                " first step; make it a tensor (register_buffer), or use compile.mode=default"
            )
        self._quiet_shapes = [] if self.rng.has_drawn_in_graphs() else shapes
        self._losses.update(losses)
        self.before_first_step = False
        self.strategy.use_step_timeout()
        return None if max_norm is None else norm

    def _python_numbers(self) -> dict[str, Any]:
        """What the network's modules and the task hold beside tensors, by name; it is a constant of the graph."""
        holders: dict[str, Any] = {"task": self.task, **dict(self.network.named_modules())}
        return {
            f"{holder}.{key}".lstrip("."): value
            for holder, held in holders.items()
            for key, value in getattr(held, "__dict__", {}).items()
            if isinstance(value, int | float | str) and not key.startswith("draw_")  # those are of the random numbers
        }

    def _step(
        self,
        groups: list[list[Tensor]],
        states: list[Moments],
        rates: list[Tensor],
        limit: Tensor,
        inputs: Any,
        targets: Any,
        share: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is compiled: returns the norm of the gradient, and the losses."""

        def loss_of(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            with self.machine.autocast(self.strategy.device):
                x, y = self.memory_format.cast((inputs, targets))
                output = functional_call(self.step_module, {**weights, **buffers}, (x, y))
                losses = name_losses(self.task.loss(output, y))
            losses = {name: loss * share for name, loss in losses.items()}
            return losses["loss"], {name: loss.detach() for name, loss in losses.items()}

        trained = {name: weight for name, weight in self.step_module.named_parameters() if weight.requires_grad}
        # given as arguments: a transform changes in place (BatchNorm's statistics) nothing else
        buffers = dict(self.step_module.named_buffers())
        gradients, losses = self.rng.call_in_graph(grad(loss_of, has_aux=True), trained, buffers)
        with torch.no_grad():
            # all data ranks: the whole gradient; each has its share of the global mean's
            sums = self.strategy.loss_group.sum_together(list(gradients.values()))
            gradients = dict(zip(gradients, sums, strict=True))
            norm = global_norm(list(gradients.values()))
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            clipped: dict[Tensor, Tensor] = {weight: gradients[name] * factor for name, weight in trained.items()}
            for update, group, state, rate in zip(self._updates, groups, states, rates, strict=True):
                update(group, [clipped[weight] for weight in group], state, rate)
        return norm, losses


Moments = dict[str, list[Tensor]]  # of an optimizer, for the parameters of a group in their order


class _SGDUpdate:
    """`torch.optim.SGD` as a function of tensors."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._momentum = group["momentum"]
        self._fixed = {key: group[key] for key in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}

    def state(self, optimizer: Optimizer, group: list[Any]) -> Moments:
        """The momentum, which the loop has made."""
        return (
            {"momentum_buffer": [optimizer.state[each]["momentum_buffer"] for each in group]} if self._momentum else {}
        )

    def __call__(self, group: list[Tensor], gradients: list[Tensor], state: Moments, rate: Tensor) -> None:
        buffers: Any = state.get("momentum_buffer") or [None] * len(group)
        sgd(group, gradients, buffers, foreach=False, fused=False, lr=rate, **self._fixed)


class _AdamUpdate:
    """`torch.optim.Adam` and `AdamW` as a function of tensors."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        self._fixed: dict[str, Any] = {key: group[key] for key in ("amsgrad", "weight_decay", "eps", "maximize")}
        self._fixed |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        self._fixed |= {"foreach": False, "decoupled_weight_decay": group["decoupled_weight_decay"]}

    def state(self, optimizer: Optimizer, group: list[Any]) -> Moments:
        """The moments and the number of steps; made here before a first step."""
        for each in group:
            state = optimizer.state[each]
            if not state:
                state["step"] = torch.zeros((), device=each.device)
                state |= {name: torch.zeros_like(each) for name in self._moments}
            elif state["step"].device != each.device:  # of a checkpoint
                state["step"] = state["step"].to(each.device)
        return {name: [optimizer.state[each][name] for each in group] for name in ("step", *self._moments)}

    def __call__(self, group: list[Tensor], gradients: list[Tensor], state: Moments, rate: Tensor) -> None:
        # torch computes the corrections of young moments in Python, with 53 bits: so do these numbers, not with 24
        steps = [each.to(rate.dtype) for each in state["step"]]
        moments: Any = [state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []), steps]
        how = {**self._fixed, "capturable": group[0].device.type != "cpu"}  # the step's number lies on the device
        adam(group, gradients, *moments, lr=rate, **how)
        for each in state["step"]:
            each.add_(1)


_KINDS = {SGD: _SGDUpdate, Adam: _AdamUpdate, AdamW: _AdamUpdate}
# as a configuration makes them, too; no class that derives from one of these: its step may be another
_UPDATES: dict[Any, Any] = _KINDS | {without_compiler(kind): update for kind, update in _KINDS.items()}
