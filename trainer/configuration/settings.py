"""The framework's own keys: what each may be. The keys of groups are judged by their targets' signatures (build.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

from omegaconf import DictConfig

from trainer.configuration.resolved import UNRESOLVED, as_written, resolved
from trainer.configuration.values import (
    Unexpected,
    below,
    converted,
    describe,
    fits,
    meeting_place,
    packages,
    positive,
    rhythm,
    seconds,
    shown,
    window,
)
from trainer.learning.cadence import Every
from trainer.refusal import Refusal

# Groups whose keys belong to what their `_target_` names; `experiment` is a group too, but leaves no key of its own.
GROUPS = ("strategy", "model", "task", "data", "optimizer", "schedule", "log")

# Keys that stand beside an optimizer's own and are the framework's: build.maker must be told to leave them out.
OPTIMIZER_KEYS = ("decay", "fused")

EPOCHS = 10  # where neither loop.epochs nor loop.steps is given


def key(read: Callable[[Any], Any] | None = None, least: int | None = None) -> Any:
    """A key of its annotation's type; `read`: in a grammar of its own. Defaults live in conf/config.yaml, once."""
    return field(metadata={"read": read, "least": least})


@dataclass(frozen=True)
class Job:
    """What the program is to do."""

    name: Literal["fit"] = key()


@dataclass(frozen=True)
class Run:
    """Where the files of a run go, and what it continues."""

    root: str = key()
    name: str | None = key()
    dir: str | None = key()
    resume: str = key()
    accept_changes: bool = key()
    stop_after: float | None = key(seconds)  # seconds


@dataclass(frozen=True)
class Loop:
    """How long, in steps of which size, and what happens how often."""

    epochs: int | None = key(least=1)
    steps: int | None = key(least=1)
    global_batch: int = key(least=1)
    micro_batches: int = key(least=1)
    micro_batch: int | None = key(least=1)
    uneven: bool = key()
    max_norm: float | None = key(positive)  # norm of the whole gradient
    log_every: tuple[Every, ...] = key(rhythm)
    eval_every: tuple[Every, ...] = key(rhythm)
    save_every: tuple[Every, ...] = key(rhythm)
    eval_batch: int | None = key(least=1)
    deterministic: bool = key()


@dataclass(frozen=True)
class Loader:
    """How samples are read that must be fetched one by one."""

    workers: int | None = key(least=0)
    prefetch: int = key(least=1)
    timeout: float = key(seconds)  # seconds


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints stay."""

    keep: int = key(least=1)
    best: str | None = key()


@dataclass(frozen=True)
class Distributed:
    """How processes talk to each other."""

    backend: Literal["nccl", "gloo"] | None = key()
    init_method: str = key(meeting_place)
    interface: str | None = key()
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
    seed: int = key(least=0)
    device: Literal["auto", "cpu", "cuda"] = key()
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = key()
    tf32: bool = key()
    compile: bool = key()
    profile: tuple[int, int] | None = key(window)  # first and last step
    trust: tuple[str, ...] = key(packages)
    # beside an optimizer's own keys (OPTIMIZER_KEYS)
    decay: Literal["weights", "all"] = "weights"  # what weight decay shrinks: weights (not biases and norms) or all
    fused: bool | None = None  # one kernel for the whole step; None: where it pays


SECTIONS: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}


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

    # Keys in sections, then those that stand alone, then the framework's beside an optimizer's own.
    for name, section in SECTIONS.items():
        if isinstance(found := values.get(name), dict):
            read[name] = _keys(section, fields(section), found, written.get(name), f"{name}.", problems)
        elif found is not UNRESOLVED:
            names = ", ".join(f"{name}.{each.name}" for each in fields(section)[:3])
            problems.append(f"{name}={written.get(name)}: expected a section with keys such as {names}")
    read |= _keys(Settings, [each for each in fields(Settings) if each.metadata], values, written, "", problems)
    if isinstance(beside := values.get("optimizer"), dict):
        given = [each for each in fields(Settings) if each.name in OPTIMIZER_KEYS and each.name in beside]
        read |= _keys(Settings, given, beside, written["optimizer"], "optimizer.", problems)
    if problems:
        return None, problems

    # Each key is right by itself: do they go together?
    read |= {name: section(**read[name]) for name, section in SECTIONS.items()}
    problems = _impossible(read["loop"], read["compile"])
    if read["loop"].epochs is None and read["loop"].steps is None:
        read["loop"] = replace(read["loop"], epochs=EPOCHS)
    return None if problems else Settings(**read), problems


def _keys(
    section: type, known: Iterable[Field], values: dict, written: Any, prefix: str, problems: list[str]
) -> dict[str, Any]:
    """The values of these keys of a section; what is wrong with them is added to the problems."""
    types, read = get_type_hints(section), {}
    for each in known:
        if each.name not in values:
            problems.append(f"{prefix}{each.name}: the framework needs this key; it cannot be removed")
        elif values[each.name] is not UNRESOLVED:
            try:
                read[each.name] = _read(values[each.name], types[each.name], each)
            except Unexpected as unexpected:
                problems.append(f"{prefix}{each.name}={shown(below(written, each.name))}: expected {unexpected}")
    return read


def _read(value: Any, annotation: Any, key: Field) -> Any:
    if value is None and type(None) in get_args(annotation):
        return None
    if read := key.metadata.get("read"):
        return read(value)
    least = key.metadata.get("least")
    # torch keeps whole numbers in 64 bits; an empty text is no name of anything
    if not fits(value, annotation) or value == "" or (least is not None and not least <= value < 2**63):
        bound = "number" if least is None else f"number of at least {least}"
        raise Unexpected(describe(annotation).replace("number", bound, 1))
    return converted(value, annotation)


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
