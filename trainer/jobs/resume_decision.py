"""What a run goes on from: its newest checkpoint, what has changed since, and whether the data are still the same.

Before there is a process group only manifests and headers of a checkpoint are read: nothing is verified for it yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainer.configuration.removed_words import in_todays_words
from trainer.data.class_names import format_class_names, read_class_names
from trainer.data.data import Data
from trainer.data.sampler import dataset_size
from trainer.jobs.batch_sizes import RunLength
from trainer.jobs.run_parts import PreparedRun, RunParts
from trainer.launch.run_status import read_status
from trainer.messages import Refusal
from trainer.parallel.optimizer_state import EMA_PREFIX, network_differences
from trainer.records.checkpoint.base_weights import base_of
from trainer.records.checkpoint.manifest import (
    RESUME_KEYS,
    CheckpointInfo,
    CorruptCheckpoint,
    check_sizes,
    read_manifest,
)
from trainer.records.checkpoint.store import inspect_checkpoint, list_candidates, open_checkpoint, open_newest
from trainer.records.resume_rules import (
    ABSENT,
    Change,
    completed_message,
    early_stop_message,
    find_changes,
    has_checkpoint,
    is_checkpoint,
    keeps_optimizer,
    parse_config,
    refuse_changes,
    resolve_resume_path,
    select_learning_changes,
)
from trainer.records.run_folder import RunFolder

_MOST = 6  # lines of a kind in a refusal


class ResumeDecision(NamedTuple):
    """What the main rank found in a run's folder."""

    precision: str  # in which the run computes from now on
    complete: str | None = None  # nothing is left to do: how to extend it
    changed: Sequence[str] = ()  # keys, with their old and new values


def decide_resume(run: PreparedRun) -> ResumeDecision:
    """Does the run go on from something in its folder, and what has changed since? Only the main rank calls it.

    Refusal where too much has changed to learn the same.
    """
    folder, horizon, precision = run.folder, run.length.steps, run.machine.resolved_precision
    checkpoint, per_epoch = peek_checkpoint(folder.path), run.length.per_epoch
    if not has_checkpoint(folder.path) or (before := last_configuration(folder, checkpoint)) is None:
        return ResumeDecision(precision, changed=branch_changes(run))
    # a folder that was copied back from a mirror has only the checkpoint, which says the same
    environment = folder.read_previous("environment.json") or (checkpoint.state if checkpoint else {})
    # weights that do not fit first: run.accept_changes=true, which the rest may suggest, could not help there
    refuse_other_network(folder.path, checkpoint, run.network, run.configuration)
    # runs from before there was the key began without
    changed = find_changes({"tf32": False, "float8": False} | before, parse_config(run.configuration))
    changed = [change for change in changed if change.old != ABSENT or change.key not in run.unused_keys]
    if run.settings.precision == "auto":
        # what auto meant is kept, whatever devices there are now
        precision = environment.get("precision", precision)
    precisions = (str(environment["precision"]), precision) if "precision" in environment else None
    horizons = (int(environment["horizon"]), horizon) if "horizon" in environment else None
    # did the steps so far have the rates of this horizon? They did where a decay had not begun
    done = checkpoint.step if checkpoint else 0
    differs = horizons is not None and run.schedule.differs(done, per_epoch, *horizons)
    learning = select_learning_changes(changed, precisions, horizons, differs)
    # other training samples teach something else; an evaluation on others is only told
    training, evaluation = (compare_sets(checkpoint, run.data_identity, part) for part in ("training", "evaluation"))
    training = [*compare_classes(checkpoint, run.data_identity), *training]
    if not run.settings.run.accept_changes:
        refuse_changes([*learning, *training], folder.path)
    # is there anything left to do?
    status, patience = read_status(folder.path), run.settings.loop.patience
    complete = completed_message(status, horizon, run.schedule.differs(horizon, per_epoch, horizon, horizon + 1))
    complete = complete or early_stop_message(status, stale_evaluations(checkpoint), patience)
    return ResumeDecision(precision, complete, [str(change) for change in (*changed, *training, *evaluation)])


