"""Is `Task.loss` the mean over what `Task.weight` counts? Two halves of a first micro-batch tell, without a forward."""

from __future__ import annotations

import pickle
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.data.nested_tensors import first_tensor, has_rows, map_tensors, slice_rows, tensors
from trainer.data.rng import preserve_rng_state
from trainer.learning.task import Task, TaskWrapper, loss_weight
from trainer.messages import format_number
from trainer.parallel.batch_gather import UnreachableRanks, set_gather_ranks
from trainer.parallel.pipeline.fake_forward import count_writes
from trainer.strategies.loss import total_loss

_BYTES = 2**26  # kept of outputs and targets: a step's memory must not grow with them
_MOST_STATE = 2**24  # bytes of a task's own variables, beside tensors
_HALF = (torch.bfloat16, torch.float16)


class MeanCheckingTask(TaskWrapper):
    """A task around which the losses of one step are watched; afterwards `problem` computes them again by halves.

    What cannot be told is passed over: outputs that are no rows of samples, losses that draw, gather or remember.
    """

    def __init__(self, inner: Task, network: nn.Module) -> None:
        super().__init__(inner)
        # an output may hand these to the loss, such as a temperature: they belong to no sample
        self._own = {id(x) for x in (*network.parameters(), *network.buffers())}
        self._kept: list[tuple[Any, Any]] = []  # output and target of some rows
        self._room = _BYTES

    @override
    def loss(self, output: Any, target: Any) -> Tensor | dict[str, Tensor]:
        before = self._state(output, target)
        loss = self.inner.loss(output, target)
        if before is not None and before == self._state(output, target):
            self._keep(output, target)
        return loss

    def _state(self, *trees: Any) -> bytes | None:
        """What changes where the loss changes something of its task, or of these tensors; None: it cannot be seen."""
        buffer = _SmallBuffer()
        try:
            _StatePickler(buffer).dump((vars(self.inner), [*map(list, map(tensors, trees))]))
        except Exception:  # a lock, an open file, a whole data set
            return None
        return buffer.getvalue()

    def _keep(self, output: Any, target: Any) -> None:
        mine = [x for x in (*tensors(output), *tensors(target)) if x.dim() and id(x) not in self._own]
        rows = first_tensor(target).shape[:1] if mine else ()
        if not rows or rows[0] < 2 or any(type(x) is not Tensor or x.shape[:1] != rows for x in mine):
            return
        # a list as long as the batch may have a tensor of each sample
        if not all(has_rows(map_tensors(tree, self._as_row(rows[0])), rows[0]) for tree in (output, target)):
            return
        each = sum(x.nbytes for x in mine) // rows[0]
        count = min(rows[0], self._room // max(each, 1)) // 2 * 2
        if count:
            self._room -= count * each
            some = map_tensors((output, target), Tensor.detach)
            if count < rows[0]:  # a copy: a view would keep all of it
                some = map_tensors(slice_rows(some, 0, count, rows[0]), Tensor.clone)
            self._kept.append(some)

    def _as_row(self, rows: int) -> Any:
        return lambda x: x if x.dim() and id(x) not in self._own else torch.empty(rows, 0)

    def problem(self) -> str:
        """What is wrong, in a sentence, or nothing."""
        with torch.no_grad(), preserve_rng_state(), set_gather_ranks(UnreachableRanks()):
            for output, target in self._kept:
                size = max(x.shape[0] for x in tensors(target) if x.dim())
                halves = [slice_rows((output, target), *ends, size) for ends in ((0, size // 2), (size // 2, size))]
                try:
                    # twice: one that draws is another one then
                    whole, again, *parts = (
                        total_loss(self.inner.loss(*each)) for each in ((output, target), (output, target), *halves)
                    )
                    one, same, *losses = map(float, (whole, again, *parts))
                    weights = [float(loss_weight(self.inner, target, size // 2)) for _, target in halves]
                except Exception:  # it gathers, or wants a gradient
                    return ""
                total = weights[0] + weights[1]
                mean = (losses[0] * weights[0] + losses[1] * weights[1]) / (total or 1)
                # what rounding makes of a loss in half precision, under autocast, and else
                narrow = torch.is_autocast_enabled(whole.device.type)
                limit = 2e-2 if whole.dtype in _HALF else 2e-3 if narrow else 1e-4
                if one == same and total and abs(one - mean) > limit * max(map(abs, (one, *losses))):
                    return _describe(one, mean, size)
        return ""


class _SmallBuffer(BytesIO):
    """OverflowError where more is written than a task should hold."""

    @override
    def write(self, part: Any) -> int:
        if self.tell() + len(part) > _MOST_STATE:
            raise OverflowError
        return super().write(part)


class _StatePickler(pickle.Pickler):
    """Of tensors it writes which they are and how often they were changed; of code, which it is."""

    @override
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return id(obj), count_writes(obj)
        return id(obj) if isinstance(obj, type | FunctionType | BuiltinFunctionType | ModuleType) else None


def _describe(one: float, mean: float, size: int) -> str:
    return (
        f"Task.loss is no mean over what Task.weight counts: of {size} samples it is {format_number(one)}, and the mean"
        f" of its halves by their weights {format_number(mean)}. So the curve depends on ranks and micro-batches. Where"
        " it divides by other units (words that count, weights of classes), say them: def weight(self, target): return"
        ' (target != -100).sum(), and in loss reduction="sum" and / self.weight(target).clamp(min=1). Where the samples'
        " of a batch are each other's negatives: trainer.gather (docs/extending.md, A task: loss and metrics)"
    )
