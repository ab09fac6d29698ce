"""The values that `init_from` gives a network: found and compared before any process group, read by one rank inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from trainer.launch.safe_files import resolve_links
from trainer.messages import Refusal, expand_home, format_count, format_names
from trainer.parallel.meta_model import named_tensors
from trainer.records.weight_files import Weights, open_weights

_SHOWN = 4  # names of a kind in a line


class InitialWeights:
    """What a network begins with that its constructor did not make. Nothing until somebody has looked for it.

    The main rank alone looks and reads; from it the values travel as if it had built them.
    """

    def __init__(self, source: str | None, best: str) -> None:
        """`source` is `init_from`; `best`: the figure by which a run's checkpoint is chosen."""
        self.lines: list[str] = []  # what was found, for the start of the run
        self.is_complete = False  # every value of the network: nobody need build any
        self._source, self._best = source, best
        self._names: dict[str, str] = {}  # of the network → of the same tensor in the file
        self._weights: Weights | None = None

    def find(self, network: nn.Module) -> None:
        """Find the weights and compare names and shapes; Refusal where none fits. The network may be an outline."""
        if self._source is None:
            self.lines = _left_random(network)
            return
        try:
            self._weights = weights = _translated(open_weights(_place(self._source, network), self._best), network)
            self._compare(weights, network)
        except Refusal as refusal:
            raise Refusal(f"init_from={self._source}: {refusal}") from refusal

    def load_into(self, network: nn.Module) -> None:
        """Give the network, in place, the values that were found; they are let go of then."""
        if self._weights is None:
            return
        own = dict(named_tensors(network))
        self._weights.read_into({there: own[name] for name, there in self._names.items()})
        self._weights = None

    def _compare(self, weights: Weights, network: nn.Module) -> None:
        own, stored = dict(named_tensors(network)), set(network.state_dict())
        there, done = plain_names(weights.tensors, own.keys())
        shapes = {name: weights.tensors[other].shape for name, other in there.items()}
        self._names = {name: there[name] for name in own if name in there and shapes[name] == own[name].shape}
        # a tensor with several names (tied weights) needs one of them
        given = {own[name] for name in self._names}
        self.is_complete = all(tensor in given for tensor in own.values())
        lacking = [name for name in own if own[name] not in given and name in stored]
        other = [name for name in lacking if name in there]
        replaced = [f"{name} {tuple(shapes[name])} → {tuple(own[name].shape)}" for name in other]
        # a count that only older files lack, and that torch's BatchNorm does without
        missing = [name for name in lacking if name not in there and not name.endswith("num_batches_tracked")]
        if not self._names:
            raise Refusal(_strangers(weights.path, there, network, replaced))
        extra = [there[name] for name in there if name not in own]
        self.lines = [
            f"weights     {len(self._names)} tensors from {weights.path}{weights.why}{done}",
            *_line("of another shape, not loaded", replaced),
            *_line("not there, not loaded", missing),
            *_line("not of this network, not loaded", extra),
        ]


def _left_random(network: nn.Module) -> list[str]:
    """A line where weights are published and nobody asked for them, though some will never learn."""
    count = len({one for one in network.parameters() if not one.requires_grad})
    if not count or not callable(getattr(network, "pretrained", None)):
        return []
    return [
        f"note        {format_count(count, 'frozen tensor')} with random values;"
        " init_from=pretrained loads published ones"
    ]


def _translated(weights: Weights, network: nn.Module) -> Weights:
    """Weights under the names of another library, where the network knows these and has a method `translated`."""
    known = getattr(network, "translated", None)
    tensors = known(weights.tensors, weights.settings) if callable(known) else None
    return weights if tensors is None else replace(weights, tensors=tensors)


def plain_names(names: Iterable[str], own: Collection[str]) -> tuple[dict[str, str], str]:
    """A file's names as the network has them → as they stand in the file; and what was done to them, in words.

    Wrappers add words: DataParallel and DDP `module.` in front, torch.compile `_orig_mod` anywhere. Beside these, one
    of the two may be a part of the other: Lightning's `model.` holds the network, a task's `backbone.` what the file
    has.
    """
    # all names are read in one way: one by one, a part that is really called `module` would pass for a wrapper
    wholes = [{name: name for name in names}]
    for change in (_uncompiled, _without("module")):
        wholes += [other for whole in wholes if (other := _renamed(whole, change)) not in wholes]
    ways = [("", whole) for whole in wholes]
    for whole in wholes:
        ways += [(f", its {word}.*", _renamed(whole, _without(word))) for word in _first_words(whole)]
        ways += [(f", as {word}.*", _renamed(whole, _below(word))) for word in _first_words(own)]
    done, found = max(ways, key=lambda way: len(way[1].keys() & own))  # of equals the first: the least is done
    return found, done


def _renamed(whole: Mapping[str, str], new: Callable[[str], str]) -> dict[str, str]:
    """The same with other names; nothing where two would have one name, as then some were not meant."""
    renamed = {new(name): there for name, there in whole.items()}
    return renamed if len(renamed) == len(whole) else {}


def _uncompiled(name: str) -> str:
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def _without(word: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(f"{word}.")


def _below(word: str) -> Callable[[str], str]:
    return lambda name: f"{word}.{name}"


def _first_words(names: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(name.split(".")[0] for name in names)


def _place(source: str, network: nn.Module) -> Path:
    """Where the weights lie; what the network's authors have published the network itself knows."""
    if source != "pretrained":
        path = resolve_links(expand_home(source))
        if not path.exists():
            kinds = "a run folder, a checkpoint, a .safetensors, .pt or .pth file, a folder of Hugging Face"
            raise Refusal(f"{path.absolute()} does not exist; give pretrained, {kinds}")
        return path
    published = getattr(network, "pretrained", None)
    if not callable(published):
        raise Refusal(
            f"{type(network).__name__} has no published weights; a network may say where they lie, in a method"
            " pretrained(self) -> Path; a file of weights may be given instead"
        )
    return published()


def _strangers(path: Path, there: Collection[str], network: nn.Module, replaced: Sequence[str]) -> str:
    kind, own = type(network).__name__, network.state_dict()
    if replaced:
        return f"no tensor of {path} has the shape that {kind} has for it: {format_names(replaced, _SHOWN)}"
    if not there:
        return f"{path} holds no tensor by name"
    in_file, here = format_names(there, _SHOWN), format_names(own, _SHOWN)
    return f"no name in {path} is one of {kind}'s; there: {in_file}; here: {here}"


def _line(what: str, names: Sequence[str]) -> list[str]:
    return [f"weights     {len(names)} {what}: {format_names(names, _SHOWN)}"] if names else []