def branch_changes(run: PreparedRun) -> list[str]:
    """What of the learning differs from the run whose checkpoint `run.resume` names, for people; none without one."""
    path = resolve_resume_path(run.settings.run.resume)
    checkpoint = None if path is None else peek_checkpoint(path)
    before = stored_configuration(checkpoint)
    if checkpoint is None or before is None:
        return []
    changes = find_changes(before, parse_config(run.configuration))
    changes = [change for change in changes if change.old != ABSENT or change.key not in run.unused_keys]
    changed = select_learning_changes(changes)
    old = int(checkpoint.state.get("horizon", run.length.steps))
    if run.schedule.differs(checkpoint.step, run.length.per_epoch, old, run.length.steps):
        changed.append(Change("the schedule's horizon in steps", f"{old:,}", f"{run.length.steps:,}"))
    return [str(change) for change in changed]


def open_start(run: PreparedRun) -> CheckpointInfo | None:
    """Collective: the checkpoint that `run.resume` names, or the newest of the run folder that it names."""
    path, ranks = resolve_resume_path(run.settings.run.resume), run.strategy.world
    if path is None:
        return None
    checkpoint: CheckpointInfo | None
    if is_checkpoint(path):
        checkpoint = open_checkpoint(path, ranks, RESUME_KEYS)
    else:
        checkpoint, _ = open_newest(path / "checkpoints", ranks, RESUME_KEYS)
    if checkpoint is None:
        return None
    # the best of another folder is not to be beaten here, so what was counted since is no matter
    progress = {**checkpoint.state["progress"], "stale": 0}
    return replace(checkpoint, state={**checkpoint.state, "progress": progress})


def peek_checkpoint(path: Path) -> CheckpointInfo | None:
    """The checkpoint of this path, or the newest of a run folder, unverified; None where its headers are damaged.

    Whoever reads it later verifies it, and says then what is wrong with it.
    """
    # of a checkpoint that was named only itself; of a run the next, where the newest is damaged
    for folder in [path] if is_checkpoint(path) else list_candidates(path / "checkpoints"):
        with suppress(CorruptCheckpoint):
            manifest = read_manifest(folder)
            check_sizes(manifest)
            return inspect_checkpoint(manifest, RESUME_KEYS)
    return None


def last_configuration(folder: RunFolder, checkpoint: CheckpointInfo | None) -> dict[str, Any] | None:
    """What the run was configured with: by its config.yaml, or where that is damaged by its checkpoint."""
    config = folder.read_previous("config.yaml")
    return stored_configuration(checkpoint) if config is None else in_todays_words(config)[0]


def stored_configuration(checkpoint: CheckpointInfo | None) -> dict[str, Any] | None:
    """What a checkpoint says that its run was configured with, in today's words; None where it says nothing."""
    config = checkpoint.state.get("configuration") if checkpoint else None
    return None if config is None else in_todays_words(config)[0]


def stale_evaluations(checkpoint: CheckpointInfo | None) -> int:
    """How many evaluations came after the best one, up to this checkpoint."""
    return checkpoint.state["progress"].get("stale", 0) if checkpoint else 0


# --- the data: other samples or other classes would teach something else ---


def identify_data(data: Data, training: Any, length: int, evaluation: Any) -> dict[str, Any]:
    """For state.json: samples and fingerprint of both sets, and the names of their classes. length: of an epoch.

    No samples where there is no such set; no names where the classes have none.
    """
    nothing = {"samples": 0, "fingerprint": ""}
    return {
        "classes": read_class_names(data),
        "training": {"samples": length, "fingerprint": data.fingerprint(training)},
        "evaluation": nothing
        if evaluation is None
        else {"samples": dataset_size(evaluation), "fingerprint": data.fingerprint(evaluation)},
    }


def compare_sets(checkpoint: CheckpointInfo | None, identity: Mapping[str, Any], part: str) -> list[Change]:
    """How the set of this part (training, evaluation) differs from that of a checkpoint, in one change or none.

    None where the checkpoint says nothing about it (an older version wrote it), or where there are as many samples
    and one of the two has no fingerprint.
    """
    if checkpoint is None or "data" not in checkpoint.state:
        return []
    old, new = checkpoint.state["data"][part], identity[part]
    if old["samples"] != new["samples"]:
        return [Change(f"samples of the {part} set", f"{old['samples']:,}", f"{new['samples']:,}")]
    if old["fingerprint"] and new["fingerprint"] and old["fingerprint"] != new["fingerprint"]:
        return [Change(f"the {part} set", f"{old['samples']:,} samples", "as many, but other samples")]
    return []


def compare_classes(checkpoint: CheckpointInfo | None, identity: Mapping[str, Any]) -> list[Change]:
    """How the names of the classes differ from those of a checkpoint; none where one of the two has no names."""
    old, new = trained_class_names(checkpoint.state if checkpoint else {}), identity["classes"]
    return [Change("classes", format_class_names(old), format_class_names(new))] if old and new and old != new else []


