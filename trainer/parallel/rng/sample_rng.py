"""From what a forward's random numbers follow: from torch's generators, or from where its samples are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from trainer.data.nested_tensors import first_tensor, to_device
from trainer.data.rng import Random, mix_seeds, seed_torch, to_int64
from trainer.learning.parallel_plan import Plan
from trainer.parallel.context_parallel import Pieces, computed, pieces
from trainer.parallel.ranks import Ranks
from trainer.parallel.rng.random_draw import Cut, Draw, Strays, Stretch, drawer
from trainer.parallel.rng.random_functions import RandomFunctionMode
from trainer.parallel.rng.torch_rng import TorchRNG
from trainer.parallel.tensor_parallel import layouts
from trainer.parallel.units import matches

OUTSIDE = "the task"  # draws when no module of the network runs; no module has such a name
_CALL, _DRAW = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F  # calls of a module are so far apart, and draws of a call


class ForwardRNGState:
    """The forward of one micro-batch: its samples, and what has been drawn in it."""

    def __init__(self, seed: int, step: int, indices: Tensor) -> None:
        self.batch, self.seed = len(indices), mix_seeds(seed, step)
        self._from = seed, step, indices
        self.draws: list[tuple[int, Cut | None]] = []
        self.calls: Counter[int] = Counter()  # by module
        self._drawn: Counter[int] = Counter()  # by call
        self._piece = computed()  # of a stretch: the last one in which something was counted
        self._before = Counter(self.calls), Counter(self._drawn)  # as its module began

    @cached_property
    def samples(self) -> Random:
        """Of each sample."""
        return Random(*self._from)

    @cached_property
    def common(self) -> Random:
        """Of what has no samples."""
        seed, step, indices = self._from
        return Random(seed, step, torch.full((1,), -1, dtype=torch.int64, device=indices.device))

    def called(self, module: int) -> int:
        """The number of one more call of this module."""
        self._look()
        self.calls[module] += 1
        return module + self.calls[module] * _CALL

    def add(self, call: int, cut: Cut | None) -> None:
        """One more draw, in this call."""
        self._look()
        self._drawn[call] += 1
        self.draws.append((to_int64(call + self._drawn[call] * _DRAW), cut))

    def _look(self) -> None:
        """In each piece of a stretch a module counts from where it began: the pieces are parts of the same draws."""
        piece, last = computed(), self._piece
        if piece == last:
            return
        self._piece = piece
        if piece and last and piece[0] is last[0]:
            self.calls, self._drawn = (Counter(each) for each in self._before)
        elif piece:
            self._before = Counter(self.calls), Counter(self._drawn)

    def add_told(self, name: str | None, call: int, draw: int, cut: Cut | None) -> None:
        """One more draw, of which it is known where it stands."""
        module = number(OUTSIDE) if name is None else number(name) + call * _CALL
        self.draws.append((to_int64(module + draw * _DRAW), cut))


def number(name: str) -> int:
    """A module's name as a number of 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


_LEARNING, _EVALUATING = 0x6C6561726E, 0x6576616C  # set a forward's numbers apart from those of augmentation
_OF_TORCH = ("Dropout", "Transformer", "Attention", "RNN", "LSTM", "GRU", "RReLU", "Fractional")  # modules that draw


