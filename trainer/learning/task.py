"""`Task`: what is learned (the loss, its weight, the metrics); wrappers around it, and checks of what a task holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from trainer.data.nested_tensors import first_tensor, named_tensors
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal, format_names


class Task:
    """What is learned: loss and metrics. Every method except `loss` has a default; none knows devices or processes.

    The methods get one micro-batch. `inputs` and `targets` are what the data set returns: a tensor, or nested dicts,
    tuples and lists of them, with the samples along the first dimension.
    """

    best: str = "-loss"  # the metric that marks the best checkpoint; a minus sign: smaller is better

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        """Compute the network's output for one micro-batch."""
        return network(inputs)

    def check(self, network: nn.Module) -> None:
        """Refuse a network that this task cannot train, before there is a group: raise Refusal. Default: none."""

    def examine(self, network: nn.Module, inputs: Any, targets: Any) -> str:
        """What is wrong with a network on one process, for `job=verify`: a sentence; default: empty, nothing.

        For what is wrong under every strategy alike, which no comparison shows. The network is in evaluation mode.
        """
        return ""

    def with_whole_outputs(self) -> Task:
        """The same task where outputs are kept (job=predict, job=export), and the loss is not all that counts.

        Default: itself. A task whose forward gives less than the network's output says another one.
        """
        return self

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        """The mean loss over the units of this micro-batch, finite if there are none; a dict's parts are summed."""
        raise NotImplementedError(f"{type(self).__name__} must say what its loss is: def loss(self, output, target)")

    def weight(self, target: Any) -> Tensor | int:
        """The number of units that `loss` is the mean of; default: the number of samples.

        Weights may differ between micro-batches and ranks; the weights of a step are summed over all of them. The
        default is known on every rank and needs no communication.
        """
        # a list has an entry for each sample (detection); other targets are tensors (B, …)
        return len(target) if is_list_of_samples(target) else first_tensor(target).shape[0]

    def tokens(self, target: Any) -> int:
        """How many tokens a micro-batch has, for the throughput in tokens/s; default: 0, no throughput is shown."""
        return 0

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums over this micro-batch: tensors of any shape. They are added over the evaluation set and all ranks."""
        return {}

    def gathered(self, output: Any, target: Any) -> dict[str, Tensor | list[Any]]:
        """What to keep of each sample of an evaluation, for metrics that are no sums (AUC, mAP). Default: nothing.

        Tensors whose first dimension is the samples, or lists with an entry for each. `finish` gets those of the whole
        set, in its order, on the CPU, the same on every rank and under every strategy.
        """
        return {}

    def finish(self, totals: dict[str, Any]) -> dict[str, float]:
        """Turn the totals over the evaluation set into metrics.

        `totals` holds `loss` (the sum of loss times weight), `weight`, `samples`, every sum of `metrics`, and what
        `gathered` keeps. The default divides each sum by the weight, and leaves out what has more than one element.
        """
        # what a sum of several elements means is unknown; a set without samples has weight 0
        sums = {
            name: total
            for name, total in totals.items()
            if name not in ("weight", "samples") and isinstance(total, Tensor) and total.numel() == 1
        }
        return {name: float(total.double() / (totals["weight"] or 1)) for name, total in sums.items()}

    def predict(self, output: Any) -> dict[str, Tensor]:
        """What `job=predict` keeps of an output: named tensors whose first dimension is the samples.

        The default is the output itself: `output`; for a dict, a dataclass or a tuple its tensors, as `output.NAME`.
        """
        if is_list_of_samples(output):
            raise ValueError(
                f"the output is a {type(output).__name__} with a {type(output[0]).__name__} for each sample:"
                f" {type(self).__name__}.predict must make tensors of it whose first dimension is the samples"
            )
        samples = first_tensor(output).shape[0]
        # a tensor without a row for each sample belongs to the batch: it cannot be stored by sample
        return {name: tensor for name, tensor in named_tensors(output, "output") if tensor.shape[:1] == (samples,)}

    def probabilities(self, output: Any) -> Tensor | None:
        """The probability of each class, (B, classes), for exported programs and `job=predict job.inputs=…`.

        Default: None, the outputs are not scores of classes.
        """
        return None

    def confusion(self, totals: dict[str, Any]) -> Tensor | None:
        """The confusion matrix, from the totals: (classes, classes), row = true class, column = predicted class.

        Default: None, there is none.
        """
        return None

    def counted(self, counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers for a training line from the counters of the plan: their sums over the step's global batch, by name.

        The same on every rank; single numbers that stay on the device. Default: none.
        """
        return {}

    def after_step(self, network: nn.Module, step: int) -> None:
        """Change the network in place after an optimizer step: elementwise, on this rank's tensors, no gradient."""

    def plan(self, network: nn.Module) -> Plan:
        """How the network can be divided over devices; default: the network's own `plan()`, if it has one."""
        # networks of other libraries have no such method, which is fine
        method = getattr(network, "plan", None)
        return method() if callable(method) else Plan()