def trained_class_names(state: Mapping[str, Any]) -> list[str]:
    """The names of the classes that a checkpoint was trained with, by its state.json; none where it has none."""
    return list(state.get("data", {}).get("classes", []))


# --- refusals ---


def refuse_resume_from(
    path: Path, network: nn.Module, run: RunParts, length: RunLength, identity: Mapping[str, Any]
) -> None:
    """Refuse a `run.resume=PATH` from which nothing could be trained: of another network, or at the end already.

    Refuse also one that was trained on other data than `identity` tells, unless changes are accepted.
    """
    checkpoint, key = peek_checkpoint(path), f"run.resume={path}"
    if checkpoint is None:
        return  # whoever reads it says what is wrong with it
    what = f"{key}: the checkpoint of step {checkpoint.step:,}"
    _refuse_network(what, checkpoint, network, run.configuration, f"leave {key} out")
    if checkpoint.step >= length.steps:
        # the keys that bound this run, so long that as much is trained as was asked for
        steps, loop = checkpoint.step + length.steps, run.settings.loop
        keys = [f"loop.steps={steps}"] if loop.steps is not None else []
        keys += [f"loop.epochs={-(-steps // length.per_epoch)}"] if loop.epochs is not None else []
        raise Refusal(
            f"{key}: that checkpoint is of step {checkpoint.step:,} and this run ends at step {length.steps:,}, so"
            f" nothing is left to train. The steps of the checkpoint count; {' '.join(keys)} trains {length.steps:,}"
            " more"
        )
    changed = [*compare_classes(checkpoint, identity), *compare_sets(checkpoint, identity, "training")]
    if changed and not run.settings.run.accept_changes:
        raise Refusal(
            f"{what} was trained on other data:{_bullets(changed)}\nadd run.accept_changes=true to go on with the new "
            f"data, take the old data back, or leave {key} out"
        )


def refuse_other_network(
    folder: Path, checkpoint: CheckpointInfo | None, network: nn.Module, configuration: str
) -> None:
    """Refuse to go on in a run folder whose newest checkpoint is of another network; no key could make that fit."""
    out = "start over with run.resume=fresh or another run.name"
    if checkpoint is not None:
        what = f"{folder}: the checkpoint of step {checkpoint.step:,}"
        _refuse_network(what, checkpoint, network, configuration, out)


def _refuse_network(what: str, checkpoint: CheckpointInfo, network: nn.Module, configuration: str, out: str) -> None:
    shapes = {name: value.shape for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    wrong = network_differences(shapes, checkpoint.tensors)
    if not wrong:
        return
    # why it is another one: keys of the model that differ, or else its code
    changed = find_changes(stored_configuration(checkpoint) or {}, parse_config(configuration))
    changed = [change for change in changed if change.key.startswith("model")]
    why = f"changed since then:{_bullets(changed)}\n" if changed else "No key of model changed since: its code did.\n"
    back = "take the old values back" if changed else "take the old code"
    raise Refusal(
        f"{what} is of another network than this command's:{_bullets(wrong)}\n{why}"
        f"No key can make these weights fit: {back}, or {out}"
    )


def _bullets(lines: Sequence[str | Change]) -> str:
    more = f"\n  … and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return "".join(f"\n  {line}" for line in lines[:_MOST]) + more


def resume_lines(run: PreparedRun, start: CheckpointInfo) -> list[str]:
    """What a run prints of the checkpoint from which it goes on, and of what it does not take from there."""
    initial = "init_from is ignored, because the run resumes"
    if base := base_of(start.state):
        initial = f"the run resumes; its {len(base.shapes)} frozen tensors are read from {base.path}, as at first"
    notes = [initial] if run.settings.init_from else []
    # a moving average that only the checkpoint has, or only this run
    decay, averaged = run.settings.ema.decay, any(name.startswith(EMA_PREFIX) for name in start.tensors)
    if averaged and decay is None:
        notes.append("the checkpoint's moving average is dropped: ema.decay=null")
    if decay is not None and not averaged:
        notes.append(f"ema.decay={decay:g}: the checkpoint has no moving average; it starts from the weights")
    if not keeps_optimizer(start.state, {"configuration": parse_config(run.configuration)}):
        notes.append("the checkpoint is of another optimizer: this one begins without state, with the weights")
    return [f"resuming    step {start.step} of {start.path}", *(f"note        {note}" for note in notes)]
