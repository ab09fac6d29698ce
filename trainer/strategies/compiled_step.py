"""`CompiledStepModel`: forward, loss, backward and the optimizer's update as one graph (`compile.mode=step`).

A short step spends most of its time in Python and in calls of kernels. One graph has none of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor, atleast_1d
from torch.func import functional_call, grad
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from typing_extensions import override

from trainer.data.nested_tensors import tensors
from trainer.launch.devices import accumulation_dtype
from trainer.learning.optimizer import Groups, Make, without_compiler
from trainer.learning.task import learning_task_weights, refuse_task_gradients, unwrap_task
from trainer.messages import FatalRunError, Refusal, format_names
from trainer.parallel.batch_gather import set_gather_span
from trainer.parallel.compile import Compiler, explain_graph_errors, is_graph_error, without_compile
from trainer.parallel.gradient_clipping import global_norm
from trainer.parallel.unused_parameters import find_always_used
from trainer.strategies.loss import TaskNetwork, evaluation_sums, loss_shares, name_losses, zero_sums
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.recurrent_state import NoRecurrentState


class CompiledStepModel(ParallelModel):
    """A whole network on each rank, whose step is one compiled function of one micro-batch.

    `forward_backward` only begins it: the function runs in `optimizer_step`, and then the losses are there.
    """

    step_draws = True  # the loss is in the graph, and may draw
    _evaluates_in_graph = False  # until there is an optimizer: what is only evaluated runs as it is written

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
        self._compiled = self.compiler.compile_whole(self._step)
        self._compiled_evaluation = self.compiler.compile_whole(self._output_and_loss)
        # numbers that change between steps are tensors: a number would be part of the graph
        device = self.strategy.device
        wide = accumulation_dtype(device)
        self._rates = [torch.zeros((), dtype=wide, device=device) for _ in optimizer.param_groups]
        self._limit = torch.zeros((), dtype=wide, device=device)
        self._fraction = torch.zeros((), dtype=self.machine.parameter_dtype, device=device)
        self._quiet_shapes: list[torch.Size] = []  # of the last batch, whose graph has drawn nothing
        self._evaluates_in_graph, self._evaluation_draws = True, True
        self._evaluated_shapes: list[torch.Size] = []  # of an evaluation's first batch
        self._steps_with_graphs, self._numbers = 0, dict[str, Any]()
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
        else:
            self.rng.begin_quietly()
        share = self._share(0)  # of the only micro-batch: a number, or a tensor that may be 0
        share = share if isinstance(share, Tensor) else self._fraction.fill_(share)
        batch = self._batch.inputs, self._batch.targets, share
        graphs = self.compiler.graphs
        with self.rng if draws else nullcontext(), self.compute_context(), explain_graph_errors():
            norm, losses = self._compiled(groups, states, self._rates, self._limit, *batch)
        self._refuse_a_graph_a_step(self.compiler.graphs > graphs)
        self._quiet_shapes = [] if self.rng.has_drawn_in_graphs() else shapes
        self._losses.update(losses)
        self.before_first_step = False
        self.strategy.use_step_timeout()
        return None if max_norm is None else norm

    def _refuse_a_graph_a_step(self, is_new: bool) -> None:
        """FatalRunError if several steps running needed a graph of their own, each of which compiles for seconds."""
        self._steps_with_graphs = self._steps_with_graphs + 1 if is_new else 0
        if self._steps_with_graphs == 1:
            self._numbers = self._python_numbers()
        if self._steps_with_graphs > _GRAPHS_RUNNING:
            changed = [name for name, value in self._python_numbers().items() if self._numbers.get(name) != value]
            cause = f"{format_names(changed, 5)} changed" if changed else "batches had other shapes, or Python changed"
            raise FatalRunError(
                f"compile.mode=step: in {self._steps_with_graphs} steps running {cause}, and each time a graph was made"
                " anew; make a number that changes a tensor (register_buffer), and batches of one shape, or use"
                " compile.mode=default"
            )

    def _python_numbers(self) -> dict[str, Any]:
        """What the network's modules and the task hold beside tensors, by name; it is a constant of the graph."""
        holders: dict[str, Any] = {"task": self.task, **dict(self.network.named_modules())}
        return {
            f"{holder}.{key}".lstrip("."): value
            for holder, held in holders.items()
            for key, value in getattr(held, "__dict__", {}).items()
            if isinstance(value, int | float | str) and not key.startswith("draw_")  # those are of the random numbers
        }

    @override
    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor | float]:
        if not self._evaluates_in_graph:
            return super().evaluate(batch, valid)
        if self.before_first_step:  # a trial, which runs as it is written and shows whether anything draws
            sums = super().evaluate(batch, valid)
            self._evaluation_draws = self.rng.has_drawn()
            return sums
        shapes = [x.shape for x in tensors((batch.inputs, batch.targets))]
        self._evaluated_shapes = self._evaluated_shapes or shapes
        if shapes != self._evaluated_shapes:  # as a rule the last batch: a graph would take longer than it does
            with without_compile():
                return super().evaluate(batch, valid)
        self.set_mode(training=False)
        self.watch.phases_done += 1  # for the watchdog: an evaluation may take hours
        if draws := self._evaluation_draws:
            self.rng.begin_evaluation(batch.indices)
        else:
            self.rng.begin_quietly()
        rng, autocast = self.rng if draws else nullcontext(), self.machine.autocast(self.strategy.device)
        with rng, self.compute_context(), set_gather_span(batch.span), autocast:
            x, y = self.memory_format.cast((batch.inputs, batch.targets))
            try:
                output, loss = self._compiled_evaluation(x, y)
            except RuntimeError as error:
                if not is_graph_error(error):
                    raise
                self._evaluates_in_graph = False  # what is not trained need not be one graph
            else:
                sums = evaluation_sums(self.task, lambda *_: loss, output, y, batch.indices.numel())
                return sums if valid else zero_sums(sums)
        return super().evaluate(batch, valid)

    def _output_and_loss(self, x: Any, y: Any) -> tuple[Any, Any]:
        """What is compiled of an evaluation; metrics are Python's, which may count and look at numbers."""

        def compute() -> tuple[Any, Any]:
            output = self.step_module(x, y)
            return output, unwrap_task(self.task).loss(output, y)

        return self.rng.call_in_graph(compute)

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
            # a parameter of shape () counts as (1,): a product of two 0-d tensors would have the wider type of both
            clipped: dict[Tensor, Tensor] = {
                weight: atleast_1d(gradients[name]) * factor for name, weight in trained.items()
            }
            for update, group, state, rate in zip(self._updates, groups, states, rates, strict=True):
                moved = [index for index, weight in enumerate(group) if weight in clipped]  # what a task may freeze
                moments = {
                    name: [values[index] if name == "step" else atleast_1d(values[index]) for index in moved]
                    for name, values in state.items()
                }
                gradients_of = [clipped[group[index]] for index in moved]
                if moved:
                    update([atleast_1d(group[index]) for index in moved], gradients_of, moments, rate)
        return norm, losses


_GRAPHS_RUNNING = 3  # steps running that may need a graph of their own

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
