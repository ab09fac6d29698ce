"""The framework's own keys: what each may be. The keys of groups are judged by their targets' signatures (build.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from omegaconf import DictConfig

from trainer.cadence import Every
from trainer.configuration.resolved import UNRESOLVED, as_written, resolved
from trainer.configuration.values import (
    Reader,
    Unexpected,
    meeting_place,
    number_above,
    one_of,
    optional,
    packages,
    rhythm,
    seconds,
    text,
    truth,
    whole,
    window,
)
from trainer.refusal import Refusal

# Groups whose keys belong to what their `_target_` names; `experiment` is a group too, but leaves no key of its own.
GROUPS = ("strategy", "model", "task", "data", "optimizer", "schedule", "log")

# Keys that stand beside an optimizer's own and are the framework's: build.maker must be told to leave them out.
OPTIMIZER_KEYS = ("decay", "fused")

EPOCHS = 10  # where neither loop.epochs nor loop.steps is given


def key(reader: Reader) -> Any:
    """A key of the configuration and what reads it. Defaults live in conf/config.yaml, once."""
    return field(metadata={"reader": reader})


@dataclass(frozen=True)
class Job:
    """What the program is to do."""

    name: str = key(one_of("fit"))


@dataclass(frozen=True)
class Run:
    """Where the files of a run go, and what it continues."""

    root: str = key(text)
    name: str | None = key(optional(text))
    dir: str | None = key(optional(text))
    resume: str = key(text)
    accept_changes: bool = key(truth)
    stop_after: float | None = key(optional(seconds))  # seconds


@dataclass(frozen=True)
class Loop:
    """How long, in steps of which size, and what happens how often."""

    epochs: int | None = key(optional(whole(1)))
    steps: int | None = key(optional(whole(1)))
    global_batch: int = key(whole(1))
    micro_batches: int = key(whole(1))
    micro_batch: int | None = key(optional(whole(1)))
    uneven: bool = key(truth)
    max_norm: float | None = key(optional(number_above(0)))
    log_every: tuple[Every, ...] = key(rhythm)
    eval_every: tuple[Every, ...] = key(rhythm)
    save_every: tuple[Every, ...] = key(rhythm)
    eval_batch: int | None = key(optional(whole(1)))
    deterministic: bool = key(truth)


@dataclass(frozen=True)
class Loader:
    """How samples are read that must be fetched one by one."""

    workers: int | None = key(optional(whole(0)))
    prefetch: int = key(whole(1))
    timeout: float = key(seconds)  # seconds


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints stay."""

    keep: int = key(whole(1))
    best: str | None = key(optional(text))


@dataclass(frozen=True)
class Distributed:
    """How processes talk to each other."""

    backend: str | None = key(optional(one_of("nccl", "gloo")))
    init_method: str = key(meeting_place)
    interface: str | None = key(optional(text))
    timeout: float = key(seconds)  # seconds
    step_timeout: float = key(seconds)  # seconds


@dataclass(frozen=True)
class Settings:
    """The framework keys of one run, each of its type."""

    job: Job
    run: Run
    loop: Loop
    loader: Loader
    checkpoint: Checkpoint
    distributed: Distributed
    seed: int = key(whole(0))
    device: str = key(one_of("auto", "cpu", "cuda"))
    precision: str = key(one_of("auto", "fp32", "bf16", "fp16", "fp64"))
    compile: bool = key(truth)
    profile: tuple[int, int] | None = key(window)  # first and last step
    trust: tuple[str, ...] = key(packages)
    decay: str = "weights"  # optimizer.decay: what weight decay shrinks: weights (not biases and norms) or all
    fused: bool | None = None  # optimizer.fused: one kernel for the whole step; None: where it pays


SECTIONS: Mapping[str, type] = {
    "job": Job,
    "run": Run,
    "loop": Loop,
    "loader": Loader,
    "checkpoint": Checkpoint,
    "distributed": Distributed,
}


def settings(cfg: DictConfig) -> Settings:
    """The framework keys of a composed configuration. Refusal that lists everything wrong with them."""
    found, problems = examine(cfg)
    if found is None:
        raise Refusal("\n".join(problems))
    return found


def examine(cfg: DictConfig) -> tuple[Settings | None, list[str]]:
    """The framework keys, or what is wrong with them, one line each."""
    values, problems = resolved(cfg)
    written = as_written(cfg)  # what messages show: never a resolved secret
    read: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        read[name] = _section(section, values.get(name), written.get(name), f"{name}.", problems)
    read |= _keys([each for each in fields(Settings) if "reader" in each.metadata], values, written, "", problems)
    read |= _beside_optimizer(values.get("optimizer"), written.get("optimizer"), problems)
    if not problems:
        problems += _impossible(read["loop"], read["compile"])
    if problems:
        return None, problems
    loop = read["loop"]
    if loop.epochs is None and loop.steps is None:
        read["loop"] = replace(loop, epochs=EPOCHS)
    return Settings(**read), []


def _section(section: type, values: Any, written: Any, prefix: str, problems: list[str]) -> Any:
    if not isinstance(values, dict):
        if values is not UNRESOLVED:
            names = ", ".join(prefix + each.name for each in fields(section)[:3])
            problems.append(f"{prefix[:-1]}={written}: expected a section with keys such as {names}")
        return None
    before = len(problems)
    read = _keys(list(fields(section)), values, written, prefix, problems)
    return section(**read) if len(problems) == before and UNRESOLVED not in values.values() else None


def _keys(known: list[Field], values: dict, written: Any, prefix: str, problems: list[str]) -> dict[str, Any]:
    read = {}
    for each in known:
        if each.name not in values:
            problems.append(f"{prefix}{each.name}: the framework needs this key; it cannot be removed")
        elif values[each.name] is not UNRESOLVED:
            try:
                read[each.name] = each.metadata["reader"](values[each.name])
            except Unexpected as unexpected:
                problems.append(f"{prefix}{each.name}={shown(written, each.name)}: expected {unexpected}")
    return read


def _beside_optimizer(values: Any, written: Any, problems: list[str]) -> dict[str, Any]:
    readers = {"decay": one_of("weights", "all"), "fused": optional(truth)}
    read = {}
    for name, reader in readers.items():
        if isinstance(values, dict) and name in values and values[name] is not UNRESOLVED:
            try:
                read[name] = reader(values[name])
            except Unexpected as unexpected:
                problems.append(f"optimizer.{name}={shown(written, name)}: expected {unexpected}")
    return read


def _impossible(loop: Loop, compiles: bool) -> list[str]:
    problems = []
    if loop.micro_batch is not None and loop.micro_batches != 1:
        problems.append(
            f"loop.micro_batches={loop.micro_batches} and loop.micro_batch={loop.micro_batch}: "
            "give the number of micro-batches or the size of one, not both"
        )
    if loop.uneven and compiles:
        problems.append(
            "loop.uneven=true and compile=true: a compiled network takes micro-batches of one size only; "
            "set compile=false, or loop.uneven=false and a global batch that divides"
        )
    return problems


def shown(written: Any, name: str) -> str:
    """A value as it was written, short enough for a line; an interpolation stays one, so that no secret is shown."""
    value = written[name] if isinstance(written, dict) else written
    word = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return word if len(word) <= 80 else word[:77] + "..."


def in_steps(value: Any) -> str:
    """What to do where epochs (1ep) were given to a key that counts steps."""
    epochs = re.search(r"\b\d+ep\b", str(value))
    return "; count in optimizer steps: an epoch has (training samples ÷ loop.global_batch) of them" if epochs else ""
