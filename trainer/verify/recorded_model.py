"""A placed network whose steps leave signatures: of its data, modules, losses, gradients and weights.

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

from trainer.data.loader import Batch
from trainer.data.nested_tensors import map_tensors
from trainer.learning.task import Task
from trainer.messages import FatalRunError
from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.batch_gather import current_span
from trainer.parallel.context_parallel import Pieces, count_tokens
from trainer.parallel.optimizer_state import optimizer_tensors
from trainer.parallel.pipeline.stages import RankStages
from trainer.parallel.ranks import Ranks
from trainer.strategies.parallel_model import ParallelModel
from trainer.verify.batch_dim_detection import Layout, by_sample, layouts
from trainer.verify.fixed_randomness import AS_DRAWN, AsDrawn
from trainer.verify.recorded_step import Stepping
from trainer.verify.tensor_sketch import signatures, whole
from trainer.verify.training_record import (
    DATA,
    FORWARD,
    GRADIENT,
    INITIAL,
    LOSS,
    NORM,
    RESUME,
    UPDATE,
    Key,
    Record,
    Signing,
)


def call_together(network: nn.Module, ranks: Ranks, step: Callable[[], int | None]) -> None:
    """From now on these ranks compare which unit they call next. step: the one under way; None: nothing is compared.

    Told on all of them where they differ.
    """
    units = [name for name, module in network.named_modules() if name and isinstance(module, FSDPModule)]

    def meet(name: str, *_: Any) -> None:
        at = None if in_backward() else step()  # what is computed again has been called before
        if at is None:
            return
        names = ranks.all_gather_values(name)  # these ranks, before any of them gathers
        if len({*names}) > 1:
            raise FatalRunError(_parted(names, at))

    if ranks.size > 1:
        for name in units:
            network.get_submodule(name).register_forward_pre_hook(
                partial(meet, name), prepend=True
            )  # before fully_shard's own
        if units:
            network.register_forward_hook(partial(meet, ""))


def _parted(names: list[str], step: int) -> str:
    who = {name: [str(rank) for rank, own in enumerate(names) if own == name] for name in dict.fromkeys(names)}
    first = next(name for name in names if name)
    said = [f"{name or 'nothing more'} on rank {', '.join(ranks)}" for name, ranks in who.items()]
    return (
        f"DIFFERS at step {step}, forward, {first}: what is called is {'; '.join(said)}; cause: a choice of layers by"
        " a rank's own samples. Each of them is a unit, which ranks gather together: they would compute with parts of"
        " different ones, or wait for each other for ever. ddp with strategy.find_unused_parameters=true can do it; or"
        " a plan's shard that names the module around the choice, so that it is one unit"
    )


_PLAIN = (Tensor, nn.Parameter)  # has values; what stands for a tensor of another rank's stage has a type of its own


class ModuleObserver:
    """Hears what goes into a step and what each module of a network makes of it."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks) -> None:
        self.ranks, self.hears = ranks, False  # hears: is a step under way that is listened to?
        self._calls: Counter[tuple[str, range]] = Counter()
        for name, module in modules:
            module.register_forward_hook(partial(self._called, name))

    @contextmanager
    def listening(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Within this context the step of these micro-batches is heard."""
        for batch in batches:
            for tree, name in ((batch.inputs, "inputs"), (batch.targets, "targets")):
                self._hear(DATA, name, 0, tree, self._rows(batch.span))
        self._calls.clear()
        self.hears = True
        try:
            yield
        finally:
            self.hears = False

    def _called(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        """A forward hook. What runs without gradient is a rehearsal, in the backward a repetition."""
        span = current_span()
        if not self.hears or span is None or not torch.is_grad_enabled() or in_backward():
            return
        call = self._calls[name, span]
        self._calls[name, span] += 1
        self._hear(FORWARD, name, call, output, self._rows(span))

    def _rows(self, span: range) -> Sequence[int]:
        """Which samples of the global batch this rank has of a span: they are dealt in turn."""
        return span[(self.ranks.rank - span.start) % self.ranks.size :: self.ranks.size]

    def _hear(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        """What is heard of these rows of the global batch: tensors, in whatever they are."""
        raise NotImplementedError


Place = tuple[str, str, int]  # phase, name, call


class Surveyor(ModuleObserver):
    """Keeps what two batches give, the second one some samples of the first, to see where samples lie."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks) -> None:
        super().__init__(modules, ranks)
        self._seen: list[tuple[Sequence[int], dict[Place, Any]]] = []  # rows, and what was heard of them

    @contextmanager
    def listening(self, batches: Sequence[Batch]) -> Iterator[None]:
        """The step of one micro-batch."""
        self._seen.append((self._rows(batches[0].span), {}))
        with super().listening(batches):
            yield

    def _hear(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        self._seen[-1][1][phase, name, call] = map_tensors(tree, lambda x: x.detach().clone())

    def layouts(self) -> dict[Place, Layout]:
        """Where samples lie, of all that has shown it."""
        (every, large), (rows, small) = self._seen
        found: dict[Place, Layout] = {}
        for (phase, name, call), tree in large.items():
            if (phase, name, call) in small:
                other = small[phase, name, call]
                own = layouts(name, tree, other, len(every), rows, phase == DATA)
                found |= {(phase, place, call): one for place, one in own.items()}
        return found


class SignatureRecorder(ModuleObserver):
    """Writes signatures of what it hears into a record, sample by sample."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ranks: Ranks, record: Record) -> None:
        super().__init__(modules, ranks)
        self.record, self.step = record, 0
        self.own, self.tokens = Pieces((0,), 1), 1  # which pieces of sequences of so many tokens are heard
        # lists with an entry for each sample
        self._lists = {(phase, place.partition(".*")[0]) for phase, place, _ in record.layouts if ".*" in place}
        self._times = Counter((phase, place) for phase, place, _ in record.layouts)  # calls in one forward
        self._heard: dict[str, set[Key]] = {}  # of each module in the step under way

    def begin(self, step: int) -> None:
        """What is heard from now on belongs to this step."""
        self.step, self._heard = step, {}

    def leave_out_parts(self) -> None:
        """Leave out of the step what was called less often than on one process: other stages have made those calls.

        Which of all calls were this rank's own nobody knows.
        """
        for name, keys in self._heard.items():
            times = max(count for (called, _), count in self._calls.items() if called == name)
            if times < max(self._times[key.phase, key.name] for key in keys):
                for key in keys:
                    self.record.values.pop(key, None)
                    self.record.parts.pop(key, None)

    def _hear(self, phase: str, name: str, call: int, tree: Any, rows: Sequence[int]) -> None:
        if not self.record.wants(phase):
            return
        known = {place for of, place in self._lists if of == phase}
        for place, sample, x in by_sample(tree, name, len(rows), known):
            layout = self.record.layouts.get((phase, place, call))
            if layout is None:
                continue
            wide = torch.complex128 if x.is_complex() else torch.float64
            plain = whole(x).to(wide, copy=True)  # a copy: what is still on its way has arrived in it
            if type(plain) not in _PLAIN:
                continue
            # what tensor ranks hold shards of has another shape: they meet again in a later module
            own = [rows[sample]] if sample is not None else rows if layout.dim >= 0 else [0]
            key = Key(self.step, phase, place, call)
            if phase == FORWARD:
                self._heard.setdefault(name, set()).add(key)
            if (found := layout.rows(plain, len(rows))) is not None:
                self.record.add(key, own, signatures(found))
            elif (around := layout.around(plain, len(rows), self.own, self.tokens)) is not None:
                found = layout.rows(around, len(rows))
                assert found is not None
                self.record.parts.setdefault(key, []).append((own, signatures(found)))


class RecordedModel:
    """A placed network, as the loop sees it, whose steps leave signatures."""

    def __init__(self, parallel_model: ParallelModel, record: Record, resume: int, draws: AsDrawn = AS_DRAWN) -> None:
        """resume: the step after which a run goes on from a checkpoint, or might. draws: what forwards draw."""
        self._parallel_model, self._record, self._resume, self._draws = parallel_model, record, resume, draws
        # a hook would be compiled, too, and change what is compiled: there only the step as a whole is heard
        modules = [] if parallel_model.strategy.machine.compile else parallel_model.network.named_modules()
        ranks = parallel_model.strategy.data_group
        self._ear = SignatureRecorder(modules, ranks, record)
        if not parallel_model.strategy.machine.compile:
            call_together(parallel_model.network, ranks, lambda: self._ear.step if self._ear.hears else None)
            parallel_model.network.register_forward_pre_hook(lambda *_: draws.begin())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel_model, name)

    @property
    def task(self) -> Task:
        """The task that losses and metrics are of; an evaluation sets another one around it."""
        return self._parallel_model.task

    @task.setter
    def task(self, task: Task) -> None:
        self._parallel_model.task = task

    def begin(self) -> None:
        """Collective: the values that training begins with."""
        self._values(0, INITIAL)

    def forward_backward(self, batches: list[Batch], step: int) -> dict[str, Tensor]:
        """Collective: the step's forward and backward, and signatures of all that is in them."""
        self._ear.begin(step + 1)
        self._ear.tokens = count_tokens(batches[0].inputs)
        sharers, self._ear.own = self._parallel_model.stretches(self._ear.tokens)
        with self._ear.listening(batches), self._draws:
            sums = self._parallel_model.forward_backward(batches, step)
        if isinstance(self._parallel_model.network, RankStages):
            self._ear.leave_out_parts()
        self._record.join(sharers)
        signing = Signing(self._record)
        for name, loss in self._parallel_model.strategy.totals(sums).read().items():
            signing.add(Key(step + 1, LOSS, name), loss)
        # as a backward comes to them: the last layer first
        # the scale of fp16 is another for other numbers of ranks
        unscaled = self._parallel_model.scaler.unscale_factor()
        for name, parameter in reversed([*self._parallel_model.network.named_parameters()]):
            if (gradient := parameter.grad) is not None:
                signing.add(Key(step + 1, GRADIENT, name), gradient if unscaled == 1 else gradient * unscaled)
        signing.join()
        return sums

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: the step, and the norm of its gradient."""
        self._optimizer = optimizer
        if self._record.wants(NORM):  # it is known before what it clips, and told after it: its place is kept
            self._record.values.setdefault(Key(self._ear.step, NORM, "norm"), [])
        with Stepping(self._parallel_model.network, optimizer, self._record, self._ear.step):
            norm = self._parallel_model.optimizer_step(optimizer, float("inf") if max_norm is None else max_norm)
        assert norm is not None
        signing = Signing(self._record)
        signing.add(Key(self._ear.step, NORM, "norm"), norm)
        signing.join()
        return norm

    def after_step(self, step: int) -> None:
        """Collective: what follows a step, and the values that it leaves."""
        self._parallel_model.after_step(step)
        self._record.facts.setdefault("heard", []).extend(self._parallel_model.heard())
        self._parallel_model.settle()
        self._values(step, UPDATE, self._optimizer)
        if step == self._resume:
            self._values(step, RESUME, self._optimizer)
        self._parallel_model.unsettle()

    def load_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Collective: take over a checkpoint; what is there then is compared with what was there before it."""
        self._parallel_model.load_state(optimizer, state)
        self._record.values = {key: value for key, value in self._record.values.items() if key.phase != RESUME}
        self._values(self._resume, RESUME, optimizer)

    def _values(self, step: int, phase: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Collective: all that the network holds, its average, and what the optimizer remembers."""
        network = self._parallel_model.network
        held = {**network.state_dict(), **self._parallel_model.average.state()}
        signing = Signing(self._record)
        for name, tensor in (held | (optimizer_tensors(network, optimizer) if optimizer else {})).items():
            signing.add(Key(step, phase, name), tensor)
        signing.join()