class TaskWrapper(Task):
    """A task around another one, to see more of its outputs. What is not overridden is done by the inner task."""

    def __init__(self, inner: Task) -> None:
        self.inner = inner  # may be a wrapper, too

    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        return self.inner.loss(output, target)

    def weight(self, target: Any) -> Tensor | int:
        return self.inner.weight(target)

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return self.inner.metrics(output, target)


def unwrap_task(task: Task) -> Task:
    """The innermost task, without the wrappers around it."""
    return unwrap_task(task.inner) if isinstance(task, TaskWrapper) else task


def loss_weight(task: Task, target: Any, samples: int) -> Tensor | int:
    """How many units the loss of a micro-batch is the mean of."""
    task = unwrap_task(task)
    # targets may not show how many samples there are: in a list of boxes the first tensor is that of one sample
    return samples if type(task).weight is Task.weight else task.weight(target)


def is_list_of_samples(tree: Any) -> bool:
    """Is it a list with a dict for each sample, as in detection? A list of tensors has all samples in each."""
    return isinstance(tree, (list, tuple)) and len(tree) > 0 and isinstance(tree[0], dict)


def gathers_samples(task: Task) -> bool:
    """Does the task keep something of every sample of an evaluation?"""
    return type(task).gathered is not Task.gathered


def refuse_metric_objects(task: Task) -> None:
    """Refuse metric objects (torchmetrics), which add up what one rank has seen."""
    for name, value in vars(task).items():
        for item in _walk_values(value):
            # by the names of base classes: none of these packages need be installed
            bases = [base for base in type(item).__mro__ if base.__module__.partition(".")[0] in _STATEFUL]
            if any(base.__name__ in ("Metric", "MetricCollection") for base in bases):
                package = bases[0].__module__.partition(".")[0]
                raise Refusal(
                    f"task: self.{name} is a {type(item).__name__} of {package}, an object that remembers what one rank"
                    " has shown it: samples of other ranks, and which of them count, it does not know. Keep what it"
                    ' needs of each sample, def gathered(self, output, target): return {"scores": …, "labels": …},'
                    ' and compute it in finish from totals["scores"] and totals["labels"], for example with'
                    " torchmetrics.functional"
                )


_STATEFUL = ("torchmetrics", "torcheval", "ignite")  # packages whose metrics add up by themselves, on one rank


def _walk_values(value: Any) -> Iterator[Any]:
    """A value, and what lists, dicts and modules hold."""
    yield value
    if isinstance(value, nn.Module):
        yield from value.modules()  # a metric of torchmetrics is a module, and may lie in a ModuleDict
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _walk_values(each)


_REMEDY = (
    "no optimizer, checkpoint or other rank would know of them. Put them into the network: a module with your network"
    " and these parameters inside, whose output hands them to the loss (docs/extending.md, Weights that a loss learns)"
)


def refuse_task_parameters(task: Task) -> None:
    """Refuse parameters that a task has made for itself. A network inside it may be one that is not to learn."""
    names = [
        name
        for name, value in _walk_variables(vars(task), ())
        if isinstance(value, nn.Parameter) and value.requires_grad
    ]
    if names:
        raise Refusal(f"task: {type(task).__name__} has parameters of its own, {format_names(names, 8)}: {_REMEDY}")


def task_weights_with_gradient(task: Task, network: nn.Module) -> list[str]:
    """The weights that lie in a task, not in the network, and got a gradient from its loss."""
    trained = {*network.parameters()}  # a task may hold a reference to the network itself
    every = ((name, x) for name, value in _walk_variables(vars(task), ()) for name, x in _named_weights(name, value))
    return [name for name, x in every if x not in trained and x.is_leaf and x.requires_grad and x.grad is not None]


def refuse_task_gradients(task: Task, names: list[str]) -> None:
    """Refuse a task whose weights got gradients, for these would be all that comes of them."""
    if names:
        raise Refusal(
            f"task: weights that {type(task).__name__} holds get gradients, {format_names(names, 8)}: {_REMEDY}. Where"
            " they are not to learn (a teacher, a network that measures a loss): requires_grad_(False)"
        )


def _walk_variables(tree: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every tensor and network of an object's variables, with its name; lists and dicts are looked into."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        # a task may be a module itself, whose tables have no name for users
        name = above if key in ("_parameters", "_modules", "_buffers") else (*above, str(key))
        if isinstance(value, nn.ParameterList | nn.ParameterDict):
            yield from ((f"{'.'.join(name)}.{key}", parameter) for key, parameter in value.named_parameters())
        elif isinstance(value, Tensor | nn.Module):
            yield ".".join(name), value  # a module as a whole; `_named_weights` looks into it
        elif isinstance(value, list | tuple | dict):
            yield from _walk_variables(value, name)


def _named_weights(name: str, value: Tensor | nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    else:
        yield from ((f"{name}.{key}", parameter) for key, parameter in value.named_parameters())
