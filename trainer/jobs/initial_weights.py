"""The values that `init_from` gives a network: found and compared before there is a process group, read by one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import nn

from trainer.launch.safe_files import resolve_links
from trainer.learning.freezing import frozen_names
from trainer.messages import Refusal, expand_home, format_count, format_names
from trainer.parallel.meta_model import named_state
from trainer.records.checkpoint.base_weights import BaseWeights, base_of
from trainer.records.weight_sources import CheckpointWeights, WeightSource, open_weights

_SHOWN = 4  # names of a kind in a line


class InitialWeights:
    """The weights that a network begins with and that its constructor did not make. None before `find`.

    The main rank alone finds and reads them; they are sent to the others as if it had built them.
    """

    def __init__(self, source: str | None, best: str) -> None:
        """`source` is `init_from`; `best`: the metric by which the checkpoint of a run folder is chosen."""
        self.lines: list[str] = []  # for the output at the start of the run
        self.is_complete = False  # do they give every value of the network? Then nobody needs to build any
        self._source, self._best = source, best
        self._names: dict[str, str] = {}  # a name in the network → the name of the same tensor in the file
        self._weights: WeightSource | None = None
        self._path = Path()  # what lies there,
        self._files: Sequence[Path] = ()  # in these files
        self._shapes: dict[str, Sequence[int]] = {}  # what is saved of the network and was found: name → shape
        self._frozen: set[str] = set()  # what nothing trains
        self._under: InitialWeights | None = None  # of a checkpoint of adapters: what gives the rest
        self._base: BaseWeights | None = None

    @classmethod
    def under(cls, base: BaseWeights, network: nn.Module, source: str | None = None) -> Self:
        """The frozen weights that a checkpoint does not hold, found and compared. Refusal where they are not the same.

        source: where they lie now, if they are no longer where they were.
        """
        weights = cls(str(base.path) if base.path.exists() or source is None else source, "")
        weights.find_again(base, network)
        return weights

    def find_again(self, base: BaseWeights, network: nn.Module) -> None:
        """The same as `find`; Refusal where these are not the frozen weights that something began with."""
        try:
            self.find(network)
            base.check(self._path, self._files)
        except Refusal as refusal:
            why = f"the checkpoint has no frozen weights, which began as {base.path} and lie there"
            raise Refusal(f"{why}: {refusal}; init_from=PATH says where the same lie now") from refusal
        if missing := [name for name in base.shapes if name not in self._shapes]:
            raise Refusal(f"the frozen weights in {self._path} do not give {format_names(missing, _SHOWN)} any more")
        self._base = replace(base, path=self._path)
        self.lines = [f"weights     {len(base.shapes)} frozen tensors from {self._path}; the checkpoint has the rest"]

    def base(self) -> BaseWeights | None:
        """What a checkpoint need not hold, after `find`: files are read for it. None where something else is frozen.

        A run's checkpoints come and go, so what began with one of them keeps its own copy.
        """
        if self._base is None and self._under is not None:
            return self._under.base()
        if self._base is None and self._files and self._frozen and self._frozen <= self._shapes.keys():
            self._base = BaseWeights.hashed(
                self._path, self._files, {name: self._shapes[name] for name in self._frozen}
            )
        return self._base

    def find(self, network: nn.Module, build: Callable[[int], nn.Module] | None = None) -> None:
        """Find the weights and compare names and shapes; Refusal where none fits. The network may be an outline.

        build: makes the network from the run's seed plus a number; then nothing that is frozen may stay random.
        """
        if self._source is None:
            self.lines = _random_note(network)
            return
        try:
            # open the file, take its names from another library to ours, then compare
            self._weights = weights = _translate(open_weights(_locate(self._source, network), self._best), network)
            self._compare(weights, network)
            if isinstance(weights, CheckpointWeights) and (base := base_of(weights.checkpoint.state)):
                self._under = InitialWeights.under(base, network)
            elif build is not None:
                self._refuse_random(weights, network, build)
        except Refusal as refusal:
            raise Refusal(f"init_from={self._source}: {refusal}") from refusal

    def load_into(self, network: nn.Module) -> None:
        """Give the network, in place, the values that were found; they are let go of then."""
        if self._weights is None:
            return
        tensors = dict(named_state(network))
        if self._under is not None:
            self._under.load_into(network)
        self._weights.load_into({stored_name: tensors[name] for name, stored_name in self._names.items()})
        self._weights = None  # files may be large

    def _compare(self, weights: WeightSource, network: nn.Module) -> None:
        # every tensor by each of its names; what is saved leaves out non-persistent buffers
        expected, saved_names = dict(named_state(network)), set(network.state_dict())
        stored_names, how = match_names(weights.tensors, expected.keys())
        shapes = {name: weights.tensors[stored].shape for name, stored in stored_names.items()}
        fitting = [name for name in expected if name in shapes and shapes[name] == expected[name].shape]
        self._names, self._how = {name: stored_names[name] for name in fitting}, how
        # a tensor with several names (tied weights) needs one of them
        loaded = {expected[name] for name in self._names}
        self.is_complete = all(tensor in loaded for tensor in expected.values())
        lacking = [name for name in expected if expected[name] not in loaded and name in saved_names]
        misshapen = [name for name in lacking if name in stored_names]
        replaced = [f"{name} {tuple(shapes[name])} → {tuple(expected[name].shape)}" for name in misshapen]
        # a count that only older files lack, and that torch's BatchNorm does without
        missing = [name for name in lacking if name not in stored_names and not name.endswith("num_batches_tracked")]
        self._path, self._files = weights.path.absolute(), weights.files
        self._shapes = {name: expected[name].shape for name in sorted(saved_names) if expected[name] in loaded}
        self._frozen = frozen_names(network) & saved_names
        if not self._names:
            raise Refusal(_explain_no_match(weights.path, stored_names, network, replaced))
        # in the file alone: usually the head of another task
        extra = [stored_names[name] for name in stored_names if name not in expected]
        self.lines = [
            f"weights     {len(self._names)} tensors from {weights.path}{weights.why}{how}",
            *_list_names("of another shape, not loaded", replaced),
            *_list_names("not there, not loaded", missing),
            *_list_names("not of this network, not loaded", extra),
        ]

    def _refuse_random(self, weights: WeightSource, network: nn.Module, build: Callable[[int], nn.Module]) -> None:
        """Refusal where something frozen would keep random values, or those of a copy whose original is replaced."""
        lacking = [name for name, _ in named_state(network) if name in self._frozen - self._shapes.keys()]
        # the seed of the run last: random numbers go on from there as if nothing had been built here
        other, own = (dict(named_state(build(add))) for add in (1, 0)) if lacking else ({}, {})
        # the same tensor of the file may have two places, as in a policy and in its reference
        fitting, how = match_names(weights.tensors, lacking) if lacking else ({}, "")
        originals = {stored: name for name, stored in self._names.items()}
        copies = {name: own[originals[fitting[name]]] for name in lacking if fitting.get(name) in originals}
        wrong = [
            name
            for name in lacking
            if not torch.equal(own[name], other[name]) or torch.equal(own[name], copies.get(name, torch.empty(0)))
        ]
        if not wrong:
            return
        fits = sum(name in copies for name in wrong)
        both = f"; {fits} of them it gives{how.replace(',', '')}, so a file with both names gives all" if fits else ""
        raise Refusal(
            f"{format_count(len(wrong), 'frozen tensor')} would stay as built: {format_names(wrong, _SHOWN)}."
            f" {weights.path} gives {len(self._names)} others{self._how}{both}. Or the network's constructor loads"
            " them, or they are not frozen"
        )


def _random_note(network: nn.Module) -> list[str]:
    """A line where weights are published and nobody asked for them, though some will never learn."""
    count = len({parameter for parameter in network.parameters() if not parameter.requires_grad})
    if not count or not callable(getattr(network, "pretrained", None)):
        return []
    return [
        f"note        {format_count(count, 'frozen tensor')} with random values;"
        " init_from=pretrained loads published ones"
    ]


def _translate(weights: WeightSource, network: nn.Module) -> WeightSource:
    """Weights under the names of another library, where the network knows these and has a method `translated`."""
    known = getattr(network, "translated", None)
    tensors = known(weights.tensors, weights.settings) if callable(known) else None
    return weights if tensors is None else replace(weights, tensors=tensors)


def match_names(names: Iterable[str], wanted: Collection[str]) -> tuple[dict[str, str], str]:
    """A mapping from names as the network has them to names in the file; and what was done to them, in words.

    Wrappers add words: DataParallel and DDP `module.` in front, torch.compile `_orig_mod` anywhere. Beside these, one
    of the two may be a part of the other: Lightning's `model.` holds the network, a task's `backbone.` what the file
    has.
    """
    # all names are read in one way: one by one, a part that is really called `module` would pass for a wrapper
    readings = [{name: name for name in names}]
    for change in (_strip_compiled, _strip("module")):
        readings += [other for reading in readings if (other := _rename(reading, change)) not in readings]
    # what was done, in words, and the names after it
    ways = [("", reading) for reading in readings]
    for reading in readings:
        ways += [(f", its {part}.*", _rename(reading, _strip(part))) for part in _first_parts(reading)]
        ways += [(f", as {part}.*", _rename(reading, _prepend(part))) for part in _first_parts(wanted)]
    how, best = max(ways, key=lambda way: len(way[1].keys() & wanted))  # of equals the first: the least is done
    return best, how


def _rename(names: Mapping[str, str], new: Callable[[str], str]) -> dict[str, str]:
    """The same with other names; nothing where two would have one name, as then some were not meant."""
    renamed = {new(name): there for name, there in names.items()}
    return renamed if len(renamed) == len(names) else {}


def _strip_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _strip(part: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(f"{part}.")


def _prepend(part: str) -> Callable[[str], str]:
    return lambda name: f"{part}.{name}"


def _first_parts(names: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(name.split(".")[0] for name in names)


def _locate(source: str, network: nn.Module) -> Path:
    """Where the weights lie; what the network's authors have published the network itself knows."""
    if source != "pretrained":
        path = resolve_links(expand_home(source))
        if not path.exists():
            kinds = "a run folder, a checkpoint, a .safetensors, .pt or .pth file, a folder of Hugging Face"
            raise Refusal(f"{path.absolute()} does not exist; give pretrained, {kinds}")
        return path
    # a network of a recipe may download or find them
    published = getattr(network, "pretrained", None)
    if not callable(published):
        raise Refusal(
            f"{type(network).__name__} has no published weights; a network may say where they lie, in a method"
            " pretrained(self) -> Path; a file of weights may be given instead"
        )
    return published()


def _explain_no_match(path: Path, stored_names: Collection[str], network: nn.Module, replaced: Sequence[str]) -> str:
    kind, expected = type(network).__name__, network.state_dict()
    if replaced:
        return f"no tensor of {path} has the shape that {kind} has for it: {format_names(replaced, _SHOWN)}"
    if not stored_names:
        return f"{path} holds no tensor by name"
    in_file, here = format_names(stored_names, _SHOWN), format_names(expected, _SHOWN)
    return f"no name in {path} is one of {kind}'s; there: {in_file}; here: {here}"


def _list_names(what: str, names: Sequence[str]) -> list[str]:
    return [f"weights     {len(names)} {what}: {format_names(names, _SHOWN)}"] if names else []
