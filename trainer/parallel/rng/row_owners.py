"""Whose the rows of random tensors are, found before the first step by how data flow through small forwards.

The forward of a few samples is run on a copy of the network with other weights. If nothing is drawn that is all. Else
one more batch with a sample less shows which dimension of each draw has the samples. Then sample 0 is changed, and
sample 1, while every draw stays as it is: where a draw is joined with activations, the changed elements belong to the
changed sample. So it is known whether rows lie sample after sample or view after view. Nothing is guessed from sizes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.nested_tensors import map_tensors, tensors
from trainer.data.rng import preserve_rng_state
from trainer.learning.task import Task
from trainer.messages import first_line
from trainer.parallel.batch_norm import all_batch_norms
from trainer.parallel.context_parallel import count_tokens
from trainer.parallel.dispatch_mode import TorchDispatchMode
from trainer.parallel.meta_model import named_state
from trainer.parallel.rng.draw_numbers import DrawNumbers, hash_name, unit_names, watch_units
from trainer.parallel.rng.kernels import see_compiler, use_source
from trainer.parallel.rng.native_rng import python_states, seed_python
from trainer.parallel.rng.random_draw import DrawSites, Rows, Site

OUTSIDE = "the task"  # draws when no module of the network runs; no module has such a name
PYTHON = (
    "loop.dropout=sample: the forward draws from Python's or NumPy's generator, and how often follows from the number"
    " of samples. So the curve depends on loop.micro_batches and on the processes. Write torch.rand(len(x)), which"
    " gives every sample its own numbers (docs/one-curve.md)"
)
GENERATOR = (
    "loop.dropout=sample: the forward draws from a torch.Generator of its own. Its numbers belong to no sample: the"
    " curve depends on loop.micro_batches and on the processes, and a resume draws others. Leave generator= out"
    " (docs/one-curve.md)"
)
DOUBT = (
    "loop.dropout=sample: in or after {unit} random numbers of shape {shape} are drawn for three samples,"
    " {doubt}{more}. They follow from where a row stands: the curve depends on loop.micro_batches and on the processes."
    " Draw for rows of samples, (B, …), before they are mixed or after they are pooled (docs/one-curve.md)"
)
_AT = torch.ops.aten
# operators whose result shows no sample, though a tensor of samples is among their arguments
_SHAPED_LIKE = {_AT.new_empty, _AT.new_zeros, _AT.new_ones, _AT.new_full, _AT.empty_like, _AT.zeros_like, _AT.ones_like}
_SHAPED_LIKE |= {_AT.full_like, _AT.new_empty_strided, _AT.rand_like, _AT.randn_like, _AT.randint_like}
_CHOOSING = {_AT.index, _AT.index_put, _AT.index_put_}
_MOST_JOINS = 4  # of a draw with activations that are looked at: the first one in which a sample shows tells
_SMALL = 2**26  # parameters of a network whose trial weights may take memory of their own


@dataclass
class _Draw:
    """A draw of a trial forward."""

    number: int
    line: int
    shape: tuple[int, ...]
    operator: str
    unit: str  # that was called last


class _Recorder:
    """Takes down what a forward draws; torch draws it."""

    def __init__(self, network: nn.Module, names: list[str]) -> None:
        self.numbers, self.draws, self.own_generator = DrawNumbers(), list[_Draw](), False
        self.last: _Draw | None = None  # until the operator that has drawn it is seen
        self._places = {hash_name(name): name for name in names}
        watch_units(network, names, lambda: self.numbers)

    def begin(self) -> None:
        """A forward begins."""
        self.numbers, self.draws, self.last = DrawNumbers(), [], None
        torch.manual_seed(0)
        seed_python(0)

    def next_draw(self, shape: tuple[int, ...], operator: str) -> None:
        """Take a draw down."""
        self.last = _Draw(*self.numbers.next(), shape, operator, self._places.get(self.numbers.unit, ""))
        self.draws.append(self.last)

    def see_generator(self) -> None:
        """A draw from another generator than torch's."""
        self.own_generator = True


# ---------------------------------------------------------------------------------------------- the batches


@dataclass
class _Leaf:
    """Where the samples are in a tensor of a batch of three."""

    dim: int | None  # None: not known, or it has none
    owner: Tensor | None = None  # (size,): the sample of each row
    uneven: bool = False  # have samples different numbers of rows?


