"""What a run goes on from: what its folder holds, and what has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.jobs.preparation import Prepared
from trainer.jobs.resume_precheck import class_changes, configuration_of, glance, refuse_own, set_changes, stale
from trainer.launch.run_status import read_status
from trainer.records.resume_rules import (
    ABSENT,
    changes,
    completed,
    has_checkpoint,
    learning_changes,
    read_config,
    refuse_changes,
    stopped_early,
)


class Verdict(NamedTuple):
    """What the main rank found in a run's folder."""

    precision: str  # in which the run computes from now on
    complete: str | None = None  # nothing is left to do: how to extend it
    changed: Sequence[str] = ()  # keys, with their old and new values


def decide_resume(run: Prepared) -> Verdict:
    """What to go on from, as the main rank finds it: nothing, or what changed since. Refusal if that is too much."""
    folder, horizon, precision = run.folder, run.length.steps, run.machine.resolved_precision
    found = glance(folder.path)
    if not has_checkpoint(folder.path) or (before := configuration_of(folder, found)) is None:
        return Verdict(precision)
    last = folder.last("environment.json") or {}
    # weights that do not fit first: run.accept_changes=true, which the rest may suggest, could not help there
    refuse_own(folder.path, found, run.network, run.configuration)
    # runs from before there was the key began without
    changed = changes({"tf32": False} | before, read_config(run.configuration))
    changed = [one for one in changed if one.old != ABSENT or one.key not in run.unused_keys]
    if run.settings.precision == "auto":
        precision = last.get("precision", precision)  # what auto meant is kept, whatever devices there are now
    precisions = (str(last["precision"]), precision) if "precision" in last else None
    horizons = (int(last["horizon"]), horizon) if "horizon" in last else None
    learning = learning_changes(changed, precisions, horizons, run.schedule.needs_horizon)
    # other samples teach something else; an evaluation on others is only said
    trained, evaluated = (set_changes(found, run.sets, part) for part in ("training", "evaluation"))
    trained = [*class_changes(found, run.sets), *trained]
    if not run.settings.run.accept_changes:
        refuse_changes([*learning, *trained], folder.path)
    status, patience = read_status(folder.path), run.settings.loop.patience
    complete = completed(status, horizon, run.schedule.needs_horizon)
    complete = complete or stopped_early(status, stale(found), patience)
    return Verdict(precision, complete, [str(one) for one in (*changed, *trained, *evaluated)])
