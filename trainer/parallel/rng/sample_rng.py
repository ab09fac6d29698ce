"""Random numbers of a forward that belong to its samples, so that no placement changes them (`sample`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from trainer.parallel.context_parallel import Pieces, current_piece, rank_pieces
from trainer.parallel.module_units import matching_modules
from trainer.parallel.ranks import Ranks
from trainer.parallel.rng.function_mode import RandomFunctionMode
from trainer.parallel.rng.native_rng import TorchRNG
from trainer.parallel.rng.random_draw import ActivationShard, RandomDraw, RowCheck, SequenceShard
from trainer.parallel.tensor_parallel import activation_layouts

OUTSIDE = "the task"  # draws when no module of the network runs; no module has such a name
# calls of a module are so far apart, and draws of a call
CALL_STRIDE, DRAW_STRIDE = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
_LEARNING, _EVALUATING = 0x6C6561726E, 0x6576616C  # set a forward's numbers apart from those of augmentation
# words in the names of torch's modules that draw
_RANDOM_TORCH_MODULES = ("Dropout", "Transformer", "Attention", "RNN", "LSTM", "GRU", "RReLU", "Fractional")


class ForwardRNGState:
    """The forward of one micro-batch: its samples, and the draws that it has made so far."""

    def __init__(self, seed: int, step: int, indices: Tensor) -> None:
        self.batch, self.seed = len(indices), mix_seeds(seed, step)  # B
        self._key = seed, step, indices  # indices: (B,) int64
        self.draws: list[tuple[int, ActivationShard | None]] = []  # the number of each draw; this rank's part of it
        self.calls: Counter[int] = Counter()  # by module
        self._draws_of_call: Counter[int] = Counter()
        self._piece = current_piece()  # of a sequence: the last one in which something was counted
        self._at_start = Counter(self.calls), Counter(self._draws_of_call)  # as the module of this piece began

    @cached_property
    def samples(self) -> Random:
        """Streams of the samples: (B,) of them."""
        return Random(*self._key)

    @cached_property
    def common(self) -> Random:
        """One stream for what has no batch dimension, the same on all ranks."""
        seed, step, indices = self._key
        return Random(seed, step, torch.full((1,), -1, dtype=torch.int64, device=indices.device))

    def count_call(self, module: int) -> int:
        """Count one more call of this module; returns the number of the call."""
        self._enter_piece()
        self.calls[module] += 1
        return module + self.calls[module] * CALL_STRIDE

    def add(self, call: int, shard: ActivationShard | None) -> None:
        """Add one more draw, in this call."""
        self._enter_piece()
        self._draws_of_call[call] += 1
        self.draws.append((to_int64(call + self._draws_of_call[call] * DRAW_STRIDE), shard))

    def _enter_piece(self) -> None:
        """In each piece of a sequence a module counts from where it began: the pieces are parts of the same draws."""
        piece, last = current_piece(), self._piece
        if piece == last:
            return
        self._piece = piece
        if piece and last and piece[0] is last[0]:  # another piece of the same call
            self.calls, self._draws_of_call = (Counter(counts) for counts in self._at_start)
        elif piece:
            self._at_start = Counter(self.calls), Counter(self._draws_of_call)


def _rng_state() -> bytes:
    """Of torch's generator; to compare bytes takes a tenth of the time of `torch.equal`."""
    return torch.default_generator.get_state().numpy().tobytes()