def _find_leaves(three: Any, two: Any) -> list[_Leaf]:
    """How samples lie in each tensor: seen by what a batch without the last one lacks."""
    leaves = []
    if len([*tensors(three)]) != len([*tensors(two)]):  # a list of samples: no tensor holds several
        return [_Leaf(None) for _ in tensors(three)]
    for large, small in zip(tensors(three), tensors(two), strict=True):
        dims = [d for d in range(large.dim()) if large.shape[d] != small.shape[d]] if large.dim() == small.dim() else []
        fitting = [d for d in dims if large.shape[d] * 2 == small.shape[d] * 3]
        if not fitting:
            leaves.append(_Leaf(None, uneven=bool(dims)))
            continue
        dim, rows = fitting[0], large.shape[fitting[0]] // 3
        order = torch.arange(3 * rows)
        in_turn, in_views = order // rows, order % 3  # sample after sample, view after view
        kept = large.index_select(dim, (in_views < 2).nonzero().flatten().to(large.device))
        same = kept.shape == small.shape and torch.equal(kept, small)
        leaves.append(_Leaf(dim, in_views if rows > 1 and same else in_turn))
    return leaves


def _with_sample(batch: Any, leaves: list[_Leaf], sample: int) -> Any:
    """The batch with other values for one of its samples: on the way to those of the last one, as data may be."""
    remaining = iter(leaves)

    def change(x: Tensor) -> Tensor:
        leaf = next(remaining)
        if leaf.dim is None or leaf.owner is None:
            return x
        mine, other = (
            (leaf.owner == which).nonzero().flatten().to(x.device) for which in (sample, int(leaf.owner.max()))
        )
        own, last = x.index_select(leaf.dim, mine), x.index_select(leaf.dim, other)
        if x.is_floating_point() or x.is_complex():
            new = own + 0.25 * (last - own)
            new = torch.where(new == own, own * 1.1 + 0.01, new)
        else:
            new = last if not torch.equal(own, last) else own.flip(-1) if own.dim() > 1 else own
        return x.index_copy(leaf.dim, mine, new.to(x.dtype))

    return map_tensors(batch, change)


def _without_last(batch: Any, leaves: list[_Leaf], collated: Any) -> Any:
    """The batch without its last sample: rows are taken out, so that nothing else of it differs, or as collated."""
    if not any(leaf.dim is not None for leaf in leaves) or any(leaf.uneven for leaf in leaves):
        return collated
    remaining = iter(leaves)

    def cut(x: Tensor) -> Tensor:
        leaf = next(remaining)
        if leaf.dim is None or leaf.owner is None:
            return x
        return x.index_select(leaf.dim, (leaf.owner < 2).nonzero().flatten().to(x.device))

    return map_tensors(batch, cut)


# ---------------------------------------------------------------------------------------------- the flow of data


@dataclass
class _Noise:
    """A tensor that a draw has made, or that was made of it alone."""

    draw: int  # which one
    places: Tensor  # in the shape of the tensor: the element of the draw that each of its elements is made of
    joins: list[int]  # operators in which it met activations, the same list for all that is made of the draw


@dataclass
class _Join:
    """An operator in which a draw meets activations."""

    draw: int
    places: Tensor
    operator: str
    partner: int  # which of its tensors are the activations
    choosing: bool  # is the noise an index, or a mask, of the activations?
    cat_dim: int | None
    values: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # activations and result, of each forward


