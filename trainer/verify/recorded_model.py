"""A parallel model whose steps leave sketches: of its data, module outputs, losses, gradients and weights.

What ranks gather together they must call together. Else each computes with parts of others, which nothing else shows,
or they wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainer.data.loader import Batch
from trainer.learning.task import Task
from trainer.messages import FatalRunError
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.context_parallel import Pieces, count_tokens
from trainer.parallel.optimizer_state import optimizer_tensors
from trainer.parallel.pipeline.stages import RankStages
from trainer.parallel.ranks import Ranks
from trainer.strategies.parallel_model import ParallelModel
from trainer.verify.batch_dim_detection import ModuleObserver, split_by_sample
from trainer.verify.fixed_randomness import USUAL_RANDOMNESS, UsualRandomness
from trainer.verify.training_record import Key, Phase, SketchRecorder, TrainingRecord, full_tensor, sketch_rows


def compare_unit_calls(network: nn.Module, ranks: Ranks, step: Callable[[], int | None]) -> None:
    """From now on these ranks compare which unit they call next. step: the one under way; None: nothing is compared.

    Told on all of them where they differ.
    """
    units = [name for name, module in network.named_modules() if name and isinstance(module, FSDPModule)]

    def compare_names(name: str, *_: Any) -> None:
        current_step = None if in_backward() else step()  # what is computed again has been called before
        if current_step is None:
            return
        names = ranks.all_gather_values(name)  # these ranks, before any of them gathers
        if len({*names}) > 1:
            raise FatalRunError(_format_divergence(names, current_step))

    if ranks.size > 1:
        for name in units:
            hook = partial(compare_names, name)
            network.get_submodule(name).register_forward_pre_hook(hook, prepend=True)  # before fully_shard's own
        if units:
            network.register_forward_hook(partial(compare_names, ""))


def _format_divergence(names: list[str], step: int) -> str:
    ranks_by_name: dict[str, list[str]] = {}
    for rank, name in enumerate(names):
        ranks_by_name.setdefault(name, []).append(str(rank))
    first = next(name for name in names if name)
    calls = [f"{name or 'nothing more'} on rank {', '.join(ranks)}" for name, ranks in ranks_by_name.items()]
    return (
        f"DIFFERS at step {step}, forward, {first}: what is called is {'; '.join(calls)}; cause: a choice of layers by"
        " a rank's own samples. Each of them is a unit, which ranks gather together: they would compute with parts of"
        " different ones, or wait for each other for ever. ddp with strategy.find_unused_parameters=true can do it; or"
        " a plan's shard that names the module around the choice, so that it is one unit"
    )


_WITH_VALUES = (Tensor, nn.Parameter)  # what stands for a tensor of another rank's stage has a type of its own
_IMPLEMENTATION_KEYS = ("fused", "foreach", "capturable", "differentiable")  # say how it is computed, not what


@contextmanager
def recording_optimizer_step(
    network: nn.Module, optimizer: Optimizer, record: TrainingRecord, step: int
) -> Iterator[None]:
    """Around a step: record the rates, the gradient and the new value of each parameter that this rank's optimizer has.

    Collective where ranks hold shards, as the step itself is. They are in the record when the context ends.
    """
    names, sketches = {parameter: name for name, parameter in network.named_parameters()}, SketchRecorder(record)

    def stepped() -> Iterator[tuple[str, nn.Parameter, Tensor, dict[str, Any]]]:
        """What this rank's optimizer steps, with gradient and group; the last layer first, as gradients come."""
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, name in reversed(names.items()):
            if parameter in groups and parameter.grad is not None:
                yield name, parameter, parameter.grad, groups[parameter]

    def before(*hook_arguments: Any) -> None:
        # rates first, then gradients: a wrong rate explains all that follows
        for name, _, _, group in stepped():
            sketches.add(Key(step, Phase.RATE, name), torch.tensor(_group_numbers(group), dtype=torch.float64))
        for name, _, gradient, _ in stepped():
            sketches.add(Key(step, Phase.CLIPPED, name), gradient)

    def after(*hook_arguments: Any) -> None:
        for name, parameter, _, _ in stepped():
            sketches.add(Key(step, Phase.STEP, name), parameter)

    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    sketches.join()