def hash_name(name: str) -> int:
    """A module's name as a number of 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class SampleRNG(TorchRNG):
    """Random numbers follow from (seed, step, name of the module, number of its call and of the draw, sample, element).

    So they do not depend on ranks, micro-batches, stages, or on the order in which anything is computed. What has no
    batch is the same on all ranks.
    """

    mode_class: Any = RandomFunctionMode
    modes: tuple[type[RandomFunctionMode], ...] = (RandomFunctionMode,)

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self._mode = self.mode_class(self)
        self._running = [hash_name(OUTSIDE)]  # calls of modules that are under way, the innermost last
        self._forward = ForwardRNGState(seed, 0, torch.empty(0, dtype=torch.int64))  # nobody's
        self._begun: tuple[int, int, Tensor, tuple[int, ...]] | None = None  # a forward in which nothing has been drawn
        self.time_first = False
        # Of torch's own modules it is known which ones draw. Where there are no others the loss alone is looked at, and
        # that only once it draws: looking costs some microseconds for each function of torch, which short steps notice.
        self._network_mode: Any = nullcontext()  # around forward and backward
        self._outside_mode: Any = self._mode  # around what is called outside of the network
        self._outside_is_quiet = device.type == "cpu"  # nothing has been drawn yet outside of the network
        self._step: int | None = None
        # a seed of torch's generator → the forward that has come so far, and how many draws it had made then
        self._progress: dict[int, tuple[ForwardRNGState, int]] = {}
        self._sequence_shard: SequenceShard | None = None  # of each sample's tokens, where ranks share them
        self.shard: ActivationShard | None = None  # of activations as they lie at present
        self._names: dict[int, str] = {}  # of modules, by their calls
        self._row_check = RowCheck()

    def __enter__(self) -> None:
        self._network_mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._network_mode.__exit__(*error)

    def watch(self, network: nn.Module, may_draw: bool) -> None:
        """Know the modules of a network by their names."""
        for name, module in network.named_modules():
            self.time_first |= getattr(module, "batch_first", True) is False
            if _may_draw(module):
                may_draw = True
                self._watch_calls(module, name)
        if may_draw:
            self._network_mode, self._outside_mode = self._outside_mode, self._network_mode
            self._outside_is_quiet = False

    def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is no part of the network; its draws belong to the forward that is under way."""
        if self._outside_is_quiet:
            before, result = _rng_state(), function(*args)
            if _rng_state() == before:
                return result
            self._outside_is_quiet = False  # it draws: once more, as it is called from now on
        with self._outside_mode:
            return function(*args)

    def begin_forward(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward of these samples begins."""
        if step != self._step:  # nobody will compute again what the last one has computed
            self._progress.clear()
            self._step = step
        self._begin(_LEARNING, step, indices, place)

    def begin_evaluation(self, indices: Tensor) -> None:
        """A forward begins in which nothing is learned: a sample draws the same in every evaluation."""
        self._progress.clear()
        self._step = None
        self._begin(_EVALUATING, 0, indices, ())

    def follow_plan(self, network: nn.Module, plan: Plan, ranks: Ranks) -> None:
        """Know which part of an activation is this rank's: that changes at the modules that a plan names."""
        for key, style in plan.tensor.items():
            before, after = activation_layouts(style)
            for _, module in matching_modules(network, key):
                if before:
                    module.register_forward_pre_hook(partial(self._change_layout, before, ranks))
                if after:
                    module.register_forward_hook(partial(self._change_layout, after, ranks))

    def set_sequence_shard(self, ranks: Ranks, tokens: int, most_pieces: int) -> None:
        """In this forward these ranks have so many tokens of each sample, in at most so many pieces."""
        shard = SequenceShard(1, tokens, rank_pieces(ranks.rank, ranks.size, tokens, most_pieces))
        self._sequence_shard = self.shard = shard if ranks.size > 1 else None

    def _change_layout(self, layout: Any, ranks: Ranks, module: nn.Module, *values: Any) -> None:
        """Activations lie as this layout says from here on. values: a module's arguments, its output if it has one."""
        layouts = layout if isinstance(layout, tuple) else (layout,)
        shards = [each for each in layouts if isinstance(each, Shard)]
        for shard in shards:
            x = first_tensor(values[-1])  # (B, T, C) or (B, C), or (T, C)
            dim = shard.dim % x.dim()
            if dim == 0:
                return  # what has its tokens first has no batch: vectors of positions, which are added to what has one
            last = dim == x.dim() - 1
            local = ActivationShard(-1 if last else dim, x.shape[-1], Pieces((ranks.rank,), ranks.size))
            self.shard = self._sequence_shard.within(local) if self._sequence_shard else local
        if not shards:
            self.shard = self._sequence_shard

    def _begin(self, *begun: Any) -> None:
        """A forward begins: (kind, step, indices, place)."""
        del self._running[1:]  # an error may have left some
        self.shard, self._begun = None, begun
        # parts of what may draw may be computed again, and know by the generator where they began; of a network that
        # draws nothing it is enough to start as the loss draws, which few do
        if self._network_mode is self._mode:
            self._start()

    def _start(self) -> None:
        """What is drawn from here on belongs to the forward that has begun."""
        if self._begun is not None:
            (kind, step, indices, place), self._begun = self._begun, None
            seed_torch(mix_seeds(self._seed, kind, step, *place), self._device)
            self._forward = ForwardRNGState(mix_seeds(self._seed, kind), step, to_device(indices, self._device))
            self._progress[torch.default_generator.initial_seed()] = self._forward, 0
            self._has_begun(self._forward)

    def _has_begun(self, forward: ForwardRNGState) -> None:
        """What is drawn from here on belongs to this forward."""

    def _next_number(self) -> int | None:
        """The number of the next draw, if it is drawn between two graphs of a compiled module."""
        return None

    def next_draw(self) -> RandomDraw | None:
        """The next draw of the forward that is under way; None where it is nobody's."""
        self._start()
        # How far a forward is stands in the seed of torch's generator: whoever computes a part of it again, here or in
        # code of users, puts the generator back to where this part began.
        progress = self._progress.get(torch.default_generator.initial_seed())
        if progress is None:
            return None
        forward, count = progress
        if count == len(forward.draws):  # drawn for the first time, not once more in a recomputation
            piece = current_piece()
            shard = self.shard.only(piece[1]) if piece and isinstance(self.shard, SequenceShard) else self.shard
            if (number := self._next_number()) is not None:
                forward.draws.append((number, shard))
            else:
                forward.add(self._running[-1], shard)
        draw = forward.draws[count]
        following = mix_seeds(torch.default_generator.initial_seed())
        torch.default_generator.manual_seed(following)
        self._progress[following] = forward, count + 1
        module = self._names.get(self._running[-1], "")
        streams = forward.batch, forward.samples, forward.common, forward.seed
        return RandomDraw(*streams, *draw, self.time_first, module, self._row_check)

    def has_drawn(self) -> bool:
        """Has anything been drawn in this step?"""
        return any(forward.draws for forward, _ in self._progress.values())

    def pop_notes(self) -> list[str]:
        """What a user should know of the draws since the last call."""
        return self._row_check.pop_notes()

    def _watch_calls(self, module: nn.Module, name: str) -> None:
        """Know when a module is called and when it has ended."""
        hashed = hash_name(name)

        # in what is compiled nobody asks for names while it runs
        def begins(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._running.append(call := self._forward.count_call(hashed))
                self._names[call] = name

        def ends(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._running.pop()

        module.register_forward_pre_hook(self._hook(module, begins))
        module.register_forward_hook(self._hook(module, ends))

    def _hook(self, module: nn.Module, function: Callable[..., None]) -> Callable[..., None]:
        """A function as a hook of this module."""
        return function


def _may_draw(module: nn.Module) -> bool:
    """May a forward of this module draw by itself? Of torch's own modules only a few do."""
    kind = type(module)
    return not kind.__module__.startswith("torch.nn.") or any(word in kind.__name__ for word in _RANDOM_TORCH_MODULES)