class _Flow(TorchDispatchMode):
    """Follows draws to where they are joined with activations, and keeps these. Tensors carry what is known of them.

    joins: by the number of the operator; the first forward finds them, the others add their values.
    """

    def __init__(self, recorder: _Recorder, joins: dict[int, _Join], first: bool) -> None:
        super().__init__()
        self._recorder, self._joins, self._first, self._at = recorder, joins, first, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._at, self._recorder.last = self._at + 1, None
        inputs = [*tensors([args, kwargs or {}])]
        known = None if self._first else self._joins.get(self._at)
        # values are copied before: operators write into what they are given
        before = [x.detach().clone() for x in inputs] if self._first or known else []
        noises = [vars(x).get("draws_noise") for x in inputs]
        shown = [vars(x).get("shows_sample", False) for x in inputs]
        result = func(*args, **(kwargs or {}))
        outputs = [*tensors([result])]
        if self._first:
            for noise, partner, choosing in self._follow(func, args, inputs, noises, shown, outputs):
                cat_dim = (args[1] if len(args) > 1 else 0) if func.overloadpacket is _AT.cat else None
                noise.joins.append(self._at)
                name = func.overloadpacket.__name__
                known = _Join(noise.draw, noise.places, name, partner, choosing, cat_dim)
                self._joins[self._at] = known
        if known and known.operator == func.overloadpacket.__name__ and outputs and len(before) > known.partner:
            known.values.append((before[known.partner], outputs[0].detach().clone()))
        return result

    def _follow(
        self, func: Any, args: Any, inputs: list[Tensor], noises: list[Any], shown: list[bool], outputs: list[Tensor]
    ) -> Iterator[tuple[_Noise, int, bool]]:
        """Mark what an operator gives; yields a draw that it joins with activations: (it, which of its inputs, how)."""
        drawn, shaped = self._recorder.last, func.overloadpacket in _SHAPED_LIKE
        if drawn is not None:
            places = torch.arange(math.prod(drawn.shape), device=outputs[0].device).view(drawn.shape)
            noise = _Noise(len(self._recorder.draws) - 1, places, [])
            for output in outputs:
                vars(output)["shows_sample"] = False
                vars(output)["draws_noise"] = noise if output.shape == places.shape else None
            # what it draws by, as probabilities, is joined with it at once
            if True in shown and not shaped:
                partner = shown.index(True)
                yield noise, partner, inputs[partner].shape != places.shape
            return
        for output in outputs if not shaped else ():
            vars(output)["shows_sample"] = any(shown) or vars(output).get("shows_sample", False)
            if func.is_view and inputs:
                vars(output)["view_of"] = inputs[0]
            base: Any = vars(output).get("view_of")
            while any(shown) and base is not None and func.overloadpacket.__name__.endswith("_"):
                vars(base)["shows_sample"] = True  # a part of it was written to
                base = vars(base).get("view_of")
        for at, noise in enumerate(noises if not shaped else ()):
            if noise is None:
                continue
            others = [i for i, other in enumerate(noises) if other is None or other.draw != noise.draw]
            partners = [i for i in others if shown[i]]  # they may hold what was drawn before
            if partners and len(noise.joins) < _MOST_JOINS:
                yield noise, partners[0], func.overloadpacket in _CHOOSING
            for output in outputs:
                carried = _carry(func, args, inputs[at], noise, output)
                if carried is not None:
                    vars(output)["draws_noise"] = _Noise(noise.draw, carried, noise.joins)


def _carry(func: Any, args: Any, x: Tensor, noise: _Noise, output: Tensor) -> Tensor | None:
    """Which elements of a draw a result is made of, in the result's shape; None where that is not known."""
    moves = func.is_view or func.overloadpacket.__name__ in ("_unsafe_view", "repeat")
    with suppress(RuntimeError, TypeError):
        if moves and args and args[0] is x:
            where = func(noise.places, *args[1:])
            return where if isinstance(where, Tensor) and where.shape == output.shape else None
        return noise.places.expand(output.shape)  # element by element
    return None


def _touched(join: _Join, sample: int, count: int) -> Tensor | None:
    """The elements of a draw that are joined with what a changed sample changes: (count,) bool; None: not known."""
    if len(join.values) < 3:
        return None  # another operator stood there: the forward went on otherwise
    (partner, output), (changed_partner, changed_output) = join.values[0], join.values[1 + sample]
    touched = torch.zeros(count, dtype=torch.bool, device=join.places.device)
    for before, after, leading in ((partner, changed_partner, False), (output, changed_output, True)):
        if before.shape != after.shape:
            return None
        differs = (before != after) & ~((before != before) & (after != after))  # what is no number twice is the same
        differs = differs.to(join.places.device)
        if join.cat_dim is not None:
            differs = differs.any(join.cat_dim, keepdim=True)
        places = join.places
        if leading or join.choosing:  # rows in front are the same, what follows differs
            same = 0
            while same < min(places.dim(), differs.dim()) and places.shape[same] == differs.shape[same]:
                same += 1
            if not same:
                continue
            differs = differs.flatten(same).any(same) if differs.dim() > same else differs
            differs = differs.view(*differs.shape, *(1,) * (places.dim() - same))
        try:
            places, differs = torch.broadcast_tensors(places, differs)
        except RuntimeError:
            continue
        touched[places[differs]] = True
        return touched
    return None