def _group_numbers(group: dict[str, Any]) -> list[float]:
    """The numbers of a group by which its parameters are stepped: rate, decay, momentum."""
    values = (group[key] for key in sorted(group) if key != "params" and key not in _IMPLEMENTATION_KEYS)
    lists = (value if isinstance(value, tuple | list) else [value] for value in values)
    return [float(number) for value in lists for number in value if isinstance(number, int | float | Tensor)]


class SketchingObserver(ModuleObserver):
    """Writes sketches of what it observes into a record, sample by sample."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks, record: TrainingRecord) -> None:
        super().__init__(modules, ranks)
        self.record, self.step = record, 0
        self.pieces, self.tokens = Pieces((0,), 1), 1  # which pieces of sequences of so many tokens are heard
        # lists with an entry for each sample
        self._lists = {(phase, place.partition(".*")[0]) for phase, place, _ in record.layouts if ".*" in place}
        self._times = Counter((phase, place) for phase, place, _ in record.layouts)  # calls in one forward
        self._observed: dict[str, set[Key]] = {}  # of each module in the step under way

    def begin(self, step: int) -> None:
        """What is heard from now on belongs to this step."""
        self.step, self._observed = step, {}

    def drop_partial_calls(self) -> None:
        """Leave out of the step what was called less often than on one process: other stages have made those calls.

        Which of all calls were this rank's own nobody knows.
        """
        for name, keys in self._observed.items():
            most = max(count for (called, _), count in self._calls.items() if called == name)
            if most < max(self._times[key.phase, key.name] for key in keys):
                for key in keys:
                    self.record.values.pop(key, None)
                    self.record.parts.pop(key, None)

    def _observe(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        if phase == Phase.FORWARD:
            self.record.note_width(name, tree)
        if not self.record.wants(phase):
            return
        lists = {place for of, place in self._lists if of == phase}
        for place, sample, x in split_by_sample(tree, name, len(rows), lists):
            layout = self.record.layouts.get((phase, place, call))
            if layout is None:
                continue
            dtype = torch.complex128 if x.is_complex() else torch.float64
            values = full_tensor(x).to(dtype, copy=True)  # a copy: what is still on its way has arrived in it
            if type(values) not in _WITH_VALUES:  # a tensor of another pipeline stage
                continue
            # what tensor ranks hold shards of has another shape: they meet again in a later module
            own_rows = [rows[sample]] if sample is not None else rows if layout.dim >= 0 else [0]
            key = Key(self.step, phase, place, call)
            if phase == Phase.FORWARD:
                self._observed.setdefault(name, set()).add(key)
            # a row for each sample: (samples, numbers of a sample)
            if (layout_rows := layout.rows(values, len(rows))) is not None:
                self.record.add(key, own_rows, sketch_rows(layout_rows))
            # a context rank has pieces of each sequence: its sketches are added to those of the others
            elif (padded := layout.pad_pieces(values, len(rows), self.pieces, self.tokens)) is not None:
                layout_rows = layout.rows(padded, len(rows))
                assert layout_rows is not None
                self.record.parts.setdefault(key, []).append((own_rows, sketch_rows(layout_rows)))


class RecordedModel:
    """A parallel model, as the loop sees it, whose steps leave sketches in a record."""

    def __init__(
        self, model: ParallelModel, record: TrainingRecord, resume: int, randomness: UsualRandomness = USUAL_RANDOMNESS
    ) -> None:
        """resume: the step after which a run goes on from a checkpoint, or might. randomness: what forwards get."""
        self._model, self._record, self._resume, self._randomness = model, record, resume, randomness
        # a hook would be compiled, too, and change what is compiled: there only the step as a whole is heard
        modules = [] if model.strategy.machine.compile else model.network.named_modules()
        ranks = model.strategy.data_group
        self._observer = SketchingObserver(modules, ranks, record)
        if not model.strategy.machine.compile:
            compare_unit_calls(model.network, ranks, lambda: self._observer.step if self._observer.active else None)
            model.network.register_forward_pre_hook(lambda *_: randomness.begin())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def task(self) -> Task:
        """The task that losses and metrics are of; an evaluation sets another one around it."""
        return self._model.task

    @task.setter
    def task(self, task: Task) -> None:
        self._model.task = task

    def begin(self) -> None:
        """Collective: the values that training begins with."""
        self._values(0, Phase.INITIAL)

    def forward_backward(self, batches: list[Batch], step: int) -> dict[str, Tensor]:
        """Collective: the step's forward and backward, and sketches of all that is in them."""
        self._observer.begin(step + 1)
        self._observer.tokens = count_tokens(batches[0].inputs)
        sharers, self._observer.pieces = self._model.stretches(self._observer.tokens)
        with self._observer.listening(batches), self._randomness:
            sums = self._model.forward_backward(batches, step)
        if isinstance(self._model.network, RankStages):
            self._observer.drop_partial_calls()
        self._record.join(sharers)  # context ranks: sketches of pieces of sequences become those of whole ones
        sketches = SketchRecorder(self._record)
        for name, loss in self._model.strategy.totals(sums).read().items():
            sketches.add(Key(step + 1, Phase.LOSS, name), loss)
        # as a backward comes to them: the last layer first
        unscaled = self._model.scaler.unscale_factor()  # the scale of fp16 is another for other numbers of ranks
        for name, parameter in reversed([*self._model.network.named_parameters()]):
            if (gradient := parameter.grad) is not None:
                sketches.add(Key(step + 1, Phase.GRADIENT, name), gradient if unscaled == 1 else gradient * unscaled)
        sketches.join()
        return sums

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: the step, and the norm of its gradient."""
        self._optimizer = optimizer
        if self._record.wants(Phase.NORM):  # it is known before what it clips, and told after it: its place is kept
            self._record.values.setdefault(Key(self._observer.step, Phase.NORM, "norm"), [])
        stepping = recording_optimizer_step(self._model.network, optimizer, self._record, self._observer.step)
        with self._randomness, stepping:  # an optimizer may draw, too
            # without a limit for the norm it is infinite, so that the norm is computed
            norm = self._model.optimizer_step(optimizer, float("inf") if max_norm is None else max_norm)
        assert norm is not None
        sketches = SketchRecorder(self._record)
        sketches.add(Key(self._observer.step, Phase.NORM, "norm"), norm)
        sketches.join()
        return norm

    def after_step(self, step: int) -> None:
        """Collective: what follows a step, and the values that it leaves."""
        self._model.after_step(step)
        self._record.facts.setdefault("heard", []).extend(self._model.heard())
        self._model.settle()  # weights as they are evaluated and saved
        self._values(step, Phase.UPDATE, self._optimizer)
        if step == self._resume:
            self._values(step, Phase.RESUME, self._optimizer)
        self._model.unsettle()

    def load_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Collective: take over a checkpoint; what is there then is compared with what was there before it."""
        self._model.load_state(optimizer, state)
        self._record.values = {key: value for key, value in self._record.values.items() if key.phase != Phase.RESUME}
        self._values(self._resume, Phase.RESUME, optimizer)

    def _values(self, step: int, phase: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Collective: all that the network holds, its average, and what the optimizer remembers."""
        network = self._model.network
        tensors = {**network.state_dict(), **self._model.average.state()}
        sketches = SketchRecorder(self._record)
        for name, tensor in (tensors | (optimizer_tensors(network, optimizer) if optimizer else {})).items():
            sketches.add(Key(step, phase, name), tensor)
        sketches.join()
