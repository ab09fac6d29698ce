"""Runs that Optuna chooses, by how the earlier ones ended. It remembers them in study.journal, in the sweep's folder.

Optuna itself, not Hydra's plugin for it: the released one is for Optuna 2, wants Hydra to run the program, and does not
go on where a killed one stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from trainer.configuration.hydra_plugins import Search
from trainer.configuration.multirun import SearchSpace, Trial
from trainer.messages import Refusal, did_you_mean
from trainer.sweeps.results import Outcome, SweepResults

JOURNAL_FILE = "study.journal"


class OptunaStudy:
    """A RunSource that maximizes the best metric of each run, a loss with its sign turned.

    A run that was stopped or killed is given again, with the same values, before any other; one that failed is told to
    Optuna as such, and not given again.
    """

    def __init__(self, search: Search, space: SearchSpace, results: SweepResults) -> None:
        """Begin, or go on with what lies in the folder. Refusal where that was begun with other values."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep says itself how each run ended
        self._space, self._results, self._n_trials = space, results, search.n_trials
        self._axes = {axis.key: axis.distribution() for axis in space.varying}
        # a journal, not a database: network file systems keep it, too
        storage = JournalStorage(JournalFileBackend(str(results.folder / JOURNAL_FILE)))
        self._study = optuna.create_study(
            study_name="sweep", storage=storage, direction="maximize", load_if_exists=True
        )
        _refuse_other_axes(self._study, space, results.folder)
        # seeded by the number of trials: numbers that were drawn already must not be drawn again
        self._study.sampler = _make_sampler(search, len(self._study.trials))
        # the sweep's folder is locked, so no other command is at work: a run under way has been stopped or killed
        self._interrupted = list[Trial]()
        for known in self._study.get_trials(states=[TrialState.RUNNING]):
            if known.params.keys() == self._axes.keys():
                self._interrupted.append(self._trial(known.number, known.params))
            else:  # killed while it was being chosen
                self._study.tell(known.number, state=TrialState.FAIL)

    def next(self) -> Trial | None:
        """Runs that were begun and have not ended; then those that Optuna chooses."""
        if self._interrupted:
            return self._interrupted.pop(0)
        if len(self._study.get_trials(deepcopy=False)) >= self._n_trials:
            return None
        # Optuna remembers the trial as running from here on, also if this process is killed
        chosen = self._study.ask(self._axes)
        return self._trial(chosen.number, chosen.params)

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Tell Optuna; nothing of a run that was stopped, as it goes on later."""
        if outcome.state == "completed" and outcome.score > -math.inf:
            self._study.tell(trial.number, outcome.score)
        elif outcome.state != "preempted":
            self._study.tell(trial.number, state=TrialState.FAIL)

    def left(self) -> int:
        """How many have not ended for good."""
        trials = self._study.get_trials(deepcopy=False)
        return max(0, self._n_trials - sum(trial.state.is_finished() for trial in trials))

    def outcomes(self) -> list[Outcome | None]:
        """Those that have ended, and None for each that is still to come; what was stopped has ended for now."""
        ended = self._results.all()
        return [*ended, *[None] * (self.left() - sum(outcome.state == "preempted" for outcome in ended))]

    def _trial(self, number: int, chosen: dict[str, Any]) -> Trial:
        """The run of these values; an axis that Optuna does not know has only one."""
        picked = [
            axis.word(chosen[axis.key]) if axis.key in chosen else axis.end_points()[0] for axis in self._space.axes
        ]
        return self._space.trial(number, picked)


def _refuse_other_axes(study: optuna.Study, space: SearchSpace, folder: Path) -> None:
    """Refuse to go on with other values: their metrics would be compared with those of the earlier runs."""
    overrides = [axis.written for axis in space.axes if not axis.key.lstrip("+").startswith("run.")]
    before: Sequence[str] = study.user_attrs.get("words", overrides)
    if different := sorted({*before} ^ {*overrides}):
        raise Refusal(
            f"{folder} holds a search with other overrides; these differ: {', '.join(different)}. Give the old ones,"
            " or another run.name"
        )
    study.set_user_attr("words", overrides)


def _make_sampler(search: Search, n_drawn: int) -> optuna.samplers.BaseSampler:
    """The sampler that was asked for. Refusal where there is none of that name, or none that takes a seed alone."""
    known = [name for name in optuna.samplers.__all__ if name.endswith("Sampler") and name != "BaseSampler"]
    if search.sampler not in known:
        raise Refusal(
            f"hydra.sweeper.sampler={search.sampler}: optuna.samplers has none of this name"
            f"{did_you_mean(search.sampler, known)} There are: {', '.join(known)}"
        )
    try:
        return getattr(optuna.samplers, search.sampler)(seed=search.seed + n_drawn)
    except (TypeError, ImportError) as error:
        raise Refusal(f"hydra.sweeper.sampler={search.sampler}: {error}") from error