def _fit(shape: tuple[int, ...], dims: list[int], touched: list[Tensor]) -> tuple[list[Rows], bool]:
    """The orders of rows that agree with what two samples touch, and whether they touch anything. Three samples."""
    fitting = []
    for dim in dims:
        size = shape[dim]
        rows = [t.view(shape).movedim(dim, 0).reshape(size, -1).any(1).cpu() for t in touched]
        for views in (v for v in range(1, size // 3 + 1) if size // 3 % v == 0):
            owner = torch.arange(size) // (size // 3 // views) % 3
            exact = all(torch.equal(found, owner == sample) for sample, found in enumerate(rows))
            within = all(not (found & (owner != sample)).any() for sample, found in enumerate(rows))
            each = views == 1 or views < size // 3  # is there more than one row of a sample in a view?
            fitting += [(exact, Rows(dim, views if each else None))] if within else []
    found = any(bool(t.any()) for t in touched)
    exactly = [rows for exact, rows in fitting if exact]
    return (exactly or [rows for _, rows in fitting]) if found else [], found


# ---------------------------------------------------------------------------------------------- the trial


def find_draw_sites(task: Task, network: nn.Module, example: Callable[[int], Any], device: torch.device) -> DrawSites:
    """Whose the rows of every draw are. example: makes (inputs, targets) of so many samples, always the same first.

    The network is whole, with values or without (meta device). It is not changed. Its copy computes with other
    weights: at the beginning many are zero and let no sample through.
    """
    found = DrawSites()
    # what cannot be tried is no mistake of the user's: then rows are told by shapes, which is said
    with preserve_rng_state(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run's own forward gives them
        try:
            names = unit_names(network, task.plan(network))
            task, network = _copy(task, network, device)
            three, two = (map_tensors(example(count), lambda x: x.to(device)) for count in (3, 2))
            if [x.shape for x in tensors(three)] == [x.shape for x in tensors(two)]:
                raise ValueError("a batch of three samples looks like one of two: there are no three")
            trial = _Trial(task, network, _Recorder(network, names), three, two)
            for training in (True, False):
                network.train(training)
                for norm in all_batch_norms(network):
                    norm.eval()  # statistics of a batch would tie all its samples together
                if not trial.look(found, training):
                    break
            for unit, shape, doubt in trial.doubts[:1]:  # one line for a run
                more = f" (and at {len(trial.doubts) - 1} more places)" if len(trial.doubts) > 1 else ""
                found.notes.append(DOUBT.format(unit=unit, shape=shape, doubt=doubt, more=more))
        except Exception as error:
            found.failure = f"a forward of three samples ended with {type(error).__name__}: {first_line(error)}"
    found.notes = [*dict.fromkeys(found.notes)]  # of both modes
    return found


@torch.no_grad()
def _copy(task: Task, network: nn.Module, device: torch.device) -> tuple[Task, nn.Module]:
    """Task and network on this device with other weights, which take no memory where the network is large."""
    generator = torch.Generator().manual_seed(0)
    instead: dict[int, Any] = {}
    size = sum(parameter.numel() for parameter in network.parameters())
    for _, tensor in named_state(network):
        shape, dims = tensor.shape, tensor.dim()
        if id(tensor) in instead:
            continue
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            # neighbours along every dimension are neighbours in one row of numbers
            row = torch.randn(max(1, sum(shape) - dims + 1), generator=generator)
            row = row * (shape[0] / max(1, tensor.numel())) ** 0.5 if dims > 1 else 1 + 0.2 * row
            weight = row.to(device, tensor.dtype).as_strided(shape, (1,) * dims)
            weight = weight.contiguous().clone() if size < _SMALL else weight
            instead[id(tensor)] = nn.Parameter(weight, requires_grad=tensor.requires_grad)
        elif tensor.is_meta:
            fill = torch.ones if tensor.is_floating_point() else torch.zeros
            value = fill(shape, dtype=tensor.dtype, device=device)
            instead[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        elif not isinstance(tensor, nn.Parameter):
            instead[id(tensor)] = tensor.to(device, copy=True)
        else:
            instead[id(tensor)] = nn.Parameter(tensor.to(device, copy=True), False)
    return deepcopy((task, network), instead)


@dataclass
class _Trial:
    """Forwards of a task and its network with a few samples."""

    task: Task
    network: nn.Module
    recorder: _Recorder
    three: Any
    two: Any
    gradients: bool = False  # does the forward take some, so that activations must be kept?
    doubts: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)  # unit, shape, what is not known

    def _run(self, batch: Any, flow: AbstractContextManager[Any]) -> list[_Draw]:
        """One forward of a copy, which may change what it holds; its draws."""
        task, network = deepcopy((self.task, self.network), {id(p): p for p in self.network.parameters()})
        self.recorder.begin()
        inputs, targets = batch
        before = use_source(self.recorder)
        try:
            with flow, torch.set_grad_enabled(self.gradients):
                output = task.forward(network, inputs, targets)
                self.recorder.numbers.begin(hash_name(OUTSIDE))
                task.loss(output, targets)
        finally:
            use_source(before)
        return self.recorder.draws

    def look(self, found: DrawSites, training: bool) -> bool:
        """Fill in the places that draw in this mode; is there any?"""
        recorder = self.recorder
        recorder.begin()
        fresh = python_states()
        try:
            draws = self._run(map_tensors(self.three, torch.clone), nullcontext())
        except RuntimeError:
            self.gradients = training
            if not training:
                raise
            draws = self._run(map_tensors(self.three, torch.clone), nullcontext())
        if see_compiler():  # the forward has compiled a part of itself, whose draws nobody has seen
            draws = self._run(map_tensors(self.three, torch.clone), nullcontext())
        states = [python_states()]
        found.python |= states[0] != fresh
        if not draws and states[0] == fresh and not recorder.own_generator:
            return False
        leaves = _find_leaves(self.three, self.two)
        smaller = self._run(_without_last(self.three, leaves, self.two), nullcontext())
        states.append(python_states())
        if states[0] != states[1]:
            found.notes.append(PYTHON)
        if recorder.own_generator:
            found.notes.append(GENERATOR)
        joins: dict[int, _Join] = {}
        batches = self.three, *(_with_sample(self.three, leaves, sample) for sample in (0, 1))
        for number, batch in enumerate(batches if draws else ()):
            marked = map_tensors(batch, torch.clone)
            for x in tensors(marked):
                vars(x)["shows_sample"] = True
            self._run(marked, _Flow(recorder, joins, first=number == 0))
        others = {draw.number: draw.shape for draw in smaller}
        tokens = count_tokens(self.three[0])
        for at, draw in enumerate(draws):
            if not math.prod(draw.shape):
                continue  # rows that data choose, and here none: nothing is known
            rows, doubt = _decide(draw, others.get(draw.number), [join for join in joins.values() if join.draw == at])
            found.add(training, draw.number, draw.line, Site(rows, rows.of_sample(draw.shape, 3), tokens))
            if doubt:
                self.doubts.append((draw.unit or "the network", draw.shape, doubt))
        return True


def _decide(draw: _Draw, smaller: tuple[int, ...] | None, joins: list[_Join]) -> tuple[Rows, str]:
    """Whose the rows of a draw for three samples are, and what is not known of it.

    smaller: its shape for two samples; None where they do not draw there.
    """
    shape = draw.shape
    dims = [dim for dim, size in enumerate(shape) if size and size % 3 == 0]
    if smaller is not None and len(smaller) == len(shape):
        if smaller == shape:
            for one, other in ([_touched(join, sample, math.prod(shape)) for sample in (0, 1)] for join in joins):
                if one is not None and other is not None and one.any() and other.any() and not (one & other).any():
                    return Rows(None), "whose rows are parts of samples, and as many for two samples"
            return Rows(None), ""  # a weight, a choice for all: nobody's, and the same for everybody
        if draw.operator.startswith("randperm"):
            return Rows(None), "the order of a batch"
        dims = [dim for dim in dims if shape[dim] * 2 == smaller[dim] * 3]
        if not dims:
            return Rows(None), f"for two samples {smaller}, so rows are parts of samples of different size"
    for join in joins:
        touched = [_touched(join, sample, math.prod(shape)) for sample in (0, 1)]
        if touched[0] is None or touched[1] is None or not dims:
            continue
        fitting, seen = _fit(shape, dims, [t for t in touched if t is not None])
        if seen and not fitting:
            return Rows(dims[0]), "and its samples are mixed before"
        if len(fitting) == 1:
            return fitting[0], ""
    if not dims:
        return Rows(None), "" if smaller is not None else "as often as there are samples"
    # no activations show it, but the sizes do, where a sample has one row
    return Rows(dims[0]), "" if shape[dims[0]] == 3 else "and nothing shows whose each row is"
