"""What a run may continue, and whether what changed since then would change the learning. Plain values in and out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.launch.safe_files import resolve_links
from trainer.messages import Refusal, expand_home, format_count

# A change under these keys changes what is learned. data.root is among them: for an image folder it is the data, and
# nobody here can tell such a set from one that only moved.
LEARNING_KEYS = (
    "model",
    "task",
    "data",
    "seed",
    "optimizer",
    "schedule",
    "loop.global_batch",
    "loop.max_norm",
    "loop.dropout",
    "precision",
    "tf32",
    "float8",
)

# Under `optimizer`: whose state it is, and what it keeps of which parameters. What another one kept means nothing.
STATE_KEYS = ("_target_", "adamw", "amsgrad")

ABSENT = "absent"  # where a key has no value


class Change(NamedTuple):
    """One key of the configuration, with its old and its new value as text."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"


def keeps_optimizer(state: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Can the optimizer go on with what that of a checkpoint has kept? Both say their `configuration`."""
    before, now = ((each.get("configuration") or {}).get("optimizer") for each in (state, facts))
    return not (before and now) or all(before.get(key) == now.get(key) for key in STATE_KEYS)


def resolve_resume_path(resume: str) -> Path | None:
    """The run folder or checkpoint that `run.resume` names, None for `auto` and `fresh`; Refusal where it has none."""
    if resume in ("auto", "fresh"):
        return None
    path = resolve_links(expand_home(resume))
    if not has_checkpoint(path) and not is_checkpoint(path):
        # what stands there instead, so that the message can say it
        kind = "holds no checkpoint" if path.exists() else "does not exist"
        if path.is_file() and is_checkpoint(path.parent):
            kind = f"is a file of the checkpoint {path.parent}: name that folder"
        elif path.is_file():  # an earlier program's weights, as a rule
            kind = f"is a file; to begin with the weights in it: init_from={resume}"
        raise Refusal(f"run.resume={resume}: {path.absolute()} {kind}; give auto, fresh, a run folder or a checkpoint")
    return path


def has_checkpoint(folder: Path) -> bool:
    """Does a run folder hold a checkpoint that was written to the end? Whether it is valid shows when it is read."""
    return any(is_checkpoint(path) for path in (folder / "checkpoints").glob("[!.]*"))


def is_checkpoint(path: Path) -> bool:
    """Is this the folder of one checkpoint?"""
    return (path / "manifest.json").is_file()


def completed_message(status: Mapping[str, Any] | None, horizon: int, needs_horizon: bool = False) -> str | None:
    """One line for a run that has nothing left to do, with the keys that extend it; None where there is work."""
    step = int(status["step"]) if status and status["state"] == "completed" else -1
    if step < horizon:
        return None
    accepted = " (with run.accept_changes=true, as the schedule depends on the length)" if needs_horizon else ""
    return f"this run is complete at step {step:,}; a larger loop.epochs or loop.steps extends it{accepted}"


def early_stop_message(status: Mapping[str, Any] | None, stale: int, patience: int | None) -> str | None:
    """One line for a run that ended because `stale` evaluations brought nothing better; None where it may go on."""
    if not status or status["state"] != "completed" or patience is None or stale < patience:
        return None
    return (
        f"this run is complete at step {status['step']:,}: {format_count(stale, 'evaluation')} in a row without"
        " improvement; a larger loop.patience extends it, loop.patience=null takes it to the end"
    )


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every key whose value differs between two configurations, in the order of the keys.

    A group that builds something else now is one change: the keys below it belong to what it built before.
    """
    # so only the two names are compared then
    for group in old.keys() & new.keys():
        old_target, new_target = _target_class(old[group]), _target_class(new[group])
        if old_target and new_target and old_target != new_target:
            old, new = {**old, group: old_target}, {**new, group: new_target}
    # key by key, as text: 1 and 1.0 are equal there
    before, now = _flatten(old), _flatten(new)
    keys = sorted(before.keys() | now.keys())
    differences = (Change(key, before.get(key, ABSENT), now.get(key, ABSENT)) for key in keys)
    # where a run lies, and what is done with it, is no part of what it is
    elsewhere = ("run.", "job.", "processes.")
    return [change for change in differences if change.old != change.new and not f"{change.key}.".startswith(elsewhere)]


def _target_class(section: Any) -> str | None:
    return _class_name(section.get("_target_")) if isinstance(section, Mapping) else None


def _class_name(value: Any) -> Any:
    """A value; of one of the framework's own names the last word, for its files move between versions."""
    return value.rsplit(".", 1)[-1] if isinstance(value, str) and value.startswith(("trainer.", "recipes.")) else value


def select_learning_changes(
    changes: list[Change],
    precision: tuple[str, str] | None = None,
    horizon: tuple[int, int] | None = None,
    needs_horizon: bool = False,
) -> list[Change]:
    """Those changes that change the learning. `precision` and `horizon` (in steps): the resolved ones, old and new."""
    groups = tuple(f"{name}." for name in LEARNING_KEYS)
    # `precision=auto` says nothing: what it came to is compared, where that is known
    selected = [
        change
        for change in changes
        if f"{change.key}.".startswith(groups) and not (change.key == "precision" and precision)
    ]
    if precision and precision[0] != precision[1]:
        # `auto` may have come to another type on another machine
        selected.append(Change("precision", *precision))
    # a shorter run ends earlier on the way it was on; a longer one would have had other rates from the start
    if horizon and needs_horizon and horizon[1] > horizon[0]:
        selected.append(Change("the schedule's horizon in steps", f"{horizon[0]:,}", f"{horizon[1]:,}"))
    return selected


def refuse_changes(changes: list[Change], folder: Path) -> None:
    """Refusal that lists what changes the learning, and says what to add to go on in spite of it."""
    if changes:
        lines = "".join(f"\n  {change}" for change in changes[:12])
        more = f"\n  … and {len(changes) - 12} more" if len(changes) > 12 else ""
        raise Refusal(
            f"{folder} holds a run with another configuration or other data; these changes change what it learns:"
            f"{lines}{more}\n"
            "add run.accept_changes=true to go on with what is new, run.resume=fresh to start over, "
            "or another run.name"
        )


def parse_config(text: str) -> dict[str, Any]:
    """The configuration in a config.yaml; plain data, whatever it says."""
    import yaml

    return yaml.safe_load(text)


def _flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as text; lists count as one value."""
    if isinstance(tree, Mapping) and tree:
        return {key: value for name, item in tree.items() for key, value in _flatten(item, f"{prefix}.{name}").items()}
    tree = _class_name(tree)
    if isinstance(tree, float) and tree.is_integer() and abs(tree) < 2**53:
        tree = int(tree)  # 1 and 1.0 are one rate
    return {prefix.removeprefix("."): json.dumps(tree, default=str, ensure_ascii=False, sort_keys=True)}
