"""The keys of the framework and the type of each. Keys of groups are checked against signatures (instantiate.py).

Not OmegaConf's structured configs: they know no ranges and no grammars, and end at the first mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_type_hints

from omegaconf import DictConfig

from trainer.configuration.interpolation import flatten_unresolved, format_override, resolve_interpolations
from trainer.configuration.key_types import (
    Count,
    Fraction,
    InitMethod,
    Intervals,
    Natural,
    NonEmpty,
    NonNegative,
    Packages,
    Positive,
    ProfileWindow,
    Rules,
    Seconds,
    StepIntervals,
)
from trainer.launch.typed_values import convert
from trainer.messages import Refusal, join_problems

# Groups whose keys belong to what their `_target_` names; `experiment` is a group too, but leaves no key of its own.
GROUPS = ("job", "strategy", "model", "task", "data", "optimizer", "schedule", "log")

DEFAULT_EPOCHS = 10  # where neither loop.epochs nor loop.steps is given

# Defaults live in conf/config.yaml, once; here only those of keys that a configuration may lack.


@dataclass(frozen=True)
class Run:
    """Where the files of a run go, and what it continues."""

    root: NonEmpty
    name: NonEmpty | None
    dir: NonEmpty | None
    resume: NonEmpty
    accept_changes: bool
    stop_after: Seconds | None


@dataclass(frozen=True)
class Loop:
    """How long, in steps of which size, and what happens how often."""

    epochs: Count | None
    steps: Count | None
    global_batch: Count
    micro_batches: Count
    micro_batch: Count | Literal["auto"] | None  # auto: a plan decides before anything is built
    uneven: bool
    max_norm: Positive | None  # norm of the whole gradient
    log_every: Intervals
    eval_every: Intervals
    save_every: Intervals
    histograms_every: StepIntervals
    patience: Count | None  # evaluations
    on_nonfinite: Literal["stop", "skip"]
    eval_batch: Count | None
    peak_flops: Positive | None  # operations a second of one device
    deterministic: bool
    dropout: Literal["sample", "native"] | None


@dataclass(frozen=True)
class Ema:
    """The moving average of the weights."""

    decay: Fraction | None
    every: Count


@dataclass(frozen=True)
class TextSampleSettings:
    """A text that a language model continues after each evaluation."""

    prompt: NonEmpty | None
    tokens: Count
    temperature: NonNegative
    top_k: Count | None


@dataclass(frozen=True)
class Loader:
    """How samples are read that must be fetched one by one."""

    workers: Natural | None
    prefetch: Count
    timeout: Seconds


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints stay, and what a save that fails means for the run."""

    keep: Count
    best: NonEmpty | None
    asynchronous: bool
    whole: bool | None
    mirror: NonEmpty | None  # a URL
    on_error: Literal["warn", "stop"]


@dataclass(frozen=True)
class Distributed:
    """How processes talk to each other."""

    backend: Literal["nccl", "xccl", "gloo"] | None
    init_method: InitMethod
    interface: NonEmpty | None
    timeout: Seconds
    step_timeout: Seconds
    restarts: Natural
    compare_copies: bool


@dataclass(frozen=True)
class ReservedModelKeys:
    """The framework's keys among those of a network's target, which is not given them."""

    freeze: tuple[str, ...] = ()  # names of modules or parameters, with wildcards
    settings: NonEmpty | None = None  # a folder, from whose config.json the sizes are


@dataclass(frozen=True)
class ReservedOptimizerKeys:
    """The framework's keys among those of an optimizer's target, which is not given them."""

    decay: Literal["weights", "all"] = "weights"  # what weight decay shrinks: weights (not biases and norms) or all
    fused: bool | None = None  # one kernel for the whole step; None: where it pays
    groups: Rules = ()  # another rate or decay for some parameters


@dataclass(frozen=True)
class Compile:
    """What torch.compile does."""

    mode: Literal["default", "reduce-overhead", "max-autotune"] | None
    scope: Literal["units", "network"] | None
    fullgraph: bool
    dynamic: bool | None


@dataclass(frozen=True)
class Settings:
    """The framework keys of one run, each of its type."""

    run: Run
    loop: Loop
    ema: Ema
    sample: TextSampleSettings
    loader: Loader
    checkpoint: Checkpoint
    distributed: Distributed
    seed: Natural
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"]
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"]
    tf32: bool
    float8: Literal[False, "tensorwise", "rowwise"]
    channels_last: bool
    compile: Compile
    profile: ProfileWindow  # first and last step
    init_from: NonEmpty | None  # pretrained, or where weights lie
    processes: Count | Literal["auto"] | None  # that this command starts
    trust: Packages
    model: ReservedModelKeys = ReservedModelKeys()
    optimizer: ReservedOptimizerKeys = ReservedOptimizerKeys()