class SampleRNG(TorchRNG):
    """Random numbers follow from (seed, step, name of the module, number of its call and of the draw, sample, element).

    So they do not depend on ranks, micro-batches, stages, or on the order in which anything is computed. What has no
    batch is the same on all ranks.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self._mode = RandomFunctionMode(self)
        self._running = [number(OUTSIDE)]  # calls of modules that are under way, the innermost last
        self._forward = ForwardRNGState(seed, 0, torch.empty(0, dtype=torch.int64))  # nobody's
        self._begun: tuple[int, int, Tensor, tuple[int, ...]] | None = None  # a forward in which nothing has been drawn
        self._time_first = False
        # Of torch's own modules it is known which ones draw. Where there are no others the loss alone is looked at, and
        # that only once it draws: looking costs some microseconds for each function of torch, which short steps notice.
        self._around: Any = nullcontext()
        self._aside: Any = self._mode
        self._quiet = device.type == "cpu"  # nothing has been drawn yet aside from the network
        self._step: int | None = None
        self._places: dict[int, tuple[ForwardRNGState, int]] = {}
        self._stretch: Stretch | None = None  # of each sample's tokens, where ranks share them
        self._cut: Cut | None = None  # of activations as they lie at present
        self._names: dict[int, str] = {}  # of modules, by their calls
        self._strays = Strays()

    def __enter__(self) -> None:
        self._around.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def follow(self, network: nn.Module, may_draw: bool) -> None:
        """Know the modules of a network by their names."""
        for name, module in network.named_modules():
            self._time_first |= getattr(module, "batch_first", True) is False
            if _may_draw(module):
                may_draw = True
                self._tell(module, name)
        if may_draw:
            self._around, self._aside, self._quiet = self._aside, self._around, False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same, of the forward that is under way."""
        if self._quiet:
            before, given = torch.get_rng_state(), function(*args)
            if torch.equal(torch.get_rng_state(), before):
                return given
            self._quiet = False  # it draws: once more, as it is called from now on
        with self._aside:
            return function(*args)

    def begin(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward begins, of these samples."""
        if step != self._step:  # nobody will compute again what the last one has computed
            self._places.clear()
            self._step = step
        self._arrive(_LEARNING, step, indices, place)

    def go_on(self, calls: Mapping[str, int]) -> None:
        """The forward that begins is the rest of one that has called these modules so often."""
        self._start()
        for name, count in calls.items():
            self._forward.calls[number(name)] += count

    def begin_evaluation(self, indices: Tensor) -> None:
        """The same where nothing is learned: a sample draws the same in every evaluation."""
        self._places.clear()
        self._step = None
        self._arrive(_EVALUATING, 0, indices, ())

    def split(self, network: nn.Module, plan: Plan, ranks: Ranks) -> None:
        """Know which part of an activation is this rank's: that changes at the modules that a plan names."""
        for key, style in plan.tensor.items():
            before, after = layouts(style)
            for _, module in matches(network, key):
                if before:
                    module.register_forward_pre_hook(partial(self._cross, before, ranks))
                if after:
                    module.register_forward_hook(partial(self._cross, after, ranks))

    def cut(self, ranks: Ranks, tokens: int, most: int) -> None:
        """In this forward these ranks have stretches of so many tokens of each sample, of at most so many pieces."""
        own = Stretch(1, tokens, pieces(ranks.rank, ranks.size, tokens, most))
        self._stretch = self._cut = own if ranks.size > 1 else None

    def _cross(self, layout: Any, ranks: Ranks, module: nn.Module, *values: Any) -> None:
        """Activations lie as this layout says from here on. values: a module's arguments, its output if it has one."""
        several = layout if isinstance(layout, tuple) else (layout,)
        if any(isinstance(each, Shard) and each.dim == 0 for each in several):
            return  # what has its tokens first has no batch: vectors of positions, which are added to what has one
        self._cut = self._stretch
        for shard in (each for each in several if isinstance(each, Shard)):
            x = first_tensor(values[-1])
            last = shard.dim in (-1, x.dim() - 1)
            own = Cut(-1 if last else shard.dim, x.shape[-1], Pieces((ranks.rank,), ranks.size))
            self._cut = self._stretch.within(own) if self._stretch else own

    def _arrive(self, *begun: Any) -> None:
        """A forward begins."""
        del self._running[1:]  # an error may have left some
        self._cut, self._begun = None, begun
        # parts of what may draw may be computed again, and know by the generator where they began; of a network that
        # draws nothing it is enough to start as the loss draws, which few do
        if self._around is self._mode:
            self._start()

    def _start(self) -> None:
        """What is drawn from here on belongs to the forward that has begun."""
        if self._begun is not None:
            (kind, step, indices, place), self._begun = self._begun, None
            seed_torch(mix_seeds(self._seed, kind, step, *place), self._device)
            self._forward = ForwardRNGState(mix_seeds(self._seed, kind), step, to_device(indices, self._device))
            self._places[torch.default_generator.initial_seed()] = self._forward, 0

    def next(self) -> Draw | None:
        """The next draw of the forward that is under way; None where it is nobody's."""
        self._start()
        # How far a forward is stands in the seed of torch's generator: whoever computes a part of it again, here or in
        # code of users, puts the generator back to where this part began.
        place = self._places.get(torch.default_generator.initial_seed())
        if place is None:
            return None
        forward, at = place
        if at == len(forward.draws):
            told, piece = drawer(), computed()
            cut = self._cut.only(piece[1]) if piece and isinstance(self._cut, Stretch) else self._cut
            forward.add(self._running[-1], cut) if told is None else forward.add_told(*told, cut)
        draw = forward.draws[at]
        following = mix_seeds(torch.default_generator.initial_seed())
        torch.default_generator.manual_seed(following)
        self._places[following] = forward, at + 1
        module = self._names.get(self._running[-1], "")
        common = forward.batch, forward.samples, forward.common, forward.seed
        return Draw(*common, *draw, self._time_first, module, self._strays)

    def heard(self) -> list[str]:
        """What a user should know of the draws since this was asked last."""
        return self._strays.heard()

    def _tell(self, module: nn.Module, name: str) -> None:
        """Know when a module is called and when it has ended."""
        own = number(name)

        # in what a network compiles by itself nobody asks for names
        def begins(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._running.append(call := self._forward.called(own))
                self._names[call] = name

        def ends(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._running.pop()

        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends)


def _may_draw(module: nn.Module) -> bool:
    """Has a forward of this module anything to draw by itself? Of torch's own modules few have."""
    kind = type(module)
    return not kind.__module__.startswith("torch.nn.") or any(word in kind.__name__ for word in _OF_TORCH)


chances: dict[str, Callable[[int, torch.device], TorchRNG]] = {"sample": SampleRNG, "native": TorchRNG}
