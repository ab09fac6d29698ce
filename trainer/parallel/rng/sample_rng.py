"""Random numbers of a forward that belong to its samples, so that no placement changes them (`sample`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer.data.nested_tensors import to_device
from trainer.data.rng import Random, mix_seeds, seed_torch
from trainer.learning.parallel_plan import Plan
from trainer.parallel.context_parallel import Pieces, current_piece, rank_pieces
from trainer.parallel.ranks import Ranks
from trainer.parallel.rng.draw_numbers import DrawNumbers, draw_number, hash_name, unit_names, watch_units
from trainer.parallel.rng.kernels import use_source
from trainer.parallel.rng.native_rng import TorchRNG, seed_python
from trainer.parallel.rng.random_draw import DrawSites, RandomDraw, Rows, Site, TensorPart, find_part
from trainer.parallel.rng.row_owners import GENERATOR, OUTSIDE

_OUTSIDE = hash_name(OUTSIDE)
_LEARNING, _EVALUATING = 0x6C6561726E, 0x6576616C  # set a forward's numbers apart from those of augmentation


class SampleForward:
    """The forward of one micro-batch: its samples, and the draws that it has made so far."""

    def __init__(self, seed: int, kind: int, step: int, indices: Tensor, device: torch.device) -> None:
        self.batch, self.training = len(indices), kind == _LEARNING  # B
        self._seed, self._kind, self._step, self._indices, self._device = seed, kind, step, indices, device
        self.numbers = DrawNumbers()
        self.draws: list[tuple[int, int]] = []  # the number of each, and that of its place in the code
        self.tokens = 0  # of each sample on this rank

    @cached_property
    def seed(self) -> int:
        """Of the step: the same in all micro-batches and on all ranks."""
        return mix_seeds(mix_seeds(self._seed, self._kind), self._step)

    @cached_property
    def samples(self) -> Random:
        """Streams of the samples: (B,) of them."""
        return Random(mix_seeds(self._seed, self._kind), self._step, to_device(self._indices, self._device))

    @cached_property
    def common(self) -> Random:
        """One stream for what belongs to no sample, the same on all ranks."""
        nobody = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        return Random(mix_seeds(self._seed, self._kind), self._step, nobody)


class SampleRNG(TorchRNG):
    """Random numbers follow from (seed, step, unit, number of its call and of the draw in it, sample, element).

    So they do not depend on ranks, micro-batches, stages, or on the order in which anything is computed. What belongs
    to no sample is the same on all ranks. Whose a row of a draw is, `sites` says.
    """

    draws_samples = True

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self._forward = SampleForward(seed, _LEARNING, 0, torch.empty(0, dtype=torch.int64), device)  # nobody's
        self._hooks: list[RemovableHandle] = []
        self._step: int | None = None
        # a seed of torch's generator → the forward that has come so far, and how many draws it had made then
        self._progress: dict[int, tuple[SampleForward, int]] = {}
        self._graph: Iterator[int | None] | None = None  # numbers of draws, while a compiled graph runs that knows them
        # the call that computes pieces of a sequence, and its piece; the seed and the counts as the call began
        self._piece: tuple[object, int, int, DrawNumbers] | None = None
        self._tensor, self._context, self._most_pieces = Ranks(), Ranks(), 1
        self._guessed = False  # was a draw at a place that nobody has looked at, which one note tells?
        self._said = 0  # of the notes
        self._before: list[Any] = []  # sources of draws, as this one was entered

    def __enter__(self) -> None:
        self._before.append(use_source(self))

    def __exit__(self, *error: Any) -> None:
        use_source(self._before.pop())

    def watch(self, network: nn.Module, plan: Plan) -> None:
        self.units = unit_names(network, plan)
        self._hooks = watch_units(network, self.units, self._numbers)
        for module in network.modules():
            if isinstance(module, nn.RNNBase) and module.dropout > 0:
                _leave_cudnn(module)

    def learn(self, sites: DrawSites | None) -> None:
        self.sites = sites
        if sites is not None and sites.python:
            self._python_used = True
        if sites is not None and not sites.sites and not sites.failure:  # nothing is drawn, so nothing is counted
            for hook in self._hooks:
                hook.remove()

    def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is no part of the network; its draws belong to the forward that is under way."""
        self._forward.numbers.begin(_OUTSIDE)
        with self:
            return function(*args)

    def begin_forward(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward of these samples begins."""
        if step != self._step:  # nobody will compute again what the last one has computed
            self._progress.clear()
            self._step = step
        self._begin(_LEARNING, step, indices, place)
        if self._python_used is not False:
            self._seed_python(self._forward.seed)

    def begin_evaluation(self, indices: Tensor) -> None:
        """A forward begins in which nothing is learned: a sample draws the same in every evaluation."""
        self._progress.clear()
        self._step = None
        self._begin(_EVALUATING, 0, indices, ())
        if self._python_used:
            seed_python(self._forward.seed)

    def set_ranks(self, tensor: Ranks, context: Ranks, most_pieces: int) -> None:
        """These ranks share the layers of a network, and these the tokens of its samples, in so many pieces."""
        self._tensor, self._context, self._most_pieces = tensor, context, most_pieces

    def set_tokens(self, tokens: int) -> None:
        """In this forward this rank has so many tokens of each sample."""
        self._forward.tokens = tokens

    def _begin(self, kind: int, step: int, indices: Tensor, place: tuple[int, ...]) -> None:
        seed = mix_seeds(self._seed, kind, step, *place)
        seed_torch(seed, self._device)
        self._forward = SampleForward(self._seed, kind, step, indices, self._device)
        self._progress[seed] = self._forward, 0
        self._graph = self._piece = None

    def see_generator(self) -> None:
        """A generator of the network's own draws; what that means was said at the start, where that could be seen."""
        if self.sites is not None and GENERATOR not in self.sites.notes:
            self.sites.notes.append(GENERATOR)

    def next_draw(self, shape: tuple[int, ...], operator: str) -> RandomDraw | None:
        """The next draw of the forward that is under way, of this shape on this rank; None where it is nobody's."""
        piece = self._enter_piece()
        # How far a forward is stands in the seed of torch's generator: whoever computes a part of it again, here or in
        # code of users, puts the generator back to where this part began.
        progress = self._progress.get(torch.default_generator.initial_seed())
        if progress is None:
            return None
        forward, count = progress
        if count == len(forward.draws):  # drawn for the first time, not once more in a recomputation
            number = next(self._graph, None) if self._graph is not None else None
            draw = forward.numbers.next() if number is None else (number, number)
            # where a graph ended inside of a unit the next one counts anew
            while self._graph is not None and draw in forward.draws:
                draw = draw_number(draw[0], 1), draw[1]
            forward.draws.append(draw)
        number, line = forward.draws[count]
        following = mix_seeds(torch.default_generator.initial_seed())
        torch.default_generator.manual_seed(following)
        self._progress[following] = forward, count + 1
        site = self._find_site(forward, number, line, shape)
        part = self._find_part(forward, site, shape, piece)
        return RandomDraw(forward.batch, forward.samples, forward.common, forward.seed, number, site.rows, part)

    def _enter_piece(self) -> int | None:
        """Which piece of a rank's sequence a module computes; each piece makes the draws of the first, its part."""
        now = current_piece()
        if now is None:
            return None
        call, index = now
        if self._piece is None or self._piece[0] is not call:
            self._piece = call, index, torch.default_generator.initial_seed(), deepcopy(self._forward.numbers)
        elif self._piece[1] != index:
            _, _, seed, numbers = self._piece
            torch.default_generator.manual_seed(seed)
            self._forward.numbers = deepcopy(numbers)
            self._piece = call, index, seed, numbers
        return index

    def _numbers(self) -> DrawNumbers:
        """The counts of the forward that is under way, for a unit that begins or ends."""
        self._enter_piece()
        return self._forward.numbers

    def _find_site(self, forward: SampleForward, number: int, line: int, shape: tuple[int, ...]) -> Site:
        """What is known of the place that draws; a guess by the shape where nobody has looked at it."""
        site = self.sites.find(forward.training, number, line) if self.sites else None
        if site is not None:
            try:
                site.rows.of_sample(shape, forward.batch)
            except (ValueError, IndexError):
                pass
            else:
                return site
        batch = forward.batch
        dim = next((d for d, size in enumerate(shape) if size == batch), None)
        if dim is None and shape and shape[0] and shape[0] % batch == 0:
            dim = 0
        several = dim is not None or site is not None or math.prod(shape) > 1  # one number is a choice for all
        if self.sites is not None and not self._guessed and several:
            unit = next((name for name in self.units if hash_name(name) == forward.numbers.unit), "the network")
            owner = "rows of samples" if dim is not None else "rows of no sample, which draw by their place"
            cause = self.sites.failure or "the forward at the start did not draw there, or otherwise"
            self._guessed = True
            self.sites.notes.append(
                f"loop.dropout=sample: in or after {unit} random numbers of shape {shape} are drawn for {batch}"
                f" samples, and taken for {owner}. That is a guess from the shape ({cause}). If it is wrong the curve"
                " depends on loop.micro_batches and on the processes; job=verify tells. Draw for rows of samples,"
                " (B, …), in every forward (docs/one-curve.md)"
            )
        return Site(Rows(dim))

    def _find_part(
        self, forward: SampleForward, site: Site, shape: tuple[int, ...], piece: int | None
    ) -> TensorPart | None:
        """What of each sample's numbers this rank draws, where tensor or context ranks share a tensor."""
        if self.sites is None or self._tensor.size * self._context.size == 1:
            return None
        local, whole, tokens = site.rows.of_sample(shape, forward.batch), site.whole, forward.tokens
        if whole is None or len(whole) != len(local):
            raise self._unclear(shape)
        # sequences may be longer than those at the start
        all_tokens = tokens * self._context.size
        whole = tuple(all_tokens if tokens and size == site.tokens else size for size in whole)
        if whole == local:
            return None
        heads = Pieces((self._tensor.rank,), self._tensor.size)
        stretch = rank_pieces(self._context.rank, self._context.size, tokens, self._most_pieces)
        if piece is not None:
            stretch = Pieces((stretch.numbers[piece],), stretch.of)
        # some of the tokens, some of the channels or heads, or of a context rank's tokens a tensor rank's
        for pieces in (stretch, heads, stretch.part(heads)):
            if part := find_part(whole, local, pieces, loosely=False):
                return part
        # of one piece attention sees as many keys as come before it: weights are (heads, tokens, earlier tokens)
        loosely = find_part(whole, local, stretch, loosely=True) if self._tensor.size == 1 else None
        if loosely is None:
            raise self._unclear(shape)
        return loosely

    def _unclear(self, shape: tuple[int, ...]) -> RuntimeError:
        split = "tensor ranks" if self._context.size == 1 else "context ranks"
        others = "" if self._tensor.size > 1 else ", or loop.dropout=native"
        others += f" ({self.sites.failure})" if self.sites is not None and self.sites.failure else ""
        return RuntimeError(
            f"loop.dropout=sample: a draw of shape {shape} where {split} hold parts of a tensor: it is not clear which"
            " part of the whole this is. Draw it where activations are whole, give sequences one length, or use"
            f" strategy=fsdp{others}"
        )

    @contextmanager
    def in_graph(self, numbers: list[int | None]) -> Iterator[None]:
        """Around a compiled graph: its draws, in its order, have these numbers; None: they are counted as elsewhere."""
        before, self._graph = self._graph, iter(numbers)
        try:
            yield
        finally:
            self._graph = before

    def pop_notes(self) -> list[str]:
        """What a user should know of the draws since the last call."""
        notes = self.sites.notes if self.sites is not None else []
        new, self._said = notes[self._said :], len(notes)
        return new


def _leave_cudnn(module: nn.RNNBase) -> None:
    """Let torch's own code compute this layer: cuDNN draws inside, where nobody sees it."""
    flags: list[Any] = []

    def begins(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            flags.append(torch.backends.cudnn.flags(enabled=False))
            flags[-1].__enter__()

    def ends(*_: Any) -> None:
        if not torch.compiler.is_compiling() and flags:
            flags.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begins)
    module.register_forward_hook(ends, always_call=True)


def make_rng(dropout: str, seed: int, device: torch.device) -> TorchRNG:
    """The random numbers of a forward. dropout: `sample` or `native`."""
    return TorchRNG(seed, device) if dropout == "native" else SampleRNG(seed, device)