_TYPES = get_type_hints(Settings)
# The framework's keys in groups whose other keys are a target's, as a yaml would write them where they are not said.
RESERVED_KEYS: Mapping[str, dict[str, Any]] = {
    name: {each.name: list(each.default) if isinstance(each.default, tuple) else each.default for each in fields(kind)}
    for name, kind in _TYPES.items()
    if is_dataclass(kind) and name in GROUPS
}
SECTIONS: Mapping[str, Any] = {name: kind for name, kind in _TYPES.items() if is_dataclass(kind) and name not in GROUPS}


def parse_settings(cfg: DictConfig) -> Settings:
    """The framework keys of a composed configuration. Refusal that lists everything wrong with them."""
    values, wrong = resolve_interpolations(cfg)
    parsed = validate_settings(values, flatten_unresolved(cfg), wrong)
    if parsed is None:
        raise Refusal(join_problems([*wrong.values()]))
    return parsed


def spell_out_compile(is_on: bool) -> dict[str, Any]:
    """The section `compile` that compile=true and compile=false are short for."""
    return {"mode": "default" if is_on else None, "scope": None, "fullgraph": False, "dynamic": None}


def validate_settings(values: Mapping[str, Any], written: Mapping[str, Any], wrong: dict[str, str]) -> Settings | None:
    """The framework keys out of resolved values; None where one is wrong, for which `wrong` then has a line."""
    # compile=true, as torch's users say it, and runs of older versions: the rest of the section has its defaults
    if isinstance(short := values.get("compile"), bool):
        values = {**values, "compile": spell_out_compile(short)}
    # every key by itself
    parsed = _parse_section(Settings, values, written, wrong)
    if wrong:
        return None

    # Each key is right by itself: do they go together?
    loop = parsed.loop
    if loop.micro_batch is not None and loop.micro_batches != 1:
        wrong["loop.micro_batch"] = (
            f"loop.micro_batches={loop.micro_batches} and loop.micro_batch={loop.micro_batch}: "
            "give the number of micro-batches or the size of one, not both"
        )
    _refuse_beside_compile(parsed, written, wrong)
    if parsed.init_from is not None and parsed.run.resume not in ("auto", "fresh"):
        wrong["init_from"] = (
            f"init_from={parsed.init_from} and run.resume={parsed.run.resume}: a run goes on from a checkpoint or"
            " begins with weights of others, not both; leave one out"
        )
    # A length that is filled in here and not in config.yaml, where it would end a run that gives steps alone.
    if loop.epochs is None and loop.steps is None:
        parsed = replace(parsed, loop=replace(loop, epochs=DEFAULT_EPOCHS))
    return None if wrong else parsed


def _refuse_beside_compile(parsed: Settings, written: Mapping[str, Any], wrong: dict[str, str]) -> None:
    """Add a line for each key that does not go with what is compiled, or changes nothing without it."""
    loop, compiled = parsed.loop, f"compile.mode={parsed.compile.mode}"
    if loop.uneven and parsed.compile.mode:
        wrong["loop.uneven"] = (
            f"loop.uneven=true and {compiled}: a compiled network takes micro-batches of one size only; "
            "set compile.mode=null, or loop.uneven=false and a global batch that divides"
        )
    changed = [key for key, value in vars(parsed.compile).items() if key != "mode" and value]
    if parsed.compile.mode is None and changed:
        key = f"compile.{changed[0]}"
        wrong[key] = f"{format_override(written, key)} changes nothing without compile.mode; set compile.mode=default"


def _parse_section(kind: Any, values: Any, written: Mapping[str, Any], wrong: dict[str, str], prefix: str = "") -> Any:
    """A section with all that is in it; what is wrong with a key is added, and the section then is None."""
    if not isinstance(values, dict):
        keys = ", ".join(f"{prefix}{field.name}" for field in fields(kind)[:3])
        raise Refusal(f"a section with keys such as {keys}")
    # Key by key, wherever one is wrong: all mistakes are told at once.
    types, parsed = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        path, annotation = prefix + field.name, types[field.name]
        try:
            if field.name in values and path not in wrong:  # whose value could not be resolved is wrong already
                parsed[field.name] = (
                    _parse_section(annotation, values[field.name], written, wrong, f"{path}.")
                    if is_dataclass(annotation)
                    else convert(values[field.name], annotation)
                )
            elif field.default is MISSING and path not in wrong:
                wrong[path] = f"{path}: the framework needs this key; it cannot be removed"
        except Refusal as expected:
            wrong[path] = f"{format_override(written, path)}: expected {expected}"
    return None if wrong else kind(**parsed)
