"""Weights that people have, in files of many kinds: which tensors those hold, and their values into given ones.

Nothing that a file names is called: safetensors, and torch's own format as far as it holds tensors (`weights_only`).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.launch.typed_values import DamagedFile, read_yaml
from trainer.messages import Refusal
from trainer.parallel.optimizer_state import EMA_PREFIX, OTHER_PREFIXES
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manifest import CheckpointInfo, CorruptCheckpoint
from trainer.records.checkpoint.store import list_complete, open_checkpoint, select_best
from trainer.records.resume_rules import has_checkpoint, is_checkpoint
from trainer.records.start_files import ConfigFields

# Under which of these a training script keeps the network's own tensors, beside its optimizer's and others.
NESTED_KEYS = ("state_dict", "model_state_dict", "model")
# What a folder of Hugging Face holds, the first that is there; an index names the files of several.
HUGGING_FACE_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class WeightSource:
    """Named tensors of files. They are mapped: their values are read when somebody looks at them."""

    path: Path
    tensors: Mapping[str, Tensor]
    why: str = ""  # why these, where there were others
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the config.json of their folder says
    files: Sequence[Path] = ()  # that hold them; of a checkpoint none are named

    @torch.no_grad()
    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill these in place; names are the files', types may be others."""
        for name, tensor in tensors.items():
            tensor.copy_(self.tensors[name])


@dataclass(frozen=True)
class CheckpointWeights(WeightSource):
    """Those of a checkpoint of our own, verified, whose files may each hold shards: only shapes are known before."""

    checkpoint: CheckpointInfo = field(kw_only=True)
    averaged: Collection[str] = ()  # names of which the moving average is meant

    def read(self, name: str) -> Tensor:
        """The values of one tensor, put together from the shards of all files; nothing else is kept."""
        from trainer.records.checkpoint.tensor_files import read_tensor

        return read_tensor(self.checkpoint, EMA_PREFIX + name if name in self.averaged else name)

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill these in place, whoever wrote which shard of them."""
        from trainer.records.checkpoint.tensor_files import load_tensors

        there = {EMA_PREFIX + name if name in self.averaged else name: tensor for name, tensor in tensors.items()}
        load_tensors({name: tensor.detach() for name, tensor in there.items()}, self.checkpoint)


def open_weights(path: Path, best: str) -> WeightSource:
    """The weights that lie there: in a run's folder, a checkpoint, a file, or a folder of Hugging Face.

    Of a run those of its best checkpoint, by the run's own `checkpoint.best`, else by the figure `best` ("accuracy",
    "-loss"); where that is one of the moving average, the average's. Refusal where there are none, or where they cannot
    be read.
    """
    try:
        if has_checkpoint(path):
            return _open_run_weights(path, best)
        if is_checkpoint(path):
            return open_checkpoint_weights(path)
        if path.is_dir():
            files = _find_files(path)
            tensors = {name: tensor for file in files for name, tensor in _load_file(file).items()}
            return WeightSource(path, tensors, settings=_read_settings(path / "config.json"), files=files)
        return WeightSource(path, _load_file(path), files=[path])
    except (CorruptCheckpoint, DamagedFile) as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        raise Refusal(f"{path.absolute()}: {error.strerror or error}") from error


def _open_run_weights(path: Path, best: str) -> WeightSource:
    # what the run itself went by: this one may look for another metric
    config_file = path / "config.yaml"
    config = read_yaml(config_file, ConfigFields) if config_file.is_file() else {}
    best = config.get("checkpoint", {}).get("best") or best
    checkpoints, metric = list_complete(path / "checkpoints"), best.removeprefix("-")
    if not checkpoints:
        raise CorruptCheckpoint(f"none of the checkpoints in {path / 'checkpoints'} can be used")
    best_checkpoint = select_best(checkpoints, best)
    if best_checkpoint is None:
        return open_checkpoint_weights(checkpoints[0].path, f" (the newest: none has {metric})")
    why = f" (best {metric}: {best_checkpoint.metrics[metric]:.4f})"
    return open_checkpoint_weights(best_checkpoint.path, why, average=metric.startswith("ema_"))


def open_checkpoint_weights(path: Path, why: str = "", average: bool = False) -> CheckpointWeights:
    """The network's own tensors of one checkpoint; with `average` the moving averages of those that have one."""
    checkpoint = open_checkpoint(path, Ranks())  # this process alone: every byte is compared with its sha256
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(OTHER_PREFIXES)}
    # the average lies beside the weights, under the same names with a prefix
    averaged = [name for name in tensors if EMA_PREFIX + name in checkpoint.tensors]
    if averaged:
        why += "; of the moving average" if average else "; the moving average beside them is left out"
    return CheckpointWeights(path, tensors, why, checkpoint=checkpoint, averaged=averaged if average else ())


def _find_files(path: Path) -> list[Path]:
    """The files of a folder of Hugging Face that hold its tensors."""
    name = next((name for name in HUGGING_FACE_FILES if (path / name).is_file()), None)
    if name is None:
        raise Refusal(f"{path.absolute()} holds no checkpoint, and none of {', '.join(HUGGING_FACE_FILES)}")
    if not name.endswith(".json"):
        return [path / name]
    # the index says which file each tensor lies in; the files say themselves what they hold
    try:
        # {"weight_map": {tensor name: file name}}
        files = sorted(set(json.loads((path / name).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{path / name} is no index of weights: {type(error).__name__}: {error}") from error
    for file in files:
        # no path: it could lead to any file of this machine
        if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
            raise Refusal(f"{path / name} names {file!r:.200}, which is no file beside it")
    return [path / file for file in files]


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is damaged: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _load_file(path: Path) -> dict[str, Tensor]:
    if path.exists() and not path.is_file():  # a pipe would keep its reader waiting for ever
        raise Refusal(f"{path.absolute()} is no regular file")
    if path.suffix != ".safetensors":
        return _load_torch_file(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # (name → tensor) mapped from the file: nothing is copied before it is used
        return load_file(path)
    except SafetensorError as error:
        raise Refusal(f"{path}: {error}") from error


def _load_torch_file(path: Path) -> dict[str, Tensor]:
    """What torch.save has written: a state_dict, or one inside of what a training script keeps."""
    try:
        # only the newer of torch's two formats, a zip, can be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # whatever a file of another kind makes of torch's reader
        match = re.search(r"GLOBAL (\S+)", str(error))
        problem = f"it holds a {match[1]}, which only running code could read" if match else "torch cannot read it"
        raise Refusal(
            f"{path}: {problem}; write its tensors alone: torch.save(network.state_dict(), 'weights.pt')"
        ) from error
    return _named_tensors(state)


def _named_tensors(state: Any) -> dict[str, Tensor]:
    while isinstance(state, Mapping):
        # model inside state_dict inside model …: what scripts save is nested in many ways
        inner = next((state[key] for key in NESTED_KEYS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        state = inner
    return {}
